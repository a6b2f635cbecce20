"""A store whose operations outlast its outages, up to `store.max_outage_s`.

Outages are told apart from other failures by StoreUnavailableError: no answer, throttling, 5xx, a full
disk. One begins with the first operation that fails so and ends with the first of its kind that succeeds,
whoever asked: a full disk can be read. An operation that fails all the while waits no longer than one may
last, though others of its kind succeed: a full disk may have room for small objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from model_runtime.config import StoreConfig
from model_runtime.errors import StoreError, StoreFullError, StoreOutageError, StoreUnavailableError
from model_runtime.store import Store, open_store

T = TypeVar("T")
Kind = Literal["reads", "writes", "removals"]

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
LOG_EVERY_S = 30.0

logger = logging.getLogger(__name__)


def open_patient_store(
    config: StoreConfig, *, waiting: Callable[[StoreUnavailableError], None] = lambda error: None
) -> PatientStore:
    """The store of this config, with its patience."""
    return PatientStore(open_store(config), max_outage_s=config.max_outage_s, waiting=waiting)


@dataclass(slots=True)
class _Outage:
    """Of one kind of operations; times by the store's clock."""

    began_at: float
    failed_at: float  # last
    logged_at: float


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
        self._outages: dict[Kind, _Outage] = {}

    def give_up(self) -> None:
        self._given_up.set()

    def at_once(self) -> Store:
        return _AtOnce(self, self._store)

    def put(self, key: str, data: bytes) -> None:
        self._outlast("writes", lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._outlast("writes", lambda: self._store.put_if_absent(key, data))

    def _create(self, key: str, data: bytes) -> bool:
        return self._outlast("writes", lambda: self._store._create(key, data))

    def get(self, key: str) -> bytes:
        return self._outlast("reads", lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        return self._outlast("reads", lambda: self._store.exists(key))

    def list(self, prefix: str) -> list[str]:
        return self._outlast("reads", lambda: self._store.list(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._outlast("reads", lambda: self._store.sizes(prefix))

    def children(self, prefix: str) -> list[str]:
        return self._outlast("reads", lambda: self._store.children(prefix))

    def delete(self, key: str) -> None:
        self._outlast("removals", lambda: self._store.delete(key))

    def remove_leftovers(self, prefix: str) -> int:
        """Without patience: it is done again later."""
        return self._store.remove_leftovers(prefix)

    def check(self) -> None:
        """Without patience: at the start of a run a store that does not answer is more likely misspelt."""
        self._store.check()

    def _outlast(self, kind: Kind, call: Callable[[], T]) -> T:
        pause_s, waits_since = FIRST_PAUSE_S, None
        while True:
            try:
                return self.once(kind, call, waits_since=waits_since)
            except StoreOutageError:
                raise
            except StoreUnavailableError as error:
                if self._given_up.is_set():
                    raise
                self._waiting(error)
            waits_since = self._clock() if waits_since is None else waits_since
            self._given_up.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def once(self, kind: Kind, call: Callable[[], T], *, waits_since: float | None = None) -> T:
        """One try, of a caller that has failed since then. An answer of the store, a refusal too, tells that
        it is there; an interrupt, or a fault of ours on the way, tells nothing."""
        try:
            result = call()
        except StoreUnavailableError as error:
            self._is_away(kind, error, waits_since)
            raise
        except StoreError:
            self._is_there(kind)  # it answered
            raise
        self._is_there(kind)
        return result

    def _is_away(self, kind: Kind, error: StoreUnavailableError, waits_since: float | None) -> None:
        with self._lock:
            now = self._clock()
            outage = self._outages.setdefault(kind, _Outage(now, now, logged_at=now - 2 * LOG_EVERY_S))
            outage.failed_at = now
            away_s = now - min(outage.began_at, now if waits_since is None else waits_since)
            if away_s > self._max_outage_s:
                raise self._lasted_too_long(kind, away_s, error) from error
            if now - outage.logged_at > LOG_EVERY_S:
                outage.logged_at = now
                logger.warning(
                    "the store is unavailable for %s, waiting for it (%.0f s so far): %s", kind, away_s, error
                )

    def _lasted_too_long(self, kind: Kind, away_s: float, error: StoreUnavailableError) -> StoreOutageError:
        remedy = "free some space there" if isinstance(error, StoreFullError) else "bring the store back"
        return StoreOutageError(
            f"{self.url} has been unavailable for {kind} for {away_s:.0f} s, longer than store.max_outage_s "
            f"({self._max_outage_s:g}): {error}. Nothing finalized is lost: {remedy} and resume the run, or "
            "raise store.max_outage_s"
        )

    def _is_there(self, kind: Kind) -> None:
        with self._lock:
            if not self._outages:
                return
            now = self._clock()
            for known, outage in list(self._outages.items()):
                # Who waits asks more often: of another kind's outage nobody has seen more.
                is_quiet = now - outage.failed_at > self._max_outage_s / 2
                if known == kind or is_quiet:
                    logger.warning("the store is back for %s after %.0f s", known, now - outage.began_at)
                    del self._outages[known]


class _AtOnce(Store):
    """The same store, asked once: StoreUnavailableError comes at once, StoreOutageError when it has been so
    for too long."""

    def __init__(self, patient: PatientStore, store: Store) -> None:
        super().__init__(store.url, single_writer=store.single_writer)
        self._patient, self._store = patient, store

    def put(self, key: str, data: bytes) -> None:
        self._patient.once("writes", lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._patient.once("writes", lambda: self._store.put_if_absent(key, data))

    def _create(self, key: str, data: bytes) -> bool:
        return self._patient.once("writes", lambda: self._store._create(key, data))

    def get(self, key: str) -> bytes:
        return self._patient.once("reads", lambda: self._store.get(key))

    def exists(self, key: str) -> bool:
        return self._patient.once("reads", lambda: self._store.exists(key))

    def list(self, prefix: str) -> list[str]:
        return self._patient.once("reads", lambda: self._store.list(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._patient.once("reads", lambda: self._store.sizes(prefix))

    def children(self, prefix: str) -> list[str]:
        return self._patient.once("reads", lambda: self._store.children(prefix))

    def delete(self, key: str) -> None:
        self._patient.once("removals", lambda: self._store.delete(key))
