"""The work of the agents: a workflow over a task set, driven through the gateway."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled

from model_runtime.config import RunConfig
from model_runtime.layout import RunLayout
from model_runtime.patient_store import open_patient_store
from model_runtime.protocol import RunRole
from model_runtime.summary import HeldOut, write_held_out
from model_runtime.workflow import DriverReport
from tasks.credentials import load_credentials
from tasks.gateway_admin import give_signs_of_life
from tasks.lifecycle import Stopped, run_watched
from tasks.rollout import RolloutReporter, drive, report_line


def _run_name() -> str:
    given = this_run.parameters
    what = "held-out evaluation" if given.get("mode") == "eval" else "rollout"
    return f"{what} · {given['run_id']}"


@flow(name="rollout", flow_run_name=_run_name, persist_result=False)
async def rollout(
    run_id: str, epoch: int, gateway_url: str, config: RunConfig, mode: Literal["train", "eval"] = "train"
) -> Any:
    """Runs the workflow: `train` until the tasks or the training end, `eval` once over tasks held out.

    Args:
        run_id: The run the work belongs to.
        epoch: The life of the parent that started this.
        gateway_url: The gateway's control API, where groups and sessions are opened.
        config: The whole run's configuration.
        mode: train, or eval: the held-out tasks, outside of training, sampled as `evaluation` says.
    """
    await load_credentials(config.store)
    outcome = await run_watched(_work(run_id, epoch, gateway_url, config, mode))
    if isinstance(outcome, Stopped):
        return Cancelled(message=f"stopped: {outcome.reason}")
    return report_line(outcome.value)


async def _work(
    run_id: str, epoch: int, gateway_url: str, config: RunConfig, mode: Literal["train", "eval"]
) -> DriverReport:
    store, reporter = open_patient_store(config.store), RolloutReporter(config, mode)
    role: RunRole = "rollout" if mode == "train" else "evaluation"
    beside = [
        asyncio.create_task(reporter.run()),
        asyncio.create_task(give_signs_of_life(gateway_url, role)),
    ]
    try:
        report = await drive(
            config, run_id=run_id, gateway_url=gateway_url, store=store, mode=mode, reporter=reporter
        )
        if mode == "eval":
            held_out = HeldOut(
                temperature=config.evaluation.temperature,
                num_executions=report.num_executions,
                reward=report.mean_reward,
                agent_success=report.agent_success,
            )
            await asyncio.to_thread(write_held_out, store, RunLayout(run_id), epoch, held_out)
    finally:
        store.give_up()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    await reporter.show(done=True)
    return report
