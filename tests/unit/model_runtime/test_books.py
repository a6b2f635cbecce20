"""Every row of a log has one place in the books, whatever happened to it."""

from __future__ import annotations

import pytest

from model_runtime.batch_journal import read_batch
from model_runtime.books import ModelBooks, read_books
from model_runtime.config import ModelConfig
from model_runtime.documents import BatchDocument, BatchRow
from model_runtime.layout import RunLayout
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.training_queue import TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Shard
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

LAYOUT = RunLayout("run").model("planner_model")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def write(
    store: MemoryStore, seq: int, group_id: str, rewards, *, size: int = 2, writer="e00001-00001", **fields
) -> None:
    """One shard that settles the first members of a group."""
    members = [{"group_id": group_id, "group_size": size, "member_index": i} for i in range(len(rewards))]
    shard = Shard(
        trajectories=tuple(
            make_trajectory(**m, reward=r, **fields) for m, r in zip(members, rewards, strict=True)
        ),
        settlements=tuple(make_settlement(**m) for m in members),
    )
    store.put(LAYOUT.log_shard(writer, seq), encode_shard(shard))


def train(store: MemoryStore, q: TrainingQueue, step: int) -> None:
    q.poll()
    batch = q.next_batch(step, published_version=0, training_version=0, oldest_open_version=None, final=True)
    assert batch is not None
    store.put(LAYOUT.batch(step), batch.document.to_bytes())
    q.consume(batch)


def queue(store: MemoryStore) -> TrainingQueue:
    config = ModelConfig(model_id="planner_model", model_path="/models/tiny", batch_size=1)
    return TrainingQueue(store, LAYOUT, config, epoch=1, resume=None)


def test_a_log_nobody_trained_is_all_in_the_log_or_teaches_nothing(store):
    write(store, 0, "usable", (0, 1))
    write(store, 1, "open", (0, 1), size=3)
    write(store, 2, "flat", (1, 1))
    books = read_books(store, LAYOUT)
    assert books == ModelBooks(finalized=6, dropped={"zero_variance": 2}, in_log=4)
    assert books.balanced


def test_trained_dropped_and_waiting_rows_add_up(store):
    write(store, 0, "a", (0, 1))
    write(store, 1, "flat", (1, 1))
    write(store, 0, "a", (0, 1), writer="e00001-00002")  # copies
    write(store, 2, "b", (0, 1))
    q = queue(store)
    train(store, q, 1)
    write(store, 3, "later flat", (1, 1))
    write(store, 1, "b", (0, 1), writer="e00001-00002")  # copies of what waits
    books = read_books(store, LAYOUT)
    assert books.dropped == {"duplicate": 4, "zero_variance": 4}
    assert (books.finalized, books.trained, books.in_log) == (12, 2, 2)
    assert books.balanced
    train(store, q, 2)
    books = read_books(store, LAYOUT)
    assert (books.finalized, books.trained, books.in_log) == (12, 4, 0)
    assert books.balanced


def test_a_copy_that_came_after_its_row_was_trained_is_named_once_though_its_step_is_replayed(store):
    write(store, 0, "a", (0, 1))
    q = queue(store)
    train(store, q, 1)
    write(store, 0, "a", (0, 1), writer="e00001-00002")  # copies
    write(store, 1, "b", (0, 1))
    train(store, q, 2)
    resumed = queue(store)  # its trainer died before it saved anything
    resumed.poll()
    for step in (1, 2):
        batch = resumed.replay(read_batch(store, LAYOUT, step))
        assert batch is not None
        resumed.consume(batch)
    assert resumed.progress() == q.progress()
    write(store, 2, "c", (0, 1))
    train(store, resumed, 3)
    assert read_batch(store, LAYOUT, 3).dropped == {}
    assert read_books(store, LAYOUT).balanced


def test_the_books_agree_with_the_queues_own_count(store):
    for seq, rewards in enumerate([(0, 1), (1, 1), (0, None), (2, 1), (0, 1)]):
        write(store, seq, f"g{seq}", rewards)
    q = queue(store)
    for step in range(1, 4):
        train(store, q, step)
    books = read_books(store, LAYOUT)
    totals = q.totals()
    assert books.trained == totals["trained"] == 6
    assert {f"dropped.{reason}": n for reason, n in books.dropped.items()} == {
        name: n for name, n in totals.items() if name.startswith("dropped.")
    }
    assert books.dropped == {"zero_variance": 2, "too_few_values": 1, "missing_reward": 1}


def test_a_row_trained_twice_unbalances_the_books(store):
    write(store, 0, "a", (0, 1))
    train(store, queue(store), 1)
    train(store, queue(store), 2)  # a trainer that forgot step 1
    books = read_books(store, LAYOUT)
    assert books.num_trained_twice == 2
    assert not books.balanced


def test_a_trained_row_that_the_log_does_not_hold_unbalances_the_books(store):
    write(store, 0, "a", (0, 1))
    row = BatchRow(trajectory_id="x", writer="w", seq=0, agent_id="planner_agent", policy_version=0)
    document = BatchDocument(
        step=1, epoch=1, groups=["x"], rows=[row], closed_untrained=[], read_positions={}, created_at=0.0
    )
    store.put(LAYOUT.batch(1), document.to_bytes())
    books = read_books(store, LAYOUT)
    assert (books.num_missing, books.trained) == (1, 0)
    assert not books.balanced


def test_damaged_shards_are_counted_and_the_rest_is_read(store):
    write(store, 0, "a", (0, 1))
    store.put(LAYOUT.log_shard("e00001-00001", 1), b"nonsense")
    write(store, 2, "b", (0, 1))
    books = read_books(store, LAYOUT)
    assert (books.finalized, books.num_damaged_shards) == (4, 1)


def test_what_teaches_nothing_depends_on_the_models_objective(store):
    write(store, 0, "a", (0, 1), agent_rewards={"reward": 1.0})
    own = read_books(store, LAYOUT, objective=ObjectiveConfig(reward_level="agent"))
    assert own.dropped == {"zero_variance": 2}
    assert read_books(store, LAYOUT).in_log == 2
