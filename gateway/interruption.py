"""A generation that goes on under a newer version: what is kept of it, and who interrupts it.

What one version sampled stays as it was sampled, with its logprobs. The next attempt is given it as prompt
and what is left of the budget; the answer is all of it together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gateway.bindings import GatewayBindingRegistry, ModelBinding, Placement
from gateway.chains import VersionSpan
from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.llm_client import Generation
from model_runtime.types import Int32Array

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
# A server that had not begun the request when it was told to end it must be told again.
REPEAT_ABORT_S = 0.5


@dataclass(slots=True, eq=False)
class Pieces:
    """What interrupted attempts sampled of one answer, one version after another. `keep` hears of each
    version that tokens are kept of."""

    keep: Callable[[int], None]
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
            self.keep(version)

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
