"""TrainerProcess over real processes (tests/fake_trainer.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from model_runtime import trainer_process as module
from model_runtime.errors import StoreOutageError, SupersededError, TrainerError
from model_runtime.protocol import TrainerControl, TrainerSpec, TrainerStatus
from model_runtime.trainer_process import TrainerLimits, TrainerProcess
from tests.fake_servers import until
from tests.fakes import FullDisk

LIMITS = TrainerLimits(max_restarts=2, backoff_s=0.01, max_backoff_s=0.02, hang_s=1.5, grace_s=2)


class Setup:
    def __init__(self, tmp_path: Path) -> None:
        self.mailbox = tmp_path / "mailbox"
        self.mailbox.mkdir()
        self.logs = tmp_path / "logs"
        self.statuses: list[TrainerStatus] = []
        config = {
            "multi_model": {"models": [{"model_id": "m", "model_path": "/m"}]},
            "agent_model_mapping": {"a": "m"},
            "store": {"url": str(tmp_path / "store")},
        }
        self.spec = TrainerSpec(
            run_id="run", model_id="m", epoch=1, incarnation=0, config=config, mailbox=str(self.mailbox)
        )

    def order(self, name: str, text: str = "") -> None:
        (self.mailbox / name).write_text(text)

    def process(self, **options: Any) -> TrainerProcess:
        settings: dict[str, Any] = {"limits": LIMITS, "on_status": self.statuses.append} | options
        return TrainerProcess(self.spec, logs=self.logs, **settings)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[TrainerProcess, asyncio.Task[None]]]:
        trainer = self.process()
        task = asyncio.create_task(trainer.run())
        try:
            yield trainer, task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TrainerError, SupersededError, StoreOutageError):
                await task


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(module, "TRAINER_ARGV", (sys.executable, "-m", "tests.fake_trainer"))
    return Setup(tmp_path)


def is_alive(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


async def test_what_the_trainer_says_arrives_and_what_it_is_told_is_obeyed(setup: Setup) -> None:
    setup.order("versions", "2")
    async with setup.running() as (trainer, task):
        await trainer.wait_loaded()
        await until(lambda: trainer.status and trainer.status.committed_version == 0)
        trainer.tell(TrainerControl(published_version=0))
        await until(lambda: trainer.status and trainer.status.committed_version == 1)
        trainer.tell(TrainerControl(published_version=1, desired="drain"))
        await asyncio.wait_for(task, 5)
        assert trainer.ended_well


async def test_what_a_full_disk_keeps_from_the_trainer_it_hears_when_there_is_room(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    async with setup.running() as (trainer, task):
        await trainer.wait_loaded()
        disk.full = True
        trainer.tell(TrainerControl(desired="drain", published_version=0))
        await until(lambda: disk.num_refused > 2)
        assert not task.done()
        disk.full = False
        await asyncio.wait_for(task, 5)
        assert trainer.ended_well
        assert trainer.attempt == 1


async def test_a_trainer_that_a_full_disk_keeps_from_starting_is_started_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    disk.full = True
    async with setup.running() as (trainer, _):
        await until(lambda: disk.num_refused == 1)
        disk.full = False
        await trainer.wait_loaded()
        assert trainer.attempt == 2


async def test_heartbeats_alone_are_not_news(setup: Setup) -> None:
    async with setup.running() as (trainer, _):
        await until(lambda: trainer.status and trainer.status.committed_version == 0)
        known = len(setup.statuses)
        await asyncio.sleep(1.2)
        assert len(setup.statuses) == known


async def test_a_killed_trainer_is_started_again_with_a_log_of_its_own(setup: Setup) -> None:
    async with setup.running() as (trainer, _):
        await trainer.wait_loaded()
        first = trainer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: trainer.pid != first)
        await until(lambda: trainer.status and trainer.status.pid == trainer.pid)
        assert not is_alive(first)
    assert sorted(path.name for path in setup.logs.iterdir()) == [
        "m-trainer-e1-0-1.log",
        "m-trainer-e1-0-2.log",
    ]


async def test_a_trainer_that_stops_beating_is_hung_and_started_again(setup: Setup) -> None:
    async with setup.running() as (trainer, _):
        await trainer.wait_loaded()
        first = trainer.pid
        setup.order("hang")
        await until(lambda: trainer.attempt == 2)
        (setup.mailbox / "hang").unlink()
        await until(lambda: trainer.pid != first)
        assert not is_alive(first)


async def test_a_stopped_trainer_is_hung_too(setup: Setup) -> None:
    async with setup.running() as (trainer, _):
        await trainer.wait_loaded()
        first = trainer.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await until(lambda: trainer.pid != first)
        assert not is_alive(first)


async def test_when_the_restarts_are_used_up_the_reason_and_the_log_are_told(setup: Setup) -> None:
    setup.order("fail", "the adapter has a NaN")
    async with setup.running() as (trainer, task):
        with pytest.raises(
            TrainerError, match=r"(?s)m: the trainer failed: the adapter has a NaN.*last words"
        ):
            await asyncio.wait_for(task, 20)
        assert trainer.attempt == 3


async def test_the_logs_of_the_oldest_lives_go(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPERTORY_LOG_LIVES", "2")
    setup.order("fail", "again")
    async with setup.running() as (_, task):
        with pytest.raises(TrainerError):
            await task
    logs = sorted(path.name for path in setup.logs.iterdir())
    assert logs == ["m-trainer-e1-0-2.log", "m-trainer-e1-0-3.log"]


async def test_a_crash_says_how_and_in_which_state(setup: Setup) -> None:
    trainer = setup.process(limits=TrainerLimits(max_restarts=0))
    setup.order("crash")
    with pytest.raises(TrainerError, match="exit code 9 while it was loading"):
        await asyncio.wait_for(trainer.run(), 10)


async def test_a_superseded_trainer_is_not_started_again(setup: Setup) -> None:
    setup.order("supersede")
    async with setup.running() as (trainer, task):
        with pytest.raises(SupersededError, match="epoch 9 leads"):
            await asyncio.wait_for(task, 10)
        assert trainer.attempt == 1


async def test_a_trainer_whose_store_stayed_away_is_not_started_again(setup: Setup) -> None:
    setup.order("outage", "s3://bucket has been unavailable for 601 s")
    async with setup.running() as (trainer, task):
        with pytest.raises(StoreOutageError, match="s3://bucket has been unavailable"):
            await task
        assert trainer.attempt == 1


async def test_a_trainer_that_was_told_to_stop_may_end(setup: Setup) -> None:
    async with setup.running() as (trainer, task):
        await trainer.wait_loaded()
        trainer.tell(TrainerControl(desired="stop"))
        await asyncio.wait_for(task, 5)
        assert trainer.attempt == 1
        assert not trainer.ended_well


async def test_cancelling_stops_the_process(setup: Setup) -> None:
    async with setup.running() as (trainer, _):
        await trainer.wait_loaded()
    assert not is_alive(trainer.pid)


async def test_the_last_words_of_an_earlier_life_do_not_count(setup: Setup) -> None:
    old = TrainerStatus(pid=1, state="finished", heartbeat_at=0.0, committed_version=99)
    setup.order("trainer_status.json", old.model_dump_json())
    async with setup.running() as (trainer, _):
        await until(lambda: trainer.status and trainer.status.committed_version == 0)
    assert all(status.committed_version != 99 for status in setup.statuses)
