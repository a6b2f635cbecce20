"""Reading a model's log: tail every writer's shards in order, and remember what is done with.

A *position* is (writer, seq), the place of one shard. Positions sort in the order the writers lived and
wrote.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from model_runtime.errors import CorruptObjectError, ObjectNotFoundError, StoreError
from model_runtime.layout import ModelLayout
from model_runtime.removed_log import RemovedLog, RemovedShard
from model_runtime.store import Store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Shard

MAX_AHEAD_BYTES = 64 * 2**20

logger = logging.getLogger(__name__)

Position = tuple[str, int]


class LogReader:
    """The shards of one model's log, each exactly once.

    A shard that can't be read twice in a row is set aside: named in `quarantined` and in the error log,
    passed over, never a reason to lose its neighbours.
    """

    def __init__(
        self,
        store: Store,
        layout: ModelLayout,
        *,
        start: Mapping[str, int] | None = None,
        tail: Store | None = None,
    ) -> None:
        """`tail` is where new shards are looked for: the store without its patience for those who look again
        and again."""
        self._store = store
        self._tail = tail or store
        self._layout = layout
        self.next_seq: dict[str, int] = dict(start or {})
        self.quarantined: dict[Position, CorruptObjectError] = {}
        self._ahead = ReadAhead(self._tail, layout)

    def prefetch(self) -> None:
        """Begin to read what comes next, on another thread. `new_shards` then finds it read."""
        self._ahead.begin(dict(self.next_seq))

    def new_shards(self) -> Iterator[tuple[Position, Shard]]:
        """Every shard written since the last call. The position moves on once the consumer takes the next."""
        ahead = self._ahead.take()
        for writer in self._tail.children(self._layout.log_writers()):
            yield from self.new_shards_of(writer, ahead)

    def new_shards_of(
        self, writer: str, ahead: dict[Position, Shard] | None = None
    ) -> Iterator[tuple[Position, Shard]]:
        """The same of one writer; what is in `ahead` has been read already."""
        seq = self.next_seq.setdefault(writer, 0)
        ahead = {} if ahead is None else ahead
        while (found := ahead.pop((writer, seq), None) or self._get(writer, seq)) is not None:
            shard = found if isinstance(found, Shard) else self._decode_or_quarantine((writer, seq), found)
            if shard is not None:
                yield (writer, seq), shard
            seq += 1
            self.next_seq[writer] = seq

    def reread(self, position: Position) -> Shard:
        """A shard read before."""
        key = self._layout.log_shard(*position)
        return decode_log_shard(self._store.get(key), source=self._store.uri(key))

    def _get(self, writer: str, seq: int) -> bytes | None:
        try:
            return self._tail.get(self._layout.log_shard(writer, seq))
        except ObjectNotFoundError:
            return None

    def _decode_or_quarantine(self, position: Position, data: bytes) -> Shard | None:
        try:
            return decode_log_shard(data, source=self._store.uri(self._layout.log_shard(*position)))
        except CorruptObjectError:
            try:  # once more: the damage may have been on the way here
                return self.reread(position)
            except CorruptObjectError as error:
                self.quarantined[position] = error
                logger.error("shard set aside, its rows are not trained: %s", error)
                return None


class WholeLog:
    """A model's log from its beginning, each shard once and in the log's order; of those that retention has
    removed, also while this is read, what it left of them."""

    def __init__(self, store: Store, layout: ModelLayout) -> None:
        self._store = store
        self._layout = layout
        self._reader = LogReader(store, layout)
        self._removed = RemovedLog(store, layout)

    def __iter__(self) -> Iterator[tuple[Position, Shard | RemovedShard]]:
        """Once. Raises CorruptObjectError when what retention left is damaged."""
        self._removed.refresh()
        written = self._store.children(self._layout.log_writers())
        for writer in sorted({*written, *self._removed.floor}):
            yield from self._of(writer)
        while self._removed.refresh():  # what was not reached yet went meanwhile: here it is
            for writer in sorted(self._removed.floor):
                yield from self._of(writer)

    def _of(self, writer: str) -> Iterator[tuple[Position, Shard | RemovedShard]]:
        next_seq = self._reader.next_seq
        start = next_seq.get(writer, 0)
        for seq, shard in self._removed.shards_of(writer, start=start):
            yield (writer, seq), shard
        next_seq[writer] = max(start, self._removed.floor.get(writer, 0))
        yield from self._reader.new_shards_of(writer)

    @property
    def num_damaged(self) -> int:
        """Shards that could not be read, of what was read so far; one that was set aside before a removal
        passed it over is one."""
        return len({*self._reader.quarantined, *self._removed.damaged})


class ReadAhead:
    """Shards read and decoded before anyone asks for them. It only saves time: what can't be read is left to
    the reader, which knows what to do about it."""

    def __init__(self, store: Store, layout: ModelLayout) -> None:
        self._store = store
        self._layout = layout
        self._found: dict[Position, Shard] = {}
        self._thread: threading.Thread | None = None

    def begin(self, next_seq: Mapping[str, int]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, args=(next_seq,), daemon=True)
            self._thread.start()

    def take(self) -> dict[Position, Shard]:
        """What was found since the last call; waits for reading that is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        found, self._found = self._found, {}
        return found

    def _read(self, next_seq: Mapping[str, int]) -> None:
        try:
            writers = self._store.children(self._layout.log_writers())
        except StoreError as error:
            logger.debug("nothing is read ahead: %s", error)
            return
        left = MAX_AHEAD_BYTES
        for writer in writers:
            left = self._read_writer(writer, next_seq.get(writer, 0), left)

    def _read_writer(self, writer: str, seq: int, left: int) -> int:
        """Bytes left to read after this writer's new shards."""
        while left > 0:
            key = self._layout.log_shard(writer, seq)
            try:
                data = self._store.get(key)
                self._found[writer, seq] = decode_log_shard(data, source=self._store.uri(key))
            except (CorruptObjectError, StoreError) as error:  # or there is no more
                logger.debug("reading ahead of %s ended: %s", writer, error)
                break
            left -= len(data)
            seq += 1
        return left


def is_below(position: Position, marks: Mapping[str, int]) -> bool:
    """Does it come before its writer's mark? Of a writer without one nothing does."""
    return position[1] < marks.get(position[0], 0)


def occurrence(position: Position, trajectory_id: str) -> str:
    """Name of one row in the log: the id alone doesn't tell a row from its copy in another shard."""
    return f"{position[0]}/{position[1]}/{trajectory_id}"


def decode_log_shard(data: bytes, *, source: str) -> Shard:
    """Raises CorruptObjectError also where the settlements announce other rows than the shard holds."""
    shard = decode_shard(data, source=source)
    found = Counter((row.member, row.agent_id) for row in (*shard.trajectories, *shard.refused))
    announced = Counter(
        {(s.member, agent): n for s in shard.settlements for agent, n in s.num_rows.items() if n}
    )
    if found != announced:
        key = next(iter((found - announced) + (announced - found)))
        raise CorruptObjectError(
            f"{source}: settlements announce {announced[key]} rows of agent {key[1]!r} in execution "
            f"{key[0].workflow_id}, the shard holds {found[key]}"
        )
    return shard


@dataclass(slots=True)
class _ShardState:
    """What is left to do with one shard's records (rows and settlements)."""

    outstanding: int = 0
    rows: list[str] = field(default_factory=list)
    consumed: list[str] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)


class ConsumptionLedger:
    """Which records of which shards are consumed, and from where a restart has to read again.

    A record is consumed when a step's document says so; until then it keeps its shard above the low-water
    mark. An id may stand in the log more than once: each occurrence is a record of its own.
    """

    def __init__(self, start: Mapping[str, int]) -> None:
        self._low_water: dict[str, int] = dict(start)
        self._shards: dict[str, dict[int, _ShardState]] = {writer: {} for writer in start}
        self._seen: Counter[str] = Counter()

    def add_shard(self, position: Position, shard: Shard) -> None:
        """Account for a shard's records before they are dealt with one by one."""
        writer, seq = position
        self._low_water.setdefault(writer, seq)
        self._shards.setdefault(writer, {})[seq] = _ShardState(
            outstanding=len(shard.trajectories) + len(shard.refused) + len(shard.settlements),
            groups={s.member.group_id for s in shard.settlements},
        )

    def seen(self, trajectory_id: str) -> bool:
        """Did a shard at or above the low-water mark hold this id before?"""
        return trajectory_id in self._seen

    def note_row(self, position: Position, trajectory_id: str) -> None:
        self._seen[trajectory_id] += 1
        self._at(position).rows.append(trajectory_id)

    def consume_row(self, position: Position, trajectory_id: str) -> None:
        state = self._at(position)
        state.outstanding -= 1
        state.consumed.append(trajectory_id)

    def consume_settlement(self, position: Position) -> None:
        self._at(position).outstanding -= 1

    def advance(self, next_seq: Mapping[str, int]) -> None:
        """Move the low-water marks over every shard that is wholly consumed and forget it."""
        for writer, end in next_seq.items():
            shards = self._shards.setdefault(writer, {})
            mark = self._low_water.get(writer, 0)
            while mark < end and (mark not in shards or shards[mark].outstanding == 0):
                if (done := shards.pop(mark, None)) is not None:
                    self._forget(done.rows)
                mark += 1
            self._low_water[writer] = mark

    def _forget(self, trajectory_ids: list[str]) -> None:
        for trajectory_id in trajectory_ids:
            self._seen[trajectory_id] -= 1
            if not self._seen[trajectory_id]:
                del self._seen[trajectory_id]

    def low_water(self) -> dict[str, int]:
        return dict(self._low_water)

    def consumed(self) -> list[str]:
        """Rows consumed in shards at or above the low-water marks, as `occurrence` names them."""
        return [
            occurrence((writer, seq), trajectory_id)
            for writer, shards in self._shards.items()
            for seq, state in shards.items()
            for trajectory_id in state.consumed
        ]

    def groups(self) -> set[str]:
        """Groups that settled a member in a shard at or above the low-water marks."""
        return {g for shards in self._shards.values() for state in shards.values() for g in state.groups}

    def _at(self, position: Position) -> _ShardState:
        return self._shards[position[0]][position[1]]
