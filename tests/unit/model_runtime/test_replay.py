"""Models that are rarely called: smaller batches after a while, and groups that are trained again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.books import read_books
from model_runtime.config import ModelConfig
from model_runtime.documents import BatchDocument, CheckpointDocument
from model_runtime.errors import CorruptObjectError
from model_runtime.layout import RunLayout
from model_runtime.training_queue import Batch, TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import SettlementStatus, Shard
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

LAYOUT = RunLayout("run").model("planner_model")
WAIT_S = 10.0


@dataclass
class Rare:
    """A model that gets one group now and then, and a clock that is set by hand."""

    replay: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 3
    max_staleness: int = 4
    store: MemoryStore = field(default_factory=MemoryStore)
    now: float = 0.0
    seq: int = 0

    def queue(self, resume: CheckpointDocument | None = None) -> TrainingQueue:
        model = ModelConfig.model_validate(
            {
                "model_id": "planner_model",
                "model_path": "/m",
                "batch_size": self.batch_size,
                "async_training": {"max_wait_s": WAIT_S, "max_staleness": self.max_staleness},
                "replay": self.replay,
                "objective": self.objective,
            }
        )
        queue = TrainingQueue(
            self.store, LAYOUT, model, epoch=1, resume=resume, seed=7, clock=lambda: self.now
        )
        queue.poll()
        return queue

    def group(
        self,
        group_id: str,
        rewards: Sequence[float | None] = (0, 1),
        *,
        version: int = 0,
        statuses: Sequence[SettlementStatus] = (),
    ) -> None:
        members = [
            {"group_id": group_id, "group_size": len(rewards), "member_index": i} for i in range(len(rewards))
        ]
        rows = [
            make_trajectory(**m, reward=r, version=version) for m, r in zip(members, rewards, strict=True)
        ]
        ends = statuses or ["finalized"] * len(members)
        settlements = [make_settlement(**m, status=end) for m, end in zip(members, ends, strict=True)]
        shard = Shard(tuple(rows), tuple(settlements))
        self.store.put(LAYOUT.log_shard("e00001-00001", self.seq), encode_shard(shard))
        self.seq += 1

    def deal(
        self, queue: TrainingQueue, step: int, *, published: int = 0, final: bool = False
    ) -> Batch | None:
        queue.poll()
        return queue.next_batch(
            step, published_version=published, training_version=published, oldest_open_version=None,
            final=final,
        )  # fmt: skip

    def step(self, queue: TrainingQueue, step: int, **options: Any) -> BatchDocument:
        """One step as the trainer takes it, after waiting in vain for more."""
        if self.deal(queue, step, **options) is None:
            self.now += WAIT_S
        batch = self.deal(queue, step, **options)
        assert batch is not None
        self.store.put(LAYOUT.batch(step), batch.document.to_bytes())
        queue.consume(batch)
        return batch.document


def replayed(document: BatchDocument) -> list[str]:
    return [entry.group_id for entry in document.replayed]


def checkpoint(queue: TrainingQueue, step: int) -> CheckpointDocument:
    progress = queue.progress()
    document = CheckpointDocument(
        step=step, epoch=1, version=0, files={}, seed=7, created_at=0.0,
        low_water=progress.low_water, consumed=progress.consumed, closed_groups=progress.closed_groups,
        totals=progress.totals, replay=progress.replay,
    )  # fmt: skip
    return CheckpointDocument.parse(document.to_bytes(), source="here")


def test_a_batch_that_stays_small_is_trained_once_its_first_group_has_waited():
    rare = Rare()
    queue = rare.queue()
    assert rare.deal(queue, 1) is None
    rare.now += 100  # nothing is there yet: no time counts
    rare.group("g0")
    assert rare.deal(queue, 1) is None
    rare.now += WAIT_S - 0.1
    rare.group("g1")
    assert rare.deal(queue, 1) is None
    rare.now += 0.1
    batch = rare.deal(queue, 1)
    assert batch is not None
    assert batch.document.groups == ["g0", "g1"]
    queue.consume(batch)
    rare.group("g2")
    assert rare.deal(queue, 2) is None, "each batch waits anew"


def test_by_default_small_batches_wait_and_nothing_is_remembered():
    rare = Rare()
    queue = rare.queue()
    model = ModelConfig(model_id="planner_model", model_path="/m", batch_size=3)
    patient = TrainingQueue(rare.store, LAYOUT, model, epoch=1, resume=None, clock=lambda: rare.now)
    rare.group("g0")
    assert rare.deal(patient, 1) is None
    rare.now += 1e6
    assert rare.deal(patient, 1) is None
    rare.step(queue, 1)
    assert queue.progress().replay == []


def test_a_late_batch_is_filled_up_with_groups_trained_before():
    rare = Rare({"max_groups": 8, "max_reuses": 2})
    queue = rare.queue()
    for name in ("a", "b", "c", "d"):
        rare.group(name)
    assert replayed(rare.step(queue, 1)) == [], "a full batch needs none"
    second = rare.step(queue, 2)
    assert second.groups == ["d"]
    assert len(replayed(second)) == 2
    assert set(replayed(second)) < {"a", "b", "c"}
    assert [len(entry.rows) for entry in second.replayed] == [2, 2]
    totals = queue.totals()
    assert (totals["trained"], totals["replayed"], totals["groups_replayed"]) == (8, 4, 2)


def test_a_replayed_row_keeps_its_advantage_and_the_samplers_logprobs():
    rare = Rare({"max_groups": 8})
    queue = rare.queue()
    rare.group("a", (0, 1, 3))
    first = rare.deal(queue, 1, final=True)
    assert first is not None
    queue.consume(first)
    rare.group("b")
    rare.deal(queue, 2)
    rare.now += WAIT_S
    second = rare.deal(queue, 2)
    assert second is not None
    again = [row for row in second.rows if row.trajectory.member.group_id == "a"]
    assert [row.advantage for row in again] == [row.advantage for row in first.rows]
    for one, other in zip(again, first.rows, strict=True):
        np.testing.assert_array_equal(one.trajectory.behavior_logprobs, other.trajectory.behavior_logprobs)
    assert second.metrics["batch/num_replayed_rows"] == 3
    assert second.metrics["batch/num_groups"] == 1


def test_replays_alone_are_never_trained():
    rare = Rare({"max_groups": 8})
    queue = rare.queue()
    rare.group("a")
    rare.step(queue, 1)
    rare.now += 1e6
    assert rare.deal(queue, 2) is None
    assert rare.deal(queue, 2, final=True) is None


@pytest.mark.parametrize(
    ("bounds", "left"),
    [({"max_groups": 2}, ["c", "d"]), ({"max_groups": 9, "max_bytes": 2 * 2 * 63}, ["c", "d"])],
)
def test_the_oldest_leave_when_there_are_too_many_groups_or_bytes(bounds, left):
    rare = Rare(bounds, batch_size=1)
    queue = rare.queue()
    for step, name in enumerate("abcd", 1):
        rare.group(name)
        rare.step(queue, step)
    assert [entry.group_id for entry in queue.progress().replay] == left


def test_what_is_too_old_is_not_trained_again_and_leaves():
    rare = Rare({"max_groups": 9, "max_age": 2, "max_reuses": 9}, batch_size=2, max_staleness=100)
    queue = rare.queue()
    rare.group("a", version=0)
    rare.group("b", version=1)
    rare.step(queue, 1)
    rare.group("c", version=3)
    assert replayed(rare.step(queue, 2, published=3)) == ["b"]
    rare.group("d", version=4)
    document = rare.step(queue, 3, published=4)
    assert replayed(document) == ["c"]
    assert [entry.group_id for entry in queue.progress().replay] == ["c", "d"]


def test_a_group_is_trained_again_as_often_as_allowed():
    rare = Rare({"max_groups": 9, "max_reuses": 2}, batch_size=9)
    queue = rare.queue()
    uses = []
    for step in range(1, 6):
        rare.group(f"g{step}")
        uses.append(replayed(rare.step(queue, step)))
    assert uses == [[], ["g1"], ["g1", "g2"], ["g2", "g3"], ["g3", "g4"]]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=8), st.data())
def test_after_a_crash_the_same_steps_follow_and_the_books_balance(arrivals, data):
    """Wherever the checkpoint stands, the journaled steps are the same again, and so is the one after."""
    rare = Rare({"max_groups": 4, "max_reuses": 2, "max_age": 3}, max_staleness=1000)
    queue = rare.queue()
    kept, documents, step = [(0, checkpoint(queue, 0))], [], 0
    for wave, count in enumerate(arrivals):
        for i in range(count):
            rare.group(f"g{wave}.{i}", version=wave)
        step += 1
        documents.append(rare.step(queue, step, published=wave))
        kept.append((step, checkpoint(queue, step)))
    start, resume = data.draw(st.sampled_from(kept[:-1]))
    again = rare.queue(resume if start else None)
    for document in documents[start:]:
        batch = again.replay(document)
        assert batch is not None
        named = [*document.rows, *(row for entry in document.replayed for row in entry.rows)]
        assert [r.trajectory.trajectory_id for r in batch.rows] == [r.trajectory_id for r in named]
        again.consume(batch)
    assert again.progress() == queue.progress()
    for q in (queue, again):
        q.poll()
    rare.group("last", version=len(arrivals))
    drawn = []
    for q in (queue, again):
        rare.deal(q, step + 1, published=len(arrivals))
        rare.now += WAIT_S
        batch = rare.deal(q, step + 1, published=len(arrivals))
        assert batch is not None
        drawn.append(batch.document.model_dump(exclude={"created_at"}))
    assert drawn[0] == drawn[1]
    books = read_books(rare.store, LAYOUT)
    assert books.balanced
    assert books.num_trained_twice == 0
    assert (
        books.num_replayed
        == queue.totals().get("replayed", 0)
        == sum(len(entry.rows) for document in documents for entry in document.replayed)
    )


@pytest.mark.parametrize("late", [None, 0.5])
@pytest.mark.parametrize("extra", [{}, {"turn_discount": 0.5}], ids=["rows", "turns"])
def test_a_row_that_did_not_finish_is_after_a_resume_what_it_was(late, extra):
    """It counts in the baseline with its own reward or the one for such rows, and has no loss."""
    objective = {"unfinished": "baseline", "unfinished_reward": -1.0, **extra}
    rare = Rare({"max_groups": 8, "max_reuses": 9}, objective, batch_size=2)
    queue = rare.queue()
    for name in ("a", "b"):
        rare.group(name, (0.0, 1.0, late), statuses=("finalized", "finalized", "expired"))
    rare.step(queue, 1)
    saved = checkpoint(queue, 1)
    rare.group("c")
    resumed, replaying = rare.queue(saved), rare.queue(saved)
    for other in (queue, resumed):
        assert rare.deal(other, 2) is None
    rare.now += WAIT_S
    one, same = rare.deal(queue, 2), rare.deal(resumed, 2)
    assert one is not None
    assert same is not None
    again = replaying.replay(one.document)
    assert again is not None
    assert len(replayed(one.document)) == 1
    assert taught(one) == taught(same) == taught(again)
    named = [row for entry in one.document.replayed for row in entry.rows]
    assert len(named) == 2, "the member that did not finish has no loss"


def taught(batch: Batch) -> list[tuple[str, float, Any]]:
    return [(row.trajectory.trajectory_id, row.advantage, row.turn_advantages) for row in batch.rows]


def test_a_buffer_whose_log_is_gone_says_so():
    rare = Rare({"max_groups": 4})
    queue = rare.queue()
    rare.group("a")
    rare.step(queue, 1)
    saved = checkpoint(queue, 1)
    rare.seq = 0
    rare.group("other")
    with pytest.raises(CorruptObjectError, match=r"replay buffer: the log no longer has row .* of group 'a'"):
        rare.queue(saved)
