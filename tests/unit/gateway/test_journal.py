# ruff: noqa: ASYNC220, ASYNC240 - nothing else waits while a test reads its files
"""The session journal: what was durable is read back by the next process, whatever happened to this one."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway import journal as module
from gateway import journal_files as files
from gateway.calls import CallIdentity
from gateway.chains import Point, SampledTurn, VersionSpan
from gateway.codec import TextMark
from gateway.conversation import ChatReply
from gateway.journal import Append, Forget, Owned, SessionJournal, remove_older_journals
from gateway.journal_events import GatesMoved, InfraMarked, OutcomeDecided, RewardGiven, TurnCommitted
from gateway.journal_files import JournalFiles
from model_runtime.errors import ConfigError
from model_runtime.store import Store
from tests.gateway_harness import live_gateway

ROOT = Path(__file__).parents[3]
LONG_S = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions" / "3.journal"


def journal_at(path: Path, *, run_id: str = "run", epoch: int = 3) -> SessionJournal:
    return SessionJournal(path, run_id=run_id, epoch=epoch)


async def started(path: Path) -> SessionJournal:
    journal = journal_at(path)
    journal.load()
    journal.start()
    return journal


async def read_again(path: Path) -> Owned:
    """What the next process finds."""
    journal = journal_at(path)
    owned = journal.load()
    await journal.close()
    return owned


def reward(value: float) -> RewardGiven:
    return RewardGiven("reward", value)


def make_reply() -> ChatReply:
    return ChatReply(
        request_id="r0",
        agent_id="planner",
        model_id="plan",
        policy_version=4,
        policy_version_max=5,
        workflow_id="g0/0/0",
        content="hello",
        finish_reason="stop",
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        token_bytes=(b"a", b"\xc3"),
        num_prompt_tokens=5,
        num_cached_tokens=0,
        created_at=1.0,
    )


def make_committed(*, num_tokens: int = 3) -> TurnCommitted:
    turn = SampledTurn(
        context_ids=np.arange(5, dtype=np.int32),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.linspace(-1, 0, num_tokens, dtype=np.float32),
        versions=(VersionSpan(4, 1), VersionSpan(5, num_tokens - 1)),
        request_id="r0",
        finish_reason="stop",
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        started_at=1.5,
        ended_at=2.5,
    )
    point = Point(b"asked", b"tip", 3, TextMark.of("text"))
    return TurnCommitted("planner", "plan", 0, 1.0, 0, turn, point, CallIdentity("k", b"d"), make_reply())


# ------------------------------------------------------------------ keeping


async def test_what_was_durable_is_read_back_in_order(path: Path) -> None:
    journal = await started(path)
    journal.write(Append("a", reward(1)), Append("b", InfraMarked("503")))
    journal.write(Append("a", reward(2)))
    await journal.durable()
    await journal.close()
    assert await read_again(path) == {"a": [reward(1), reward(2)], "b": [InfraMarked("503")]}


async def test_a_turn_comes_back_to_the_bit(path: Path) -> None:
    journal, turn = await started(path), make_committed()
    journal.write(Append("a", turn))
    await journal.close()
    [[found]] = (await read_again(path)).values()
    assert isinstance(found, TurnCommitted)
    for name in ("context_ids", "token_ids", "logprobs"):
        before, after = getattr(turn.turn, name), getattr(found.turn, name)
        assert after.dtype == before.dtype
        assert after.tolist() == before.tolist()
    assert found.turn.versions == turn.turn.versions
    assert (found.point, found.identity, found.num_turns) == (turn.point, turn.identity, 0)
    assert found.reply is not None
    assert found.reply.content == make_reply().content


async def test_what_is_written_together_is_one_write(path: Path) -> None:
    journal = await started(path)
    with journal.together():
        journal.write(Append("a", reward(1)))
        journal.write(Append("b", reward(2)))
        assert journal._num_written == 0
    assert journal._num_written == 1
    await journal.close()
    assert await read_again(path) == {"a": [reward(1)], "b": [reward(2)]}


async def test_what_comes_during_a_write_is_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, append = await started(path), JournalFiles.append
    has_begun, may_go_on = threading.Event(), threading.Event()
    batches: list[int] = []

    def slow(self: JournalFiles, batch: list[Any]) -> None:
        batches.append(len(batch))
        has_begun.set()
        assert may_go_on.wait(10)
        append(self, batch)

    monkeypatch.setattr(JournalFiles, "append", slow)
    monkeypatch.setattr(module, "MAX_BYTES_ON_LOOP", 0)
    journal.write(Append("a", reward(0)))
    journal.write(Append("a", reward(1)))
    assert await asyncio.to_thread(has_begun.wait, 10)
    for value in range(2, 6):
        journal.write(Append("a", reward(value)))
        await asyncio.sleep(0.001)
    may_go_on.set()
    await journal.durable()
    assert batches == [2, 4]
    await journal.close()
    assert await read_again(path) == {"a": [reward(value) for value in range(6)]}


def note_threads(monkeypatch: pytest.MonkeyPatch, *, slow_write_s: float = LONG_S) -> list[tuple[bool, int]]:
    """Of each write from now on: is it the event loop's, and how many rows it has."""
    append, noted, ours = JournalFiles.append, [], threading.get_ident()

    def noting(self: JournalFiles, rows: list[Any]) -> None:
        noted.append((threading.get_ident() == ours, len(rows)))
        append(self, rows)

    monkeypatch.setattr(JournalFiles, "append", noting)
    monkeypatch.setattr(module, "SLOW_WRITE_S", slow_write_s)
    monkeypatch.setattr(module, "AFTER_SLOW_WRITE_S", LONG_S)
    return noted


async def test_the_loop_writes_small_events_itself_those_of_one_pass_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, writes = await started(path), note_threads(monkeypatch)
    for value in range(3):
        journal.write(Append("a", reward(value)))
    await journal.durable()
    journal.write(Append("a", make_committed()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert writes == [(True, 3), (True, 1)]
    await journal.close()
    assert len((await read_again(path))["a"]) == 4


@pytest.mark.parametrize("what", ["a large event", "untidy files"])
async def test_what_takes_long_is_the_threads(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    journal, writes = await started(path), note_threads(monkeypatch)
    if what == "untidy files":
        monkeypatch.setattr(files, "FILE_BYTES", 100)
        journal.write(Append("a", make_committed()))
        await journal.durable()
        del writes[:]
    journal.write(Append("a", make_committed(num_tokens=100_000 if what == "a large event" else 3)))
    await journal.durable()
    monkeypatch.setattr(files, "FILE_BYTES", 10**9)
    journal.write(Append("b", reward(1)))
    await journal.durable()
    assert writes == [(False, 1), (True, 1)]
    await journal.close()
    assert (await read_again(path))["b"] == [reward(1)]


async def test_a_slow_disk_is_the_threads_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, writes = await started(path), note_threads(monkeypatch, slow_write_s=0.0)
    for value in range(3):
        journal.write(Append("a", reward(value)))
        await journal.durable()
    assert writes == [(True, 1), (False, 1), (False, 1)]
    journal._off_loop_until = time.monotonic()
    journal.write(Append("a", reward(3)))
    await journal.durable()
    assert writes[-1] == (True, 1)
    await journal.close()
    assert (await read_again(path))["a"] == [reward(value) for value in range(4)]


async def test_what_is_written_just_before_the_end_is_kept(path: Path) -> None:
    journal = await started(path)
    journal.write(Append("a", reward(1)))
    await asyncio.sleep(0)
    journal.write(Append("a", reward(2)))
    await journal.close()
    assert await read_again(path) == {"a": [reward(1), reward(2)]}


async def test_what_is_forgotten_does_not_come_back(path: Path) -> None:
    journal = await started(path)
    journal.write(Append("a", reward(1)), Append("b", reward(2)))
    journal.write(Forget("a"), Append("c", reward(3)))
    await journal.close()
    assert await read_again(path) == {"b": [reward(2)], "c": [reward(3)]}


async def test_durable_waits_for_what_was_written_before_it_only(path: Path) -> None:
    journal = await started(path)
    await journal.durable()  # nothing was written
    for i in range(200):
        journal.write(Append("a", reward(i)))
    await asyncio.gather(*(journal.durable() for _ in range(50)))
    await journal.close()
    assert len((await read_again(path))["a"]) == 200


async def test_a_caller_that_is_cancelled_takes_no_other_with_it(path: Path) -> None:
    journal = await started(path)
    journal.write(Append("a", reward(1)))
    first, second = asyncio.create_task(journal.durable()), asyncio.create_task(journal.durable())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 10)
    await journal.close()


async def test_without_a_path_everything_is_durable_at_once() -> None:
    journal = SessionJournal()
    assert journal.load() == {}
    journal.start()
    journal.write(Append("a", reward(1)))
    await asyncio.wait_for(journal.durable(), 1)
    assert not journal.is_kept
    await journal.close()


async def test_the_files_are_for_their_owner_alone(path: Path) -> None:
    journal = await started(path)
    for made in (path, *path.iterdir()):
        assert made.stat().st_mode & 0o077 == 0
    await journal.close()


# ------------------------------------------------------------------ dying

KILLED = """
import asyncio, sys
from pathlib import Path
from gateway.journal import Append, SessionJournal
from gateway.journal_events import RewardGiven

async def main():
    journal = SessionJournal(Path(sys.argv[1]), run_id="run", epoch=3)
    journal.load()
    journal.start()
    for i in range(10**9):
        journal.write(Append("a", RewardGiven("reward", i)), Append("b", RewardGiven("reward", i)))
        if i % 7 == 0:
            await journal.durable()
            print(i, flush=True)

asyncio.run(main())
"""


async def test_all_that_was_durable_outlives_sigkill_and_no_entry_is_halved(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 300:
            pass
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split("\n")
    told = max((int(line) for line in rest[:-1]), default=300)
    found = await read_again(path)
    values = [event.value for event in found["a"] if isinstance(event, RewardGiven)]
    assert values == list(range(len(values)))  # no gap
    assert len(values) > told
    assert found["a"] == found["b"]


async def test_a_journal_can_be_written_on_by_the_next_process(path: Path) -> None:
    for life in range(3):
        journal = await started(path)
        journal.write(Append("a", reward(life)))
        await journal.close()
    assert (await read_again(path))["a"] == [reward(0), reward(1), reward(2)]


async def test_a_second_gateway_of_the_epoch_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
    journal = await started(path)
    journal.write(Append("a", reward(1)))
    with pytest.raises(ConfigError, match="another process is the gateway of this run's epoch"):
        journal_at(path).load()
    await journal.close()
    assert await read_again(path) == {"a": [reward(1)]}


# ------------------------------------------------------------------ damage


async def test_an_unreadable_journal_is_set_aside_and_an_empty_one_begun(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    (path / "00000001").write_bytes(b"not a journal at all" * 100)
    with caplog.at_level(logging.ERROR):
        journal = await started(path)
    assert "the sessions in it are lost" in caplog.text
    [aside] = path.parent.glob("3.journal.unreadable-*")
    assert (aside / "00000001").read_bytes() == b"not a journal at all" * 100
    journal.write(Append("a", reward(1)))
    await journal.close()
    assert await read_again(path) == {"a": [reward(1)]}


async def test_a_journal_with_a_damaged_file_or_event_is_set_aside(path: Path) -> None:
    journal = await started(path)
    for i in range(500):
        journal.write(Append(f"owner-{i}", make_committed(num_tokens=200)))
    await journal.close()
    file = path / "00000001"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    assert await read_again(path) == {}
    journal = await started(path)
    assert journal._files is not None
    journal._files.append([("x", b"\x92\xa0")])
    await journal.close()
    assert await read_again(path) == {}
    assert len(list(path.parent.glob("*.unreadable-*"))) == 2


async def test_a_journal_of_another_run_or_epoch_is_set_aside(path: Path) -> None:
    journal = await started(path)
    journal.write(Append("a", reward(1)))
    await journal.close()
    for other in (journal_at(path, run_id="other"), journal_at(path, epoch=4)):
        assert other.load() == {}
        await other.close()
    assert len(list(path.parent.glob("*.unreadable-*"))) == 2


async def test_journals_of_older_epochs_are_removed(path: Path) -> None:
    journal = await started(path)
    await journal.close()
    for name in ("1.journal", "2.journal.unreadable-1", "4.journal"):
        (path.parent / name).mkdir()
        (path.parent / name / "00000001").touch()
    (path.parent / "notes.txt").touch()
    remove_older_journals(path, 3)
    assert {p.name for p in path.parent.iterdir()} == {"3.journal", "4.journal", "notes.txt"}


# ------------------------------------------------------------------ bounds


def size_of(path: Path) -> int:
    num_bytes = 0
    for file in path.iterdir():
        with suppress(FileNotFoundError):  # the thread may be tidying up
            num_bytes += file.stat().st_size
    return num_bytes


async def test_the_files_do_not_grow_with_what_was_settled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 100_000)
    journal, turn, sizes = await started(path), make_committed(num_tokens=400), []
    for round_ in range(12):
        for session in range(40):
            journal.write(*[Append(f"s{round_}-{session}", turn)] * 10)
            await journal.durable()
        for session in range(40):
            journal.write(Forget(f"s{round_}-{session}"))
            await journal.durable()
        sizes.append(size_of(path))
    await journal.close()
    assert max(sizes) <= 400_000 < 12 * 40 * 10 * 400 * 8


async def test_space_is_given_back_when_most_sessions_have_ended_and_what_is_left_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 100_000)
    journal, turn = await started(path), make_committed(num_tokens=4000)
    for session in range(100):
        journal.write(Append(f"s{session}", turn))
        await journal.durable()
    journal.write(Append("s7", reward(1)))
    for session in range(100):
        if session != 7:
            journal.write(Forget(f"s{session}"))
    for i in range(100):
        journal.write(Append("gates", GatesMoved({"m": (i, 0)})))
        await journal.durable()
    journal.write(Append("s7", reward(2)))
    await journal.close()
    assert size_of(path) < 500_000 < 100 * 4000 * 8
    found = await read_again(path)
    assert [type(event).__name__ for event in found["s7"]] == ["TurnCommitted", "RewardGiven", "RewardGiven"]
    assert (found["s7"][1:], len(found["gates"]), len(found)) == ([reward(1), reward(2)], 100, 2)


def fill_disk(monkeypatch: pytest.MonkeyPatch, *, room: int) -> threading.Event:
    """From now on it takes `room` more bytes, and again all once the event is set."""
    write, has_room, left = os.pwrite, threading.Event(), [room]

    def pwrite(descriptor: int, data: bytes, place: int) -> int:
        if has_room.is_set():
            return write(descriptor, data, place)
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written = write(descriptor, data[: left[0]], place)
        left[0] -= num_written
        return num_written

    monkeypatch.setattr(os, "pwrite", pwrite)
    return has_room


async def test_a_full_disk_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await started(path)
    has_room = fill_disk(monkeypatch, room=1000)
    journal.write(Append("a", make_committed(num_tokens=10_000)))
    waiting = asyncio.create_task(journal.durable())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    has_room.set()
    await asyncio.wait_for(waiting, 10)
    assert journal.is_kept
    await journal.close()
    assert len((await read_again(path))["a"]) == 1


async def test_a_disk_that_stays_full_costs_the_journal_and_no_call(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WRITE_PATIENCE_S", 0.1)
    journal = await started(path)
    journal.write(Append("a", OutcomeDecided("finalized", "")))
    await journal.durable()
    has_room = fill_disk(monkeypatch, room=1000)
    journal.write(Append("a", make_committed(num_tokens=100_000)))
    await asyncio.wait_for(journal.durable(), 10)
    assert not journal.is_kept
    assert "is given up" in caplog.text
    journal.write(Append("a", reward(1)))
    await asyncio.wait_for(journal.durable(), 1)
    await journal.close()
    has_room.set()
    assert await read_again(path) == {}  # a gap is worse than nothing


def test_a_journal_that_is_given_up_shows_in_the_metrics(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_PATIENCE_S", 0.0)
    with live_gateway(local_store) as harness:
        harness.start_afresh()
        session = harness.open_session()
        assert "repertory_gateway_journal_kept 1.0" in harness.http.get("/metrics").text

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(JournalFiles, "append", refuse)
        assert session.chat("x").status_code == 200
        assert "repertory_gateway_journal_kept 0.0" in harness.http.get("/metrics").text
        assert session.finalize(1.0)["status"] == "finalized"
