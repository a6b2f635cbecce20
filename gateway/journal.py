"""SessionJournal: what open sessions are, on this machine's disk, so that they outlive the gateway's process.

Whoever changes a session says so with `write`, which never waits; whoever answers a client waits for
`durable` first. What came together in one pass of the event loop is one transaction. The loop commits it
itself when that takes less than to wake a thread; a thread of its own has what takes longer: large events,
sessions that are forgotten, a disk that fails, and everything for a while when the disk was slow.
The file is SQLite in WAL mode: a commit is safe from the death of the process, not from that of the machine,
whose sessions end with the run's epoch anyway. A settled session leaves the file, so its size follows the
open ones.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
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
from model_runtime.errors import ConfigError, CorruptObjectError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
# A write that fails is tried again for this long; then the gateway goes on without its journal.
WRITE_PATIENCE_S = 5.0
# A turn of a hundred tokens is two to three kilobytes: with SQLite's own 4 KiB each has a page.
PAGE_BYTES = 8192
# Free pages are given back to the file system in slices of so many, once they are more than half the file.
VACUUM_PAGES = 1000
# 1 MB between two checkpoints: each is a millisecond's work, and what it copies is still in the caches.
CHECKPOINT_PAGES = 125
# What the event loop writes itself at most; and after a commit that took so long, for how long nothing.
MAX_BYTES_ON_LOOP = 500_000
SLOW_COMMIT_S = 0.05
AFTER_SLOW_COMMIT_S = 5.0

_FORMAT = 1
_SCHEMA = f"""
CREATE TABLE events (id INTEGER PRIMARY KEY, owner TEXT NOT NULL, event BLOB NOT NULL);
CREATE INDEX events_of_owner ON events (owner);
CREATE TABLE about (run_id TEXT NOT NULL, epoch INTEGER NOT NULL);
PRAGMA user_version = {_FORMAT};
"""


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
_Row = tuple[str, bytes | None]
"""An owner and its next event; None: its earlier ones go."""
Owned = dict[str, list[Event]]
"""Owner → its events, oldest first; owners in the order of their first events."""


class SessionJournal:
    """The journal of one run and epoch. Order of use: `load`, `start`, then `write` and `durable`, `close`.

    Without a path nothing is kept, and everything counts as durable at once.
    """

    def __init__(self, path: Path | None = None, *, run_id: str = "", epoch: int = 0) -> None:
        self.path = path
        self._about = (run_id, epoch)
        self._connection: sqlite3.Connection | None = None
        self._pending: list[Sequence[Entry]] = []
        self._goes_on = False  # soon, or when the thread is done with what it has
        self._has_free_pages = False  # in the file, more than it should
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
        """Open the file, new or left by an earlier process, and read it. A file that can't be read is set
        aside and an empty one begun.

        Raises ConfigError when another process has it open."""
        if self.path is None:
            return {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = self._open()
            return self._read(self._connection)
        except (sqlite3.Error, msgspec.MsgspecError, CorruptObjectError) as error:
            if _is_locked(error):
                raise ConfigError(
                    f"{self.path}: another process is the gateway of this run's epoch; stop it first"
                ) from error
            self.set_aside(f"{type(error).__name__}: {error}")
            return {}

    def set_aside(self, reason: str) -> None:
        """Keep the file under another name for whoever wants to look into it, and begin an empty one."""
        assert self.path is not None
        self._disconnect()
        aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
        logger.error(
            "the session journal %s can't be used, so the sessions in it are lost and the gateway starts "
            "without them; it is kept as %s: %s",
            self.path,
            aside.name,
            reason,
        )
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
        self._connection = self._open()

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
        """Write what is left and let go of the file. What is in it is for the next process."""
        thread = self._thread
        if thread is None:
            await asyncio.to_thread(self._disconnect)
            return
        self._off_loop_until = float("inf")
        self._go_on()
        self._queue.put(None)
        await asyncio.to_thread(thread.join)
        self._let_all_go()

    # -------------------------------------------------------------- the file

    def _open(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.touch(mode=0o600)  # it holds keys and conversations
        connection = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            # One process alone: no shared memory file, and a second gateway is refused.
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            for pragma in ("locking_mode = EXCLUSIVE", "auto_vacuum = INCREMENTAL", "journal_mode = WAL"):
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.execute("PRAGMA synchronous = OFF")  # no commit waits for the disk
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}").fetchall()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("COMMIT")
            if connection.execute("PRAGMA user_version").fetchone() == (0,):
                connection.executescript(f"BEGIN; {_SCHEMA} COMMIT")
                connection.execute("INSERT INTO about VALUES (?, ?)", self._about)
        except BaseException:
            connection.close()
            raise
        return connection

    def _read(self, connection: sqlite3.Connection) -> Owned:
        [(form,)] = connection.execute("PRAGMA user_version")
        if form != _FORMAT:
            raise CorruptObjectError(f"its format is {form}; this gateway writes {_FORMAT}")
        if (about := connection.execute("SELECT run_id, epoch FROM about").fetchall()) != [self._about]:
            raise CorruptObjectError(f"it belongs to {about}, not to {self._about}")
        [(verdict,)] = connection.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise CorruptObjectError(verdict)
        owned: Owned = {}
        for owner, data in connection.execute("SELECT owner, event FROM events ORDER BY id"):
            owned.setdefault(owner, []).append(decode_event(data))
        return owned

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -------------------------------------------------------------- the thread

    def _write_forever(self) -> None:
        """One transaction after another, each of all that is waiting."""
        try:
            while (batch := self._queue.get()) is not None:
                rows = _rows(batch)
                self._commit_persistently(rows)
                self._tell(self._note_durable, len(batch))
                if self._has_free_pages or _sets_free(rows):
                    self._has_free_pages = self._give_space_back()
                self._tell(self._go_on)
        except Exception as error:  # whatever it was: calls must not wait for a thread that is gone
            self._disconnect()
            self._remove()
            self._tell(self._give_up, error)
        else:
            self._disconnect()

    def _commit_persistently(self, rows: Sequence[_Row]) -> None:
        until, pause_s = time.monotonic() + WRITE_PATIENCE_S, 0.05
        while True:
            try:
                return self._commit(rows)
            except sqlite3.Error as error:
                if time.monotonic() > until:
                    raise
                logger.warning("the session journal can't be written, trying again: %s", error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _commit(self, rows: Sequence[_Row]) -> None:
        connection = self._connection
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        try:
            for owner, event in rows:
                if event is None:
                    connection.execute("DELETE FROM events WHERE owner = ?", (owner,))
                else:
                    connection.execute("INSERT INTO events (owner, event) VALUES (?, ?)", (owner, event))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _give_space_back(self) -> bool:
        """Keep the file near the size of what is in it. True: there is more to give. A failure is no reason
        to lose the journal."""
        assert self._connection is not None
        with suppress(sqlite3.OperationalError):
            [(free,)] = self._connection.execute("PRAGMA freelist_count")
            [(pages,)] = self._connection.execute("PRAGMA page_count")
            if free < VACUUM_PAGES or 2 * free <= pages:
                return False
            # Of `execute` this pragma would see one step, which is one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        return True

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
        if began < self._off_loop_until or self._has_free_pages:
            return False
        try:
            rows = _rows(batch)
            if _sets_free(rows) or sum(len(event or b"") for _, event in rows) > MAX_BYTES_ON_LOOP:
                return False
            self._commit(rows)
        except Exception as error:
            logger.debug("left to the journal's thread: %s", error)
            return False
        if time.monotonic() - began > SLOW_COMMIT_S:
            self._off_loop_until = began + AFTER_SLOW_COMMIT_S
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

    def _remove(self) -> None:
        for suffix in ("", "-wal"):
            try:
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            except OSError as error:
                logger.error("%s%s can't be removed; do so before a restart: %s", self.path, suffix, error)


def _rows(batch: Iterable[Sequence[Entry]]) -> list[_Row]:
    return [
        (entry.owner, encode_event(entry.event) if isinstance(entry, Append) else None)
        for entries in batch
        for entry in entries
    ]


def _sets_free(rows: Iterable[_Row]) -> bool:
    """Some of the file."""
    return any(event is None for _, event in rows)


def remove_older_journals(path: Path, epoch: int) -> None:
    """Files of older epochs beside this one, named `<epoch>.sqlite…`: their sessions were given up."""
    for file in path.parent.glob("*.sqlite*"):
        of_epoch = file.name.split(".")[0]
        if of_epoch.isdigit() and int(of_epoch) < epoch:
            file.unlink(missing_ok=True)


def _is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
