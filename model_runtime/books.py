"""The books of one model: where every row of its log went. Counted from the store alone, row by row, from
what the log holds and what the steps' documents name; the trainer's own counters are not asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_runtime.documents import BatchDocument
from model_runtime.groups import Group, GroupBook, LogRow
from model_runtime.layout import ModelLayout
from model_runtime.log_reader import Position, WholeLog
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.removed_log import RemovedShard
from model_runtime.store import Store
from model_runtime.types import MemberKey, Shard

_TRAINED = "trained"
_DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class ModelBooks:
    """Rows of one model's log. Every row is trained, dropped or still in the log."""

    finalized: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason → rows
    in_log: int = 0
    num_trained_twice: int = 0
    num_replayed: int = 0  # reuses of rows that count as trained already
    num_missing: int = (
        0  # rows that a step's document names and no readable shard holds, or removed ones it doesn't
    )
    num_damaged_shards: int = 0

    @property
    def balanced(self) -> bool:
        """Does every row have one place, and was none trained twice?"""
        accounted = self.trained + sum(self.dropped.values()) + self.in_log
        return accounted == self.finalized and not self.num_trained_twice and not self.num_missing


def read_books(
    store: Store,
    layout: ModelLayout,
    *,
    objective: ObjectiveConfig | None = None,
    visit: Callable[[Shard | RemovedShard], None] | None = None,
) -> ModelBooks:
    """Read the model's whole log and all documents of its steps. `visit` is shown each shard in passing, or
    what retention left of it.

    A step counts from the moment its document is written. Rows that no document names yet, but whose group
    is complete and teaches nothing, count as dropped, as the next document would have it; `objective` is
    the model's, its default when None.
    """
    count = _Count(objective or ObjectiveConfig())
    for document in _documents(store, layout):
        count.enter(document)
    log = WholeLog(store, layout)
    for position, shard in log:
        if isinstance(shard, RemovedShard):
            count.read_removed(shard)
        else:
            count.read(position, shard)
        if visit is not None:
            visit(shard)
    return count.books(num_damaged_shards=log.num_damaged)


def _documents(store: Store, layout: ModelLayout) -> Iterator[BatchDocument]:
    for key in store.list(layout.batches()):
        yield BatchDocument.parse(store.get(key), source=store.uri(key))


class _Count:
    def __init__(self, objective: ObjectiveConfig) -> None:
        self._objective = objective
        self._fates: defaultdict[str, list[str]] = defaultdict(
            list
        )  # id → trained, or reason, per occurrence
        self._retired: set[str] = set()
        self._book: GroupBook | None = None
        self._seen: set[str] = set()
        self._num_trained_twice = 0
        self._num_replayed = 0
        self._num_unnamed = 0
        self._finalized = 0
        self._where: Counter[str] = Counter()  # trained, or reason → rows
        self._complete: list[Group] = []

    def enter(self, document: BatchDocument) -> None:
        """One step's document; all of them come before the first shard."""
        self._retired.update(document.groups, (g.group_id for g in document.closed_untrained))
        for row in document.rows:
            self._num_trained_twice += _TRAINED in self._fates[row.trajectory_id]
            self._fates[row.trajectory_id].append(_TRAINED)
        self._num_replayed += sum(len(entry.rows) for entry in document.replayed)
        for reason, ids in document.dropped_rows.items():
            for trajectory_id in ids:
                self._fates[trajectory_id].append(reason)

    def read(self, position: Position, shard: Shard) -> None:
        """One shard; they come in log order."""
        if self._book is None:
            self._book = GroupBook(self._objective, retired=self._retired)
        left: dict[MemberKey, list[LogRow]] = defaultdict(list)
        for refused in shard.refused:
            self._where[self._fate(refused.trajectory_id) or "invalid"] += 1
        for trajectory in shard.trajectories:
            fate = self._fate(trajectory.trajectory_id)
            if fate is not None:
                self._where[fate] += 1
                continue
            row = LogRow.of(trajectory, position, self._objective)
            row.trajectory = None
            left[trajectory.member].append(row)
        for settlement in shard.settlements:
            outcome = self._book.settle(position, settlement, left.pop(settlement.member, []))
            self._where.update(reason for _, reason in outcome.dropped)
            if outcome.completed is not None:
                self._complete.append(outcome.completed)
        self._finalized += len(shard.trajectories) + len(shard.refused)

    def read_removed(self, shard: RemovedShard) -> None:
        """A shard is removed once documents name all its rows; one they don't name is missing from them."""
        for row in (*shard.trajectories, *shard.refused):
            fate = self._fate(row.trajectory_id)
            if fate is None:
                self._num_unnamed += 1
            else:
                self._where[fate] += 1
            self._finalized += 1

    def _fate(self, trajectory_id: str) -> str | None:
        """Where this occurrence went, None when no document says. The first one in the log is the row, any
        other is a copy, whatever the order in which the documents name them."""
        fates = self._fates.get(trajectory_id, [])
        if trajectory_id in self._seen:
            return fates.pop(0) if fates else _DUPLICATE
        self._seen.add(trajectory_id)
        own = next((f for f in (_TRAINED, *fates) if f in fates and f != _DUPLICATE), None)
        if own is not None:
            fates.remove(own)
        return own

    def books(self, *, num_damaged_shards: int) -> ModelBooks:
        where = self._where.copy()
        in_log = sum(len(g.rows) for g in self._book.open_groups()) if self._book else 0
        for group in self._complete:
            if group.verdict is None or group.verdict.closed_reason is None:
                in_log += len(group.rows)
            else:
                where.update(group.verdict.excluded.values())
        trained = where.pop(_TRAINED, 0)
        return ModelBooks(
            finalized=self._finalized,
            trained=trained,
            dropped=dict(sorted(where.items())),
            in_log=in_log,
            num_trained_twice=self._num_trained_twice,
            num_replayed=self._num_replayed,
            num_missing=sum(len(fates) for fates in self._fates.values()) + self._num_unnamed,
            num_damaged_shards=num_damaged_shards,
        )
