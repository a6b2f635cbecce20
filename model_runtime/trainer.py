"""The trainer process of one model: queue → batch → update → version → checkpoint, until told otherwise.

`python -m model_runtime.trainer SPEC.json` (protocol.TrainerSpec). It never sees a request. It speaks with
its runtime through the mailbox and with everybody else through the store:

    batches/<step>.json   written before the update, so that a step is replayed and never made up anew
    versions/v<k>/        every trigger_parameter_sync_step steps, at most one ahead of the published one
    checkpoints/step-<n>/ weights, optimizer and what the queue has consumed, under one manifest

Killed at any moment, it goes on from its last manifest: it replays the journaled batches and, on one CPU
process, arrives at the same bytes. While the store is away it trains what it has read and writes when the
store is back, in the order above. Exit code 0: ended well or stopped; 1: failed; 3: superseded; 4: the
store was away for longer than `store.max_outage_s`.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model_runtime.adapters import (
    AdapterFiles,
    Tensors,
    check_adapter,
    fetch_version,
    is_of,
    latest_version,
    next_free_version,
    write_version,
)
from model_runtime.batch_source import BatchSource, no_signal_bound
from model_runtime.checkpoints import TrainingState, load_latest_checkpoint, save_checkpoint
from model_runtime.config_file import parse_config
from model_runtime.documents import CheckpointDocument, VersionDocument
from model_runtime.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepertoryError,
    StoreOutageError,
    StoreUnavailableError,
    SupersededError,
    TrainerError,
)
from model_runtime.layout import RunLayout
from model_runtime.mailbox import StopRequested, TrainerMailbox
from model_runtime.metrics import MetricsWriter
from model_runtime.patient_store import PatientStore
from model_runtime.protocol import STORE_OUTAGE_EXIT_CODE, TrainerControl, TrainerSpec, TrainerState
from model_runtime.store import Store, open_store
from model_runtime.store_writer import StoreWriter
from model_runtime.tracing import open_traces
from model_runtime.tracking import Tracking
from model_runtime.training_queue import Batch, TrainingQueue
from model_runtime.training_trace import TrainingTrace

if TYPE_CHECKING:
    from model_runtime.learner import Learner

POLL_S = 0.05  # between two looks at the mailbox while waiting
LOAD_S = 600.0  # the longest sign of life while the model loads
WORK_S = 300.0  # … during one forward and backward pass, or one store operation
MAX_CANARY_PROMPT_TOKENS = 256

T = TypeVar("T")
logger = logging.getLogger(__name__)


class FullyAsyncTrainer:
    """Trains one model's adapter from its log.

    `stop` may be set from a signal handler; it is looked at between forward passes and while waiting.
    """

    def __init__(self, spec: TrainerSpec, mailbox: TrainerMailbox, *, stop: threading.Event) -> None:
        config = parse_config(spec.config, source=f"spec of {spec.model_id}")
        self._spec = spec
        self._model = config.model(spec.model_id)
        self._seed = config.seed
        self._max_wait_s = config.workflow.group_timeout_s
        self._mailbox = mailbox
        self._stop = stop
        self._store = PatientStore(
            open_store(config.store), max_outage_s=config.store.max_outage_s, waiting=self._store_is_away
        )
        self._run = RunLayout(spec.run_id)
        self._layout = self._run.model(spec.model_id)
        self._control = TrainerControl()
        self._step = 0
        self._writer = StoreWriter(
            self._store, self._run, model_id=spec.model_id, epoch=spec.epoch, alive=self._is_at_work
        )
        self._version = -1  # newest version of this line of training; it may still be on its way to the store
        self._version_step = 0  # the step it was committed after
        self._newest_version = -1  # newest in the store; above `_version` while batches are replayed
        self._first_free_version = 0  # above all that the store knew when this life began, begun ones too
        self._committed_step: int | None = None  # `_version_step` of the newest of this line in the store
        self._version_tensors: Tensors | None = None
        self._has_queue = False  # not before the warm-up is over
        self._trained_prompt: list[int] | None = None  # the canary's; from the first batch on
        self._saved_step: int | None = None  # of the newest checkpoint, which may still be on its way too
        self._checkpoint_step: int | None = None  # of the newest in the store
        self._timings: dict[str, float] = {}
        self._end_ranks: Callable[[], None] = lambda: None
        self._tracking_config = config.tracking
        self._tracking: Tracking | None = None
        traces = open_traces(config.tracing, run_id=spec.run_id, process="trainer")
        self._trace = TrainingTrace(traces, model_id=spec.model_id)

    # ------------------------------------------------------------------ the loop

    def run(self) -> TrainerState:
        """Train until there is nothing left to do. Raises StopRequested when told to stop before that;
        what is trained by then is saved."""
        try:
            self._begin()
            try:
                return self._train()
            except StopRequested:
                if self._step != (self._saved_step or 0):
                    self._save()
                self._writer.finish()
                raise
        finally:
            self._writer.close()
            self._end_ranks()
            if self._tracking is not None:
                self._tracking.close()
            self._trace.close()

    def _train(self) -> TrainerState:
        self._commit_if_due()  # a stop may have come between a step and its version
        while self._model.max_steps is None or self._step < self._model.max_steps:
            began = time.monotonic()
            batch = self._next_batch()
            if isinstance(batch, str):
                return self._finish(batch)
            self._journal(batch)
            waited = time.monotonic() - began
            self._queue.prefetch()
            metrics = self._learner.update(
                batch.rows,
                step=batch.step,
                proximal=self._version_tensors,
                between_passes=self._obey,
            )
            self._consume(batch)
            self._note(batch, metrics, waited_s=waited, step_s=time.monotonic() - began)
            self._trace.step(batch, seconds=time.monotonic() - began - waited)
            self._commit_if_due()
            if self._step % self._model.save_every == 0:
                self._save()
        return self._finish("finished")

    def _finish(self, state: TrainerState) -> TrainerState:
        if self._step > self._version_step:
            self._commit()
        if self._saved_step != self._step:
            self._save()
        self._writer.finish()
        reason = (
            f"{no_signal_bound(self._model)} groups in a row had no signal" if state == "no_signal" else ""
        )
        self._report(state=state, reason=reason)
        logger.info("%s: %s after step %d, version %d", self._spec.model_id, state, self._step, self._version)
        return state

    # ------------------------------------------------------------------ start and resume

    def _begin(self) -> None:
        self._mailbox.working(for_s=LOAD_S)
        # Seconds of import: after the first heartbeat.
        from model_runtime.data_parallel import LeadingRank, start_ranks
        from model_runtime.learner import Learner, prepare_torch
        from model_runtime.policy import canary_prompts

        model_id, trainer = self._spec.model_id, self._model.trainer
        started = start_ranks(self._spec, trainer.num_ranks) if trainer.num_ranks > 1 else None
        if started is not None:
            self._end_ranks = started.end
        device = prepare_torch(trainer, model_id=model_id, gpu_ids=self._spec.gpu_ids)
        self._learner: Learner = Learner(self._model, seed=self._seed, device=device)
        if started is not None:
            self._learner.ranks = LeadingRank(started, device=device)
            self._end_ranks = self._learner.ranks.close
        self._canary_prompts = canary_prompts(
            self._model.model_path, vocab_size=self._learner.policy.vocab_size
        )
        if self._model.sft is not None:
            self._warm_up()
        resume = self._restore()
        self._queue = TrainingQueue(
            self._store, self._layout, self._model,
            epoch=self._spec.epoch, resume=resume, seed=self._seed, max_wait_s=self._max_wait_s,
        )  # fmt: skip
        self._has_queue = True
        self._batches = BatchSource(self._store, self._layout, self._model, self._queue)
        self._metrics = MetricsWriter(
            self._store, self._layout, "steps", epoch=self._spec.epoch, incarnation=self._spec.incarnation,
        )  # fmt: skip
        if self._tracking_config.trackers:
            self._tracking = Tracking(
                self._tracking_config, run_id=self._spec.run_id, model_id=model_id, step=self._step
            )
        newest = latest_version(self._store, self._layout)
        self._newest_version = -1 if newest is None else newest
        self._first_free_version = next_free_version(self._store, self._layout)
        self._report()
        if self._version < 0:
            self._commit()
            self._writer.finish()
        self._report(state="running")

    def _warm_up(self) -> None:
        from model_runtime.supervised import Orders, WarmUp

        orders = Orders(
            obey=self._obey,
            may_write=self._writer.require_leading,
            say=lambda what: self._mailbox.report(state="running", reason=what),
        )
        stage = WarmUp(
            self._model, self._store, self._layout,
            seed=self._seed, epoch=self._spec.epoch, incarnation=self._spec.incarnation,
        )  # fmt: skip
        stage.run(self._learner, orders)
        self._mailbox.report(state="running", reason="")

    def _restore(self) -> CheckpointDocument | None:
        checkpoint = load_latest_checkpoint(self._store, self._layout)
        if checkpoint is None:
            return None
        document, state = checkpoint.document, checkpoint.state
        if document.seed != self._seed:
            raise ConfigError(f"seed is {self._seed}, but this run was trained with {document.seed} so far")
        self._learner.policy.load(state.adapter)
        self._learner.load_optimizer_state(state.optimizer)
        self._learner.load_generator_state(state.generators, state.values["generators"])
        self._step = self._saved_step = self._checkpoint_step = document.step
        self._version, self._version_step = document.version, state.values["version_step"]
        self._committed_step = self._version_step
        self._trained_prompt = state.values["trained_prompt"]
        self._version_tensors = self._tensors_of(document.version)
        logger.info("%s: resumed at step %d, version %d", self._spec.model_id, self._step, self._version)
        return document

    def _tensors_of(self, version: int) -> Tensors | None:
        """A version's adapter, to compare the next one with; None when it is no longer kept."""
        try:
            _, files = fetch_version(self._store, self._layout, version)
        except ObjectNotFoundError:
            return None
        return check_adapter(files, source=self._store.uri(self._layout.version(version)))

    # ------------------------------------------------------------------ batches

    def _next_batch(self) -> Batch | TrainerState:
        """The next step's batch, or the state in which training ends."""
        step = self._step + 1
        if self._batches.is_journaled(step):
            return self._wait(self._batches.replay(step), reason=f"replaying step {step}")
        return self._wait(lambda: self._batch_or_end(step), reason="waiting for finished groups")

    def _batch_or_end(self, step: int) -> Batch | TrainerState | None:
        control = self._control  # as read before polling: told to drain, the log is complete
        found = self._batches.next_or_end(step, control, training_version=self._version)
        self._mailbox.report(queue=self._queue.report(), totals=self._queue.totals())
        return found

    def _journal(self, batch: Batch) -> None:
        """Make the batch durable before anything is trained on it; while the store is away, before anything
        that came of it."""
        self._writer.durably(lambda store: self._journal_in(store, batch))

    def _journal_in(self, store: Store, batch: Batch) -> None:
        self._writer.require_leading(store)
        try:
            self._batches.journal(batch, store)
        except ObjectExistsError as error:
            self._writer.require_leading(store)
            raise TrainerError(
                f"{self._spec.model_id}: another trainer is at work on this model: {error}"
            ) from error

    def _consume(self, batch: Batch) -> None:
        self._queue.consume(batch)
        if self._control.published_version is not None:
            self._queue.published(self._control.published_version)
        self._step = batch.step
        if self._trained_prompt is None and batch.rows:
            prompt_ids = batch.rows[0].trajectory.prompt_ids
            self._trained_prompt = prompt_ids[:MAX_CANARY_PROMPT_TOKENS].tolist()

    # ------------------------------------------------------------------ versions and checkpoints

    def _commit_if_due(self) -> None:
        due = self._step % self._model.async_training.trigger_parameter_sync_step == 0
        if due and self._step > self._version_step:
            self._commit()

    def _commit(self) -> None:
        """Commit the adapter as the next version, once the one before it is published."""
        self._wait(
            self._publisher_has_caught_up, reason=f"waiting for v{self._newest_version} to be published"
        )
        began = time.monotonic()
        self._mailbox.working(for_s=WORK_S)
        from model_runtime.policy import make_canary

        policy = self._learner.policy
        prompts = [*self._canary_prompts, *([self._trained_prompt] if self._trained_prompt else [])]
        canary = make_canary(policy, prompts, previous=self._version_tensors)
        tensors, step = policy.tensors(), self._step

        def write(version: int) -> VersionDocument:
            return write_version(
                self._store, self._layout, policy.packed(tensors),
                version=version, step=step, epoch=self._spec.epoch, canary=canary,
            )  # fmt: skip

        number = self._number_of_next_version(lambda: policy.packed(tensors))
        self._version, self._version_step = number, step
        self._version_tensors = tensors
        self._timings["timing_s/commit_version"] = time.monotonic() - began
        self._trace.version(self._version, seconds=time.monotonic() - began)
        self._writer.beside(partial(write, self._version), self._note_version)

    def _note_version(self, document: VersionDocument) -> None:
        self._newest_version = max(self._newest_version, document.version)
        self._committed_step = document.step
        self._report()
        logger.info("%s: committed v%d after step %d", self._spec.model_id, document.version, document.step)

    def _number_of_next_version(self, packed: Callable[[], AdapterFiles]) -> int:
        """The next number, unless it was given before: what is there of a version, also one that was only
        begun, stays what it is (a replay on hardware that doesn't repeat itself finds others)."""
        number = self._version + 1
        if number >= self._first_free_version:
            return number
        if number < self._newest_version and not self._store.exists(self._layout.version_marker(number)):
            logger.warning("v%d was removed, or only begun; taking the next free number", number)
        elif is_of(self._store, self._layout, packed(), version=number):
            return number
        else:
            logger.warning("v%d is another adapter; taking the next free number", number)
        return next_free_version(self._store, self._layout)

    def _store_is_away(self, error: StoreUnavailableError) -> None:
        """Called on any thread that waits for the store."""
        self._is_at_work()
        if self._stop.is_set() or self._mailbox.control().desired == "stop":
            self._store.give_up()

    def _is_at_work(self) -> None:
        self._mailbox.working(for_s=WORK_S)

    def _publisher_has_caught_up(self) -> bool | None:
        published = self._control.published_version
        newest = max(self._newest_version, self._version)
        return True if newest <= (-1 if published is None else published) else None

    def _save(self) -> None:
        if self._saved_step != self._checkpoint_step:
            self._writer.finish()  # a store slower than training holds it up: copies don't pile up
        began = time.monotonic()
        self._mailbox.working(for_s=WORK_S)
        arrays, generators = self._learner.generator_state()
        state = TrainingState(
            adapter=self._learner.policy.tensors(),
            optimizer=self._learner.optimizer_state(),
            generators=arrays,
            values={
                "generators": generators,
                "version_step": self._version_step,
                "trained_prompt": self._trained_prompt,
            },
        )
        save = partial(
            save_checkpoint, self._store, self._layout, state,
            step=self._step, epoch=self._spec.epoch, version=self._version,
            seed=self._seed, progress=self._queue.progress(),
        )  # fmt: skip
        self._saved_step = self._step
        self._timings["timing_s/save_checkpoint"] = time.monotonic() - began
        self._writer.beside(save, self._note_checkpoint)

    def _note_checkpoint(self, document: CheckpointDocument) -> None:
        self._checkpoint_step = document.step
        self._report()
        logger.info("%s: checkpoint of step %d", self._spec.model_id, document.step)

    # ------------------------------------------------------------------ orders, waits, reports

    def _wait(self, poll: Callable[[], T | None], *, reason: str) -> T:
        """Poll until there is something; every wait obeys orders and is visible in the status."""
        while True:
            self._obey()
            found = poll()
            if found is not None:
                self._mailbox.report(state="running", reason="")
                return found
            self._mailbox.report(state="waiting", reason=reason)
            self._stop.wait(POLL_S)

    def _obey(self) -> None:
        """Read the runtime's orders and give a sign of life. Raises StopRequested, and what went wrong beside
        the loop."""
        self._is_at_work()
        self._writer.settle()
        control = self._mailbox.control()
        if self._stop.is_set() or control.desired == "stop":
            raise StopRequested
        published = control.published_version
        if self._has_queue and published not in (None, self._control.published_version):
            self._queue.published(published or 0)
            self._mailbox.report(queue=self._queue.report())
        self._control = control

    def _note(self, batch: Batch, metrics: dict[str, float], *, waited_s: float, step_s: float) -> None:
        """Write the step's row and show it in the status."""
        row = {
            "training/global_step": float(batch.step),
            "fully_async/count/current_param_version": float(self._version),
            **batch.metrics,
            **metrics,
            **self._timings,
            "timing_s/gen": waited_s,
            "timing_s/update_actor": step_s - waited_s,
            "timing_s/step": step_s,
            "trainer/idle_ratio": waited_s / step_s,
            "perf/time_per_step": step_s,
            "perf/throughput": batch.metrics.get("batch/num_tokens", 0.0) / step_s,
        }
        self._timings = {}
        self._mailbox.working(for_s=WORK_S)
        identity = {"step": batch.step, "model_id": self._spec.model_id, "version": self._version}
        write = self._metrics.row({**identity, "epoch": self._spec.epoch, "time": time.time(), **row})
        self._writer.durably(write)
        if self._tracking is not None:
            self._tracking.log(row, step=batch.step)
        self._report(last_metrics={name: value for name, value in row.items() if math.isfinite(value)})

    def _report(self, **changes: object) -> None:
        max_steps = self._model.max_steps
        self._mailbox.report(
            step=self._step,
            committed_version=None if self._newest_version < 0 else self._newest_version,
            committed_step=self._committed_step,
            checkpoint_step=self._checkpoint_step,
            steps_left=None if max_steps is None else max(0, max_steps - self._step),
            queue=self._queue.report(),
            totals=self._queue.totals(),
            **changes,
        )


def run_trainer(spec: TrainerSpec, *, stop: threading.Event) -> int:
    """Run one trainer to its end; the process's exit code."""
    with TrainerMailbox(spec.mailbox) as mailbox:
        try:
            FullyAsyncTrainer(spec, mailbox, stop=stop).run()
        except StopRequested:
            mailbox.report(reason="stopped")
        except SupersededError as error:
            mailbox.report(state="failed", reason=str(error))
            logger.warning("%s", error)
            return 3
        except RepertoryError as error:
            mailbox.report(state="failed", reason=str(error))
            logger.error("%s", error)
            return STORE_OUTAGE_EXIT_CODE if isinstance(error, StoreOutageError) else 1
        except BaseException as error:
            mailbox.report(state="failed", reason=f"{type(error).__name__}: {error}")
            raise
    return 0


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m model_runtime.trainer SPEC.json", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return run_trainer(TrainerSpec.model_validate_json(Path(argv[0]).read_bytes()), stop=stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
