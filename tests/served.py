"""Sampling from a real server in integration tests, and comparing with transformers + PEFT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from model_runtime.llm_client import Generation, LLMServerClient
from tests.tiny_models import reference_logprobs

PROMPT = [1, 50, 60, 70, 80, 90, 100, 2, 1, 33]
# 40 tokens: more than one block of 32, so that the prefix cache has something to hold.
LONG_PROMPT = [1, *range(40, 78), 2]


def largest_difference(
    base: Path, adapter: Path | None, prompt: list[int], answer: Generation, *, temperature: float = 1.0
) -> float:
    """Between the served logprobs and those of transformers + PEFT on the same tokens."""
    ids = prompt + answer.token_ids.tolist()
    wanted = reference_logprobs(base, adapter, ids, temperature=temperature)[len(prompt) - 1 :]
    return float(np.abs(np.asarray(wanted) - answer.logprobs).max())


async def sample(client: LLMServerClient, name: str, *, prompt=PROMPT, **sampling) -> Generation:
    defaults = {"max_tokens": 64, "temperature": 1.0, "ignore_eos": True}
    return await client.generate(
        model=name,
        token_ids=prompt,
        sampling=defaults | sampling,
        request_id=f"test-{time.monotonic_ns()}",
        timeout_s=60.0,
    )


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
