"""Putting a version into service, as one task."""

from __future__ import annotations

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from model_runtime.errors import PublishError
from model_runtime.runtime import ModelAsyncRuntime
from tasks.reporting import announce
from tasks.staggering import turn

RETRY_DELAYS_S: list[float] = [2, 5, 15]


def _may_pass(_task: Task[Any, Any], _run: TaskRun, state: State) -> bool:
    """Retry what another attempt may cure: a replica that restarts, a store or gateway that was away."""
    return isinstance(state.data, PublishError | ConnectionError | TimeoutError)


@task(
    name="publish",
    task_run_name="publish v{version}",
    retries=len(RETRY_DELAYS_S),
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=_may_pass,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def publish(runtime: ModelAsyncRuntime, version: int) -> None:
    """When it is this model's turn, load the version beside the old one on every replica, verify it, flip the
    binding. A server that is being restarted meanwhile is waited for."""
    await runtime.until_servable()  # before the turn, which others wait for
    async with turn(runtime.config) as slot:
        await runtime.publish(version, **slot.as_columns())
    announce("version.published", model_id=runtime.model_id, run_id=runtime.run_id, version=version)
