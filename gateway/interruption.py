"""A generation that goes on in another attempt: what is kept of it, and who interrupts it.

It goes on under a newer version, or on another server when a stream broke off. What was sampled stays as it
was sampled, with its logprobs. The next attempt is given it as prompt and what is left of the budget; the
answer is all of it together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gateway.bindings import GatewayBindingRegistry, ModelBinding, Placement
from gateway.chains import VersionSpan
from gateway.text_stream import MAX_HELD_TOKENS, UNREADABLE, num_begun
from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.llm_client import Generation, GenerationChunk, join_chunks
from model_runtime.types import Int32Array

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
# A server that had not begun the request when it was told to end it must be told again.
REPEAT_ABORT_S = 0.5


@dataclass(slots=True, eq=False)
class Pieces:
    """What attempts sampled of one answer before they ended too early, one after another. `kept` counts the
    versions that tokens are kept of: until they are let go of, they are open work."""

    kept: Counter[int]
    generations: list[Generation] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.versions)

    def after(self, prompt_ids: Int32Array) -> Int32Array:
        """The prompt, and what there is of its answer."""
        if not self.generations:
            return prompt_ids
        return np.concatenate([prompt_ids, *(piece.token_ids for piece in self.generations)])

    def add(self, piece: Generation, version: int) -> None:
        if len(piece.token_ids):
            self.generations.append(piece)
            self.versions.append(VersionSpan(version, len(piece.token_ids)))
            self.kept[version] += 1

    def let_go(self) -> None:
        """The answer is whole, or given up."""
        for span in self.versions:
            self.kept[span.version] -= 1
            if not self.kept[span.version]:
                del self.kept[span.version]
        self.versions.clear()

    def forget(self) -> None:
        """Begin anew."""
        self.let_go()
        self.generations.clear()

    def seam(self, decode: Callable[[Sequence[int]], str], stops: Iterable[str]) -> StopAtSeam:
        return StopAtSeam(decode, stops, [id_ for piece in self.generations for id_ in piece.token_ids])

    def settings_for_the_rest(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The budget is one for all pieces. A seed is moved on: the same one would draw again what was drawn
        for the first tokens."""
        rest = {**settings, "max_tokens": settings["max_tokens"] - self.num_tokens}
        if self.num_tokens and "seed" in settings:
            rest["seed"] = min(settings["seed"], 2**63 - 1 - self.num_tokens) + self.num_tokens
        return rest

    def joined(self, last: Generation, version: int) -> tuple[Generation, tuple[VersionSpan, ...]]:
        """The answer that `last` completes, and the versions of its tokens."""
        versions = (*self.versions, VersionSpan(version, len(last.token_ids)))
        if not self.generations:
            return last, versions
        pieces, first = [*self.generations, last], self.generations[0]
        whole = replace(
            last,
            token_ids=np.concatenate([piece.token_ids for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            top_logprobs=[top for piece in pieces for top in piece.top_logprobs],
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
        )
        return whole, versions


class StopAtSeam:
    """Looks for a stop string that begins in what there is of an answer and ends in what comes: the server
    that goes on does not see it, because to it the former is prompt."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Iterable[str], ids_before: Sequence[int]
    ) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        longest = max(map(len, self._stops), default=0)
        self._window = [int(id_) for id_ in ids_before[-(longest + MAX_HELD_TOKENS) :]]
        self._num_left = longest + MAX_HELD_TOKENS  # tokens, after which the server sees it whole
        before = decode(self._window) if self._stops else ""
        self._num_before = len(before.rstrip(UNREADABLE))
        self.is_open = bool(ids_before) and self._may_end_in_what_comes(before)

    def push(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """How many of these tokens there are up to the end of a stop string, and which it is."""
        for number, id_ in enumerate(ids, start=1):
            if not self.is_open:
                return None
            self._window.append(id_)
            self._num_left -= 1
            text = self._decode(self._window)
            found = next((stop for stop in self._stops if stop in text), None)
            if found is not None:
                return number, found
            self.is_open = self._num_left > 0 and self._may_end_in_what_comes(text)
        return None

    def _may_end_in_what_comes(self, text: str) -> bool:
        """Does one begin before the seam that has not ended yet?"""
        if not self._stops:
            return False
        num_after = len(text) - self._num_before
        return text.endswith(UNREADABLE) or num_begun(text, self._stops) > num_after


def cut_at_stop(chunk: GenerationChunk, num_tokens: int, stop: str) -> GenerationChunk:
    """The last chunk of a stream in which a stop string ends after so many tokens."""
    return replace(
        chunk,
        token_ids=chunk.token_ids[:num_tokens],
        logprobs=chunk.logprobs[:num_tokens],
        top_logprobs=chunk.top_logprobs[:num_tokens],
        finish_reason="stop",
        stop_reason=stop,
    )


def broken_off(chunks: Sequence[GenerationChunk], *, num_prompt_tokens: int, url: str) -> Generation | None:
    """What a stream brought before it broke off, ended by "abort". None: no token, or it was at its end."""
    if not any(chunk.token_ids for chunk in chunks) or any(chunk.finish_reason for chunk in chunks):
        return None
    try:
        end = GenerationChunk(finish_reason="abort")
        return joined_early([*chunks, end], num_prompt_tokens=num_prompt_tokens, url=url)
    except BackendUnavailableError:
        return None  # what came is nonsense, too


def joined_early(chunks: Sequence[GenerationChunk], *, num_prompt_tokens: int, url: str) -> Generation:
    """The generation of a stream that was left, or lost, before it said how many tokens it had."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    counts = GenerationChunk(num_prompt_tokens=num_prompt_tokens, num_completion_tokens=num_tokens)
    return join_chunks([*chunks, counts], url=url)


@dataclass(slots=True, eq=False)
class Interruption:
    """Whether the gateway itself has asked the server to end the generation."""

    asked: bool = False

    def ended(self, generation: Generation) -> bool:
        return self.asked and generation.finish_reason == "abort"


@asynccontextmanager
async def interrupted_at_a_new_version(
    bindings: GatewayBindingRegistry, binding: ModelBinding, place: Placement, request_id: str
) -> AsyncIterator[Interruption]:
    """While the block runs, the generation `request_id` is ended as soon as another version is published.
    One that can't be ended finishes under its own."""
    interruption = Interruption()
    task = asyncio.create_task(_interrupt(bindings, binding, place, request_id, interruption))
    try:
        yield interruption
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _interrupt(
    bindings: GatewayBindingRegistry,
    binding: ModelBinding,
    place: Placement,
    request_id: str,
    interruption: Interruption,
) -> None:
    await bindings.newer_version(binding, place.version)
    while True:
        interruption.asked = True
        try:
            await place.client.abort(request_id, timeout_s=ABORT_TIMEOUT_S)
        except (BackendRejectedError, BackendUnavailableError) as error:
            logger.warning("request %s was not interrupted on %s: %s", request_id, place.replica_id, error)
        await asyncio.sleep(REPEAT_ABORT_S)
