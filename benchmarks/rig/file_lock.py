"""Series of runs that share a machine take turns."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def holding(lock: Path | None) -> Iterator[None]:
    """Hold this file's lock (flock(2)), waiting for it as long as it takes; nothing where there is none."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
