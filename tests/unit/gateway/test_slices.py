"""What keeps the event loop's passes short, and calls together."""

from __future__ import annotations

import asyncio

import pytest

from gateway.slices import in_step


@pytest.mark.parametrize(
    ("num_others", "order"),
    [(1, ["a1", "b1", "c1", "a2", "b2", "c2"]), (0, ["a1", "a2", "b1", "b2", "c1", "c2"])],
)
async def test_calls_at_once_take_each_step_together_and_one_alone_does_not_wait(
    num_others: int, order: list[str]
) -> None:
    steps: list[str] = []

    async def call(name: str) -> None:
        steps.append(f"{name}1")
        await in_step(num_others)
        steps.append(f"{name}2")

    await asyncio.gather(*(call(name) for name in "abc"))
    assert steps == order
