"""A store whose operations outlast its outages, up to `store.max_outage_s`.

Outages are told apart from other failures by StoreUnavailableError: no answer, throttling, 5xx, a full
disk. One begins with the first operation that fails so and ends with the first that succeeds, whoever
asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from model_runtime.config import StoreConfig
from model_runtime.errors import StoreError, StoreOutageError, StoreUnavailableError
from model_runtime.store import Store, open_store

T = TypeVar("T")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
LOG_EVERY_S = 30.0

logger = logging.getLogger(__name__)


def open_patient_store(
    config: StoreConfig, *, waiting: Callable[[StoreUnavailableError], None] = lambda error: None
) -> PatientStore:
    """The store of this config, with its patience."""
    return PatientStore(open_store(config), max_outage_s=config.max_outage_s, waiting=waiting)


class PatientStore(Store):
    """`waiting` is called before each pause, on the thread that waits: a sign of life.

    Raises StoreOutageError once an outage has lasted too long; after `give_up` at once, with the store's
    own error.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_outage_s: float,
        waiting: Callable[[StoreUnavailableError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store.url, single_writer=store.single_writer)
        self._store = store
        self._max_outage_s = max_outage_s
        self._waiting = waiting
        self._clock = clock
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._logged_at = 0.0

    def give_up(self) -> None:
        self._given_up.set()

    def at_once(self) -> Store:
        return _AtOnce(self, self._store)

    def put(self, key: str, data: bytes) -> None:
        self._outlast(lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._outlast(lambda: self._store.put_if_absent(key, data))

    def _create(self, key: str, data: bytes) -> bool:
        return self._outlast(lambda: self._store._create(key, data))

    def get(self, key: str) -> bytes:
        return self._outlast(lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        return self._outlast(lambda: self._store.exists(key))

    def list(self, prefix: str) -> list[str]:
        return self._outlast(lambda: self._store.list(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._outlast(lambda: self._store.sizes(prefix))

    def children(self, prefix: str) -> list[str]:
        return self._outlast(lambda: self._store.children(prefix))

    def delete(self, key: str) -> None:
        self._outlast(lambda: self._store.delete(key))

    def remove_leftovers(self, prefix: str) -> int:
        """Without patience: it is done again later."""
        return self._store.remove_leftovers(prefix)

    def check(self) -> None:
        """Without patience: at the start of a run a store that does not answer is more likely misspelt."""
        self._store.check()

    def _outlast(self, call: Callable[[], T]) -> T:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self.once(call)
            except StoreOutageError:
                raise
            except StoreUnavailableError as error:
                if self._given_up.is_set():
                    raise
                self._waiting(error)
            self._given_up.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def once(self, call: Callable[[], T]) -> T:
        """One try; an answer of the store, a refusal too, tells that it is there. An interrupt, or a fault of
        ours on the way, tells nothing."""
        try:
            result = call()
        except StoreUnavailableError as error:
            self._is_away(error)
            raise
        except StoreError:
            self._is_there()  # it answered
            raise
        self._is_there()
        return result

    def _is_away(self, error: StoreUnavailableError) -> None:
        with self._lock:
            now = self._clock()
            self._away_since = now if self._away_since is None else self._away_since
            away_s = now - self._away_since
            if away_s > self._max_outage_s:
                raise StoreOutageError(
                    f"{self.url} has been unavailable for {away_s:.0f} s, longer than store.max_outage_s "
                    f"({self._max_outage_s:g}): {error}. Nothing finalized is lost: bring the store back and "
                    "resume the run, or raise store.max_outage_s"
                ) from error
            if away_s == 0 or now - self._logged_at > LOG_EVERY_S:
                self._logged_at = now
                logger.warning("the store is unavailable, waiting for it (%.0f s so far): %s", away_s, error)

    def _is_there(self) -> None:
        with self._lock:
            if self._away_since is not None:
                logger.warning("the store is back after %.0f s", self._clock() - self._away_since)
                self._away_since = None


class _AtOnce(Store):
    """The same store, asked once: StoreUnavailableError comes at once, StoreOutageError when it has been so
    for too long."""

    def __init__(self, patient: PatientStore, store: Store) -> None:
        super().__init__(store.url, single_writer=store.single_writer)
        self._patient, self._store = patient, store

    def put(self, key: str, data: bytes) -> None:
        self._patient.once(lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._patient.once(lambda: self._store.put_if_absent(key, data))

    def _create(self, key: str, data: bytes) -> bool:
        return self._patient.once(lambda: self._store._create(key, data))

    def get(self, key: str) -> bytes:
        return self._patient.once(lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        return self._patient.once(lambda: self._store.exists(key))

    def list(self, prefix: str) -> list[str]:
        return self._patient.once(lambda: self._store.list(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._patient.once(lambda: self._store.sizes(prefix))

    def children(self, prefix: str) -> list[str]:
        return self._patient.once(lambda: self._store.children(prefix))

    def delete(self, key: str) -> None:
        self._patient.once(lambda: self._store.delete(key))
