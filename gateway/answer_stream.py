"""What a listener hears of an answer while it is being sampled.

Plain text is told token by token. Where the server's parsers have to read the answer, they are asked as it
grows, and reasoning and text are told up to where a tool call begins. Calls wait for the end: one that can't
be read is handed over as text, and what was told can't be taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from gateway.conversation import Answer
from gateway.text_stream import HeldText, TextStream
from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.llm_client import GenerationChunk, ParsedDelta

logger = logging.getLogger(__name__)

# Parsers keep no state between calls and read all that came before again. Asked only when an eighth has been
# added, the work stays near n·log(n) tokens instead of n².
_SHARE_OF_NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Heard:
    """A piece of an answer and the chunks it came with."""

    chunks: Sequence[GenerationChunk]
    text: str = ""
    reasoning: str = ""


Tell = Callable[[Heard], None]
Parse = Callable[[list[int], msgspec.Raw | None], Awaitable[ParsedDelta]]


class AnswerStream(Protocol):
    """One attempt at an answer, as a listener hears it."""

    @property
    def was_heard(self) -> bool: ...

    def push(self, chunk: GenerationChunk) -> None: ...

    async def close(self) -> None:
        """Nothing more is told after this."""
        ...

    def settle(self, answer: Answer) -> Answer:
        """The answer as the listener will send it back: it goes on from what was heard."""
        ...


class PlainStream:
    """Text, token by token."""

    def __init__(self, decode: Callable[[Sequence[int]], str], tell: Tell, stop: Iterable[str]) -> None:
        self._text = TextStream(decode, stop)
        self._tell = tell
        self.was_heard = False

    def push(self, chunk: GenerationChunk) -> None:
        self.was_heard = True
        self._tell(Heard([chunk], text=self._text.push(chunk.token_ids)))

    async def close(self) -> None:
        return

    def settle(self, answer: Answer) -> Answer:
        self._text.finish(answer.content)
        return replace(answer, content=self._text.text)


class ParsedStream:
    """Reasoning and text as the server's parsers find them in what has come so far."""

    def __init__(self, parse: Parse, tell: Tell, *, eos: Sequence[int], stop: Iterable[str]) -> None:
        self._parse = parse
        self._tell = tell
        self._eos = frozenset(eos)
        self._held = HeldText(stop)
        self._content, self._reasoning = "", ""
        self._untold: list[GenerationChunk] = []
        self._pending: list[GenerationChunk] = []
        self._num_parsed, self._num_pending = 0, 0
        self._enough = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def was_heard(self) -> bool:
        return bool(self._content or self._reasoning)

    def push(self, chunk: GenerationChunk) -> None:
        self._pending.append(chunk)
        self._num_pending += len(chunk.token_ids)
        self._look()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def settle(self, answer: Answer) -> Answer:
        content, reasoning = answer.content, answer.reasoning
        return replace(
            answer,
            content=content if content.startswith(self._content) else self._content,
            reasoning=reasoning if (reasoning or "").startswith(self._reasoning) else self._reasoning,
        )

    def _look(self) -> None:
        if self._num_pending * _SHARE_OF_NEW_TOKENS >= max(self._num_parsed, 1):
            self._enough.set()

    async def _follow(self) -> None:
        state: msgspec.Raw | None = None
        while True:
            await self._enough.wait()
            self._enough.clear()
            ids = self._take_pending()
            if not ids:
                continue
            try:
                delta = await self._parse(ids, state)
            except (BackendRejectedError, BackendUnavailableError) as error:
                logger.info("an answer is told only when it is whole: %s", error)
                return
            state = delta.state
            self._hear(delta)
            if delta.begins_call:
                return
            self._look()

    def _take_pending(self) -> list[int]:
        chunks, self._pending = self._pending, []
        self._untold += chunks
        ids = [id_ for chunk in chunks for id_ in chunk.token_ids if id_ not in self._eos]
        self._num_parsed += self._num_pending
        self._num_pending = 0
        return ids

    def _hear(self, delta: ParsedDelta) -> None:
        content = self._held.push(delta.content)
        if not content and not delta.reasoning:
            return
        self._content += content
        self._reasoning += delta.reasoning
        chunks, self._untold = self._untold, []
        self._tell(Heard(chunks, text=content, reasoning=delta.reasoning))
