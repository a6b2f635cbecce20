"""JournalFiles: rows that are appended, belong to owners, and go with them. A process may die at
any moment.

A folder of numbered files, each a head and then *frames*: a length, a checksum, and rows that were written
together. The newest file is appended to. Once most of what the files hold belongs to nobody, the oldest goes,
after what is still wanted of it was appended again under its old numbers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from model_runtime.errors import ConfigError, CorruptObjectError

LOCK_TIMEOUT_S = 5.0
# A file is full then, and what nobody wants is kept until it is more than two of them.
FILE_BYTES = 4_000_000

_FORMAT = 2
_FRAME = struct.Struct("<III")  # length of the rows, the same inverted, their CRC-32
_ROW_BYTES = 10  # of a row beside its owner and its data, about

Row = tuple[str, bytes | None]
"""An owner and what it wants kept; None: nothing of what came before."""
_Numbered = tuple[int, str, bytes | None]

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_Numbered])


@dataclass(slots=True)
class _File:
    path: Path
    num_bytes: int


@dataclass(slots=True)
class _Wanted:
    """What is kept of an owner."""

    first: int  # number of its oldest row
    num_bytes: int = 0


class JournalFiles:
    """The files of one run and epoch, in a folder that is locked while they are open."""

    def __init__(self, folder: Path, *, run_id: str, epoch: int) -> None:
        self.folder = folder
        self._head = _frame(_ENCODER.encode((_FORMAT, run_id, epoch)))
        self._lock = self._newest = -1  # descriptors of the folder and the last file
        self._files: list[_File] = []  # the oldest first
        self._wanted: dict[str, _Wanted] = {}
        self._num_rows = 0
        self._num_bytes = self._num_wanted_bytes = 0  # of all files, of what is wanted in them

    def open(self) -> dict[str, list[bytes]]:
        """Take hold of the folder, new or left by an earlier process: owner → what it wants kept, in order.

        Raises ConfigError when another process has it, CorruptObjectError for what is no journal of this run
        and epoch, or damaged. A last frame that is not whole was never told to anybody, and is removed."""
        self._lock = _locked(self.folder)
        found: dict[int, _Numbered] = {}
        paths = sorted(self.folder.iterdir())
        for path in paths:
            data = path.read_bytes()
            end = 0
            for rows, place in _frames(data, self._head, source=path):
                found.update((row[0], row) for row in rows)
                end = place
            if end < len(data):
                if path != paths[-1]:
                    raise CorruptObjectError(f"{path} breaks off after {end} bytes")
                os.truncate(path, end)
            self._add_file(path, end)
        self._begin_file()
        in_order = [found[number] for number in sorted(found)]
        for row in in_order:
            self._note(row)
        owned: dict[str, list[bytes]] = {}
        for row in in_order:
            _, owner, kept = row
            if kept is not None and self._is_wanted(row):
                owned.setdefault(owner, []).append(kept)
        return owned

    def append(self, rows: Sequence[Row]) -> None:
        """All of them, or with an OSError none."""
        first = self._num_rows + 1
        numbered = [(number, owner, kept) for number, (owner, kept) in enumerate(rows, first)]
        self._write(numbered)
        for row in numbered:
            self._note(row)

    @property
    def is_untidy(self) -> bool:
        num_unwanted = self._num_bytes - self._num_wanted_bytes
        too_much = num_unwanted > self._num_wanted_bytes + 2 * FILE_BYTES
        return self._files[-1].num_bytes >= FILE_BYTES or (too_much and len(self._files) > 1)

    def tidy(self) -> None:
        """A step towards tidiness, of milliseconds. Raises OSError."""
        if self._files[-1].num_bytes >= FILE_BYTES:
            self._begin_file()
            return
        oldest = self._files[0]
        frames = _frames(oldest.path.read_bytes(), self._head, source=oldest.path)
        wanted = [row for rows, _ in frames for row in rows if row[2] is not None and self._is_wanted(row)]
        if wanted:
            self._write(wanted)
        oldest.path.unlink()
        self._num_bytes -= oldest.num_bytes
        del self._files[0]

    def close(self) -> None:
        for descriptor in (self._newest, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._newest = self._lock = -1

    def remove(self) -> None:
        """All of it. Raises OSError."""
        shutil.rmtree(self.folder)

    # -------------------------------------------------------------- inside

    def _begin_file(self) -> None:
        number = int(self._files[-1].path.name) + 1 if self._files else 1
        path = self.folder / f"{number:08d}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_at(descriptor, self._head, 0)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)  # the one that is written on must stay the last
            raise
        if self._newest >= 0:
            os.close(self._newest)
        self._newest = descriptor
        self._add_file(path, len(self._head))

    def _add_file(self, path: Path, num_bytes: int) -> None:
        self._files.append(_File(path, num_bytes))
        self._num_bytes += num_bytes

    def _write(self, rows: Sequence[_Numbered]) -> None:
        data, newest = _frame(_ENCODER.encode(rows)), self._files[-1]
        try:
            _write_at(self._newest, data, newest.num_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._newest, newest.num_bytes)
            raise
        newest.num_bytes += len(data)
        self._num_bytes += len(data)

    def _note(self, row: _Numbered) -> None:
        number, owner, kept = row
        self._num_rows = number
        wanted = self._wanted.get(owner)
        if kept is None:
            if wanted is not None:
                del self._wanted[owner]
                self._num_wanted_bytes -= wanted.num_bytes
            return
        if wanted is None:
            wanted = self._wanted[owner] = _Wanted(number)
        num_bytes = len(owner) + len(kept) + _ROW_BYTES
        wanted.num_bytes += num_bytes
        self._num_wanted_bytes += num_bytes

    def _is_wanted(self, row: _Numbered) -> bool:
        wanted = self._wanted.get(row[1])
        return wanted is not None and row[0] >= wanted.first


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock. Raises ConfigError when another process keeps it."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise ConfigError(
                    f"{folder}: another process is the gateway of this run's epoch; stop it first"
                ) from None
        time.sleep(0.05)


def _frame(data: bytes) -> bytes:
    return _FRAME.pack(len(data), len(data) ^ 0xFFFFFFFF, zlib.crc32(data)) + data


def _frames(data: bytes, head: bytes, *, source: Path) -> Iterator[tuple[list[_Numbered], int]]:
    """The rows of each whole frame, and where it ends; the head counts as one. Raises CorruptObjectError."""
    if not data.startswith(head):
        if head.startswith(data):
            return  # its writer died over it
        raise CorruptObjectError(f"{source} is no journal of this run and epoch in this gateway's format")
    start = len(head)
    yield [], start
    while len(data) - start >= _FRAME.size:
        length, inverted, checksum = _FRAME.unpack_from(data, start)
        rows = data[start + _FRAME.size : start + _FRAME.size + length]
        is_whole = len(rows) == length
        if length ^ inverted != 0xFFFFFFFF or (is_whole and zlib.crc32(rows) != checksum):
            raise CorruptObjectError(f"{source} is damaged after {start} bytes")
        if not is_whole:
            return
        start += _FRAME.size + length
        yield _DECODER.decode(rows), start


def _write_at(descriptor: int, data: bytes, place: int) -> None:
    num_written = os.pwrite(descriptor, data, place)
    while num_written < len(data):
        num_written += os.pwrite(descriptor, data[num_written:], place + num_written)
