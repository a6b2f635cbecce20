"""The arrays of rows that wait in the queue: as many as fit stay in memory, the others are read again."""

from __future__ import annotations

from collections.abc import Iterable

from model_runtime.groups import Group, LogRow
from model_runtime.log_reader import LogReader, Position


class RowArrays:
    """Counts the bytes of the arrays held and lets go of those furthest from their turn."""

    def __init__(self, reader: LogReader, *, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self.num_bytes = 0  # of the arrays held

    def hold(self, row: LogRow) -> None:
        """A new row, with its arrays."""
        self.num_bytes += row.num_bytes

    def let_go(self, row: LogRow) -> None:
        if row.trajectory is not None:
            row.trajectory = None
            self.num_bytes -= row.num_bytes

    def hand_over(self, row: LogRow) -> None:
        """Somebody else keeps these arrays now, and counts them."""
        if row.trajectory is not None:
            self.num_bytes -= row.num_bytes

    def fit(self, furthest_first: Iterable[Group]) -> None:
        """Let go until the rest fits."""
        for group in furthest_first:
            if self.num_bytes <= self._max_bytes:
                return
            for row in group.rows:
                self.let_go(row)

    def load(self, groups: Iterable[Group]) -> None:
        """Bring back what these groups had to let go."""
        missing: dict[Position, list[LogRow]] = {}
        for row in (row for group in groups for row in group.rows if row.trajectory is None):
            missing.setdefault(row.position, []).append(row)
        for position, rows in missing.items():
            found = {t.trajectory_id: t for t in self._reader.reread(position).trajectories}
            for row in rows:
                row.trajectory = found[row.trajectory_id]
                self.num_bytes += row.num_bytes
