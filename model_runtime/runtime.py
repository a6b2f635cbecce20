"""ModelAsyncRuntime: everything one model needs to serve and to learn, in one place.

    training side    a trainer process of its own, supervised (trainer_process.py)
    rollout side     RolloutRuntime: the vLLM servers (rollout_server.py)
    between them     ParameterSynchronizer and VersionTracker (synchronizer.py, versions.py)
    to the outside   Registrar: the lease and binding at the gateway (registrar.py)

Whoever runs a model calls, in this order:

    await asyncio.gather(runtime.start_rollout_servers(), runtime.start_trainer())
    while (version := await runtime.next_version()) is not None:
        await runtime.publish(version)
    reason = await runtime.serve_until_stopped()
    ...
    await runtime.close()      # in a `finally`
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from model_runtime import adapters
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.devices import assign_gpus, check_gpus, cuda_numbers, visible_gpus
from model_runtime.errors import RepertoryError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.patient_store import open_patient_store
from model_runtime.protocol import (
    ADMIN_KEY_ENV,
    ModelRenewal,
    QueueReport,
    RenewalAnswer,
    Replica,
    RuntimeStatus,
    TrainerControl,
    TrainerSpec,
    TrainerStatus,
)
from model_runtime.registrar import Registrar
from model_runtime.rollout_server import RolloutRuntime
from model_runtime.synchronizer import ParameterSynchronizer, PublishReport, SyncLimits
from model_runtime.tokenizer_bundle import publish_tokenizer
from model_runtime.tracing import open_traces
from model_runtime.trainer_process import TrainerLimits, TrainerProcess
from model_runtime.versions import Changed, VersionTracker
from model_runtime.workspace import Workspace

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ModelAsyncRuntime:
    """One model's runtime. One life: `incarnation` counts the lives within an `epoch` of the parent.

    `sync_limits`, `trainer_limits` and `before_load` are handed to the parts they name.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        model_id: str,
        run_id: str,
        epoch: int,
        incarnation: int,
        gateway_url: str,
        sync_limits: SyncLimits | None = None,
        trainer_limits: TrainerLimits | None = None,
        before_load: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self.model: ModelConfig = config.model(model_id)
        self.model_id = model_id
        self.run_id = run_id
        self.epoch = epoch
        self.incarnation = incarnation
        self._store = open_patient_store(config.store)
        self._layout = RunLayout(run_id)
        self._model_layout = self._layout.model(model_id)
        self._workspace = Workspace(run_id)
        self._devices = assign_gpus(config.models)[model_id]
        self._sync_limits = sync_limits or SyncLimits.of(config)
        self._changed = Changed()
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._registering: asyncio.Task[None] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._syncing = False
        self._tokenizer_key: str | None = None
        self._sync_rows: MetricsWriter | None = None
        self._traces = open_traces(config.tracing, run_id=run_id, process="model-runtime")

        self.version_tracker = VersionTracker(model_id, on_change=self._state_changed)
        self.rollout_runtime = RolloutRuntime(
            self.model, logs=self._workspace.logs(), gpu_ids=cuda_numbers(self._devices.rollout)
        )
        self.registrar = Registrar(
            gateway_url=gateway_url,
            model_id=model_id,
            epoch=epoch,
            config=config.gateway,
            store=self._store.at_once(),
            layout=self._layout,
            compose=self._renewal,
            on_answer=self._take_answer,
            on_orders=self._take_orders,
        )
        self.parameter_synchronizer = ParameterSynchronizer(
            model=self.model,
            store=self._store,
            layout=self._model_layout,
            folder=self._workspace.adapters(model_id),
            replicas=self.rollout_runtime.replicas,
            versions=self.version_tracker,
            record=self._record_sync,
            flip=self._flip,
            limits=self._sync_limits,
            before_load=before_load,
            on_change=self._state_changed,
        )
        self.trainer = (
            self._make_trainer(trainer_limits or TrainerLimits()) if self.model.kind == "trainable" else None
        )

    # ------------------------------------------------------------------ the story

    async def start_rollout_servers(self) -> None:
        """Start every vLLM server and watch over them from then on. Returns when all of them have
        generated something. May run beside `start_trainer`."""
        await self._open()
        try:
            await self._unless_failed(self.rollout_runtime.start())
        except RepertoryError as error:
            self._fail(error)
            raise
        watching = self.rollout_runtime.watch(self.parameter_synchronizer.restore, self._state_changed)
        self._in_background(watching, "rollout servers")
        self._state_changed()

    async def start_trainer(self) -> None:
        """Start the trainer process and supervise it from then on. Returns when it has loaded its model;
        at once for a frozen model."""
        await self._open()
        if self.trainer is not None:
            self._tell_trainer()
            self._in_background(self.trainer.run(), "trainer")
            await self._unless_failed(self.trainer.wait_loaded())

    async def next_version(self) -> int | None:
        """Wait for a committed version newer than the published one. None: no more will come (the trainer
        has drained, finished, or got no signal), or this runtime is to stop."""
        await self._open()
        while True:
            self._raise_failure()
            committed, published = self.version_tracker.committed, self.version_tracker.published
            if self.stop_reason is not None:
                return None
            if committed is not None and (published is None or committed > published):
                return committed
            if committed is not None and (self.trainer is None or self.trainer.ended_well):
                return None
            await self._changed.wait()

    async def until_servable(self) -> None:
        """Wait for a server that takes versions, which none does while it restarts; not when this runtime is
        to stop. Raises what made the model fail: servers that don't come back use up their restarts."""
        while self.stop_reason is None and not any(r.ready for r in self.rollout_runtime.replicas):
            self._raise_failure()
            await self._changed.wait()

    async def publish(self, version: int, **columns: object) -> PublishReport:
        """Put a committed version into service; `columns` are noted in its row of the metrics. Raises
        PublishError; the version before it keeps serving and the call may be repeated. Raises SupersededError
        when a newer life of the model leads."""
        self._syncing = True
        self._state_changed()
        began, error = time.time(), "interrupted"
        try:
            report = await self._unless_failed(
                self.parameter_synchronizer.publish(version, columns=columns), or_superseded=True
            )
            error = ""
            return report
        finally:
            self._syncing = False
            self._state_changed()
            if self._traces is not None:
                self._traces.publication(
                    self.model_id, version, started_at=began, ended_at=time.time(), error=error
                )

    async def serve_until_stopped(self) -> str:
        """Go on serving and renewing until told to stop; returns the reason."""
        return await self._unless_failed(self.registrar.wait_until_stopped())

    async def close(self) -> None:
        """Say goodbye to the gateway, stop trainer and servers; returns when they have ended. May be called
        again; goes on when the caller is cancelled meanwhile, and begins again if it was cancelled itself."""
        if self._closing is None or self._closing.cancelled():
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # ------------------------------------------------------------------ what others look at

    @property
    def published_version(self) -> int | None:
        return self.version_tracker.published

    @property
    def trainer_status(self) -> TrainerStatus | None:
        """What the trainer last said; None before it has said anything, and for a frozen model."""
        return self.trainer.status if self.trainer is not None else None

    @property
    def checkpoint_step(self) -> int | None:
        """Step of the trainer's newest checkpoint."""
        return self.trainer_status.checkpoint_step if self.trainer_status is not None else None

    @property
    def stop_reason(self) -> str | None:
        """Why this runtime is to stop: the parent asked, or a newer epoch or incarnation leads."""
        return self.registrar.stop_reason

    @property
    def status(self) -> RuntimeStatus:
        if self._failure is not None:
            return "failed"
        if self._closing is not None:
            return "stopped"
        if self.version_tracker.announced is None:
            return "starting"
        return "syncing" if self._syncing else "ready"

    # ------------------------------------------------------------------ starting

    async def _open(self) -> None:
        """What both sides need, once: devices, tokenizer, first versions, the lease."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_once())
        await asyncio.shield(self._opening)

    async def _open_once(self) -> None:
        check_gpus(self.model_id, self._devices, visible_gpus())
        committed = await asyncio.to_thread(self._prepare_store)
        if committed is not None:
            self.version_tracker.commit(committed)
        self._registering = self._in_background(self.registrar.run(), "renewals")

    def _prepare_store(self) -> int | None:
        """Put the tokenizer there, and a frozen model's adapter as version 0; the newest version there."""
        self._tokenizer_key = publish_tokenizer(self._store, self._model_layout, self.model)
        if self.parameter_synchronizer.base_served:
            return 0
        if self.model.kind == "frozen" and self.model.adapter_path is not None:
            files = adapters.read_folder(self.model.adapter_path)
            adapters.write_version(
                self._store, self._model_layout, files, version=0, step=0, epoch=self.epoch
            )
        return adapters.latest_version(self._store, self._model_layout)

    def _make_trainer(self, limits: TrainerLimits) -> TrainerProcess:
        mailbox = self._workspace.mailbox(self.model_id)
        spec = TrainerSpec(
            run_id=self.run_id,
            model_id=self.model_id,
            epoch=self.epoch,
            incarnation=self.incarnation,
            config=self.config.model_dump(mode="json"),
            mailbox=str(mailbox),
            gpu_ids=cuda_numbers(self._devices.trainer),
        )
        return TrainerProcess(
            spec,
            logs=self._workspace.logs(),
            env=trainer_environment(os.environ, self.model, spec.gpu_ids),
            on_status=self._take_trainer_status,
            limits=limits,
        )

    # ------------------------------------------------------------------ what arrives

    def _take_trainer_status(self, status: TrainerStatus) -> None:
        if status.committed_version is not None:
            self.version_tracker.commit(status.committed_version)
        self._state_changed()

    def _take_answer(self, renewal: ModelRenewal, answer: RenewalAnswer) -> None:
        announced = self.version_tracker.announced
        if announced is not None and renewal.published_version == announced:
            self.version_tracker.acknowledge(announced)
            # Only such an answer counts every request that may still use an older version.
            self._unload_idle(answer.inflight_versions)
        self._take_orders()

    def _take_orders(self) -> None:
        self._tell_trainer()
        self._changed.notify()

    def _unload_idle(self, inflight: Mapping[int, int]) -> None:
        if self._closing is None and (self._unloading is None or self._unloading.done()):
            work = self.parameter_synchronizer.unload_idle(inflight)
            self._unloading = self._in_background(work, "unloading")

    def _state_changed(self) -> None:
        self._changed.notify()
        self.registrar.changed()
        self._tell_trainer()

    def _tell_trainer(self) -> None:
        if self.trainer is None:
            return
        answer = self.registrar.last_answer
        self.trainer.tell(
            TrainerControl(
                desired=self.registrar.desired,
                published_version=self.version_tracker.published,
                oldest_open_version=answer.oldest_open_version if answer else None,
            )
        )

    # ------------------------------------------------------------------ what leaves

    async def _flip(self, version: int) -> None:
        await self.registrar.flip(version, timeout_s=self._sync_limits.flip_s)

    def _renewal(self, seq: int) -> ModelRenewal:
        announced = self.version_tracker.announced
        trainer = self.trainer_status
        return ModelRenewal(
            model_id=self.model_id,
            epoch=self.epoch,
            incarnation=self.incarnation,
            seq=seq,
            kind=self.model.kind,
            status=self.status,
            reason=str(self._failure) if self._failure is not None else "",
            replicas=self._serving_replicas(announced),
            published_version=announced,
            live_versions=self.version_tracker.live,
            base_served=self.parameter_synchronizer.base_served,
            tokenizer_uri=self._tokenizer_key,
            committed_version=self.version_tracker.committed,
            limit=self.model.admission_limit if self.trainer is not None else 0,
            trainer_state=trainer.state if trainer else None,
            step=trainer.step if trainer else 0,
            steps_left=trainer.steps_left if trainer else self.model.max_steps,
            queue=trainer.queue if trainer else QueueReport(),
            load=self.rollout_runtime.load,
            totals=trainer.totals if trainer else {},
            last_metrics=trainer.last_metrics if trainer else {},
        )

    def _serving_replicas(self, version: int | None) -> list[Replica]:
        """The gateway hears only of replicas that have verified the version it shall ask them for."""
        if version is None or self._closing is not None:
            return []
        return [
            Replica.model_validate(
                {"replica_id": server.replica_id, "url": server.url, "api_key": server.api_key}
            )
            for server in self.rollout_runtime.replicas
            if server.ready and self.parameter_synchronizer.serves(server, version)
        ]

    def _record_sync(self, row: Mapping[str, Any]) -> None:
        if self._sync_rows is None:
            self._sync_rows = MetricsWriter(
                self._store.at_once(),
                self._model_layout,
                "syncs",
                epoch=self.epoch,
                incarnation=self.incarnation,
            )
        self._sync_rows.append(row)

    # ------------------------------------------------------------------ background work and its failures

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work`; if it fails the model has failed, and everybody who waits on this runtime hears why."""
        task = asyncio.create_task(work, name=f"{self.model_id}: {name}")
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SupersededError):
            self.registrar.stop(str(error), superseded=True)
        elif error is not None:
            self._fail(error)
        self._changed.notify()

    def _fail(self, error: BaseException) -> None:
        """The model has failed for good; the first reason counts."""
        self._failure = self._failure or error
        self._state_changed()

    async def _unless_failed(self, work: Coroutine[Any, Any, _T], *, or_superseded: bool = False) -> _T:
        """The result of `work`, or the failure of this runtime's background, whichever is first. With
        `or_superseded` a newer life of the model ends it too: raises SupersededError."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._wait_for_failure(or_superseded))
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._raise_failure()
                raise SupersededError(self.stop_reason or "")
            return working.result()
        finally:
            await _cancelled(working, failing)

    async def _wait_for_failure(self, or_superseded: bool) -> None:
        while self._failure is None and not (or_superseded and self.registrar.superseded):
            await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------ the end

    async def _close(self) -> None:
        self._store.give_up()
        if self._opening is not None:
            await _cancelled(self._opening)
        if self._registering is not None:
            await _cancelled(self._registering)
            await self._say_goodbye()
        outcomes = await asyncio.gather(
            self._end_background(),
            self.rollout_runtime.stop(),
            self.parameter_synchronizer.close(),
            self.registrar.close(),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    async def _say_goodbye(self) -> None:
        """The gateway stops asking the servers before they go."""
        try:
            await self.registrar.send()
        except Exception as error:  # of whatever the model failed: its processes must end all the same
            logger.warning("%s: the gateway does not hear that its runtime ends: %s", self.model_id, error)

    async def _end_background(self) -> None:
        await _cancelled(*self._background)  # this stops the trainer
        if self.trainer is not None:
            await self.trainer.stop()


def trainer_environment(
    environ: Mapping[str, str], model: ModelConfig, gpu_ids: Sequence[int]
) -> dict[str, str]:
    """The trainer process's environment: its devices and threads, and no key of the gateway."""
    env = {name: value for name, value in environ.items() if name != ADMIN_KEY_ENV}
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    env["OMP_NUM_THREADS"] = str(model.trainer.num_threads)
    return env


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel these tasks and wait until they have ended; what they raise has been seen by others."""
    for task in tasks:
        # SIGTERM may have cancelled every task of the loop already; once more would break off their cleanup.
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
