"""Metric rows of one model in the store: one JSON object a line, one row per step, sync or evaluation.

An object store can't append, so a writer rewrites its current chunk; a full chunk is left alone and the
next one begun, which bounds what one row costs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from model_runtime.errors import CorruptObjectError
from model_runtime.layout import ModelLayout
from model_runtime.store import Store

_CHUNK_BYTES = 256 * 2**10

Row = Mapping[str, Any]


class MetricsWriter:
    """Appends rows to one stream (`steps`, `syncs`, `evaluations`) of a model.

    A new writer of the same epoch and incarnation begins a chunk of its own: it never touches what an
    earlier life wrote. Not for two writers of one stream at the same time.
    """

    def __init__(
        self, store: Store, layout: ModelLayout, stream: str, *, epoch: int, incarnation: int
    ) -> None:
        self._store = store
        self._key = partial(layout.metrics_file, stream, epoch, incarnation)
        self._chunk = 0
        while store.exists(self._key(self._chunk)):
            self._chunk += 1
        self._lines: list[bytes] = []
        self._num_bytes = 0

    def append(self, row: Row) -> None:
        """Durable when it returns. Values that are not finite are stored as null."""
        self.row(row)(self._store)

    def row(self, row: Row) -> Callable[[Store], None]:
        """Take the row in; what is returned makes it durable, with all rows before it."""
        line = json.dumps({key: _finite(value) for key, value in row.items()}).encode()
        if self._lines and self._num_bytes + len(line) > _CHUNK_BYTES:
            self._chunk, self._lines, self._num_bytes = self._chunk + 1, [], 0
        self._lines.append(line)
        self._num_bytes += len(line) + 1
        key, data = self._key(self._chunk), b"\n".join(self._lines) + b"\n"
        return lambda store: store.put(key, data)


def read_metrics(store: Store, layout: ModelLayout, stream: str) -> list[dict[str, Any]]:
    """All rows of a stream in the order they were written.

    Of the rows with one `step` in the stream `steps`, the last counts: a step that was replayed after a
    crash is one step.
    """
    rows: list[dict[str, Any]] = []
    for name in store.children(layout.metrics(stream)):
        key = f"{layout.metrics(stream)}/{name}"
        rows.extend(_parse(store.get(key), source=store.uri(key)))
    if stream != "steps":
        return rows
    by_step = {row["step"]: row for row in rows if "step" in row}
    return [by_step[step] for step in sorted(by_step)]


def _parse(data: bytes, *, source: str) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in data.splitlines() if line]
    except ValueError as error:
        raise CorruptObjectError(f"{source}: not JSON lines: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise CorruptObjectError(f"{source}: not JSON lines of one object each")
    return rows


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
