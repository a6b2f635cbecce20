"""Groups that were trained and may be trained again, for a model that is rarely called.

What it holds after step n follows from the steps' documents up to n, so that a restart which replays them
draws the same. A checkpoint keeps its index; the rows are read again from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model_runtime.config import ModelConfig
from model_runtime.documents import BatchDocument, CheckpointDocument, RememberedGroup, RememberedRow
from model_runtime.errors import CorruptObjectError
from model_runtime.groups import Group, LogRow, judge
from model_runtime.log_reader import LogReader, Position
from model_runtime.types import UNFINISHED_STATUSES, Int8Array, MemberKey, Shard, Trajectory


@dataclass(slots=True, eq=False)
class _Remembered:
    group: Group
    num_reuses: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.group.rows)


class ReplayBuffer:
    """Oldest groups leave first once there are too many, or too many bytes; so does what is too old or was
    used often enough. Its rows keep their arrays."""

    def __init__(self, model: ModelConfig, *, seed: int) -> None:
        self._settings = model.replay
        self._objective = model.objective
        self._seed = seed
        self._groups: dict[str, _Remembered] = {}

    @property
    def is_on(self) -> bool:
        return self._settings.max_groups > 0

    def add(self, group: Group) -> None:
        """A group that was trained just now."""
        if self.is_on:
            self._groups[group.group_id] = _Remembered(group)

    def used(self, document: BatchDocument) -> None:
        """A step was trained: count what it replayed, and forget what goes beyond the bounds."""
        for entry in document.replayed:
            self._groups[entry.group_id].num_reuses += 1
        for remembered in list(self._groups.values()):
            spent = remembered.num_reuses >= self._settings.max_reuses
            if spent or not self._has_fresh_rows(remembered.group, document.published_version):
                self._forget(remembered.group.group_id)
        num_bytes = sum(r.num_bytes for r in self._groups.values())
        for remembered in list(self._groups.values()):
            if len(self._groups) <= self._settings.max_groups and num_bytes <= self._settings.max_bytes:
                return
            num_bytes -= remembered.num_bytes
            self._forget(remembered.group.group_id)

    def _forget(self, group_id: str) -> None:
        for row in self._groups.pop(group_id).group.rows:
            row.trajectory = None

    def choose(self, step: int, count: int, *, published: int) -> list[Group]:
        """Up to `count` different groups for this step, drawn with the seed, oldest first."""
        usable = [
            r.group for r in self._groups.values() if count > 0 and self._has_fresh_rows(r.group, published)
        ]
        drawn = np.random.default_rng([self._seed, step]).permutation(len(usable))[: max(0, count)]
        return [usable[i] for i in sorted(drawn.tolist())]

    def group(self, group_id: str) -> Group | None:
        remembered = self._groups.get(group_id)
        return remembered.group if remembered is not None else None

    def loss_mask(self, published: int) -> Callable[[Trajectory], Int8Array]:
        """The response mask without tokens older than the buffer's bound."""

        def mask(trajectory: Trajectory) -> Int8Array:
            is_fresh = published - trajectory.token_versions <= self._settings.max_age
            return trajectory.response_mask * is_fresh.astype(np.int8)

        return mask

    def _has_fresh_rows(self, group: Group, published: int) -> bool:
        trained = group.verdict.advantages if group.verdict is not None else {}
        return any(
            published - row.policy_version_max <= self._settings.max_age
            for row in group.rows
            if row.trajectory_id in trained
        )

    # ------------------------------------------------------------------ checkpoints

    def remembered(self) -> list[RememberedGroup]:
        return [
            RememberedGroup(
                group_id=r.group.group_id,
                group_size=r.group.group_size,
                num_reuses=r.num_reuses,
                rows=[
                    RememberedRow(
                        trajectory_id=row.trajectory_id, writer=row.position[0], seq=row.position[1]
                    )
                    for row in r.group.rows
                ],
            )
            for r in self._groups.values()
        ]

    def restore(self, remembered: Sequence[RememberedGroup], reader: LogReader) -> None:
        """Read these groups again. Raises CorruptObjectError when the log no longer has a row of theirs."""
        if not self.is_on:
            return
        wanted: dict[Position, set[str]] = {}
        for entry in remembered:
            for row in entry.rows:
                wanted.setdefault((row.writer, row.seq), set()).add(row.trajectory_id)
        rows: dict[str, LogRow] = {}
        for position, names in sorted(wanted.items()):
            shard = reader.reread(position)
            rows |= {row.trajectory_id: row for row in self._rows_again(shard, position, names)}
        for entry in remembered:
            group = Group(entry.group_id, entry.group_size)
            try:
                group.rows = [rows[row.trajectory_id] for row in entry.rows]
            except KeyError as error:
                raise CorruptObjectError(
                    f"replay buffer: the log no longer has row {error} of group {entry.group_id!r}"
                ) from None
            group.verdict = judge(group, self._objective)
            self._groups[group.group_id] = _Remembered(group, entry.num_reuses)

    def _rows_again(self, shard: Shard, position: Position, names: Collection[str]) -> Iterator[LogRow]:
        """Those rows of this shard as their group took them in, by the settlement they came with."""
        status: dict[MemberKey, str] = {}
        for settlement in shard.settlements:
            status.setdefault(settlement.member, settlement.status)  # the rows go with a member's first
        for trajectory in shard.trajectories:
            if trajectory.trajectory_id not in names:
                continue
            row = LogRow.of(trajectory, position, self._objective)
            is_unfinished = status.get(row.member) in UNFINISHED_STATUSES
            yield row.as_unfinished(self._objective.unfinished_reward) if is_unfinished else row


def first_replayed(checkpoint: CheckpointDocument) -> dict[str, int]:
    """Writer → seq of the first shard that this checkpoint's replay buffer is read from again."""
    first: dict[str, int] = {}
    for row in (row for group in checkpoint.replay for row in group.rows):
        first[row.writer] = min(row.seq, first.get(row.writer, row.seq))
    return first
