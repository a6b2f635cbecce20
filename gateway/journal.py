"""SessionJournal: what open sessions are, on this machine's disk, so that they outlive the gateway's process.

Whoever changes a session says so with `write`, which never waits; whoever answers a client waits for
`durable` first. What came together in one pass of the event loop is written together. The loop writes it
itself when that takes less than to wake a thread; a thread of its own has what takes longer: large events,
files to be tidied up, a disk that fails, and everything for a while when the disk was slow.
A write is safe from the death of the process, not from that of the machine, whose sessions end with the run's
epoch anyway. A settled session leaves the files, so their size follows the open ones.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec

from gateway.journal_events import Event, decode_event, encode_event
from gateway.journal_files import JournalFiles, Row
from model_runtime.errors import CorruptObjectError

logger = logging.getLogger(__name__)

# A write that fails is tried again for this long; then the gateway goes on without its journal.
WRITE_PATIENCE_S = 5.0
# What the event loop writes itself at most; and after a write that took so long, for how long nothing.
MAX_BYTES_ON_LOOP = 500_000
SLOW_WRITE_S = 0.05
AFTER_SLOW_WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class Append:
    """One more event of an owner."""

    owner: str
    event: Event


@dataclass(frozen=True, slots=True)
class Forget:
    """All earlier events of an owner go."""

    owner: str


Entry = Append | Forget
Owned = dict[str, list[Event]]
"""Owner → its events, oldest first; owners in the order of their first events."""


class SessionJournal:
    """The journal of one run and epoch. Order of use: `load`, `start`, then `write` and `durable`, `close`.

    Without a path nothing is kept, and everything counts as durable at once.
    """

    def __init__(self, path: Path | None = None, *, run_id: str = "", epoch: int = 0) -> None:
        self.path = path
        self._about = (run_id, epoch)
        self._files: JournalFiles | None = None
        self._pending: list[Sequence[Entry]] = []
        self._goes_on = False  # soon, or when the thread is done with what it has
        self._off_loop_until = float("-inf")  # the disk was slow
        self._queue: SimpleQueue[list[Sequence[Entry]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._num_written = 0
        self._num_durable = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._held: list[Entry] | None = None

    @property
    def is_kept(self) -> bool:
        """False without a path, and after the disk refused it for too long."""
        return self._thread is not None

    # -------------------------------------------------------------- before the loop runs

    def load(self) -> Owned:
        """Open the files, new or left by an earlier process, and read them. Those that can't be read are set
        aside and new ones begun.

        Raises ConfigError when another process has them open."""
        if self.path is None:
            return {}
        self._files = self._new_files(self.path)
        try:
            owned = self._files.open()
            return {owner: [decode_event(data) for data in kept] for owner, kept in owned.items()}
        except (msgspec.MsgspecError, CorruptObjectError) as error:
            self.set_aside(f"{type(error).__name__}: {error}")
            return {}

    def set_aside(self, reason: str) -> None:
        """Keep the files under another name for whoever wants to look into them, and begin without."""
        assert self.path is not None
        self._let_go_of_files()
        aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
        logger.error(
            "the session journal %s can't be used, so the sessions in it are lost and the gateway starts "
            "without them; it is kept as %s: %s",
            self.path,
            aside.name,
            reason,
        )
        self.path.rename(aside)
        self._files = self._new_files(self.path)
        self._files.open()

    def _new_files(self, path: Path) -> JournalFiles:
        run_id, epoch = self._about
        return JournalFiles(path, run_id=run_id, epoch=epoch)

    def _let_go_of_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def start(self) -> None:
        """Begin to write. Belongs to the running event loop from now on."""
        if self.path is None:
            return
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write_forever, name="session journal", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- while it runs

    def write(self, *entries: Entry) -> None:
        """Note what just happened; all of these entries or none outlive the process. Never waits."""
        if self._held is not None:
            self._held.extend(entries)
        elif self._thread is not None:
            self._num_written += 1
            self._pending.append(entries)
            if not self._goes_on:
                self._goes_on = True
                self._loop.call_soon(self._go_on)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written in this block, which waits for nothing, is one write."""
        self._held = held = []
        try:
            yield
        finally:
            self._held = None
            self.write(*held)

    async def durable(self) -> None:
        """Wait until all that was written so far outlives this process."""
        if self._thread is None or self._num_durable >= self._num_written:
            return
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._num_written, done))
        await done

    async def close(self) -> None:
        """Write what is left and let go of the files. What is in them is for the next process."""
        thread = self._thread
        if thread is None:
            await asyncio.to_thread(self._let_go_of_files)
            return
        self._off_loop_until = float("inf")
        self._go_on()
        self._queue.put(None)
        await asyncio.to_thread(thread.join)
        self._let_all_go()

    # -------------------------------------------------------------- the thread

    def _write_forever(self) -> None:
        """One write after another, each of all that is waiting, and a step of tidying up after it."""
        files = self._files
        assert files is not None
        try:
            while (batch := self._queue.get()) is not None:
                self._append_persistently(files, _rows(batch))
                self._tell(self._note_durable, len(batch))
                if files.is_untidy:
                    with suppress(OSError):  # no reason to lose the journal
                        files.tidy()
                self._tell(self._go_on)
        except Exception as error:  # whatever it was: calls must not wait for a thread that is gone
            self._remove(files)
            self._tell(self._give_up, error)
        else:
            self._let_go_of_files()

    def _append_persistently(self, files: JournalFiles, rows: Sequence[Row]) -> None:
        until, pause_s = time.monotonic() + WRITE_PATIENCE_S, 0.05
        while True:
            try:
                return files.append(rows)
            except OSError as error:
                if time.monotonic() > until:
                    raise
                logger.warning("the session journal can't be written, trying again: %s", error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
            self._loop.call_soon_threadsafe(what, *arguments)

    # -------------------------------------------------------------- on the loop, while the thread rests

    def _go_on(self) -> None:
        """Write what has come together, or have the thread write it; then nothing more until it has."""
        batch, self._pending = self._pending, []
        self._goes_on = bool(batch) and not self._is_written_here(batch)
        if self._goes_on:
            self._queue.put(batch)
        else:
            self._note_durable(len(batch))

    def _is_written_here(self, batch: Sequence[Sequence[Entry]]) -> bool:
        """False: it is for the thread, which meets an error again and has the time for it."""
        began = time.monotonic()
        assert self._files is not None
        if began < self._off_loop_until or self._files.is_untidy:
            return False
        try:
            rows = _rows(batch)
            if sum(len(event or b"") for _, event in rows) > MAX_BYTES_ON_LOOP:
                return False
            self._files.append(rows)
        except Exception as error:
            logger.debug("left to the journal's thread: %s", error)
            return False
        if time.monotonic() - began > SLOW_WRITE_S:
            self._off_loop_until = began + AFTER_SLOW_WRITE_S
        return True

    def _note_durable(self, count: int) -> None:
        self._num_durable += count
        while self._waiting and self._waiting[0][0] <= self._num_durable:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_result(None)

    def _give_up(self, error: Exception) -> None:
        """Go on without: a journal with a gap would bring sessions back that never were."""
        logger.error(
            "the session journal %s is given up: open sessions do not outlive this process any more",
            self.path,
            exc_info=error,
        )
        self._let_all_go()

    def _let_all_go(self) -> None:
        self._thread = None
        self._pending.clear()
        self._note_durable(self._num_written - self._num_durable)

    def _remove(self, files: JournalFiles) -> None:
        try:
            files.remove()
        except OSError as error:
            logger.error("%s can't be removed; do so before a restart: %s", self.path, error)
        self._let_go_of_files()


def _rows(batch: Iterable[Sequence[Entry]]) -> list[Row]:
    return [
        (entry.owner, encode_event(entry.event) if isinstance(entry, Append) else None)
        for entries in batch
        for entry in entries
    ]


def remove_older_journals(path: Path, epoch: int) -> None:
    """Those of older epochs beside this one, named `<epoch>.journal…`: their sessions were given up."""
    for folder in path.parent.glob("*.journal*"):
        of_epoch = folder.name.split(".")[0]
        if of_epoch.isdigit() and int(of_epoch) < epoch:
            shutil.rmtree(folder, ignore_errors=True)
