"""A folder of this machine as the store."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from model_runtime.config import StoreConfig
from model_runtime.errors import (
    ConfigError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnsafeError,
)
from model_runtime.store import HIDDEN, SINGLE_WRITER_HINT, Store, check_key, visible

LEFT_AFTER_S = 86_400.0
"""No writer is at one object for so long, not even where other machines don't see its lock."""


class LocalStore(Store):
    """A folder. Writes go to a hidden file beside the target first and reach the disk before they show."""

    def __init__(self, config: StoreConfig) -> None:
        self._root = _local_root(config.url)
        super().__init__(self._root.as_uri(), single_writer=config.single_writer)

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _translated("put", self.uri(key)):
            with _written_beside(path, data) as temp:
                os.replace(temp, path)
            _sync_folder(path.parent)

    def _create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _translated("create", self.uri(key)):
            with _written_beside(path, data) as temp:
                created = self._link(temp, path)
            # Also when another writer won: its link must be on disk before we build on it.
            _sync_folder(path.parent)
            return created

    def _link(self, temp: Path, path: Path) -> bool:
        """Give the finished file its name: unlike a rename, a link never replaces one that is there."""
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise StoreUnsafeError(
                f"create {path.as_uri()}: this file system has no hard links, so it can't be "
                f"guaranteed that an object is created only once. {SINGLE_WRITER_HINT}"
            ) from error
        return True

    def get(self, key: str) -> bytes:
        with _translated("get", self.uri(key)):
            return self._path(key).read_bytes()

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list(self, prefix: str) -> list[str]:
        folder = self._folder(prefix)
        found = []
        with _translated("list", self.uri(prefix)):
            for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
                found += [
                    Path(parent, name).relative_to(self._root).as_posix() for name in names if visible(name)
                ]
        return sorted(found)

    def sizes(self, prefix: str) -> dict[str, int]:
        found = {}
        for key in self.list(prefix):
            with suppress(FileNotFoundError):  # deleted meanwhile
                found[key] = (self._root / key).stat().st_size
        return found

    def children(self, prefix: str) -> list[str]:
        with _translated("list", self.uri(prefix)):
            try:
                entries = list(os.scandir(self._folder(prefix)))
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(
                e.name for e in entries if visible(e.name) and (e.is_file() or _holds_object(Path(e.path)))
            )

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated("delete", self.uri(key)):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder(path.parent)

    def remove_leftovers(self, prefix: str) -> int:
        folder = self._folder(prefix)
        with _translated("clean", self.uri(prefix)):
            walk = os.walk(folder, onerror=_raise_unless_gone)
            hidden = [Path(parent, name) for parent, _, names in walk for name in names if not visible(name)]
            if not hidden:
                return 0
            # By the clock of who keeps the folder, which may be another machine.
            with _written_beside(folder / "now", b"") as now:
                oldest = now.stat().st_mtime - LEFT_AFTER_S
        return sum(_remove_if_left(path, older_than=oldest) for path in hidden)

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    def _folder(self, prefix: str) -> Path:
        prefix = prefix.strip("/")
        return self._path(prefix) if prefix else self._root


def _local_root(url: str) -> Path:
    if "://" not in url:
        return Path(url).expanduser().resolve()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"store.url: {url!r} names a host; write file:///absolute/path or a plain path")
    return Path(unquote(parts.path)).resolve()


class _translated:
    """Turns the operating system's errors into the store's."""

    def __init__(self, operation: str, uri: str) -> None:
        self._what = f"{operation} {uri}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, StoreError):
            return
        reason = error.strerror or str(error)
        if isinstance(error, PermissionError):
            raise StoreAccessError(f"{self._what}: {reason}; is the folder writable for you?") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(
                f"{self._what}: {reason}; free some space there, the write is tried again meanwhile"
            ) from error
        missing = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
        if self._what.startswith("get ") and isinstance(error, missing):
            raise ObjectNotFoundError(f"{self._what}: no such object") from error
        raise StoreError(f"{self._what}: {reason}") from error


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """The data, on the disk, under a hidden name in the same folder (a rename or link across file systems
    would be a copy). It is locked until it has its name: so a writer that lives is told from a killed one."""
    _make_folder(path.parent)
    temp = path.parent / f"{HIDDEN}{uuid.uuid4().hex}"
    try:
        with open(temp, "xb") as file:
            with suppress(OSError):  # some file systems know no locks
                _lock(file)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            yield temp
    finally:
        temp.unlink(missing_ok=True)


def _remove_if_left(path: Path, *, older_than: float) -> int:
    """Remove a hidden file unless it was written to since then, or its writer lives; its bytes. One that
    can't be opened or locked stays."""
    with suppress(OSError), open(path, "r+b") as file:
        found = os.fstat(file.fileno())
        if found.st_mtime < older_than:
            _lock(file)
            path.unlink()
            return found.st_size
    return 0


def _lock(file: BinaryIO) -> None:
    """Raises OSError when another process, on any machine, has locked it, or it can't be locked."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _make_folder(folder: Path) -> None:
    """mkdir -p that also makes the new names durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _holds_object(folder: Path) -> bool:
    walk = os.walk(folder, onerror=_raise_unless_gone)
    return any(visible(name) for _, _, names in walk for name in names)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
