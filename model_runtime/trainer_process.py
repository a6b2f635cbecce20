"""The trainer process of one model, supervised: started, spoken to, watched, restarted.

Runtime and trainer speak through two small files in a mailbox folder, each replaced atomically by its one
writer. A trainer goes on from its last checkpoint by itself, so restarting it is all there is to do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from model_runtime.errors import ProcessError, StoreOutageError, SupersededError, TrainerError
from model_runtime.process_logs import make_room
from model_runtime.processes import ChildProcess
from model_runtime.protocol import (
    CONTROL_FILE,
    STATUS_FILE,
    STORE_OUTAGE_EXIT_CODE,
    TrainerControl,
    TrainerSpec,
    TrainerStatus,
)
from model_runtime.versions import Changed

logger = logging.getLogger(__name__)

TRAINER_ARGV = (sys.executable, "-m", "model_runtime.trainer")
SUPERSEDED_EXIT_CODE = 3
ENDED_WELL = frozenset({"drained", "finished", "no_signal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """Limits of supervision."""

    max_restarts: int = 5  # in a row
    forgiven_after_s: float = 600.0  # a trainer that lived this long starts a new row
    backoff_s: float = 1.0  # before the first restart; doubles up to max_backoff_s
    max_backoff_s: float = 30.0
    load_s: float = 300.0  # from its start to its first heartbeat
    hang_s: float = 45.0  # without a heartbeat: hung. A trainer that works beats, however long a step takes
    poll_s: float = 0.05
    grace_s: float = 8.0  # between SIGTERM and SIGKILL


class TrainerProcess:
    """Keeps one trainer running until it has ended well.

    `on_status` is called whenever what the trainer says has changed, heartbeats aside.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        logs: Path,
        env: Mapping[str, str] | None = None,
        on_status: Callable[[TrainerStatus], None] = lambda status: None,
        limits: TrainerLimits = TrainerLimits(),
    ) -> None:
        self.model_id = spec.model_id
        self.status: TrainerStatus | None = None
        self.attempt = 0
        self.pid: int | None = None
        self._child: ChildProcess | None = None
        self._spec = spec
        self._mailbox = Path(spec.mailbox)
        self._logs = logs
        self._env = env
        self._on_status = on_status
        self._limits = limits
        self._control: TrainerControl | None = None
        self._written: TrainerControl | None = None  # what the trainer reads
        self._changed = Changed()

    @property
    def ended_well(self) -> bool:
        """It has said that it trains no more, and why (`status.state`)."""
        return self.status is not None and self.status.state in ENDED_WELL

    def tell(self, control: TrainerControl) -> None:
        """Replace what the trainer reads between its steps. What can't be written, as on a full disk, is
        written as soon as it can be."""
        is_news = control != self._control
        self._control = control
        if is_news and (error := self._write_control()):
            logger.warning("%s: the trainer can't be told anything, trying on: %s", self.model_id, error)

    def _write_control(self) -> OSError | None:
        """What the write failed of, if it did."""
        if self._control is not None and self._control != self._written:
            try:
                _replace(self._mailbox / CONTROL_FILE, self._control.model_dump_json())
            except OSError as error:
                return error
            self._written = self._control
        return None

    async def wait_loaded(self) -> None:
        """Wait until the trainer has loaded its model. `run` must be under way."""
        while self.status is None or self.status.state in ("loading", "failed"):  # the latter is restarted
            await self._changed.wait()

    async def run(self) -> None:
        """Start the trainer, and again whenever it dies or hangs; return when it has ended well.

        Raises TrainerError with the last reason and the end of the log when the restarts are used up,
        SupersededError when the trainer saw a newer epoch, StoreOutageError when the store was away for too
        long. When cancelled it stops the trainer first.
        """
        failures = 0
        while True:
            began = time.monotonic()
            log_path = self._next_log()
            trouble = await self._attempt(log_path)
            if trouble is None:
                return
            failures = 1 if time.monotonic() - began > self._limits.forgiven_after_s else failures + 1
            if failures > self._limits.max_restarts:
                raise TrainerError(f"{self.model_id}: {trouble.reason}\n{trouble.log_tail}")
            logger.warning(
                "%s: %s; restart %d of %d (log: %s)",
                self.model_id,
                trouble.reason,
                failures,
                self._limits.max_restarts,
                log_path.name,
            )
            await asyncio.sleep(min(self._limits.backoff_s * 2 ** (failures - 1), self._limits.max_backoff_s))

    async def stop(self) -> None:
        """End its process and wait for that: `run` does, unless it is cancelled a second time meanwhile."""
        if self._child is not None and self._child.returncode is None:
            await self._child.stop()

    async def _attempt(self, log_path: Path) -> _Trouble | None:
        """One life of the trainer; None when it ended well."""
        try:
            child = await self._begin(log_path)
        except (ProcessError, OSError) as error:  # of a disk that is full, say
            return _Trouble(f"the trainer could not be started: {error}", "")
        self.pid, self._child = child.pid, child
        try:
            reason = await self._follow(child, _StatusFile(self._mailbox / STATUS_FILE))
        finally:
            await child.stop()
        return None if reason is None else _Trouble(reason, child.log_tail())

    async def _begin(self, log_path: Path) -> ChildProcess:
        spec_path, status_path = self._mailbox / "trainer_spec.json", self._mailbox / STATUS_FILE
        _replace(spec_path, self._spec.model_dump_json(indent=1))
        status_path.unlink(missing_ok=True)  # an earlier life's last words are not this one's
        return await ChildProcess.start(
            [*TRAINER_ARGV, str(spec_path)], log_path=log_path, env=self._env, grace_s=self._limits.grace_s
        )

    async def _follow(self, child: ChildProcess, file: _StatusFile) -> str | None:
        """Read its status until it ends; why it ended badly, or None."""
        silence = _Silence()
        last: TrainerStatus | None = None
        while True:
            self._write_control()
            ended = child.returncode is not None  # asked first: what it wrote before it ended is read below
            status = file.read()
            if status is not None:
                silence.heard()
                if last is None or not _says_the_same(last, status):
                    self._take(status)
                last = status
            if ended:
                return self._why_it_ended(child, last)
            silence.pass_time()
            limit_s = self._limits.hang_s if last else self._limits.load_s
            if silence.seconds > limit_s:
                return f"the trainer (pid {child.pid}) has given no sign of life for {limit_s:g} s"
            await asyncio.sleep(self._limits.poll_s)

    def _take(self, status: TrainerStatus) -> None:
        self.status = status
        self._changed.notify()
        self._on_status(status)

    def _why_it_ended(self, child: ChildProcess, last: TrainerStatus | None) -> str | None:
        state = last.state if last else None
        if child.returncode == SUPERSEDED_EXIT_CODE:
            raise SupersededError(last.reason if last else "the trainer saw a newer epoch")
        if child.returncode == STORE_OUTAGE_EXIT_CODE:
            raise StoreOutageError(last.reason if last else "the store was away for too long")
        told_to_stop = self._control is not None and self._control.desired == "stop"
        if child.returncode == 0 and (state in ENDED_WELL or told_to_stop):
            return None
        if last is not None and state == "failed":
            return f"the trainer failed: {last.reason}"
        return f"the trainer ended with exit code {child.returncode} while it was {state or 'starting'}"

    def _next_log(self) -> Path:
        """A log of its own for every life: none is ever overwritten, the oldest go."""
        make_room(self._logs, f"{self.model_id}-trainer", r"e\d+-\d+-\d+")
        self.attempt += 1
        life = f"e{self._spec.epoch}-{self._spec.incarnation}"
        path = self._logs / f"{self.model_id}-trainer-{life}-{self.attempt}.log"
        while path.exists():
            self.attempt += 1
            path = self._logs / f"{self.model_id}-trainer-{life}-{self.attempt}.log"
        return path


@dataclass(frozen=True, slots=True)
class _Trouble:
    reason: str
    log_tail: str


class _StatusFile:
    """The trainer's status, read again only when the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def read(self) -> TrainerStatus | None:
        """What has been written since the last call; None when nothing has."""
        try:
            stat = self._path.stat()
            if (stat.st_ino, stat.st_mtime_ns) == self._seen:
                return None
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        self._seen = (stat.st_ino, stat.st_mtime_ns)
        try:
            return TrainerStatus.model_validate_json(text)
        except ValidationError as error:
            raise TrainerError(f"{self._path}: not a trainer's status: {error}") from None


class _Silence:
    """How long nothing was heard. Time in which this process itself stood still does not count."""

    _LONGEST_STEP_S = 1.0

    def __init__(self) -> None:
        self.seconds = 0.0
        self._at = time.monotonic()

    def heard(self) -> None:
        self.seconds = 0.0

    def pass_time(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._at, self._LONGEST_STEP_S)
        self._at = now


def _says_the_same(one: TrainerStatus, other: TrainerStatus) -> bool:
    return one.model_copy(update={"heartbeat_at": other.heartbeat_at}) == other


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
