"""The agents' work as one task, and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal
from uuid import UUID

from prefect import task
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal

from model_runtime.config import RunConfig, artifact_slug
from model_runtime.store import Store
from model_runtime.workflow import DriverProgress, DriverReport, RolloutDriver
from tasks.reporting import tell

PROGRESS_EVERY_S = 5.0

Mode = Literal["train", "eval"]


class RolloutReporter:
    """Shows the newest progress of a driver, at most every few seconds."""

    def __init__(self, config: RunConfig, mode: Mode) -> None:
        what = "evaluation" if mode == "eval" else "rollout"
        self._key = f"{artifact_slug(config.name)}-{what}-progress"
        self._newest: DriverProgress | None = None
        self._artifact: UUID | None = None

    def note(self, progress: DriverProgress) -> None:
        """The driver's callback: keeps the newest and returns at once."""
        self._newest = progress

    async def run(self) -> None:
        """Show until cancelled."""
        while True:
            await self.show()
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def show(self, *, done: bool = False) -> None:
        if self._newest is None:
            return
        percent, text = (100.0 if done else percent_of(self._newest)), describe(self._newest)
        if self._artifact is None:
            create = acreate_progress_artifact(percent, key=self._key, description=text)
            self._artifact = await tell("the rollout's progress", create)
        else:
            update = aupdate_progress_artifact(self._artifact, percent, description=text)
            await tell("the rollout's progress", update)


def percent_of(progress: DriverProgress) -> float:
    """Share of the groups opened; of the executions done where none is opened, in an evaluation."""
    done = progress.groups_opened if progress.mode == "train" else sum(progress.executions.values())
    return round(100.0 * min(1.0, done / max(1, progress.groups_total)), 1)


def describe(progress: DriverProgress) -> str:
    """`120 of 600 groups opened, 64 executions running; 870 finalized, 2 expired; mean reward 0.41`.

    An evaluation opens no groups: `40 executions to do, 8 executions running; …`."""
    settled = ", ".join(f"{n} {status}" for status, n in sorted(progress.executions.items()))
    reward = "" if progress.mean_reward is None else f"; mean reward {progress.mean_reward:.2f}"
    opened = f"{progress.groups_opened} of {progress.groups_total} groups opened"
    return (
        f"{opened if progress.mode == 'train' else f'{progress.groups_total} executions to do'}, "
        f"{progress.running} executions running; {settled or 'none settled'}{reward}"
        f"{skipped_tasks(progress.skipped_tasks)}"
    )


@task(name="drive", task_run_name="drive agents ({mode})", cache_policy=NO_CACHE, persist_result=False)
async def drive(
    config: RunConfig,
    *,
    run_id: str,
    gateway_url: str,
    store: Store,
    mode: Mode,
    reporter: RolloutReporter,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> DriverReport:
    """Run the workflow over the task set; returns when the tasks or the training are over. `versions` answer
    an evaluation in place of the published ones."""
    driver = RolloutDriver(
        config,
        run_id=run_id,
        gateway_url=gateway_url,
        store=store,
        mode=mode,
        progress=reporter.note,
        versions=versions,
        stop_signals=(KeyboardInterrupt, TerminationSignal),
    )
    return await driver.run()


def report_line(report: DriverReport) -> str:
    """The flow run's last word."""
    settled = ", ".join(f"{n} {status}" for status, n in sorted(report.executions.items()))
    reward = "no reward" if report.mean_reward is None else f"mean reward {report.mean_reward:.3f}"
    return (
        f"{report.groups_opened} groups, {report.num_calls} model calls, "
        f"{settled or 'none settled'}, {reward}{skipped_tasks(report.skipped_tasks)}"
    )


def skipped_tasks(places: tuple[int, ...], *, shown: int = 20) -> str:
    """`; 2 tasks skipped, never finished: 3, 17`; empty for none. Their content stays out of Prefect."""
    if not places:
        return ""
    more = ", …" if len(places) > shown else ""
    named = ", ".join(map(str, places[:shown]))
    return f"; {len(places)} task{'s' * (len(places) > 1)} skipped, never finished: {named}{more}"
