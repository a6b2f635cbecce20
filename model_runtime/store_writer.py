"""How one life of a trainer writes: never once a newer epoch leads the run, never out of order, and through
outages.

What is small is written at once and found there by whoever comes later. Versions and checkpoints are
written beside the loop, in the order they were given. While the store is away the small things join that
line, so that nothing ever becomes durable before what it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from model_runtime.background import BackgroundWriter
from model_runtime.errors import StoreOutageError, StoreUnavailableError, SupersededError
from model_runtime.layout import RunLayout, number_in
from model_runtime.patient_store import PatientStore
from model_runtime.store import Store

T = TypeVar("T")

SIGN_OF_LIFE_S = 10.0  # between two while the last writes end


class StoreWriter:
    """Called from one thread, the loop's. `alive` is a sign of life, given wherever something takes its
    time."""

    def __init__(
        self, store: PatientStore, run: RunLayout, *, model_id: str, epoch: int, alive: Callable[[], None]
    ) -> None:
        self._store = store
        self._run = run
        self._model_id = model_id
        self._epoch = epoch
        self._alive = alive
        self._line = BackgroundWriter(f"{model_id}-writer")
        self._num_deferred = 0  # small writes that wait for the store to come back

    def beside(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do it beside the loop, while this epoch leads; `then` gets its result, on the loop's thread."""

        def fenced() -> T:
            self.require_leading()
            return job()

        self._line.submit(fenced, then)

    def durably(self, job: Callable[[Store], None]) -> None:
        """Do it now. While the store is away: beside the loop, before all that follows from it."""
        if not self._num_deferred:
            try:
                return job(self._store.at_once())
            except StoreOutageError:
                raise
            except StoreUnavailableError:
                self._alive()
        self._num_deferred += 1
        self.beside(lambda: job(self._store), self._note_deferred)

    def _note_deferred(self, _: None) -> None:
        self._num_deferred -= 1

    def require_leading(self, store: Store | None = None) -> None:
        """Nothing durable is written once a newer epoch leads the run: raises SupersededError."""
        names = (store or self._store).children(self._run.epochs())
        newest = max((number_in(n) for n in names if n.startswith("epoch-")), default=self._epoch)
        if newest > self._epoch:
            raise SupersededError(
                f"run {self._run.run_id}: epoch {newest} leads; the trainer of {self._model_id} "
                f"in epoch {self._epoch} stops"
            )

    def settle(self) -> None:
        """Tell of what is done. Raises what went wrong beside the loop."""
        self._line.settle()

    def finish(self) -> None:
        """Wait for everything given so far, and settle it."""
        self._line.finish(sign_of_life=self._alive, every_s=SIGN_OF_LIFE_S)

    def close(self) -> None:
        self._line.close()
