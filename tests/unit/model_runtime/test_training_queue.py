"""The training queue over a real log: exactly once, bounded lag, the same again after a crash."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.books import ModelBooks, read_books
from model_runtime.config import ModelConfig
from model_runtime.documents import BatchDocument, CheckpointDocument
from model_runtime.errors import CorruptObjectError
from model_runtime.layout import ModelLayout, RunLayout
from model_runtime.removed_log import NOTHING_REMOVED, ShardRecord
from model_runtime.training_queue import Batch, QueueProgress, TrainingQueue
from model_runtime.trajectory_log import decode_shard, encode_shard
from model_runtime.types import Settlement, Shard, Trajectory
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

LAYOUT: ModelLayout = RunLayout("run").model("planner_model")
FIRST, SECOND = "e00001-00001", "e00001-00002"
SIZE = 4


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def model(*, batch_size: int = 1, trigger: int = 1, **async_training: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "model_id": "planner_model",
            "model_path": "/models/tiny",
            "batch_size": batch_size,
            "async_training": {"trigger_parameter_sync_step": trigger, "staleness_threshold": 0}
            | async_training,
        }
    )


def queue(store: MemoryStore, config: ModelConfig | None = None, **options: Any) -> TrainingQueue:
    return TrainingQueue(store, LAYOUT, config or model(), **{"epoch": 1, "resume": None} | options)


class Log:
    """Appends shards to the log of one writer."""

    def __init__(self, store: MemoryStore, writer: str = FIRST) -> None:
        self.store, self.writer, self.seq = store, writer, 0

    def append(self, *executions: tuple[Settlement, list[Trajectory]]) -> None:
        shard = Shard(
            trajectories=tuple(t for _, rows in executions for t in rows),
            settlements=tuple(settlement for settlement, _ in executions),
        )
        self.append_bytes(encode_shard(shard))

    def append_bytes(self, data: bytes) -> None:
        self.store.put(LAYOUT.log_shard(self.writer, self.seq), data)
        self.seq += 1

    def group(self, group_id: str, rewards: tuple[float | None, ...] = (0, 0, 1, 1), **fields: Any) -> None:
        """One shard per member."""
        for index in range(len(rewards)):
            self.append(member(group_id, index, rewards[index], size=len(rewards), **fields))


def member(
    group_id: str, index: int, reward: float | None, *, size: int = SIZE, chains: int = 1, **fields: Any
) -> tuple[Settlement, list[Trajectory]]:
    status = fields.pop("status", "finalized")
    place: dict[str, Any] = {"group_id": group_id, "group_size": size, "member_index": index}
    place["attempt"] = fields.pop("attempt", 0)
    rows = [make_trajectory(**place, chain_index=c, reward=reward, **fields) for c in range(chains)]
    num_rows = {"planner_agent": chains} if chains else {}
    return make_settlement(**place, status=status, num_rows=num_rows), rows


def deal(
    q: TrainingQueue, step: int = 1, *, published: int = 0, training: int | None = None,
    oldest_open: int | None = None, final: bool = False,
) -> Batch | None:  # fmt: skip
    return q.next_batch(
        step,
        published_version=published,
        training_version=published if training is None else training,
        oldest_open_version=oldest_open,
        final=final,
    )


def dealt(q: TrainingQueue, *args: Any, **options: Any) -> Batch:
    batch = deal(q, *args, **options)
    assert batch is not None
    return batch


def train(store: MemoryStore, q: TrainingQueue, batch: Batch) -> None:
    """What the trainer does around an update."""
    store.put(LAYOUT.batch(batch.step), batch.document.to_bytes())
    q.consume(batch)


def checkpoint(q: TrainingQueue, step: int) -> CheckpointDocument:
    progress = q.progress()
    return CheckpointDocument(
        step=step,
        epoch=1,
        version=step,
        files={},
        low_water=progress.low_water,
        consumed=progress.consumed,
        closed_groups=progress.closed_groups,
        totals=progress.totals,
        seed=0,
        created_at=0.0,
    )


def contents(batch: Batch) -> list[tuple[str, float, float, bytes]]:
    return [(r.trajectory.trajectory_id, r.reward, r.advantage, r.loss_mask.tobytes()) for r in batch.rows]


# ------------------------------------------------------------------ batches


def test_a_batch_waits_until_enough_usable_groups_are_settled(store):
    log, q = Log(store), queue(store, model(batch_size=2))
    log.group("a")
    assert q.poll() == 8
    assert deal(q) is None
    log.group("flat", (1, 1, 1, 1))
    log.append(*(member("b", i, float(i)) for i in range(3)))
    q.poll()
    assert deal(q) is None
    log.append(member("b", 3, 3.0))
    q.poll()
    assert dealt(q).document.groups == ["a", "b"]


def test_groups_are_dealt_out_in_the_order_they_close(store):
    log, q = Log(store), queue(store)
    log.append(*(member("early", i, float(i)) for i in range(3)))
    log.group("late")
    log.append(member("early", 3, 3.0))
    q.poll()
    assert list(q._ready) == ["late", "early"]


def test_rows_stand_by_group_member_agent_and_chain(store):
    log, q = Log(store), queue(store)
    log.append(member("a", 3, 1.0, chains=2), member("a", 1, 0.0))
    log.append(member("a", 0, 0.0, chains=0), member("a", 2, 1.0))
    q.poll()
    batch = dealt(q)
    assert [(r.trajectory.member.member_index, r.trajectory.chain_index) for r in batch.rows] == [
        (1, 0), (2, 0), (3, 0), (3, 1),
    ]  # fmt: skip
    assert [(row.writer, row.seq) for row in batch.document.rows] == [
        (FIRST, 0),
        (FIRST, 1),
        (FIRST, 0),
        (FIRST, 0),
    ]
    assert [r.advantage > 0 for r in batch.rows] == [False, True, True, True]


def test_the_document_names_what_closed_untrained_and_what_was_dropped(store):
    log, q = Log(store), queue(store)
    log.group("flat", (1, 1, 1, 1))
    log.append(member("a", 0, 0.0, status="retried"))
    log.append(member("a", 0, 0.0, attempt=1), member("a", 1, 0.0, status="infra"))
    log.append(member("a", 2, None), member("a", 3, 1.0))
    q.poll()
    document = dealt(q).document
    assert [(g.group_id, g.reason, g.num_trajectories) for g in document.closed_untrained] == [
        ("flat", "zero_variance", 4)
    ]
    assert document.dropped == {"retried": 1, "infra": 1, "zero_variance": 4, "missing_reward": 1}
    assert document.read_positions == {FIRST: 7}


def test_nothing_is_consumed_before_the_batch_was_trained(store):
    log, q = Log(store), queue(store)
    log.group("a")
    q.poll()
    first, again = dealt(q), dealt(q)
    assert contents(first) == contents(again)
    q.consume(again)
    assert deal(q) is None
    assert q.totals() == {"trained": 4, "groups_trained": 1}


def test_final_takes_a_smaller_batch_and_never_an_empty_one(store):
    log, q = Log(store), queue(store, model(batch_size=3))
    assert deal(q, final=True) is None
    log.group("a")
    q.poll()
    assert deal(q) is None
    assert dealt(q, final=True).document.groups == ["a"]


def test_negative_advantages_are_damped(store):
    log = Log(store)
    log.group("a")
    config = model().model_copy(
        update={"objective": model().objective.model_copy(update={"negative_advantage_scale": 0.5})}
    )
    plain, damped = queue(store), queue(store, config)
    for q in (plain, damped):
        q.poll()
    for a, b in zip(dealt(plain).rows, dealt(damped).rows, strict=True):
        assert b.advantage == (a.advantage if a.advantage > 0 else a.advantage / 2)


def test_metrics_count_groups_without_a_gradient_too(store):
    log, q = Log(store), queue(store)
    log.group("flat", (1, 1, 1, 1))
    log.group("a", (0, 0, 1, 1))
    q.poll()
    metrics = dealt(q).metrics
    assert metrics["agent/planner_agent/reward/mean"] == 0.75
    assert metrics["agent/planner_agent/zero_variance_share"] == 0.5
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["batch/num_rows"] == 4


# ------------------------------------------------------------------ duplicates and damage


def test_a_row_seen_twice_is_trained_once(store):
    log, q = Log(store), queue(store)
    log.group("a")
    for writer in (SECOND, "e00002-00001"):
        Log(store, writer).group("a")
    q.poll()
    batch = dealt(q)
    assert len(batch.rows) == 4
    assert batch.document.dropped == {"duplicate": 8}
    train(store, q, batch)
    assert deal(q) is None


def test_a_whole_group_written_again_after_it_was_trained_is_not_trained_again(store):
    log, q = Log(store), queue(store)
    log.group("a")
    q.poll()
    train(store, q, dealt(q))
    Log(store, SECOND).group("a")
    resumed = queue(store, resume=checkpoint(q, 1))
    for again in (q, resumed):
        again.poll()
        assert deal(again, 2, final=True) is None


def test_a_damaged_shard_is_set_aside_by_name_and_its_neighbours_are_trained(store, caplog):
    log, q = Log(store), queue(store)
    log.append(member("lost", 0, 1.0))
    damaged = bytearray(store.get(LAYOUT.log_shard(FIRST, 0)))
    damaged[len(damaged) // 2] ^= 0xFF
    store.put(LAYOUT.log_shard(FIRST, 0), bytes(damaged))
    log.group("a")
    q.poll()
    assert dealt(q).document.groups == ["a"]
    assert "log/e00001-00001/00000000.parquet" in str(q.quarantined[FIRST, 0])
    assert "00000000.parquet" in caplog.text
    assert q.totals()["quarantined_shards"] == 1


def test_a_shard_that_holds_other_rows_than_it_announces_is_set_aside(store):
    log, q = Log(store), queue(store)
    settlement, _ = member("a", 0, 1.0)
    log.append((settlement, []))
    q.poll()
    assert "announce 1 rows of agent 'planner_agent' in execution a/0/0, the shard holds 0" in str(
        q.quarantined[FIRST, 0]
    )


# ------------------------------------------------------------------ staleness


def aging(**options: Any) -> ModelConfig:
    return model(**{"max_staleness": 2, "max_staleness_action": "drop"} | options)


def test_tokens_past_the_lag_bound_lose_their_place_in_the_loss(store):
    log, q = Log(store), queue(store, aging())
    versions = np.asarray([1, 3, 3], dtype=np.int32)
    log.append(*(member("a", i, float(i), version=3) for i in range(3)))
    log.append(member("a", 3, 3.0, version=1, policy_version_max=3, token_versions=versions))
    q.poll()
    batch = dealt(q, published=4)
    assert [row.loss_mask.tolist() for row in batch.rows] == [[1, 1, 1]] * 3 + [[0, 1, 1]]
    assert batch.metrics["batch/num_aged_out_tokens"] == 1


def test_an_aged_out_row_keeps_its_reward_in_the_baseline(store):
    log = Log(store)
    log.append(*(member("a", i, float(i), version=3) for i in range(3)))
    log.append(member("a", 3, 9.0, version=0))
    fresh, aged = queue(store, aging()), queue(store, aging())
    for q in (fresh, aged):
        q.poll()
    whole, rest = dealt(fresh, published=2), dealt(aged, published=3)
    assert [r.advantage for r in rest.rows] == [r.advantage for r in whole.rows][:3]
    assert rest.document.dropped == {"aged_out": 1}


def test_a_group_without_a_token_left_closes_and_makes_room(store):
    log, q = Log(store), queue(store, aging())
    log.group("old", version=0)
    log.group("new", version=3)
    q.poll()
    assert q.report().untrained_groups == 2
    batch = dealt(q, published=3)
    assert batch.document.groups == ["new"]
    assert [(g.group_id, g.reason) for g in batch.document.closed_untrained] == [("old", "aged_out")]
    assert q.report().untrained_groups == 1


def test_strict_on_policy_trains_only_the_version_being_updated(store):
    log, q = Log(store), queue(store, model(strict_on_policy=True))
    log.group("before", version=4)
    log.append(*(member("now", i, float(i), version=5 if i else 4) for i in range(4)))
    q.poll()
    batch = dealt(q, published=5, training=5)
    assert batch.document.groups == ["now"]
    assert {row.trajectory.policy_version for row in batch.rows} == {5}
    assert batch.document.dropped == {"aged_out": 5}
    assert q.report().feed_share == 1.0


def test_strict_on_policy_leaves_out_a_row_that_an_older_version_began(store):
    log, q = Log(store), queue(store, model(strict_on_policy=True))
    versions = np.asarray([4, 5, 5], dtype=np.int32)
    log.append(*(member("now", i, float(i), version=5) for i in range(3)))
    log.append(member("now", 3, 3.0, version=4, policy_version_max=5, token_versions=versions))
    q.poll()
    batch = dealt(q, published=5, training=5)
    assert [row.trajectory.member.member_index for row in batch.rows] == [0, 1, 2]
    assert batch.document.dropped == {"aged_out": 1}


def waiting(store: MemoryStore, **options: Any) -> tuple[TrainingQueue, Clock]:
    clock = Clock()
    config = model(**{"max_staleness": 1, "trigger": 2, "max_staleness_action": "wait"} | options)
    return queue(store, config, clock=clock, max_wait_s=100.0), clock


def test_a_step_waits_while_it_would_publish_past_open_work(store):
    Log(store).group("a", version=5)
    q, _ = waiting(store)
    q.poll()
    assert deal(q, 2, published=5, oldest_open=4) is None  # version 6 would put 4 two behind
    assert deal(q, 2, published=5, oldest_open=5) is not None
    assert deal(q, 2, published=5, oldest_open=None) is not None
    assert deal(q, 1, published=5, oldest_open=4) is not None  # step 1 of 2 publishes nothing
    assert deal(q, 2, published=5, oldest_open=4, final=True) is not None


def test_dropping_never_waits(store):
    Log(store).group("a", version=5)
    q, _ = waiting(store, max_staleness_action="drop")
    q.poll()
    assert deal(q, 2, published=5, oldest_open=4) is not None


def test_a_half_settled_group_is_waited_for_too(store):
    log = Log(store)
    log.group("a", version=5)
    log.append(*(member("half", i, float(i), version=4) for i in range(3)))
    q, _ = waiting(store)
    q.poll()
    assert deal(q, 2, published=5) is None
    log.append(member("half", 3, 3.0, version=5))
    q.poll()
    # Both are queued now. Waiting can't help any more: what would age out goes first.
    assert dealt(q, 2, published=5).document.groups == ["half"]


def test_waiting_is_bounded_and_does_not_start_again_for_the_same_work(store):
    log = Log(store)
    for name in ("a", "b", "c"):
        log.group(name, version=5)
    q, clock = waiting(store)
    q.poll()
    assert deal(q, 2, published=5, oldest_open=4) is None
    clock.now = 99
    assert deal(q, 2, published=5, oldest_open=4) is None
    clock.now = 100
    for step in (2, 4):
        train(store, q, dealt(q, step, published=5, oldest_open=4))
    assert deal(q, 6, published=6, oldest_open=5) is None  # other work is waited for


def test_a_group_nobody_finishes_is_closed_in_the_end(store):
    log = Log(store)
    log.append(member("lost", 0, 1.0))
    q, clock = waiting(store)
    q.poll()
    clock.now = 201
    log.group("a")
    q.poll()
    batch = dealt(q)
    assert [(g.group_id, g.reason) for g in batch.document.closed_untrained] == [("lost", "cancelled")]
    assert batch.document.dropped == {"cancelled": 1}
    train(store, q, batch)
    assert q.progress().low_water == {FIRST: 5}
    again = queue(store)
    again.poll()
    replayed = again.replay(batch.document)
    assert replayed is not None
    again.consume(replayed)
    assert again.progress() == q.progress()


LATE: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "nobody": [],
    "one member, another is missing": [(1, {})],
    "all members, so that there is something to learn": [(1, {}), (2, {})],
    "all members, one with two chains, one with none": [(1, {"chains": 2}), (2, {"chains": 0})],
    "all members, one of them as lost": [(1, {}), (2, {"status": "infra", "chains": 0})],
}


@pytest.mark.parametrize("late", LATE)
def test_who_comes_after_a_group_was_given_up_is_named_once_though_its_step_is_replayed(late):
    """A trainer that dies then leaves the same books as one that goes on, also of a log that was cut."""
    left = [_after_a_group_was_given_up(LATE[late], dies=dies) for dies in (False, True)]
    assert left[0] == left[1]
    for books in left[0][1:]:
        assert books.balanced
        assert (books.num_trained_twice, books.trained) == (0, 2 * SIZE)
        assert books.dropped.get("duplicate_attempt", 0) == sum(o.get("chains", 1) for _, o in LATE[late])


def _after_a_group_was_given_up(
    late: list[tuple[int, dict[str, Any]]], *, dies: bool
) -> tuple[QueueProgress, ModelBooks, ModelBooks]:
    """What the trainer is past after a second step; the books of the whole log, and of the log cut there."""
    store, clock = MemoryStore(), Clock()
    log, q = Log(store), queue(store, clock=clock, max_wait_s=100.0)
    log.append(member("lost", 0, 1.0, size=3))
    q.poll()
    clock.now = 201
    log.group("a")
    q.poll()
    first = dealt(q)
    assert [(g.group_id, g.reason) for g in first.document.closed_untrained] == [("lost", "cancelled")]
    train(store, q, first)
    for index, options in late:
        log.append(member("lost", index, 0.0, size=3, **options))
    log.group("b")
    if dies:
        q = queue(store, clock=clock, max_wait_s=100.0)
        q.poll()
        for _ in range(2):  # to ask for it changes nothing
            replayed = q.replay(first.document)
        assert replayed is not None
        assert replayed.metrics == first.metrics
        q.consume(replayed)
    q.poll()
    second = dealt(q, 2)
    train(store, q, second)
    assert deal(q, 3, final=True) is None
    later = queue(store, clock=clock)
    later.poll()
    for batch in (first, second):
        replayed = later.replay(batch.document)
        assert replayed is not None
        later.consume(replayed)
    assert later.progress() == q.progress()
    whole = read_books(store, LAYOUT)
    _cut(store, q.progress().low_water[FIRST])
    return q.progress(), whole, read_books(store, LAYOUT)


def _cut(store: MemoryStore, end: int) -> None:
    """Remove the first shards of the log, as retention does."""
    keys = [LAYOUT.log_shard(FIRST, seq) for seq in range(end)]
    shards = [
        ShardRecord.of(FIRST, seq, decode_shard(store.get(key), source=key)) for seq, key in enumerate(keys)
    ]
    removal = msgspec.structs.replace(NOTHING_REMOVED, number=1, floor={FIRST: end}, shards=shards)
    store.put(LAYOUT.removal(1), removal.to_bytes())
    for key in keys:
        store.delete(key)


# ------------------------------------------------------------------ what admission hears


def test_trained_groups_count_until_the_version_they_went_into_is_published(store):
    log, q = Log(store), queue(store)
    for name in "abc":
        log.group(name)
    q.poll()
    assert q.report().untrained_groups == 3
    train(store, q, dealt(q, 1, published=0, training=0))
    train(store, q, dealt(q, 2, published=0, training=1))
    assert (q.report().untrained_groups, q.report().trained_since_publish) == (1, 2)
    q.published(1)
    assert q.report().trained_since_publish == 1  # step 2 went into version 2
    q.published(2)
    assert q.report().trained_since_publish == 0


def test_the_share_follows_how_often_a_settled_group_feeds_the_model(store):
    log, q = Log(store), queue(store)
    assert q.report().feed_share == 1.0
    log.group("flat", (1, 1, 1, 1))
    q.poll()
    assert q.report().feed_share == pytest.approx(0.9)
    log.group("not ours", train=False)
    q.poll()
    log.group("a")
    q.poll()
    assert q.report().feed_share == pytest.approx(0.91, abs=0.02)
    assert q.report().closed_groups == 0
    log.append(*(member(f"flat {i}", j, 1.0, size=2) for i in range(40) for j in range(2)))
    q.poll()
    assert q.report().feed_share == 0.05  # never 0: admission would open without bound
    assert q.report().closed_groups == 40


def test_the_report_says_how_far_each_writer_was_read_and_the_oldest_version(store):
    Log(store).group("a", version=3)
    Log(store, SECOND).append(member("b", 0, 1.0, version=2))
    q = queue(store)
    q.poll()
    assert q.report().read_positions == {FIRST: 4, SECOND: 1}
    assert q.report().oldest_queued_version == 2


# ------------------------------------------------------------------ memory


def test_arrays_beyond_the_bound_are_read_again_when_they_are_needed(store):
    log = Log(store)
    for i in range(6):
        log.group(f"g{i}", (0, 1, 2, i))
    free, tight = queue(store), queue(store, max_resident_bytes=260)
    for q in (free, tight):
        q.poll()
    assert tight._arrays.num_bytes <= 260 < free._arrays.num_bytes
    for step in range(1, 7):
        a, b = dealt(free, step), dealt(tight, step)
        assert contents(a) == contents(b)
        free.consume(a)
        tight.consume(b)
    assert free._arrays.num_bytes == tight._arrays.num_bytes == 0


# ------------------------------------------------------------------ again after a crash


def test_consumed_shards_are_not_read_again(store):
    log, q = Log(store), queue(store)
    log.group("a")
    log.append(member("b", 0, 1.0))
    q.poll()
    train(store, q, dealt(q))
    assert q.progress().low_water == {FIRST: 4}
    for seq in range(4):
        store.delete(LAYOUT.log_shard(FIRST, seq))
    resumed = queue(store, resume=checkpoint(q, 1))
    assert resumed.poll() == 2


def test_records_above_the_low_water_mark_are_consumed_once(store):
    log, q = Log(store), queue(store)
    log.append(member("slow", 0, 1.0))
    log.group("a")
    Log(store, SECOND).append(member("a", 0, 0.0))  # a copy
    q.poll()
    train(store, q, dealt(q))
    progress = q.progress()
    assert progress.low_water == {FIRST: 0, SECOND: 1}
    assert progress.closed_groups == ["a"]
    assert len(progress.consumed) == 4
    resumed = queue(store, resume=checkpoint(q, 1))
    resumed.poll()
    assert deal(resumed, 2, final=True) is None
    assert resumed.progress() == progress
    log.append(*(member("slow", i, 0.0) for i in range(1, 4)))
    resumed.poll()
    assert dealt(resumed, 2).document.groups == ["slow"]


def test_a_replay_waits_for_its_part_of_the_log_and_refuses_another(store):
    log, q = Log(store), queue(store)
    log.group("a")
    q.poll()
    document = dealt(q).document
    again = queue(store)
    assert again.replay(document) is None
    again.poll()
    assert again.replay(document) is not None
    other = document.model_copy(update={"rows": document.rows[:3]})
    with pytest.raises(CorruptObjectError, match=r"batches/00000001.json: the log gives other rows"):
        again.replay(other)
    missing = document.model_copy(update={"groups": ["b"]})
    with pytest.raises(CorruptObjectError, match="group 'b' is not complete"):
        again.replay(missing)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), die_at=st.integers(0, 6), saved_at=st.integers(0, 6))
def test_a_run_that_died_anywhere_deals_out_what_an_undisturbed_one_does(
    tmp_path_factory, seed, die_at, saved_at
):
    """Crash after step `die_at`, resume from the checkpoint of step min(saved_at, die_at), replay, go on."""
    store = MemoryStore()
    _write_random_log(store, np.random.default_rng(seed))
    config = aging(batch_size=2, trigger=2)

    def steps(q: TrainingQueue, first: int, last: int) -> list[Batch]:
        batches = []
        for step in range(first, last + 1):
            batch = deal(q, step, published=step // 2, final=True)
            if batch is None:
                break
            train(store, q, batch)
            batches.append(batch)
        return batches

    whole = queue(store, config)
    whole.poll()
    undisturbed = steps(whole, 1, 50)

    doomed = queue(store, config)
    doomed.poll()
    saved = checkpoint(doomed, 0)
    for batch in undisturbed[:die_at]:
        train(store, doomed, dealt(doomed, batch.step, published=batch.step // 2, final=True))
        if batch.step <= saved_at:
            saved = checkpoint(doomed, batch.step)
    for batch in undisturbed[die_at:]:
        store.delete(LAYOUT.batch(batch.step))

    resumed = queue(store, config, resume=saved)
    resumed.poll()
    got = []
    for batch in undisturbed[saved.step : die_at]:
        key = LAYOUT.batch(batch.step)
        replayed = resumed.replay(BatchDocument.parse(store.get(key), source=key))
        assert replayed is not None
        assert replayed.metrics == batch.metrics
        resumed.consume(replayed)
        got.append(replayed)
    got += steps(resumed, min(die_at, len(undisturbed)) + 1, 50)
    assert [contents(b) for b in got] == [contents(b) for b in undisturbed[saved.step :]]
    assert [b.document.dropped_rows for b in got] == [
        b.document.dropped_rows for b in undisturbed[saved.step :]
    ]
    assert resumed.progress() == whole.progress()


def _write_random_log(store: MemoryStore, rng: np.random.Generator) -> None:
    """Twelve groups of three, members interleaved over two writers, some retried, copied or broken off."""
    executions = []
    for g in range(12):
        for i in range(3):
            reward = [0.0, 1.0, None][rng.choice(3, p=[0.45, 0.45, 0.1])]
            status = ["finalized", "infra"][int(rng.random() < 0.1)]
            place: dict[str, Any] = {
                "size": 3,
                "chains": int(rng.integers(0, 3)),
                "version": int(rng.integers(0, 3)),
            }
            if rng.random() < 0.15:
                executions.append(member(f"g{g}", i, reward, status="retried", **place))
                executions.append(member(f"g{g}", i, reward, status=status, attempt=1, **place))
            else:
                executions.append(member(f"g{g}", i, reward, status=status, **place))
            if rng.random() < 0.1:
                executions.append(executions[-1])
    rng.shuffle(executions)
    half = len(executions) // 2
    for log, part in ((Log(store, FIRST), executions[:half]), (Log(store, SECOND), executions[half:])):
        while part:
            count = int(rng.integers(1, 4))
            unique = {id(e): e for e in part[:count]}.values()
            log.append(*unique)
            part = part[count:]
