"""The training queue of one model: a reader of its log that deals out batches, each row exactly once.

The log is the queue. Nothing is consumed by reading: a record is done with once a step's document
(`batches/<step>.json`) names it as trained or dropped, so the state after step n is a fold of the documents
up to n over the log, and a restart that replays the documents stands where it stood.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_runtime.batch_journal import closed_before
from model_runtime.batch_metrics import batch_metrics, replay_metrics
from model_runtime.batch_rows import TrainingRow, named_rows, rows_of, with_batch_advantages
from model_runtime.config import ModelConfig
from model_runtime.documents import (
    BatchDocument,
    CheckpointDocument,
    ClosedGroup,
    RememberedGroup,
    ReplayedGroup,
)
from model_runtime.errors import CorruptObjectError
from model_runtime.groups import Group, GroupBook, LogRow, Verdict
from model_runtime.layout import ModelLayout
from model_runtime.log_reader import ConsumptionLedger, LogReader, Position, occurrence
from model_runtime.protocol import QueueReport
from model_runtime.removed_log import refuse_removed
from model_runtime.replay import ReplayBuffer, first_replayed
from model_runtime.row_arrays import RowArrays
from model_runtime.staleness import StalenessBound
from model_runtime.store import Store
from model_runtime.types import Int8Array, MemberKey, Shard, Trajectory

# The share of settled groups that feed this model moves by a tenth with each group. It never reaches 0:
# admission divides its room by it.
_SHARE_MEMORY = 0.9
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains, in a fixed order: group, member, agent, chain."""

    step: int
    rows: tuple[TrainingRow, ...]
    document: BatchDocument
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """What a checkpoint keeps of the queue (CheckpointDocument's fields of the same names)."""

    low_water: dict[str, int]
    consumed: list[str]
    closed_groups: list[str]
    totals: dict[str, int]
    replay: list[RememberedGroup]


@dataclass(frozen=True, slots=True)
class _Drop:
    """A row that left the log untrained while it was read."""

    position: Position
    trajectory_id: str
    reason: str


class TrainingQueue:
    """Tails the log (`poll`), assembles groups, deals out batches (`next_batch`, `replay`), and forgets
    what a batch's document names once that batch was trained (`consume`).

    `seed` draws what is replayed.
    `max_wait_s` bounds one wait for work in flight that would age out; pass the longest life of a group.
    `max_resident_bytes` bounds the arrays held; groups far back in the line are read again when their turn
    comes. `report()` may be called from any thread, everything else from one.
    """

    def __init__(
        self,
        store: Store,
        layout: ModelLayout,
        model: ModelConfig,
        *,
        epoch: int,
        resume: CheckpointDocument | None,
        seed: int = 0,
        max_wait_s: float = 900.0,
        max_resident_bytes: int = 512 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._model = model
        self._settings = model.async_training
        self._epoch = epoch
        start = dict(resume.low_water) if resume else {}
        refuse_removed(
            store,
            layout,
            start,
            by=f"the checkpoint of step {resume.step}" if resume else "a training from its beginning",
            reread=first_replayed(resume) if resume else {},
        )
        self._reader = LogReader(store, layout, start=start, tail=store.at_once())
        self._ledger = ConsumptionLedger(start)
        # Rows that the checkpoint holds as consumed are passed over when they are read again.
        self._consumed_before = Counter(resume.consumed if resume else ())
        self._book = GroupBook(
            model.objective, retired=closed_before(store, layout, resume) if resume else ()
        )
        self._ready: dict[str, Group] = {}  # usable, in closing order
        self._closed: dict[str, ClosedGroup] = {}  # unusable, not yet named by a batch's document
        self._drops: list[_Drop] = []
        self._totals: Counter[str] = Counter(resume.totals if resume else {})
        self._trained: list[tuple[int, int]] = []  # (version trained from, groups), not yet published
        self._feed_share = 1.0
        self._arrays = RowArrays(self._reader, max_bytes=max_resident_bytes)
        self._replay = ReplayBuffer(model, seed=seed)
        if resume is not None:
            self._replay.restore(resume.replay, self._reader)
        self._clock = clock
        self._abandoned_after_s = 2 * max_wait_s
        self._bound = StalenessBound(model.async_training, max_wait_s=max_wait_s, clock=clock)
        self._short_since: float | None = None  # there is work, and less than a batch
        self._closed_in_a_row = 0  # groups closed untrained since one was last usable
        self._report = self._make_report()

    # ------------------------------------------------------------------ reading

    def poll(self) -> int:
        """Read what was written since the last call; the number of new records. Raises StoreError; what
        was read before stays. Damaged shards are set aside, see `quarantined`."""
        num_records = 0
        for position, shard in self._reader.new_shards():
            self._enter(position, shard)
            self._arrays.fit(self._furthest_first())
            num_records += len(shard.trajectories) + len(shard.refused) + len(shard.settlements)
        self._ledger.advance(self._reader.next_seq)
        self._report = self._make_report()
        return num_records

    def prefetch(self) -> None:
        """Read ahead, beside what the caller does until its next poll."""
        self._reader.prefetch()

    def _furthest_first(self) -> list[Group]:
        """Whose arrays can be missed: open groups, then the end of the line; the next batch keeps its own."""
        return [*self._book.open_groups(), *reversed(list(self._ready.values())[self._wanted :])]

    @property
    def _wanted(self) -> int:
        return self._model.batch_size * self._settings.require_batches

    @property
    def quarantined(self) -> Mapping[Position, CorruptObjectError]:
        """Shards set aside in this process because their bytes are damaged."""
        return self._reader.quarantined

    def _enter(self, position: Position, shard: Shard) -> None:
        self._ledger.add_shard(position, shard)
        rows: dict[MemberKey, list[LogRow]] = {}
        for trajectory in shard.trajectories:
            if (row := self._new_row(position, trajectory)) is not None:
                rows.setdefault(trajectory.member, []).append(row)
        for refused in shard.refused:
            self._drop_unless_done(position, refused.trajectory_id, "invalid")
        for settlement in shard.settlements:
            own = rows.pop(settlement.member, [])
            outcome = self._book.settle(position, settlement, own, now=self._clock())
            if not outcome.belongs:
                self._ledger.consume_settlement(position)
            for row, reason in outcome.dropped:
                self._drop(row, reason)
            if outcome.completed is not None:
                self._enqueue(outcome.completed)

    def _new_row(self, position: Position, trajectory: Trajectory) -> LogRow | None:
        """The row, or None when it is consumed already or a copy of one seen before."""
        key = trajectory.trajectory_id
        seen = self._ledger.seen(key)
        self._ledger.note_row(position, key)
        if self._passed_over(position, key):
            return None
        if seen:
            self._drops.append(_Drop(position, key, "duplicate"))
            return None
        row = LogRow.of(trajectory, position, self._model.objective)
        self._arrays.hold(row)
        return row

    def _drop_unless_done(self, position: Position, trajectory_id: str, reason: str) -> None:
        self._ledger.note_row(position, trajectory_id)
        if not self._passed_over(position, trajectory_id):
            self._drops.append(_Drop(position, trajectory_id, reason))

    def _passed_over(self, position: Position, trajectory_id: str) -> bool:
        name = occurrence(position, trajectory_id)
        if not self._consumed_before[name]:
            return False
        self._consumed_before[name] -= 1
        self._ledger.consume_row(position, trajectory_id)
        return True

    def _drop(self, row: LogRow, reason: str) -> None:
        self._drops.append(_Drop(row.position, row.trajectory_id, reason))
        self._arrays.let_go(row)

    def _enqueue(self, group: Group) -> None:
        verdict = _verdict(group)
        usable = verdict.closed_reason is None
        if usable:
            self._ready[group.group_id] = group
            self._closed_in_a_row = 0
        else:
            self._close(group, verdict.closed_reason or "")
        # Groups opened without this model in mind say nothing about how often it is fed.
        if verdict.closed_reason != "not_for_training":
            self._closed_in_a_row += not usable
            self._feed_share = _SHARE_MEMORY * self._feed_share + (1 - _SHARE_MEMORY) * usable

    def _close(self, group: Group, reason: str) -> None:
        self._closed[group.group_id] = ClosedGroup(
            group_id=group.group_id, reason=reason, num_trajectories=len(group.rows)
        )
        for row in group.rows:
            self._arrays.let_go(row)

    # ------------------------------------------------------------------ dealing out

    def next_batch(
        self,
        step: int,
        *,
        published_version: int,
        training_version: int,
        oldest_open_version: int | None,
        final: bool,
    ) -> Batch | None:
        """The oldest `batch_size × require_batches` usable groups, or None while there are too few, or
        while training them would make work in flight age out. After `async_training.max_wait_s` fewer will
        do, filled up from the replay buffer. `final`: whatever is there, unless nothing.

        Consumes nothing: without `consume` the next call deals out the same groups again.
        """
        self._forget_published(published_version)
        self._close_aged(published_version, training_version)
        self._close_abandoned()
        unfinished = [oldest_open_version, *(group.oldest_version for group in self._book.open_groups())]
        late = self._is_late()
        batch = None
        if len(self._ready) >= (1 if final or late else self._wanted) and (
            final or not self._bound.must_wait(unfinished, step=step, training=training_version)
        ):
            groups = self._choose(self._wanted, step, training_version)
            missing = self._wanted - len(groups) if late else 0
            replayed = self._replay.choose(step, missing, published=published_version)
            batch = self._assemble(step, groups, replayed, published_version, training_version)
        self._report = self._make_report()
        return batch

    def _is_late(self) -> bool:
        """Has a batch that is too small waited for more groups long enough?"""
        limit_s = self._settings.max_wait_s
        if limit_s is None or not 0 < len(self._ready) < self._wanted:
            self._short_since = None
            return False
        now = self._clock()
        self._short_since = now if self._short_since is None else self._short_since
        return now - self._short_since >= limit_s

    def replay(self, document: BatchDocument) -> Batch | None:
        """The batch of this document again, bit for bit; None until its part of the log has been read.

        Raises CorruptObjectError when the log no longer gives that batch.
        """
        if any(self._reader.next_seq.get(writer, 0) < seq for writer, seq in document.read_positions.items()):
            return None
        groups = [self._complete(document, name) for name in document.groups]
        for entry in document.closed_untrained:
            if entry.reason == "cancelled":
                for row in self._book.abandon_as_of(entry.group_id, document.read_positions):
                    self._drop(row, "duplicate_attempt")
        closed = [self._complete(document, entry.group_id) for entry in document.closed_untrained]
        replayed = [self._replay.group(entry.group_id) for entry in document.replayed]
        if None in replayed:
            raise CorruptObjectError(
                f"{self._layout.batch(document.step)}: a group it replays is not in the replay buffer"
            )
        replayed = [group for group in replayed if group is not None]
        rows = self._training_rows(groups, replayed, document.published_version, document.training_version)
        named = [*document.rows, *(row for entry in document.replayed for row in entry.rows)]
        if [row.trajectory.trajectory_id for row in rows] != [row.trajectory_id for row in named]:
            raise CorruptObjectError(
                f"{self._layout.batch(document.step)}: the log gives other rows for this step"
            )
        return self._batch(document, rows, groups, closed)

    def _batch(
        self, document: BatchDocument, rows: list[TrainingRow], groups: list[Group], closed: list[Group]
    ) -> Batch:
        metrics = batch_metrics(rows, groups, closed, published_version=document.published_version)
        if self._replay.is_on:
            metrics |= replay_metrics(document.replayed)
        return Batch(document.step, tuple(rows), document, metrics)

    def _complete(self, document: BatchDocument, group_id: str) -> Group:
        group = self._book.complete(group_id)
        if group is None:
            source = self._layout.batch(document.step)
            raise CorruptObjectError(
                f"{source}: group {group_id!r} is not complete in the log, or is done with"
            )
        return group

    def _close_aged(self, published: int, training: int) -> None:
        for group in list(self._ready.values()):
            verdict = _verdict(group)
            trainable = [row for row in group.rows if row.trajectory_id in verdict.advantages]
            if all(self._bound.is_aged(row, published=published, training=training) for row in trainable):
                del self._ready[group.group_id]
                self._close(group, "aged_out")

    def _close_abandoned(self) -> None:
        """Groups nobody finishes (their writer was lost and nobody took over) don't wait for ever. The
        gateway's own deadline comes long before this."""
        limit = self._clock() - self._abandoned_after_s
        for group in [g for g in self._book.open_groups() if g.first_read_at < limit]:
            self._book.abandon(group.group_id)
            self._close(group, "cancelled")

    def _choose(self, wanted: int, step: int, training: int) -> list[Group]:
        """The oldest first; before them those that would age out at the version this step leads to."""
        would_age = self._bound.would_age
        line = sorted(
            self._ready.values(), key=lambda g: not would_age(g.oldest_version, step=step, training=training)
        )
        return line[:wanted]

    def _assemble(
        self, step: int, groups: list[Group], replayed: list[Group], published: int, training: int
    ) -> Batch:
        rows = self._training_rows(groups, replayed, published, training)
        dropped = self._dropped_rows(groups, {row.trajectory.trajectory_id for row in rows})
        closed = [self._complete_closed(name) for name in self._closed]
        document = BatchDocument(
            step=step,
            epoch=self._epoch,
            groups=[group.group_id for group in groups],
            rows=named_rows(rows, groups),
            replayed=[
                ReplayedGroup(group_id=group.group_id, rows=named_rows(rows, [group])) for group in replayed
            ],
            closed_untrained=list(self._closed.values()),
            dropped={reason: len(ids) for reason, ids in dropped.items()},
            dropped_rows=dropped,
            read_positions=dict(self._reader.next_seq),
            published_version=published,
            training_version=training,
            created_at=time.time(),
        )
        return self._batch(document, rows, groups, closed)

    def _complete_closed(self, group_id: str) -> Group:
        group = self._book.complete(group_id)
        assert group is not None, f"closed group {group_id} left the book before a document named it"
        return group

    def _training_rows(
        self, groups: list[Group], replayed: list[Group], published: int, training: int
    ) -> list[TrainingRow]:
        self._arrays.load(groups)

        def fresh(trajectory: Trajectory) -> Int8Array:
            return self._bound.loss_mask(trajectory, published=published, training=training)

        rows = [row for group in groups for row in rows_of(group, fresh)]
        rows += [row for g in replayed for row in rows_of(g, self._replay.loss_mask(published))]
        return with_batch_advantages(rows, self._model.objective)

    def _dropped_rows(self, groups: list[Group], trained: set[str]) -> dict[str, list[str]]:
        """reason → ids of all that leaves the log untrained with this batch."""
        dropped: dict[str, list[str]] = {}
        for drop in self._drops:
            dropped.setdefault(drop.reason, []).append(drop.trajectory_id)
        for group in [*map(self._complete_closed, self._closed), *groups]:
            excluded = _verdict(group).excluded
            for row in sorted(group.rows, key=lambda r: r.order):
                if row.trajectory_id not in trained:
                    reason = excluded.get(row.trajectory_id, "aged_out")
                    dropped.setdefault(reason, []).append(row.trajectory_id)
        return dropped

    # ------------------------------------------------------------------ consuming

    def consume(self, batch: Batch) -> None:
        """The batch was trained: everything its document names is done with."""
        document = batch.document
        dropped = Counter(name for names in document.dropped_rows.values() for name in names)
        dropped.update(row.trajectory_id for row in document.rows)
        for group_id in [*document.groups, *(entry.group_id for entry in document.closed_untrained)]:
            self._ready.pop(group_id, None)
            self._closed.pop(group_id, None)
            group, trained = self._book.retire(group_id), group_id in document.groups
            for position in group.positions:
                self._ledger.consume_settlement(position)
            for row in group.rows:
                dropped[row.trajectory_id] -= 1
                self._ledger.consume_row(row.position, row.trajectory_id)
                if self._replay.is_on and trained:
                    self._arrays.hand_over(row)
                else:
                    self._arrays.let_go(row)
            if trained:
                self._replay.add(group)
        self._replay.used(document)
        self._short_since = None
        self._consume_drops(dropped)
        self._totals["trained"] += len(document.rows)
        self._totals["groups_trained"] += len(document.groups)
        for entry in document.replayed:
            self._totals["groups_replayed"] += 1
            self._totals["replayed"] += len(entry.rows)
        for reason, ids in document.dropped_rows.items():
            self._totals[f"dropped.{reason}"] += len(ids)
        for entry in document.closed_untrained:
            self._totals[f"groups_closed.{entry.reason}"] += 1
        self._trained.append((document.training_version, len(document.groups)))
        self._ledger.advance(self._reader.next_seq)
        self._report = self._make_report()

    def _consume_drops(self, named: Counter[str]) -> None:
        """Rows that left while they were read, by their ids: when a step is replayed, later shards have been
        read before it, and a copy may have another reason than it had."""
        left = []
        for drop in self._drops:
            if named[drop.trajectory_id] > 0:
                named[drop.trajectory_id] -= 1
                self._ledger.consume_row(drop.position, drop.trajectory_id)
            else:
                left.append(drop)
        self._drops = left

    def published(self, version: int) -> None:
        """This version is served now. What was trained into it no longer counts against admission; what
        was trained since still does."""
        self._forget_published(version)
        self._report = self._make_report()

    def _forget_published(self, version: int) -> None:
        self._trained = [(start, groups) for start, groups in self._trained if start >= version]

    # ------------------------------------------------------------------ reporting

    def report(self) -> QueueReport:
        """The model's side of admission."""
        return self._report

    def _make_report(self) -> QueueReport:
        queued = [*self._ready.values(), *self._book.open_groups()]
        share = 1.0 if self._settings.strict_on_policy else max(self._feed_share, _LEAST_SHARE)
        return QueueReport(
            untrained_groups=len(self._ready),
            trained_since_publish=sum(groups for _, groups in self._trained),
            feed_share=share,
            read_positions=dict(self._reader.next_seq),
            oldest_queued_version=min(
                (v for g in queued if (v := g.oldest_version) is not None), default=None
            ),
            closed_groups=self._closed_in_a_row,
        )

    def totals(self) -> dict[str, int]:
        """Books: trained, dropped.<reason>, groups_trained, groups_closed.<reason>, quarantined_shards, and
        replayed and groups_replayed, which count each reuse.
        What no batch's document names yet is not in them."""
        totals = dict(self._totals)
        if self.quarantined:
            totals["quarantined_shards"] = len(self.quarantined)
        return totals

    def progress(self) -> QueueProgress:
        """The state after the last consumed batch, whatever was read since."""
        return QueueProgress(
            low_water=self._ledger.low_water(),
            consumed=sorted(self._ledger.consumed()),
            closed_groups=sorted(g for g in self._ledger.groups() if self._book.is_retired(g)),
            totals=dict(self._totals),
            replay=self._replay.remembered(),
        )


def _verdict(group: Group) -> Verdict:
    assert group.verdict is not None, f"group {group.group_id} is not complete"
    return group.verdict
