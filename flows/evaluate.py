"""An evaluation of versions: by the gateway of a run that serves them, else from the store with rollout
servers and a gateway of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled

from flows.multi_model_training import (
    Run,
    add_models,
    config_name,
    shut_down,
    stop_children,
    take_over,
    watch_children,
)
from flows.run_form import ConfigBox, RunId, checked, settled_config
from model_runtime.config import RunConfig
from model_runtime.errors import RunFailedError
from model_runtime.evaluation import (
    EvaluationDocument,
    EvaluationPlan,
    ModelVersion,
    due_checkpoints,
    estimate,
    frozen_config,
    make_plan,
    newest_run,
    pass_rates,
    read_evaluation,
    read_evaluations,
    write_evaluation,
)
from model_runtime.layout import RunLayout
from model_runtime.store import Store, open_store
from model_runtime.workflow import DriverReport
from model_runtime.workspace import Workspace
from tasks.alerts import tell_of_regression
from tasks.children import start_child
from tasks.evaluation import headline, show_evaluation
from tasks.lifecycle import Stopped, cancel_children_of, run_watched, to_the_end, told_to_stop
from tasks.live_evaluation import LiveHold, evaluate_live, live_hold
from tasks.rollout import RolloutReporter, drive

log = logging.getLogger(__name__)

POLL_S = 1.0


def _run_name() -> str:
    given = this_run.parameters
    return f"evaluation · {given.get('run_id') or config_name(given)}"


@flow(
    name="evaluate",
    flow_run_name=_run_name,
    on_cancellation=[cancel_children_of],
    on_crashed=[cancel_children_of],
    on_failure=[cancel_children_of],
    persist_result=False,
    validate_parameters=False,  # by settled_config, whose message can be read
)
async def evaluate(
    run_id: RunId = "",
    versions: list[ModelVersion] = [],  # noqa: B006 - a flow's defaults are its form's
    config_from: str = "",
    config: ConfigBox = {},  # noqa: B006
) -> Any:
    """Works on the held-out tasks, outside of any training.

    A run that trains now and serves the versions is asked itself, and keeps them in service meanwhile; else they
    are served from the store. The same evaluation is done once: asked again, its outcome is shown.

    Args:
        run_id: Run whose versions are evaluated. Empty: the newest run of this config.
        versions: Which version of which model: a number, latest, or base. A model not named here: its latest.
        config_from: Name of another registered config, or path of a YAML file on the machine that runs this, in place of the config below. Empty: the config below.
        config: Models, agents, workflow, store, and how to evaluate, as in a config file.
    """  # noqa: E501 - Prefect's form keeps the line breaks
    settings = await settled_config(config, config_from=config_from)
    chosen = checked("versions", list[ModelVersion], versions)
    outcome = await run_watched(_evaluate(settings, run_id, chosen))
    if isinstance(outcome, Stopped):
        return Cancelled(message=f"stopped: {outcome.reason}")
    return outcome.value


async def _evaluate(config: RunConfig, run_id: str, versions: list[ModelVersion]) -> str:
    store = open_store(config.store)
    run_id = run_id or await asyncio.to_thread(newest_run, store, config.name)
    if versions or config.evaluation.every_checkpoints is None:
        return await _evaluate_one(config, store, run_id, versions)
    found = await asyncio.to_thread(due_checkpoints, store, config, run_id=run_id)
    for due in found:
        await _evaluate_one(config, store, run_id, [due])
    if not found:
        return f"run {run_id}: no checkpoint to evaluate"
    return f"run {run_id}: evaluated " + ", ".join(f"{due.model_id} v{due.version}" for due in found)


async def _evaluate_one(config: RunConfig, store: Store, run_id: str, versions: list[ModelVersion]) -> str:
    """By the run's own gateway while it serves these versions, else with servers of our own."""
    layout, began = RunLayout(run_id), time.time()
    async with _maybe_live(store, layout, config, versions) as hold:
        wanted = versions if hold is None else hold.choices(config)
        plan = await asyncio.to_thread(make_plan, store, config, run_id=run_id, wanted=wanted)
        document = await asyncio.to_thread(read_evaluation, store, layout, plan.evaluation_id)
        if document is not None:
            log.info("%s of run %s is evaluated already", plan.named_versions(), run_id)
            return headline(document)
        if hold is not None:
            report = await evaluate_live(hold, config, run_id=run_id, store=store)
        else:
            report = await _evaluate_from_store(config, store, plan)
    where = "store" if hold is None else "live"
    document = _document(plan, config, report, duration_s=time.time() - began, where=where)
    document = await asyncio.to_thread(write_evaluation, store, layout, document)
    before = await asyncio.to_thread(read_evaluations, store, layout)
    await show_evaluation(document, before, headline(document))
    tell_of_regression(document, before, drop=config.alerts.evaluation_drop, config=config.name)
    return headline(document)


def _maybe_live(
    store: Store, layout: RunLayout, config: RunConfig, versions: list[ModelVersion]
) -> AbstractAsyncContextManager[LiveHold | None]:
    return nullcontext() if config.evaluation.where == "store" else live_hold(store, layout, config, versions)


async def _evaluate_from_store(config: RunConfig, store: Store, plan: EvaluationPlan) -> DriverReport:
    work_id = RunLayout(plan.run_id).evaluation_run(plan.evaluation_id)
    folder = Workspace(work_id).root / "versions"
    frozen = await asyncio.to_thread(frozen_config, store, config, plan, folder)
    return await run_frozen(frozen, work_id)


async def run_frozen(config: RunConfig, work_id: str) -> DriverReport:
    """Serve the frozen models, work on the held-out tasks, and leave nothing running."""
    state, place = "failed", ExitStack()
    run = await take_over(config, work_id, place)
    try:
        add_models(run)
        for child in run.children:
            await start_child(child)
        report = await _drive(run)
        await stop_children(run)
        state = "completed"
    except BaseException as error:
        state = "cancelled" if told_to_stop(error) else "failed"
        raise
    finally:
        await to_the_end(lambda: shut_down(run, state))
        place.close()
    return report


async def _drive(run: Run) -> DriverReport:
    """The work itself. Raises RunFailedError when a model ended before it was done."""
    reporter = RolloutReporter(run.config, "eval")
    working = asyncio.ensure_future(
        drive(
            run.config,
            run_id=run.run_id,
            gateway_url=run.gateway.url,
            store=run.store,
            mode="eval",
            reporter=reporter,
        )
    )
    reporting = asyncio.create_task(reporter.run())
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=POLL_S)
            await watch_children(run)
            if run.failures:
                reasons = "\n".join(f"{role}: {reason}" for role, reason in run.failures.items())
                raise RunFailedError(f"the evaluation failed:\n{reasons}")
        report = working.result()
    finally:
        for task in (working, reporting):
            task.cancel()
        await asyncio.gather(working, reporting, return_exceptions=True)
    await reporter.show(done=True)
    return report


def _document(
    plan: EvaluationPlan,
    config: RunConfig,
    report: DriverReport,
    *,
    duration_s: float,
    where: Literal["store", "live"],
) -> EvaluationDocument:
    ended = ", ".join(f"{n} {status}" for status, n in sorted(report.executions.items())) or "none began"
    if not report.executions.get("finalized"):
        raise RunFailedError(f"no execution of the evaluation was finished ({ended}): {report.errors}")
    if report.executions.get("unsettled"):
        raise RunFailedError(f"the evaluation came to no end ({ended}): start it again")
    return EvaluationDocument(
        plan=plan,
        executions=report.executions,
        reward=estimate(report.task_rewards),
        pass_at=pass_rates(
            report.task_rewards,
            samples_per_task=plan.samples_per_task,
            success_reward=config.evaluation.success_reward,
            unknown=report.task_unknown,
        ),
        agent_success=report.agent_success,
        task_rewards=report.task_rewards,
        created_at=time.time(),
        duration_s=duration_s,
        where=where,
    )
