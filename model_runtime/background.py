"""Work beside the training loop, on one thread, in the order it was given.

What is written there is a copy in host memory, so the loop goes on meanwhile. The first job that fails is the
last one tried (a checkpoint may only follow the version it names), and its error reaches the loop when it
next looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundWriter:
    """`submit` and `settle` are called from one thread, the loop's."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._failed = False

    def submit(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `job` after those before it; `then` gets its result, on the loop's thread."""
        self._pending.append((self._executor.submit(self._run, job), then))

    def _run(self, job: Callable[[], T]) -> T | None:
        if self._failed:
            return None  # its error, or the one it followed from, is on the way to the loop
        try:
            return job()
        except BaseException:
            self._failed = True
            raise

    def settle(self) -> None:
        """Tell of what is done. Raises what a job raised."""
        while self._pending and self._pending[0][0].done():
            future, then = self._pending.popleft()
            then(future.result())

    def finish(self, *, sign_of_life: Callable[[], None], every_s: float) -> None:
        """Wait for everything given so far, and settle it."""
        while self._pending:
            wait_for([self._pending[0][0]], timeout=every_s)
            sign_of_life()
            self.settle()

    def close(self) -> None:
        """Ends after the job at work; those behind it are given up."""
        self._executor.shutdown(wait=True, cancel_futures=True)
