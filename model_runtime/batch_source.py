"""Where a trainer's steps come from: the journal for steps that began before a crash, else the queue."""

from __future__ import annotations

import time
from collections.abc import Callable

from model_runtime.batch_journal import journaled_steps, read_batch
from model_runtime.config import ModelConfig
from model_runtime.errors import StoreOutageError, StoreUnavailableError, TrainerError
from model_runtime.layout import ModelLayout
from model_runtime.protocol import TrainerControl, TrainerState
from model_runtime.store import Store
from model_runtime.training_queue import Batch, TrainingQueue

MIN_QUEUE_POLL_S = 0.05  # between two looks at a log that was written just now
MAX_QUEUE_POLL_S = 0.25  # between two looks at an idle log
AWAY_POLL_S = 1.0  # between two at a store that is away
REPLAY_WAIT_S = 60.0  # for the log to show what a journaled batch has read before
NO_SIGNAL_BATCHES = 10  # batch-equivalents of groups without signal that end a model ...
NO_SIGNAL_GROUPS = 64  # ... but never fewer: rare rewards in small batches look the same for a while


def no_signal_bound(model: ModelConfig) -> int:
    """How many groups in a row may close untrained before the model's training ends."""
    batch = model.batch_size * model.async_training.require_batches
    return max(NO_SIGNAL_GROUPS, NO_SIGNAL_BATCHES * batch)


class BatchSource:
    """Deals out the batch of each step; none of its calls waits."""

    def __init__(self, store: Store, layout: ModelLayout, model: ModelConfig, queue: TrainingQueue) -> None:
        self._store = store
        self._layout = layout
        self._model = model
        self._queue = queue
        self._journaled = journaled_steps(store, layout)
        self._poll_pause_s = MIN_QUEUE_POLL_S
        self._next_poll = 0.0

    def is_journaled(self, step: int) -> bool:
        """Was this step begun before? Then it is replayed and never made up anew."""
        return step in self._journaled

    def next_or_end(
        self, step: int, control: TrainerControl, *, training_version: int
    ) -> Batch | TrainerState | None:
        """The next batch of the queue, the state in which training ends, or None for now."""
        final = control.desired == "drain"
        is_read = self._poll(at_once=final)
        batch = self._queue.next_batch(
            step,
            published_version=control.published_version or 0,
            training_version=training_version,
            oldest_open_version=control.oldest_open_version,
            final=final,
        )
        if batch is not None:
            return batch
        if not is_read:
            return None
        if final:
            return "drained"
        report = self._queue.report()
        spent = report.closed_groups >= no_signal_bound(self._model) and not report.untrained_groups
        return "no_signal" if spent else None

    def replay(self, step: int) -> Callable[[], Batch | None]:
        """Looks for the journaled batch of this step; None as long as the log doesn't show all of it.
        Raises TrainerError when that takes too long."""
        document = read_batch(self._store, self._layout, step)
        deadline = time.monotonic() + REPLAY_WAIT_S

        def poll() -> Batch | None:
            nonlocal deadline
            if not self._poll(at_once=True):
                deadline = time.monotonic() + REPLAY_WAIT_S  # the store is away, not the log short
            batch = self._queue.replay(document)
            if batch is None and time.monotonic() > deadline:
                raise TrainerError(
                    f"{self._model.model_id}: {self._store.uri(self._layout.batch(step))} was made from the "
                    f"log up to {document.read_positions}, which the log no longer shows: it reads to "
                    f"{self._queue.report().read_positions}"
                )
            return batch

        return poll

    def journal(self, batch: Batch, store: Store) -> None:
        """Make the batch durable. Raises ObjectExistsError when another trainer wrote this step."""
        if batch.step not in self._journaled:
            store.put_if_absent(self._layout.batch(batch.step), batch.document.to_bytes())

    def _poll(self, *, at_once: bool) -> bool:
        """False while the store is away: there may be more in the log than is known."""
        now = time.monotonic()
        if not at_once and now < self._next_poll:
            return True
        try:
            found = self._queue.poll()
        except StoreOutageError:
            raise
        except StoreUnavailableError:  # what was read before can be trained meanwhile
            self._next_poll = time.monotonic() + AWAY_POLL_S
            return False
        self._poll_pause_s = MIN_QUEUE_POLL_S if found else min(2 * self._poll_pause_s, MAX_QUEUE_POLL_S)
        self._next_poll = time.monotonic() + self._poll_pause_s
        return True
