"""Conversations put on a chat endpoint."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tests.fakes import make_tokenizer

QUESTION = "What is the sum of {number} and two?"

_numbers = itertools.count(1)


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Conversation:
    """One agent's messages so far. No two conversations say the same."""

    url: str
    headers: dict[str, str]
    context: str = ""  # what each question brings along
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "system", "content": "You answer questions about numbers."})
        self._ask()

    async def take_turn(self, http: aiohttp.ClientSession) -> float:
        """Ask, and add the answer and the next question. Returns the seconds until the answer was there."""
        body = msgspec.json.encode({"model": "m", "messages": self.messages, "max_tokens": 512})
        headers = self.headers | {"Content-Type": "application/json"}
        began = time.perf_counter()
        async with http.post(self.url, data=body, headers=headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{self.url} answered {answer.status}: {data[:300]!r}")
        took = time.perf_counter() - began
        self.messages.append(
            {"role": "assistant", "content": _ANSWER.decode(data).choices[0].message.content}
        )
        self._ask()
        return took

    def _ask(self) -> None:
        question = QUESTION.format(number=next(_numbers))
        self.messages.append({"role": "user", "content": f"{self.context}{question}"})


async def converse(
    endpoints: Sequence[tuple[str, dict[str, str]]],
    *,
    num_requests: int,
    num_turns: int,
    concurrency: int,
    http: aiohttp.ClientSession,
) -> None:
    """Conversations of `num_turns` turns at the endpoints in turn, so many at a time."""
    conversations = (Conversation(url, headers) for url, headers in itertools.cycle(endpoints))
    left = iter(range(num_requests))

    async def worker() -> None:
        while await _one(next(conversations), left):
            pass

    async def _one(conversation: Conversation, left: Iterator[int]) -> bool:
        for _ in range(num_turns):
            if next(left, None) is None:
                return False
            await conversation.take_turn(http)
        return True

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(worker())


def new_client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def text_of_tokens(count: int) -> str:
    """A text of so many tokens, within one percent."""
    sentence = "the report goes on and on about this and that and names a number here and there. "
    length = len(make_tokenizer().encode(sentence * 100, add_special_tokens=False).ids) / 100
    return sentence * round(count / length)
