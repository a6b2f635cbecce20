"""A turn is waited for, passed, or not asked for; never does Prefect hold a sync up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.errors import ConfigError
from tasks import staggering
from tasks.staggering import limit_name, turn


def config(**sync: Any) -> RunConfig:
    return parse_config(
        {
            "name": "my.run",
            "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
            "agent_model_mapping": {"x": "a"},
            "sync": sync,
        }
    )


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Prefect's side of it, with one slot."""
    free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def concurrency(name: str, *, timeout_seconds: float, **_: Any) -> AsyncIterator[None]:
        async with asyncio.timeout(timeout_seconds):
            await free.acquire()
        try:
            yield
        finally:
            free.release()

    monkeypatch.setattr(staggering, "concurrency", concurrency)
    return free


async def test_a_free_slot_is_held_for_as_long_as_the_sync_takes(slots: asyncio.Semaphore) -> None:
    async with turn(config(max_concurrent=1)) as slot:
        assert slots.locked()
        assert slot.turn == "taken"
    assert not slots.locked()


async def test_a_slot_is_given_back_by_a_sync_that_fails(slots: asyncio.Semaphore) -> None:
    with pytest.raises(RuntimeError):
        async with turn(config(max_concurrent=1)):
            raise RuntimeError
    assert not slots.locked()


async def test_who_waited_long_enough_goes_on_without_a_slot(slots: asyncio.Semaphore) -> None:
    await slots.acquire()
    async with turn(config(max_concurrent=1, max_wait_s=0.05)) as slot:
        assert slot.turn == "passed"
        assert slot.waited_s >= 0.05
    assert slots.locked(), "a slot that was not taken is not given back"


async def test_no_limit_asks_prefect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(staggering, "concurrency")
    async with turn(config()) as slot:
        assert slot.as_columns() == {"turn": "unlimited", "turn_wait_s": 0.0}


async def test_prefect_being_away_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def refused(*_: Any, **__: Any) -> AsyncIterator[None]:
        raise ConnectionError("refused")
        yield

    monkeypatch.setattr(staggering, "concurrency", refused)
    async with turn(config(max_concurrent=1)) as slot:
        assert slot.turn == "away"


async def test_prefect_being_away_at_the_end_does_not_fail_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def breaks(*_: Any, **__: Any) -> AsyncIterator[None]:
        yield
        raise ConnectionError("gone")

    monkeypatch.setattr(staggering, "concurrency", breaks)
    async with turn(config(max_concurrent=1)) as slot:
        assert slot.turn == "taken"


def test_the_limit_has_one_name_for_all_runs_of_a_config() -> None:
    assert limit_name(config()) == "repertory-sync-my-run"


@pytest.mark.parametrize(
    ("sync", "message"), [({"max_concurrent": 0}, "max_concurrent"), ({"max_wait_s": 31}, "30")]
)
def test_a_bound_that_makes_no_sense_is_refused(sync: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**sync)
