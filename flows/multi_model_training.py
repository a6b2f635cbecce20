"""The parent of a run: launches the models and the agents' work, keeps them together, ends them in order."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled

from flows.run_form import (
    TRAINING_FLOW,
    ConfigBox,
    ModelChoice,
    RunId,
    Seed,
    StepLimit,
    TimeLimit,
    settled_config,
)
from model_runtime.config import AgentRoute, RunConfig
from model_runtime.coordinator import (
    CheckpointCoordinator,
    begin_run,
    claim_epoch,
    refuse_unsafe_resume,
    require_leading,
    update_run,
    write_desired,
)
from model_runtime.documents import DesiredState
from model_runtime.errors import (
    ProcessError,
    RepertoryError,
    RunFailedError,
    StoreUnavailableError,
    SupersededError,
)
from model_runtime.layout import RunLayout
from model_runtime.own_address import place_gateway
from model_runtime.patient_store import open_patient_store
from model_runtime.protocol import ModelStatus, RunRole, TrainerState
from model_runtime.retention import remove_leftovers, sweep
from model_runtime.store import Store
from model_runtime.summary import RunSummary
from model_runtime.workspace import ONE_RUN_ENV, Workspace, exclusive
from tasks.checkpoint import take_snapshot
from tasks.children import Child, look, restart_if_lost, start_child
from tasks.gateway import GatewayProcess, keep_gateway
from tasks.hang_watch import HangWatch
from tasks.lifecycle import (
    Stopped,
    cancel_children,
    cancel_children_of,
    cancel_older_runs,
    run_watched,
    tag_self,
    to_the_end,
    told_to_stop,
)
from tasks.model_failure import IdleWatch, reason_to_end
from tasks.summary import write_summary

log = logging.getLogger(__name__)

POLL_S = 1.0
KEEP_UP_EVERY_S = 10.0
SWEEP_EVERY_S = 60.0
CLEAN_EVERY_S = 3600.0
DRAIN_LIMIT_S = 900.0
"""Longest wait, once open groups have had their time, for the rest of the log to be trained and published."""
EVALUATION_LIMIT_S = 1800.0
STOP_LIMIT_S = 60.0
"""Longest wait for the models to end by themselves after `stop`; then they are cancelled."""
PLACE_WAIT_S = 3.0
ONE_RUN_REFUSAL = "another training run has this machine: wait for its end, or stop it"
TRAINING_OVER = frozenset({"drained", "finished", "no_signal"})
CLEANUP_LIMIT_S = 12.0
"""The runner kills a cancelled flow 30 s after it asked; children and gateway must be down before."""


@dataclass(slots=True)
class Run:
    """What the parent holds of one run in one epoch."""

    config: RunConfig
    run_id: str
    epoch: int
    store: Store
    layout: RunLayout
    gateway: GatewayProcess
    gateway_task: asyncio.Task[None]
    models: dict[str, Child]
    coordinator: CheckpointCoordinator
    hang_watch: HangWatch
    idle_watch: IdleWatch = field(default_factory=IdleWatch)
    rollout: Child | None = None
    evaluation: Child | None = None
    failures: dict[str, str] = field(default_factory=dict)  # model or role → why
    endings: dict[str, TrainerState] = field(default_factory=dict)  # trained model → why it trains no more

    @property
    def children(self) -> list[Child]:
        others = (self.rollout, self.evaluation)
        return [*self.models.values(), *(child for child in others if child is not None)]


def run_id_for(config: RunConfig, run_id: str, flow_run_id: str | None) -> str:
    """The given id, else one made of the config's name and this flow run's id."""
    return run_id or f"{config.name}-{(flow_run_id or 'local')[:8]}"


def config_name(parameters: dict[str, Any]) -> str:
    """Name of the config among a flow run's parameters, which are not validated yet when a run is named."""
    config = parameters.get("config")
    if isinstance(config, RunConfig):
        return config.name
    given = config.get("name") if isinstance(config, dict) else None
    return str(given or Path(parameters.get("config_from") or "default").stem)


def _run_name() -> str:
    given = this_run.parameters
    return given.get("run_id") or f"{config_name(given)}-{(this_run.id or 'local')[:8]}"


@flow(
    name=TRAINING_FLOW,
    flow_run_name=_run_name,
    on_cancellation=[cancel_children_of],
    on_crashed=[cancel_children_of],
    on_failure=[cancel_children_of],
    persist_result=False,
    validate_parameters=False,  # by settled_config, whose message can be read
)
async def multi_model_training(
    run_id: RunId = "",
    seed: Seed = -1,
    max_steps: StepLimit = 0,
    max_duration_s: TimeLimit = 0,
    config_from: str = "",
    models: list[ModelChoice] = [],  # noqa: B006 - a flow's defaults are its form's
    agents: list[AgentRoute] = [],  # noqa: B006
    config: ConfigBox = {},  # noqa: B006
) -> Any:
    """Trains several policies at once from the work of a multi-agent system.

    Args:
        run_id: Name of the run. The name of an earlier run goes on with it. Empty: a new name.
        seed: Seeds adapters, task order and samplers. -1: as the config says.
        max_steps: Training steps after which each model is only served. 0: as the config says.
        max_duration_s: The run drains after this many seconds. 0: as the config says.
        config_from: Name of another registered config, or path of a YAML file on the machine that runs this, in place of the config below. Empty: the config below.
        models: The policies. Empty: as the config says.
        agents: Which model answers for which agent. Empty: as the config says.
        config: Everything else, as in a config file. What the fields above say goes before it.
    """  # noqa: E501 - Prefect's form keeps the line breaks
    settings = await settled_config(
        config,
        config_from=config_from,
        models=models,
        agents=agents,
        seed=seed,
        max_steps=max_steps,
        max_duration_s=max_duration_s,
    )
    run_id = run_id_for(settings, run_id, this_run.id)
    outcome = await run_watched(lead(settings, run_id))
    if isinstance(outcome, Stopped):
        return Cancelled(message=f"stopped: {outcome.reason}; the run can be resumed as {run_id!r}")
    return outcome.value.headline


async def lead(config: RunConfig, run_id: str) -> RunSummary:
    """The run from top to bottom. Raises RunFailedError at the end if a model or the work failed."""
    started_at, state = time.time(), "failed"
    place = ExitStack()
    run = await take_over(config, run_id, place)
    try:
        await start_children(run)
        await follow(run)
        await drain(run)
        await evaluate(run)
        await stop_children(run)
        state = "failed" if run.failures else "completed"
    except SupersededError:
        state = "superseded"
        raise
    except BaseException as error:
        state = "cancelled" if told_to_stop(error) else "failed"
        raise
    finally:
        await to_the_end(lambda: shut_down(run, state))
        place.close()
    await take_snapshot(run.coordinator)
    summary = await write_summary(
        run.store,
        run.layout,
        config,
        started_at=started_at,
        failures=dict(run.failures),
        endings=dict(run.endings),
    )
    if run.failures:
        reasons = "\n".join(f"{role}: {reason}" for role, reason in run.failures.items())
        raise RunFailedError(f"run {run_id!r} failed; what the other models learned is kept:\n{reasons}")
    return summary


# ------------------------------------------------------------------------------------------------ begin


async def take_over(config: RunConfig, run_id: str, place: ExitStack) -> Run:
    """Check store and config, lead the run, end who led it before, write run.json, start the gateway.

    `place` gets this machine's place for a training run, where there is only one.
    """
    for warning in config.warnings():
        log.warning("%s", warning)
    config = place_gateway(config)
    store, layout = open_patient_store(config.store), RunLayout(run_id)
    await asyncio.to_thread(store.check)
    await asyncio.to_thread(refuse_unsafe_resume, store, layout, config)
    own_id = this_run.id
    claim = await asyncio.to_thread(claim_epoch, store, layout, flow_run_id=own_id, host=socket.gethostname())
    await tag_self(f"run:{run_id}")
    older = await cancel_older_runs(run_id, own_id=own_id)
    if older:
        log.warning("ended older flow runs of %s: %s", run_id, ", ".join(older))
    if os.environ.get(ONE_RUN_ENV):
        place.enter_context(exclusive("training", refusal=ONE_RUN_REFUSAL, wait_s=PLACE_WAIT_S))
    await asyncio.to_thread(begin_run, store, layout, config, epoch=claim.epoch)
    await asyncio.to_thread(write_desired, store, layout, epoch=claim.epoch, state="run", reason="launched")
    gateway = GatewayProcess(config, run_id=run_id, epoch=claim.epoch, workspace=Workspace(run_id))
    try:
        await gateway.begin()
        await asyncio.to_thread(update_run, store, layout, epoch=claim.epoch, gateway_url=gateway.url)
    except BaseException:
        await to_the_end(gateway.stop)
        raise
    trainable = tuple(m.model_id for m in config.trainable_models)
    return Run(
        config=config,
        run_id=run_id,
        epoch=claim.epoch,
        store=store,
        layout=layout,
        gateway=gateway,
        gateway_task=asyncio.create_task(keep_gateway(gateway)),
        models={},
        coordinator=CheckpointCoordinator(store, layout, trainable, claim.epoch),
        hang_watch=HangWatch(lease_s=config.gateway.lease_s),
    )


async def start_children(run: Run) -> None:
    """One flow run per model, and one that drives the agents' work if the config names any."""
    add_models(run)
    if run.config.workflow.function is not None:
        run.rollout = _driver(run, "rollout")
    for child in run.children:
        await start_child(child)


def add_models(run: Run) -> None:
    """The children that serve and train the models, not started yet."""
    for model in run.config.models:
        child = _child(run, model.model_id, f"model-runtime/{model.model_id}", "model-runtime/default")
        child.parameters |= {"model_id": model.model_id, "incarnation": 1}
        child.tags.append(f"model:{model.model_id}")
        run.models[model.model_id] = child


def _driver(run: Run, role: RunRole) -> Child:
    child = _child(run, role, f"rollout/{run.config.name}", "rollout/default")
    # A workflow that computes without awaiting holds up all else in its process, for an execution's time.
    child.busy_limit_s = run.config.workflow.execution_timeout_s
    return child


def _child(run: Run, role: str, *deployments: str) -> Child:
    return Child(
        role=role,
        deployments=deployments,
        parameters={
            "run_id": run.run_id,
            "epoch": run.epoch,
            "gateway_url": run.gateway.url,
            "config": run.config.model_dump(mode="json"),
        },
        tags=[f"run:{run.run_id}", f"config:{run.config.name}"],
        idempotency_key=f"{run.run_id}:{role}:{run.epoch}",
    )


# ------------------------------------------------------------------------------------------------ middle


async def follow(run: Run) -> None:
    """Watch until the work is done, the time is up, or nobody is left to train."""
    keeping_up = asyncio.create_task(keep_up(run))
    try:
        await _follow(run, keeping_up)
    finally:
        keeping_up.cancel()
        await asyncio.gather(keeping_up, return_exceptions=True)


async def _follow(run: Run, keeping_up: asyncio.Task[None]) -> None:
    began, limit = time.monotonic(), run.config.max_duration_s
    while True:
        await watch_children(run)
        if keeping_up.done():
            await keeping_up
        if run.rollout is not None and run.rollout.final is not None:
            return
        if not await anyone_trains(run):
            return
        if limit is not None and time.monotonic() - began > limit:
            log.info("max_duration_s is up: draining")
            return
        await asyncio.sleep(POLL_S)


async def keep_up(run: Run) -> None:
    """Again and again: name what the models saved together, see who leads the run, remove what is no longer
    kept. Beside the watch, so that a store that is away does not hold that up. Raises SupersededError and
    StoreOutageError."""
    swept_at, cleaned_at = time.monotonic(), -math.inf
    while True:
        await asyncio.sleep(KEEP_UP_EVERY_S)
        await asyncio.to_thread(run.coordinator.snapshot)
        await asyncio.to_thread(require_leading, run.store, run.layout, run.epoch)
        if time.monotonic() - swept_at > SWEEP_EVERY_S:
            await asyncio.to_thread(sweep, run.store, run.layout, run.config, epoch=run.epoch)
            swept_at = time.monotonic()
        if time.monotonic() - cleaned_at > CLEAN_EVERY_S:
            await asyncio.to_thread(remove_leftovers, run.store, run.layout)
            cleaned_at = time.monotonic()


async def watch_children(run: Run) -> None:
    """Restart children whose process was lost; note those that failed. Raises if the gateway is given up, and
    RunFailedError when the run is not to go on without a model that failed, or can't."""
    if run.gateway_task.done():
        await run.gateway_task
        raise ProcessError("the gateway's supervisor ended while the run went on")
    await run.hang_watch.end_hung(run.children, run.gateway.admin)
    for child in await look(run.children):
        if await restart_if_lost(child):
            log.warning("%s was lost (%s); started again", child.role, child.history[-1])
        elif not child.completed:
            run.failures[child.role] = child.outcome
            log.error("%s ended: %s", child.role, child.outcome)
    failed = [role for role in run.failures if role in run.models]
    run.gateway.failed_models.update(failed)
    if failed and (
        why := await reason_to_end(
            run.config.multi_model, run.idle_watch, run.gateway.admin, driven=run.rollout is not None
        )
    ):
        reasons = "; ".join(f"{role}: {run.failures[role]}" for role in failed)
        raise RunFailedError(f"{', '.join(failed)} failed and {why}; the run can be resumed. {reasons}")


async def anyone_trains(run: Run) -> bool:
    """Is there a model whose training is not over? Without a rollout of our own, its end ends the run."""
    models = [run.models[m.model_id] for m in run.config.trainable_models]
    if models and all(child.final is not None for child in models):
        return False
    if run.rollout is not None or not models:
        return True  # the driver ends the run; it is told when every model is past its steps
    status = await run.gateway.admin.status()
    if status is None:
        return True
    return not all(_training_over(status.models.get(c.role), c) for c in models)


# --------------------------------------------------------------------------------------------------- end


async def want(run: Run, state: DesiredState, reason: str) -> None:
    """Say it in the store first: whoever can't reach the gateway reads it there."""
    await asyncio.to_thread(write_desired, run.store, run.layout, epoch=run.epoch, state=state, reason=reason)
    await run.gateway.want(state, reason)


async def drain(run: Run) -> None:
    """No new work: open groups settle, trainers train what is left, the last versions are published."""
    await want(run, "drain", "the work is done")
    limit_s = run.config.workflow.group_timeout_s + DRAIN_LIMIT_S
    until = time.monotonic() + limit_s
    while not await _drained(run):
        if time.monotonic() > until:
            run.failures["drain"] = f"not every model had drained after {limit_s:.0f} s"
            return
        await asyncio.sleep(POLL_S)
        await watch_children(run)


async def _drained(run: Run) -> bool:
    if run.rollout is not None and run.rollout.final is None:
        return False
    status = await run.gateway.admin.status()
    if status is None:
        return all(child.final is not None for child in run.models.values())
    models = [run.models[m.model_id] for m in run.config.trainable_models]
    for child in models:
        found = status.models.get(child.role)
        if found is not None and found.renewal is not None and found.renewal.trainer_state in TRAINING_OVER:
            run.endings[child.role] = found.renewal.trainer_state
    return all(_training_over(status.models.get(c.role), c) for c in models)


def _training_over(status: ModelStatus | None, child: Child) -> bool:
    """Trained all it will, and serving the last version it committed; or ended."""
    if child.final is not None:
        return True
    renewal = status.renewal if status else None
    if renewal is None:
        return False
    if renewal.status in ("failed", "stopped") or renewal.trainer_state == "failed":
        return True
    over = renewal.trainer_state in TRAINING_OVER
    return over and renewal.published_version == renewal.committed_version


async def evaluate(run: Run) -> None:
    """The held-out tasks with the last versions. A failed model's agents can't be evaluated."""
    if run.config.workflow.held_out_tasks is None or run.config.workflow.function is None or run.failures:
        return
    run.evaluation = _driver(run, "evaluation")
    run.evaluation.parameters["mode"] = "eval"
    await start_child(run.evaluation)
    until = time.monotonic() + EVALUATION_LIMIT_S
    while run.evaluation.final is None:
        if time.monotonic() > until:
            run.failures["evaluation"] = f"not done after {EVALUATION_LIMIT_S:.0f} s"
            return
        await asyncio.sleep(POLL_S)
        await watch_children(run)


async def stop_children(run: Run) -> None:
    """`stop`, and wait until every model's flow run has ended. One whose process was lost meanwhile is not
    started again: training was over, and all of it is in the store."""
    await want(run, "stop", "the run is over")
    until = time.monotonic() + STOP_LIMIT_S
    while any(child.final is None for child in run.children):
        if time.monotonic() > until:
            late = [child.role for child in run.children if child.final is None]
            log.warning("%s did not stop within %.0f s: cancelling", ", ".join(late), STOP_LIMIT_S)
            return
        await asyncio.sleep(POLL_S)
        for child in await look(run.children):
            if child.lost:
                log.warning("%s was lost while it stopped: %s", child.role, child.outcome)
            elif not child.completed:
                run.failures[child.role] = child.outcome


async def shut_down(run: Run, state: str) -> None:
    """Whatever happened: no child and no gateway is left. Within CLEANUP_LIMIT_S when cancelled."""
    if state != "completed":
        run.store.give_up()
    if state not in ("completed", "superseded"):  # also for those that can't reach Prefect
        await asyncio.to_thread(_leave_word, run, f"the run is {state}")
    own_id = this_run.id
    if own_id is not None and any(child.final is None for child in run.children):
        try:
            await asyncio.to_thread(cancel_children, own_id, reason=f"the run is {state}")
        except Exception as error:  # the children watch their parent too; the gateway must still go
            log.warning("children could not be cancelled (%s); they will see that their parent ended", error)
        until = time.monotonic() + CLEANUP_LIMIT_S
        while any(child.final is None for child in run.children) and time.monotonic() < until:
            await look(run.children)
            await asyncio.sleep(0.3)
    await run.gateway.stop()
    await asyncio.wait({run.gateway_task}, timeout=5)
    run.gateway_task.cancel()
    await asyncio.gather(run.gateway_task, return_exceptions=True)
    if state != "superseded":
        await asyncio.to_thread(_note_the_end, run, state)


def _note_the_end(run: Run, state: str) -> None:
    try:
        update_run(run.store, run.layout, epoch=run.epoch, state=state, gateway_url=None)
    except StoreUnavailableError as error:
        if state == "completed":
            raise
        log.warning("run.json still says that the run is under way: %s", error)


def _leave_word(run: Run, reason: str) -> None:
    try:
        write_desired(run.store, run.layout, epoch=run.epoch, state="stop", reason=reason)
    except RepertoryError as error:  # the cascade through Prefect comes next
        log.warning("`stop` could not be left in the store: %s", error)
