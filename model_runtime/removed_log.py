"""What retention leaves of a model's log: of each shard it removed who was called, how it was rewarded and
how each execution ended. The tokens are gone.

One object stands for one removal, `removed/<n>.bin`, written before the first shard of it is deleted. So a
shard is gone only if an object says so, and whoever reads the log from its beginning finds of each shard
either the shard itself or its record.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from model_runtime.errors import CorruptObjectError, LogRemovedError
from model_runtime.layout import ModelLayout, number_in, parse_log_shard
from model_runtime.store import Store
from model_runtime.types import MemberKey, RefusedRow, Rewards, Settlement, SettlementStatus, Shard

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class RemovedTrajectory:
    """The fields of a `Trajectory` by which it is counted."""

    trajectory_id: str
    member: MemberKey
    agent_id: str
    created_at: float
    workflow_rewards: Rewards
    agent_rewards: Rewards


@dataclass(frozen=True, slots=True)
class RemovedShard:
    """What is left of a shard, under the same names. Of a settlement the reason and the time are gone."""

    trajectories: tuple[RemovedTrajectory, ...]
    settlements: tuple[Settlement, ...]
    refused: tuple[RefusedRow, ...]


class _Settled(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    group_size: int
    member_index: int
    attempt: int
    status: SettlementStatus
    train: bool


class _Row(msgspec.Struct, frozen=True, array_like=True):
    settled: int  # index of its execution's settlement, which is in the same shard
    trajectory_id: str
    agent_id: str
    created_at: float
    workflow_rewards: dict[str, float | None]
    agent_rewards: dict[str, float | None]
    refused: str | None = None  # why the reader refused it


class ShardRecord(msgspec.Struct, frozen=True, array_like=True):
    """One removed shard as it is written."""

    writer: str
    seq: int
    settled: list[_Settled]
    rows: list[_Row]

    @classmethod
    def of(cls, writer: str, seq: int, shard: Shard) -> ShardRecord:
        settled = [
            _Settled(m.group_id, m.group_size, m.member_index, m.attempt, s.status, s.train)
            for s in shard.settlements
            for m in (s.member,)
        ]
        places = {s.member: index for index, s in enumerate(shard.settlements)}
        rows = [
            _Row(
                places[t.member], t.trajectory_id, t.agent_id, t.created_at,
                dict(t.workflow_rewards), dict(t.agent_rewards),
            )
            for t in shard.trajectories
        ]  # fmt: skip
        rows += [
            _Row(places[r.member], r.trajectory_id, r.agent_id, 0.0, {}, {}, r.reason) for r in shard.refused
        ]
        return cls(writer, seq, settled, rows)

    def shard(self) -> RemovedShard:
        members = [
            MemberKey(
                group_id=s.group_id,
                group_size=s.group_size,
                member_index=s.member_index,
                attempt=s.attempt,
            )
            for s in self.settled
        ]
        num_rows: list[dict[str, int]] = [{} for _ in members]
        for row in self.rows:
            of_agent = num_rows[row.settled]
            of_agent[row.agent_id] = of_agent.get(row.agent_id, 0) + 1
        return RemovedShard(
            tuple(
                RemovedTrajectory(
                    row.trajectory_id, members[row.settled], row.agent_id, row.created_at,
                    row.workflow_rewards, row.agent_rewards,
                )
                for row in self.rows
                if row.refused is None
            ),
            tuple(
                Settlement(member=member, status=s.status, num_rows=rows, train=s.train)
                for member, s, rows in zip(members, self.settled, num_rows, strict=True)
            ),
            tuple(
                RefusedRow(row.trajectory_id, members[row.settled], row.agent_id, row.refused)
                for row in self.rows
                if row.refused is not None
            ),
        )  # fmt: skip


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """removed/<n>.bin. Floor, damaged and counts are those of all removals so far, shards this one's."""

    number: int
    epoch: int
    created_at: float
    floor: dict[str, int]  # writer → seq below which every shard is removed
    damaged: list[tuple[str, int]]  # shards below the floor that nobody could read; they stay where they are
    num_shards: int
    num_trajectories: int
    num_bytes: int  # of the shards, as they stood in the store
    shards: list[ShardRecord]

    def to_bytes(self) -> bytes:
        body = zlib.compress(msgspec.msgpack.encode(self))
        return hashlib.sha256(body).digest() + body

    @classmethod
    def parse(cls, data: bytes, *, source: str) -> Removal:
        """Raises CorruptObjectError naming `source`."""
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            raise CorruptObjectError(f"{source}: its {len(data)} bytes do not match their sha256")
        try:
            return msgspec.msgpack.decode(zlib.decompress(body), type=cls)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise CorruptObjectError(f"{source}: not what retention left of a log: {error}") from error


NOTHING_REMOVED = Removal(
    number=0,
    epoch=0,
    created_at=0.0,
    floor={},
    damaged=[],
    num_shards=0,
    num_trajectories=0,
    num_bytes=0,
    shards=[],
)


def last_removal(store: Store, layout: ModelLayout) -> Removal:
    """The newest one, with the totals of all. Raises CorruptObjectError naming it when it is damaged."""
    number = max(_numbers(store, layout), default=0)
    return NOTHING_REMOVED if number == 0 else _read(store, layout, number)


def refuse_removed(
    store: Store, layout: ModelLayout, needed: Mapping[str, int], *, by: str, reread: Mapping[str, int]
) -> None:
    """Raise LogRemovedError unless the log still has every shard from `needed` on (writer → seq, 0 for one
    that isn't named), and those of `reread`."""
    for writer, floor in last_removal(store, layout).floor.items():
        first = min(needed.get(writer, 0), reread.get(writer, floor))
        if first < floor:
            raise LogRemovedError(
                f"{by} needs {store.uri(layout.log_shard(writer, first))} and what follows, and retention "
                f"has removed this log up to number {floor} (retention.max_log_bytes and max_log_age_s): "
                "go on from a newer checkpoint, or begin a new run"
            )


def is_in_log(store: Store, key: str) -> bool:
    """Is a shard of this key in its log, or was it?"""
    if store.exists(key):
        return True
    place = parse_log_shard(key)
    if place is None:
        return False
    layout, writer, seq = place
    return seq < last_removal(store, layout).floor.get(writer, 0)


class RemovedLog:
    """All removals of one model's log, as far as `refresh` has read them."""

    def __init__(self, store: Store, layout: ModelLayout) -> None:
        self._store = store
        self._layout = layout
        self._last = NOTHING_REMOVED
        self._shards: dict[str, list[ShardRecord]] = {}  # by writer, in order

    def refresh(self) -> bool:
        """Read the removals there are since; False when there are none. Raises CorruptObjectError naming one
        that is damaged."""
        newer = sorted(n for n in _numbers(self._store, self._layout) if n > self._last.number)
        for number in newer:
            self._last = _read(self._store, self._layout, number)
            for record in self._last.shards:
                self._shards.setdefault(record.writer, []).append(record)
        return bool(newer)

    @property
    def floor(self) -> Mapping[str, int]:
        return self._last.floor

    @property
    def damaged(self) -> Collection[tuple[str, int]]:
        """(writer, seq) of shards below the floor of which nothing is known."""
        return self._last.damaged

    def shards_of(self, writer: str, *, start: int) -> Iterator[tuple[int, RemovedShard]]:
        for record in self._shards.get(writer, []):
            if record.seq >= start:
                yield record.seq, record.shard()


def _numbers(store: Store, layout: ModelLayout) -> list[int]:
    return [number_in(name) for name in store.children(layout.removals())]


def _read(store: Store, layout: ModelLayout, number: int) -> Removal:
    key = layout.removal(number)
    return Removal.parse(store.get(key), source=store.uri(key))
