"""What retention removes of a model's log, what it leaves of it, and that nobody misses what is gone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.books import read_books
from model_runtime.config import RunConfig
from model_runtime.coordinator import begin_run, claim_epoch
from model_runtime.documents import BatchDocument, CheckpointDocument
from model_runtime.errors import LogRemovedError, StoreUnavailableError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.log_reader import WholeLog
from model_runtime.removed_log import NOTHING_REMOVED, is_in_log, last_removal
from model_runtime.retention import sweep
from model_runtime.store import Store, open_store
from model_runtime.summary import summarize, usage
from model_runtime.training_queue import TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Settlement, Shard
from model_runtime.workflow_tasks import read_cursor
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

RUN = RunLayout("run")
LAYOUT = RUN.model("planner_model")
WRITER = "e00001-00001"
LATER_WRITER = "e00001-00002"
LONG_AGO = 10_000_000_000.0  # `now`, long after everything that is written here


class Fused(MemoryStore):
    """Fails every change from the `fuse`-th on, as a process does that dies there."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse: int | None = None

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise StoreUnavailableError("died here")

    def put(self, key: str, data: bytes) -> None:
        self._burn()
        super().put(key, data)

    def _create(self, key: str, data: bytes) -> bool:
        self._burn()
        return super()._create(key, data)

    def delete(self, key: str) -> None:
        self._burn()
        super().delete(key)


def run_config(*, max_replayed: int = 0, **retention: Any) -> RunConfig:
    model = {
        "model_id": "planner_model",
        "model_path": "/m",
        "batch_size": 2,
        "replay": {"max_groups": max_replayed, "max_reuses": 50},
        "async_training": {"max_wait_s": 0.0 if max_replayed else None},
    }
    return RunConfig.model_validate(
        {
            "multi_model": {"models": [model]},
            "agent_model_mapping": {"planner_agent": "planner_model"},
            "retention": {"min_age_s": 0, **retention},
        }
    )


@dataclass
class Life:
    """A model's log, the trainer that reads it, and its checkpoints."""

    config: RunConfig
    store: Store = field(default_factory=Fused)
    step: int = 0
    seqs: dict[str, int] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoints can't be loaded

    def __post_init__(self) -> None:
        claim_epoch(self.store, RUN)
        begin_run(self.store, RUN, self.config, epoch=1)
        self.queue = self.new_queue(None)

    def new_queue(self, resume: CheckpointDocument | None) -> TrainingQueue:
        return TrainingQueue(self.store, LAYOUT, self.config.models[0], epoch=1, resume=resume, seed=3)

    def write(self, shard: Shard, *, writer: str = WRITER) -> None:
        seq = self.seqs.get(writer, 0)
        self.store.put(LAYOUT.log_shard(writer, seq), encode_shard(shard))
        self.seqs[writer] = seq + 1

    def group(self, group_id: str, rewards: Sequence[float | None] = (0, 1), **options: Any) -> None:
        self.write(shard_of(group_id, rewards), **options)

    def train(self) -> BatchDocument | None:
        """One step of what is there, if anything is."""
        self.queue.poll()
        batch = self.queue.next_batch(
            self.step + 1, published_version=0, training_version=0, oldest_open_version=None, final=True
        )
        if batch is None:
            return None
        self.step += 1
        self.store.put_if_absent(LAYOUT.batch(self.step), batch.document.to_bytes())
        self.queue.consume(batch)
        return batch.document

    def save(self) -> None:
        progress = self.queue.progress()
        document = CheckpointDocument(
            step=self.step, epoch=1, version=0, files={}, seed=3, created_at=0.0,
            low_water=progress.low_water, consumed=progress.consumed, closed_groups=progress.closed_groups,
            totals=progress.totals, replay=progress.replay,
        )  # fmt: skip
        self.store.put(LAYOUT.checkpoint_marker(self.step), document.to_bytes())
        self.damaged.discard(self.step)

    def saved(self) -> list[CheckpointDocument]:
        """Newest first, those that can be loaded."""
        keys = [key for key in self.store.list(LAYOUT.checkpoints()) if key.endswith("MANIFEST.json")]
        found = [CheckpointDocument.parse(self.store.get(key), source=key) for key in keys]
        return sorted((d for d in found if d.step not in self.damaged), key=lambda d: -d.step)

    def resume(self) -> None:
        """A trainer that died goes on from its newest checkpoint and trains again what came after it."""
        newest = next(iter(self.saved()), None)
        last, self.step = self.step, newest.step if newest else 0
        self.queue = self.new_queue(newest)
        self.queue.poll()
        while self.step < last:
            self.step += 1
            key = LAYOUT.batch(self.step)
            batch = self.queue.replay(BatchDocument.parse(self.store.get(key), source=key))
            assert batch is not None, "the log no longer shows what this step was made from"
            self.queue.consume(batch)

    def sweep(self, *, now: float = LONG_AGO) -> int:
        """Bytes removed of the log."""
        removed = sweep(self.store, RUN, self.config, epoch=1, now=now)
        return sum(of_model.log_bytes for of_model in removed)

    def shards(self, writer: str = WRITER) -> list[int]:
        names = self.store.children(f"{LAYOUT.log_writers()}/{writer}")
        return [int(name.partition(".")[0]) for name in names]

    def what_is_known(self) -> dict[str, Any]:
        """Everything that is ever made from the whole log: cursor of the tasks, books and rewards."""
        cursor = read_cursor(self.store, RUN, ["planner_model"])
        summary = summarize(self.store, RUN, self.config, started_at=0.0, failures={})
        changing = {"created_at", "duration_s", "store_bytes", "removed_log_bytes", "run_uri", "summary_uri"}
        return {
            "cursor": (cursor.settled, cursor.finished, cursor.failed, cursor.next_attempt),
            "summary": summary.model_dump(exclude=changing),
        }


def shard_of(group_id: str, rewards: Sequence[float | None], *, at: float = 1000.0) -> Shard:
    members = [
        {"group_id": group_id, "group_size": len(rewards), "member_index": i} for i in range(len(rewards))
    ]
    return Shard(
        tuple(
            make_trajectory(**m, reward=r, agent_rewards={"success": r})
            for m, r in zip(members, rewards, strict=True)
        ),
        tuple(make_settlement(**m, settled_at=at) for m in members),
    )


def trained(
    num_groups: int = 8,
    *,
    checkpoints: Sequence[int] = (2, 3, 4),
    store: Store | None = None,
    **retention: Any,
) -> Life:
    """A shard a group, two groups a step, checkpoints after some of them."""
    life = Life(run_config(**retention), store or Fused())
    for number in range(num_groups):
        life.group(f"g{number}")
    life.queue.poll()
    while life.train() is not None:
        if life.step in checkpoints:
            life.save()
    return life


# ------------------------------------------------------------------ what goes, what stays


def test_by_default_the_whole_log_stays():
    life = trained(keep_last=2)
    assert life.sweep() == 0
    assert life.shards() == list(range(8))


def test_what_no_resume_needs_goes_and_the_newest_shard_stays():
    life = trained(checkpoints=(3, 4), max_log_bytes=0)
    assert life.sweep() > 0
    assert life.shards() == [6, 7], "the older checkpoint is of step 3: six groups"


def test_as_many_checkpoints_as_are_kept_can_be_resumed_from():
    life = trained(checkpoints=(2, 3, 4), keep_last=3, max_log_bytes=0)
    life.sweep()
    assert life.shards() == [4, 5, 6, 7]


@pytest.mark.parametrize("checkpoints", [(), (4,)])
def test_nothing_goes_while_a_damaged_checkpoint_would_have_none_before_it(checkpoints: Sequence[int]):
    life = trained(checkpoints=checkpoints, max_log_bytes=0)
    assert life.sweep() == 0


def test_nothing_goes_while_it_is_not_known_what_a_checkpoint_needs():
    life = trained(max_log_bytes=0)
    life.store.put(LAYOUT.checkpoint_marker(4), b"nonsense")
    assert life.sweep() == 0


def test_what_the_replay_buffer_of_a_checkpoint_is_read_from_stays():
    life = Life(run_config(max_replayed=3, max_log_bytes=0))
    for number in range(8):
        life.group(f"g{number}")
        life.train()
        life.save()
    life.sweep()
    assert life.shards() == [4, 5, 6, 7], "the checkpoint of step 7 remembers groups 4 to 6"
    life.damaged.add(8)
    life.resume()


def test_up_to_its_bytes_a_log_is_kept_the_newest_of_it():
    life = trained(12, checkpoints=(5, 6))
    sizes = list(life.store.sizes(LAYOUT.log_writers()).values())
    life.config = run_config(max_log_bytes=sum(sizes))
    assert life.sweep() == 0
    life.config = run_config(max_log_bytes=sum(sizes[-6:]) + 1)
    assert life.sweep() == sum(sizes[:7]), "a portion goes at once, not a shard at a time"
    assert life.shards() == list(range(7, 12))


def test_by_age_what_ended_long_ago_goes():
    life = Life(run_config(max_log_age_s=100))
    for number in range(6):
        life.write(shard_of(f"g{number}", (0, 1), at=100.0 * number))
        life.train()
        life.save()
    assert life.sweep(now=105.0) == 0, "a tenth more is waited for"
    assert life.sweep(now=250.0) > 0
    assert life.shards() == [2, 3, 4, 5]


def test_what_is_too_young_stays():
    life = trained(max_log_bytes=0, min_age_s=600)
    assert life.sweep(now=1500.0) == 0
    assert life.sweep(now=1601.0) > 0


def test_a_long_run_takes_a_bounded_part_of_the_store():
    life = Life(run_config(keep_last=2, max_log_bytes=20_000))
    kept, left = [], []
    for number in range(60):
        life.group(f"g{number}")
        life.train()
        life.save()
        life.sweep()
        used = usage(life.store, RUN)
        kept.append(used["log"] + used["checkpoints"])
        left.append(used.get("removed", 0))
    assert max(kept[30:]) < 1.1 * max(kept[10:30])
    assert left[-1] < 0.1 * last_removal(life.store, LAYOUT).num_bytes


@pytest.mark.parametrize("kind", ["local_store", "s3_store_config"])
def test_a_folder_and_s3_lose_the_same(kind: str, request: pytest.FixtureRequest):
    given = request.getfixturevalue(kind)
    store = given if isinstance(given, Store) else open_store(given)
    life = trained(store=store, max_log_bytes=0)
    before = life.what_is_known()
    assert life.sweep() > 0
    assert life.shards() == [6, 7]
    assert life.what_is_known() == before


def test_rows_of_evaluations_go_beyond_the_same_bounds():
    """They have no settlements, and nothing is made from them later."""
    store = Fused()
    for writer in (WRITER, LATER_WRITER):
        for seq in range(4):
            shard = Shard(trajectories=shard_of(f"held-out-{seq}", (0, 1)).trajectories)
            store.put(LAYOUT.eval_shard(writer, seq), encode_shard(shard))
    sizes = list(store.sizes(LAYOUT.eval_writers()).values())
    assert sweep(store, RUN, run_config(), epoch=1, now=LONG_AGO) == []
    assert sweep(store, RUN, run_config(max_log_bytes=0, min_age_s=600), epoch=1, now=1500.0) == []
    [removed] = sweep(store, RUN, run_config(max_log_bytes=sum(sizes[3:])), epoch=1, now=LONG_AGO)
    assert removed.log_bytes == sum(sizes[:3]) + sizes[4], "the newest of each writer stays"
    later = [LAYOUT.eval_shard(LATER_WRITER, seq) for seq in (1, 2, 3)]
    assert store.list(LAYOUT.eval_writers()) == [LAYOUT.eval_shard(WRITER, 3), *later]
    store.put(later[0], b"nonsense")
    assert sweep(store, RUN, run_config(max_log_age_s=60), epoch=1, now=LONG_AGO) != []
    assert store.list(LAYOUT.eval_writers()) == [LAYOUT.eval_shard(WRITER, 3), later[-1]]
    assert sweep(store, RUN, run_config(max_log_age_s=60), epoch=1, now=LONG_AGO) == []


# ------------------------------------------------------------------ what is left


def test_books_rewards_and_settled_tasks_are_those_of_the_whole_log():
    life = Life(run_config(max_log_bytes=0))
    life.group("a", (0, 1))
    life.group("flat", (1, 1))
    life.group("a", (0, 1), writer=LATER_WRITER)  # copies
    tried = make_settlement(group_id="b", group_size=2, member_index=0, status="retried", num_rows={})
    gone = make_settlement(
        group_id="b", group_size=2, member_index=0, attempt=1, status="expired", num_rows={}
    )
    life.write(Shard((), (tried, gone)))
    late = shard_of("b", (0.25, 0.75))
    life.write(Shard(late.trajectories[1:], late.settlements[1:]))
    for number in range(4):
        life.group(f"g{number}", (number, 7))
        life.train()
        life.save()
    life.group("open", (None, 1))
    before = life.what_is_known()
    assert life.sweep() > 0
    assert life.shards() == [7, 8]
    assert life.what_is_known() == before
    books = read_books(life.store, LAYOUT)
    assert (books.balanced, books.dropped["duplicate"]) == (True, 2)


def test_rows_that_were_refused_and_shards_that_were_damaged_are_still_counted():
    life = Life(run_config(max_log_bytes=0))
    good = shard_of("a", (0, 1))
    bad = make_trajectory(group_id="bad", group_size=1, reward=1.0)
    object.__setattr__(bad, "policy_version", 9)  # not its tokens' version
    life.write(Shard((bad,), (make_settlement(group_id="bad", group_size=1),)))
    life.store.put(LAYOUT.log_shard(WRITER, 1), b"nonsense")
    life.seqs[WRITER] = 2
    life.write(good)
    for number in range(4):
        life.group(f"g{number}")
        life.train()
        life.save()
    before, books = life.what_is_known(), read_books(life.store, LAYOUT)
    assert (books.dropped["invalid"], books.num_damaged_shards) == (1, 1)
    life.sweep()
    assert life.shards() == [1, 6], "what nobody could read is not removed"
    assert life.what_is_known() == before
    assert read_books(life.store, LAYOUT) == books
    life.sweep()
    assert 1 in life.shards()


def test_a_row_that_left_the_log_without_a_document_unbalances_the_books():
    life = trained(max_log_bytes=0)
    life.sweep()
    document = json.loads(life.store.get(LAYOUT.batch(1)))
    document["rows"].pop()
    life.store.put(LAYOUT.batch(1), json.dumps(document).encode())
    books = read_books(life.store, LAYOUT)
    assert (books.num_missing, books.balanced) == (1, False)


def test_the_log_is_read_whole_while_it_is_removed():
    life = trained(max_log_bytes=0)
    found = []
    for number, (position, _) in enumerate(WholeLog(life.store, LAYOUT)):
        found.append(position)
        if number == 1:
            life.sweep()
    assert life.shards() == [6, 7]
    assert found == [(WRITER, seq) for seq in range(8)]


def test_a_damaged_shard_that_a_removal_passes_over_while_the_log_is_read_counts_once():
    life = Life(run_config(max_log_bytes=0))
    life.store.put(LAYOUT.log_shard(WRITER, 0), b"nonsense")
    life.seqs[WRITER] = 1
    for number in range(4):
        life.group(f"g{number}")
        life.train()
        life.save()
    life.store.put(LAYOUT.log_shard(LATER_WRITER, 0), b"nonsense")  # above what is removed
    log, num_damaged = WholeLog(life.store, LAYOUT), []
    for number, _ in enumerate(log):
        if number == 1:
            life.sweep()
        num_damaged.append(log.num_damaged)
    assert last_removal(life.store, LAYOUT).damaged == [(WRITER, 0)]
    assert num_damaged == [1, 1, 2, 2]
    assert log.num_damaged == read_books(life.store, LAYOUT).num_damaged_shards == 2


def test_what_is_removed_is_counted():
    life = trained(16, checkpoints=(2, 3, 5, 8), max_log_bytes=0)
    sizes = life.store.sizes(LAYOUT.log_writers())
    freed = life.sweep()
    last = last_removal(life.store, LAYOUT)
    assert (last.num_shards, last.num_trajectories, last.num_bytes) == (10, 20, freed)
    assert freed == sum(size for key, size in sizes.items() if not life.store.exists(key))
    life.group("g16")
    life.train()
    life.save()
    freed += life.sweep()
    last = last_removal(life.store, LAYOUT)
    assert (last.number, last.num_shards, last.num_bytes) == (2, 16, freed)


# ------------------------------------------------------------------ who meets it


def test_a_trainer_that_needs_what_is_gone_says_so_and_names_the_settings():
    life = trained(checkpoints=(1, 3, 4), max_log_bytes=0)
    life.sweep()
    life.damaged |= {3, 4}
    with pytest.raises(LogRemovedError, match=r"checkpoint of step 1 needs .*retention\.max_log_bytes"):
        life.resume()
    life.damaged.add(1)
    with pytest.raises(LogRemovedError, match="a training from its beginning needs"):
        life.resume()


def test_a_shard_that_comes_back_is_read_by_nobody_and_removed_again():
    """A gateway writes again what its journal still names."""
    life = trained(max_log_bytes=0)
    key, before = LAYOUT.log_shard(WRITER, 0), life.what_is_known()
    data = life.store.get(key)
    life.sweep()
    assert is_in_log(life.store, key), "it was"
    assert not is_in_log(life.store, LAYOUT.log_shard(WRITER, 99))
    life.store.put_if_absent(key, data)
    assert life.what_is_known() == before
    life.sweep()
    assert not life.store.exists(key)


@pytest.mark.parametrize("model_id", ["solver", "log", "removed"])
def test_a_removed_shard_was_in_its_log_whatever_its_model_is_called(model_id: str):
    place, store = RUN.model(model_id), MemoryStore()
    store.put(place.log_shard(WRITER, 2), b"the newest stays")
    removal = msgspec.structs.replace(NOTHING_REMOVED, number=1, floor={WRITER: 2})
    store.put(place.removal(1), removal.to_bytes())
    found = [is_in_log(store, place.log_shard(WRITER, seq)) for seq in range(4)]
    assert found == [True, True, True, False]
    assert not is_in_log(store, place.eval_shard(WRITER, 0))


def test_an_older_epoch_removes_nothing():
    life = trained(max_log_bytes=0)
    claim_epoch(life.store, RUN)
    with pytest.raises(SupersededError):
        life.sweep()
    assert life.shards() == list(range(8))


def test_of_two_removals_at_once_one_counts():
    life = trained(max_log_bytes=0)
    store = _Late(life)
    assert sweep(store, RUN, life.config, epoch=1, now=LONG_AGO) == []
    assert (last_removal(life.store, LAYOUT).number, life.shards()) == (1, [6, 7])


class _Late(MemoryStore):
    """Another's removal comes just before one's own."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        assert isinstance(life.store, MemoryStore)
        self.objects, self._life = life.store.objects, life

    def _create(self, key: str, data: bytes) -> bool:
        life, self._life = self._life, None
        if life is not None:
            life.sweep(now=LONG_AGO - 1)
        return super()._create(key, data)


@pytest.mark.parametrize("fuse", range(6))
def test_a_removal_that_dies_anywhere_is_finished_by_the_next(fuse: int):
    life = trained(max_log_bytes=0)
    before = life.what_is_known()
    assert isinstance(life.store, Fused)
    life.store.fuse = fuse
    with suppress(StoreUnavailableError):
        life.sweep()
    life.store.fuse = None
    assert life.what_is_known() == before
    life.resume()
    life.sweep()
    assert life.shards() == [6, 7]
    assert life.what_is_known() == before


# ------------------------------------------------------------------ in any order


def _shards(number: int, kind: str) -> tuple[list[tuple[str, Shard]], list[tuple[str, Shard]]]:
    """A group's shards: those that come now, and those that come later."""
    whole = shard_of(f"g{number}", (number % 3, 1.5))
    halves = [Shard(whole.trajectories[i : i + 1], whole.settlements[i : i + 1]) for i in range(2)]
    match kind:
        case "flat":
            return [(WRITER, shard_of(f"g{number}", (1, 1)))], []
        case "in halves":
            return [(WRITER, halves[0]), (LATER_WRITER, halves[1])], []
        case "half later":
            return [(WRITER, halves[0])], [(LATER_WRITER, halves[1])]
        case "copied later":
            return [(WRITER, whole)], [(LATER_WRITER, whole)]
        case "cancelled":
            return [(LATER_WRITER, Shard((), tuple(_end(number, i) for i in range(2))))], []
        case _:
            return [(WRITER, whole)], []


def _end(number: int, member: int) -> Settlement:
    return make_settlement(
        group_id=f"g{number}", group_size=2, member_index=member, status="aborted", num_rows={}
    )


KINDS = ("usable", "usable", "flat", "in halves", "half later", "copied later", "cancelled")


@dataclass
class Twins:
    """Two lives that meet the same; of the log of one parts are removed."""

    life: Life
    twin: Life
    draw: random.Random
    freed_bytes: int = 0
    written: list[tuple[str, bytes]] = field(default_factory=list)
    later: list[tuple[str, Shard]] = field(default_factory=list)
    num_groups: int = 0

    def meet_something(self) -> None:
        [event] = self.draw.choices([self.round, self.sweep, self.crash, self.write_again], [5, 4, 1, 1])
        event()

    def round(self) -> None:
        """What was to come later, new groups, then steps with a checkpoint after most of them."""
        now, self.later = self.later, []
        for kind in self.draw.choices(KINDS, k=self.draw.randint(1, 3)):
            self.num_groups += 1
            soon, later = _shards(self.num_groups, kind)
            now += soon
            self.later += later
        for writer, shard in now:
            self.written.append(
                (LAYOUT.log_shard(writer, self.life.seqs.get(writer, 0)), encode_shard(shard))
            )
            for one in (self.life, self.twin):
                one.write(shard, writer=writer)
        while (mine := self.life.train()) is not None:
            other = self.twin.train()
            assert other is not None
            assert mine.model_dump(exclude={"created_at"}) == other.model_dump(exclude={"created_at"})
            if self.draw.random() < 0.7:
                self.life.save()
                self.twin.save()
        assert self.twin.train() is None

    def crash(self) -> None:
        """Of the trainer; sometimes the newest checkpoint is damaged."""
        is_damaged = self.draw.random() < 0.3
        for one in (self.life, self.twin):
            steps = [document.step for document in one.saved()]
            if is_damaged and len(steps) > 1 and not one.damaged:
                one.damaged.add(steps[0])
            one.resume()

    def write_again(self) -> None:
        """As a gateway does whose journal still names a shard."""
        if self.written:
            self.life.store.put_if_absent(*self.draw.choice(self.written))

    def sweep(self) -> None:
        """It dies at some change of the store, or it doesn't."""
        fuse = self.draw.choice([None, None, 0, 1, 2, 3, 5])
        assert isinstance(self.life.store, Fused)
        self.life.store.fuse = fuse
        try:
            self.freed_bytes += self.life.sweep()
        except StoreUnavailableError:
            assert fuse is not None
        finally:
            self.life.store.fuse = None


def test_nothing_that_is_made_from_a_log_changes_when_parts_of_it_are_removed():
    """The same batches, replays, books, rewards and task cursor as without, through removals and trainers
    that die anywhere."""
    num_cut = 0

    @settings(max_examples=10, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal num_cut
        draw = random.Random(seed)
        max_replayed, keep_last = draw.choice([0, 2]), draw.choice([None, 3])
        config = run_config(
            max_replayed=max_replayed, max_log_bytes=draw.choice([0, 30_000]), keep_last=keep_last
        )
        twins = Twins(Life(config), Life(run_config(max_replayed=max_replayed)), draw)
        for _ in range(25):
            twins.meet_something()
        known = twins.life.what_is_known()
        assert known == twins.twin.what_is_known()
        assert known["summary"]["models"][0]["balanced"]
        num_cut += twins.freed_bytes > 0

    check()
    assert num_cut, "nothing was removed"
