"""What an event loop's thread does at a stretch, in CPU time: a busy machine makes it no longer."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOOK_EVERY_S = 0.01
WORTH_NOTING_S = 0.02


@dataclass(frozen=True, slots=True)
class Stretch:
    """One callback of the loop, or one step of a task. `where`: what its thread was at, when looked at."""

    cpu_s: float
    where: str


class LoopWatchdog:
    """Keeps the long stretches of one loop. A thread looks now and then what is going on."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._began_at = 0.0  # of the callback that runs; 0: none
        self._thread_id = 0
        self._seen = ""
        self._stop = threading.Event()

    def over(self, limit_s: float) -> list[Stretch]:
        """The stretches above the limit, the longest first."""
        return sorted((s for s in self.stretches if s.cpu_s > limit_s), key=lambda s: -s.cpu_s)

    def run(self, callback: Any, handle: asyncio.Handle) -> Any:
        self._thread_id, self._seen, self._began_at = threading.get_ident(), "", time.monotonic()
        began = time.thread_time()
        try:
            return callback(handle)
        finally:
            self._began_at = 0.0
            if (cpu_s := time.thread_time() - began) > WORTH_NOTING_S:
                self.stretches.append(Stretch(cpu_s, self._seen or repr(handle)[:300]))

    def look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            began_at = self._began_at
            if began_at and time.monotonic() - began_at > WORTH_NOTING_S:
                frame = sys._current_frames().get(self._thread_id)
                self._seen = "".join(traceback.format_stack(frame)[-8:])

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def watching(loop: asyncio.AbstractEventLoop) -> Iterator[LoopWatchdog]:
    """Times every callback that `loop` runs meanwhile. For asyncio's own loops: their handles can be had."""
    watchdog = LoopWatchdog()
    looking = threading.Thread(target=watchdog.look, name="loop watchdog", daemon=True)
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> Any:
        return watchdog.run(run, handle) if handle._loop is loop else run(handle)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    looking.start()
    try:
        yield watchdog
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        watchdog.stop()
        looking.join()
