"""The object store: a thin layer over a local folder or S3 with five guarantees.

- An object appears whole or not at all, also when the writer is killed.
- `put_if_absent` has exactly one winner, whoever else tries at the same time.
- Every read is fresh: nothing is cached, so another process's write is seen at once.
- Every wait on the network is bounded, per attempt (connect and read timeouts) and per operation.
- Errors name the operation and the URL, and never a credential.

Everything is synchronous and thread-safe; async code calls it through `asyncio.to_thread`.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod

from model_runtime.config import StoreConfig
from model_runtime.errors import ObjectExistsError, StoreError, StoreUnsafeError

# Objects being written and probes; `list` and `children` hide them.
HIDDEN = ".tmp-"

SINGLE_WRITER_HINT = (
    "Use another store, or set store.single_writer: true if no other run will ever write to this one"
)


def open_store(config: StoreConfig) -> Store:
    """The store of this config. Touches neither disk nor network; `check` does."""
    # Imported on use: s3fs takes a second to load and a local run never needs it.
    if config.url.startswith("s3://"):
        from model_runtime.s3_store import S3Store

        return S3Store(config)
    from model_runtime.local_store import LocalStore

    return LocalStore(config)


class Store(ABC):
    """Keys are relative paths with `/` between parts, below the store's root."""

    def __init__(self, url: str, *, single_writer: bool) -> None:
        self.url = url
        self.single_writer = single_writer

    def uri(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def at_once(self) -> Store:
        """This store without patience, for those who have something else to do while it is away."""
        return self

    def give_up(self) -> None:  # noqa: B027 - most stores have no patience to lose
        """Nobody waits for this store any longer than one operation takes: this process is to end."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write the object; replaces one that is there, atomically."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create the object. True: created. False: an object with the same bytes was there already.

        Raises ObjectExistsError when other bytes are there. An answer lost on the network can turn this
        caller's own success into False: whoever must know that it won puts a unique token in the bytes.
        """
        check_key(key)
        if not (self.single_writer and self.exists(key)):
            try:
                created = self._create(key, data)
            except StoreUnsafeError:
                if not self.single_writer:
                    raise
                self.put(key, data)
                created = True
            if created:
                return True
        if self.get(key) == data:
            return False
        raise ObjectExistsError(f"create {self.uri(key)}: an object with other bytes is already there")

    @abstractmethod
    def _create(self, key: str, data: bytes) -> bool:
        """True if this call created the object, False if one is there. Raises StoreUnsafeError where the
        store can't decide that."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectNotFoundError."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Keys of all objects below the folder `prefix`, sorted; [] when there is none."""

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every object below the folder `prefix`, by key."""

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """Names of objects and folders directly below the folder `prefix`, sorted; [] when absent.
        A folder is there as long as an object is below it."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; one that is missing is no error."""

    def remove_leftovers(self, prefix: str) -> int:
        """Remove what writers that were killed left below the folder `prefix` of objects that never appeared,
        and nothing that anybody may still be writing; its bytes. 0 where a killed writer leaves nothing."""
        return 0

    def check(self) -> None:
        """Prove with a hidden probe object that this store can be written, read back, listed and deleted,
        and that it refuses to create an object twice.

        Raises StoreUnsafeError (unless single_writer), StoreAccessError, StoreUnavailableError, or
        StoreError for a bucket that is missing.
        """
        key = f"{HIDDEN}check-{uuid.uuid4().hex}"
        first, second = f"first {key}".encode(), f"second {key}".encode()
        self.put_if_absent(key, first)
        try:
            self._expect(key, first)
            self._check_condition(key, first, second)
            self.put(key, second)
            self._expect(key, second)
            self.children("")
        finally:
            self.delete(key)
        if self.exists(key):
            raise StoreError(f"delete {self.uri(key)}: the object is still there afterwards")

    def _check_condition(self, key: str, first: bytes, second: bytes) -> None:
        try:
            self.put_if_absent(key, second)
        except ObjectExistsError:
            self._expect(key, first)
            return
        raise StoreUnsafeError(
            f"{self.url} ignores conditional writes (PUT with If-None-Match: *): a second create of the same "
            f"object succeeded, so two processes could overwrite each other unseen. {SINGLE_WRITER_HINT}"
        )

    def _expect(self, key: str, data: bytes) -> None:
        found = self.get(key)
        if found != data:
            raise StoreError(
                f"get {self.uri(key)}: {len(data)} bytes were written, {len(found)} other bytes came back. "
                "Some S3 servers store checksum trailers inside the object: try "
                "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
            )


def check_key(key: str) -> None:
    if not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"not a store key: {key!r}; write a relative path without empty parts or dots")


def visible(name: str) -> bool:
    return not name.startswith(HIDDEN)
