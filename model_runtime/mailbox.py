"""The trainer's side of the two files it and its runtime speak through."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model_runtime.errors import CorruptObjectError
from model_runtime.protocol import CONTROL_FILE, STATUS_FILE, TrainerControl, TrainerStatus

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
LAST_WORDS_S = 30.0
"""Longest a trainer that ends waits until what it said last can be written."""


class StopRequested(Exception):
    """The runtime wants the trainer to end, or a signal came. Nothing is wrong."""


class TrainerMailbox:
    """Reads what the runtime wants; writes what the trainer does, at every change and twice a second.

    A thread writes the heartbeats, but only as long as the main thread said it may take: a trainer that
    hangs falls silent. What can't be written, as on a full disk, it writes as soon as it can be. Use as a
    context manager.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._status = TrainerStatus(pid=os.getpid(), state="loading", heartbeat_at=time.time())
        self._alive_until = time.monotonic()
        self._unwritten = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._heartbeats, name="heartbeat", daemon=True)

    @property
    def status(self) -> TrainerStatus:
        return self._status

    def control(self) -> TrainerControl:
        """The runtime's current orders; the defaults before it has written any."""
        path = self._folder / CONTROL_FILE
        try:
            return TrainerControl.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return TrainerControl()
        except ValidationError as error:
            raise CorruptObjectError(f"{path}: not a trainer's control: {error}") from None

    def report(self, **changes: Any) -> None:
        """Change fields of the status; written at once if anything is different."""
        with self._lock:
            status = self._status.model_copy(update=changes)
            if status != self._status:
                self._status = status
                self._write()

    def working(self, *, for_s: float = 60.0) -> None:
        """The main thread is alive, and its next sign of life may take this long."""
        self._alive_until = time.monotonic() + for_s

    def __enter__(self) -> TrainerMailbox:
        with self._lock:
            self._write()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
        until = time.monotonic() + LAST_WORDS_S
        while self._unwritten and time.monotonic() < until:
            time.sleep(HEARTBEAT_S)
            self._write()

    def _heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                if self._unwritten or time.monotonic() < self._alive_until:
                    self._write()

    def _write(self) -> None:
        try:
            self._replace_file()
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                logger.warning("the trainer's status can't be written, trying on: %s", error)
            self._unwritten = True

    def _replace_file(self) -> None:
        self._status = self._status.model_copy(update={"heartbeat_at": time.time()})
        path = self._folder / STATUS_FILE
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(self._status.model_dump_json(), encoding="utf-8")
        os.replace(temporary, path)
