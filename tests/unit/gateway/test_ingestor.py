"""What `ingest` promises: durable when it returns, written once, whole in spite of crashes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gateway.ingestor import FinishedExecution, TrajectoryIngestor
from model_runtime.config import GatewayConfig, StoreConfig
from model_runtime.errors import (
    CorruptObjectError,
    InvalidTrajectoryError,
    ObjectExistsError,
    StoreUnavailableError,
)
from model_runtime.layout import RunLayout, writer_id
from model_runtime.local_store import LocalStore
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import MemberKey, Shard
from tests.fake_servers import until
from tests.fakes import make_trajectory

LAYOUT = RunLayout("run")
WRITER = writer_id(1, 1)
MODELS = ["planner_model", "solver_model"]


class FailingStore(LocalStore):
    """Fails puts of keys that hold a word, as long as it is told to; may hold them up instead."""

    def __init__(self, url: Path) -> None:
        super().__init__(StoreConfig(url=str(url)))
        self.failing: str | None = None
        self.failures = threading.Semaphore(0)
        self.gate = threading.Event()
        self.held: str | None = None
        self.created: list[str] = []

    async def failed(self, times: int) -> None:
        """Wait for so many failures."""
        for _ in range(times):
            assert await asyncio.to_thread(self.failures.acquire, timeout=10)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.failing is not None and self.failing in key:
            self.failures.release()
            raise StoreUnavailableError(f"put {key}: no answer")
        if self.held is not None and self.held in key:
            self.gate.wait(10)
        created = super().put_if_absent(key, data)
        if created:
            self.created.append(key)
        return created


@pytest.fixture
def store(tmp_path: Path) -> FailingStore:
    return FailingStore(tmp_path)


def ingestor(
    store: LocalStore, *, writer: str = WRITER, timeout_s: float = 5.0, **config
) -> TrajectoryIngestor:
    return TrajectoryIngestor(
        store,
        LAYOUT,
        writer=writer,
        trainable_models=MODELS,
        config=GatewayConfig(**{"commit_interval_s": 0.01} | config),
        ingest_timeout_s=timeout_s,
        retry_after_s=0.01,
    )


def execution(index: int = 0, *, group: str = "g0", mode="train", **fields) -> FinishedExecution:
    """One planner row and two solver rows."""
    member = MemberKey(group_id=group, group_size=8, member_index=index, attempt=0)
    rows = [
        ("planner_agent", "planner_model", 0),
        ("search_agent", "solver_model", 0),
        ("search_agent", "solver_model", 1),
    ]
    values = {
        "member": member,
        "status": "finalized",
        "reason": "",
        "train": {"planner_model": True, "solver_model": False},
        "trajectories": tuple(
            make_trajectory(member=member, agent_id=agent, model_id=model, chain_index=chain, reward=1.0)
            for agent, model, chain in rows
        ),
        "mode": mode,
    }
    return FinishedExecution(**values | fields)


def shard(store: LocalStore, model_id: str, seq: int, *, writer: str = WRITER) -> Shard:
    key = LAYOUT.model(model_id).log_shard(writer, seq)
    return decode_shard(store.get(key), source=key)


async def seqs(*ingesting) -> list[int]:
    return [written.seq for written in await asyncio.gather(*ingesting)]


async def test_ingest_returns_when_rows_and_settlements_are_in_every_models_log(store):
    writing = ingestor(store)
    await writing.start()
    assert (await writing.ingest(execution())).seq == 0
    planner, solver = (shard(store, m, 0) for m in MODELS)
    assert len(planner.trajectories) == 1
    assert len(solver.trajectories) == 2
    assert [(s.num_rows, s.train) for s in planner.settlements] == [({"planner_agent": 1}, True)]
    assert [(s.num_rows, s.train) for s in solver.settlements] == [({"search_agent": 2}, False)]
    assert store.list(LAYOUT.journal_writers()) == []
    await writing.close()


async def test_a_model_that_was_never_called_gets_its_settlement(store):
    writing = ingestor(store)
    await writing.start()
    await writing.ingest(execution(status="infra", reason="502", trajectories=()))
    for model_id in MODELS:
        (settlement,) = shard(store, model_id, 0).settlements
        assert (settlement.status, settlement.num_rows, settlement.reason) == ("infra", {}, "502")
    await writing.close()


async def test_executions_of_one_interval_share_a_shard(store):
    writing = ingestor(store, commit_interval_s=0.1)
    await writing.start()
    assert await seqs(*(writing.ingest(execution(i)) for i in range(5))) == [0] * 5
    assert len(shard(store, "planner_model", 0).settlements) == 5
    assert (await writing.ingest(execution(5))).seq == 1
    await writing.close()


@pytest.mark.parametrize("limit", [{"commit_max_rows": 6}, {"commit_max_bytes": 300}])
async def test_many_rows_or_bytes_are_written_without_waiting_for_the_interval(store, limit):
    writing = ingestor(store, commit_interval_s=60, **limit)
    await writing.start()
    async with asyncio.timeout(5):
        assert await seqs(*(writing.ingest(execution(i)) for i in range(2))) == [0, 0]
    await writing.close()


async def test_a_failing_store_keeps_the_work_and_it_is_written_once_when_it_is_back(store):
    writing = ingestor(store)
    await writing.start()
    store.failing = "solver_model"
    task = asyncio.create_task(writing.ingest(execution()))
    await store.failed(3)
    assert not task.done()
    assert len(store.list(LAYOUT.journal_writers())) == 1
    store.failing = None
    assert (await task).seq == 0
    assert len(store.list(LAYOUT.model("solver_model").log_writers())) == 1
    await writing.close()


async def test_a_caller_gives_up_with_the_stores_error_and_may_ask_again(store):
    writing = ingestor(store, timeout_s=0.1)
    await writing.start()
    store.failing = "journal"
    with pytest.raises(StoreUnavailableError, match=r"g0/0/0 is not durable after .*no answer"):
        await writing.ingest(execution())
    writing._ingest_timeout_s = 10
    again = asyncio.create_task(writing.ingest(execution()))
    await asyncio.sleep(0)
    store.failing = None
    assert (await again).seq == 0
    assert len(shard(store, "planner_model", 0).settlements) == 1
    assert not store.exists(LAYOUT.model("planner_model").log_shard(WRITER, 1))
    await writing.close()


async def test_what_became_durable_after_its_caller_gave_up_is_not_written_again(store):
    writing = ingestor(store, timeout_s=0.05)
    await writing.start()
    store.failing = "journal"
    with pytest.raises(StoreUnavailableError, match="is not durable after"):
        await writing.ingest(execution())
    store.failing = None
    await until(lambda: len(store.created) >= 3)
    await asyncio.sleep(0.05)  # the commit is over
    assert (await writing.ingest(execution())).seq == 0
    await writing.close()
    assert store.list(LAYOUT.model(MODELS[0]).log_writers()) == [LAYOUT.model(MODELS[0]).log_shard(WRITER, 0)]


@pytest.mark.parametrize("died_before", ["planner_model", "solver_model"])
async def test_what_a_crash_left_in_the_journal_is_written_by_the_next_start_exactly(store, died_before):
    dying = ingestor(store)
    await dying.start()
    store.failing = died_before
    task = asyncio.create_task(dying.ingest(execution()))
    await store.failed(2)
    assert dying._task is not None
    dying._task.cancel()
    task.cancel()
    await asyncio.gather(task, dying._task, return_exceptions=True)

    store.failing = None
    next_life = ingestor(store, writer=writer_id(1, 2))
    await next_life.start()
    assert [len(shard(store, m, 0).trajectories) for m in MODELS] == [1, 2]
    assert (await next_life.ingest(execution(1))).seq == 0
    await next_life.close()
    logs = [key for m in MODELS for key in store.list(LAYOUT.model(m).log_writers())]
    assert len(logs) == 4
    assert sorted(store.created.count(key) for key in logs) == [1] * 4
    assert store.list(LAYOUT.journal_writers()) == []


async def test_driving_the_journal_again_changes_nothing(store):
    first = ingestor(store)
    await first.start()
    entries = {}
    delete, store.delete = store.delete, lambda key: entries.setdefault(key, store.get(key))
    await first.ingest(execution())
    await first.close()
    before = {k: store.get(k) for k in store.list("run/models")}
    store.delete = delete
    assert len(entries) == 1
    second = ingestor(store, writer=writer_id(1, 2))
    await second.start()
    await second.close()
    assert {k: store.get(k) for k in store.list("run/models")} == before
    assert store.list(LAYOUT.journal_writers()) == []


async def test_a_log_whose_oldest_shards_are_gone_goes_on_with_its_next_number(store):
    first = ingestor(store)
    await first.start()
    assert [(await first.ingest(execution(i))).seq for i in range(3)] == [0, 1, 2]
    for number in range(2):
        await first.ingest(execution(number, mode="eval"))
    await first.close()
    solver = LAYOUT.model("solver_model")
    store.delete(solver.eval_shard(WRITER, 0))
    for model_id in MODELS:
        for seq in range(2):
            store.delete(LAYOUT.model(model_id).log_shard(WRITER, seq))
    again = ingestor(store)
    await again.start()
    assert (await again.ingest(execution(3))).seq == 3
    await again.ingest(execution(2, mode="eval"))
    await again.close()
    assert store.list(solver.eval_writers()) == [solver.eval_shard(WRITER, seq) for seq in (1, 2)]


async def test_evaluations_stand_apart_and_take_no_number_of_the_log(store):
    writing = ingestor(store)
    await writing.start()
    await writing.ingest(execution(mode="eval"))
    await writing.ingest(execution(1, mode="eval"))
    assert (await writing.ingest(execution(2))).seq == 0
    key = LAYOUT.model("solver_model").eval_shard(WRITER, 1)
    rows = decode_shard(store.get(key), source=key)
    assert [t.member.member_index for t in rows.trajectories] == [1, 1]
    assert rows.settlements == ()
    await writing.close()


async def test_sessions_of_evaluations_that_work_on_one_member_at_once_are_all_written(store):
    writing = ingestor(store, commit_interval_s=0.05)
    await writing.start()
    ends = [execution(mode="eval", session_id=session_id) for session_id in ("s-a", "s-b", "s-b")]
    written = await asyncio.gather(*(writing.ingest(end) for end in ends))
    assert len({w.rows_in for w in written}) == 1
    key = LAYOUT.model("solver_model").eval_shard(WRITER, 0)
    assert len(decode_shard(store.get(key), source=key).trajectories) == 4  # asked again, s-b is joined
    await writing.close()


async def test_close_writes_what_is_pending(store):
    writing = ingestor(store, commit_interval_s=60)
    await writing.start()
    task = asyncio.create_task(writing.ingest(execution()))
    await asyncio.sleep(0.01)
    await writing.close()
    assert (await task).seq == 0
    with pytest.raises(StoreUnavailableError, match="not running"):
        await writing.ingest(execution(1))


async def test_only_one_commit_is_in_flight_and_later_work_gathers_behind_it(store):
    writing = ingestor(store)
    await writing.start()
    store.held = "journal"
    first = asyncio.create_task(writing.ingest(execution()))
    await asyncio.sleep(0.05)
    later = [asyncio.create_task(writing.ingest(execution(i))) for i in range(1, 4)]
    await asyncio.sleep(0.05)
    assert not first.done()
    store.gate.set()
    assert await seqs(first, *later) == [0, 1, 1, 1]
    await writing.close()


async def test_a_record_that_cannot_be_written_is_refused_alone(store):
    writing = ingestor(store, commit_interval_s=0.05)
    await writing.start()
    row = make_trajectory(member_index=1, group_size=8, workflow_rewards={"reward": "much"})
    bad = execution(1, trajectories=(row,))
    results = await asyncio.gather(
        *(writing.ingest(e) for e in (execution(0), bad, execution(2))), return_exceptions=True
    )
    assert [getattr(result, "seq", None) for result in (results[0], results[2])] == [0, 0]
    assert isinstance(results[1], InvalidTrajectoryError)
    assert [s.member.member_index for s in shard(store, "planner_model", 0).settlements] == [0, 2]
    await writing.close()


async def test_another_process_under_the_same_name_is_an_error_at_once(store):
    writing = ingestor(store)
    await writing.start()
    store.put(LAYOUT.model("planner_model").log_shard(WRITER, 0), b"somebody else's")
    with pytest.raises(ObjectExistsError):
        await writing.ingest(execution())
    await writing.close()


async def test_a_journal_entry_that_cannot_be_read_is_named(store):
    store.put(LAYOUT.journal_entry(WRITER, 0), b"\xc1 nonsense")
    with pytest.raises(CorruptObjectError, match=r"journal/e00001-00001/00000000.bin: not a journal entry"):
        await ingestor(store, writer=writer_id(1, 2)).start()


async def test_close_gives_up_on_a_store_that_stays_away_and_leaves_the_journal(store):
    writing = ingestor(store, timeout_s=0.3)
    await writing.start()
    store.failing = "solver_model"
    task = asyncio.create_task(writing.ingest(execution()))
    await store.failed(1)
    with pytest.raises(StoreUnavailableError, match="not durable"):
        await writing.close()
    with pytest.raises(StoreUnavailableError, match="not durable"):
        await task
    assert len(store.list(LAYOUT.journal_writers())) == 1
