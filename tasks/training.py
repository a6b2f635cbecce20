"""Training up to the next version, as one task."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from model_runtime.runtime import ModelAsyncRuntime
from tasks.narrator import Narrator

NO_MORE_VERSIONS = "No more versions"
"""State of the last `train → v<n>`, which yields none."""


@task(name="train", task_run_name="train → v{target}", cache_policy=NO_CACHE, persist_result=False)
async def train_next(runtime: ModelAsyncRuntime, target: int) -> Any:
    """Wait until the trainer has committed a version newer than the published one. None: no more will come,
    which the task's state says.

    `target` only names the run; the version returned may be newer.
    """
    version = await runtime.next_version()
    if version is not None:
        return version
    return Completed(name=NO_MORE_VERSIONS, message=_why_none(runtime), data=None)


async def next_version(narrator: Narrator, runtime: ModelAsyncRuntime, target: int) -> int | None:
    """`train_next`, as the flow asks it: the version, or None."""
    outcome = await narrator.run(train_next, runtime, target)
    return None if isinstance(outcome, State) else outcome


def _why_none(runtime: ModelAsyncRuntime) -> str:
    """`after step 40: finished`, or that the run is to stop."""
    if runtime.stop_reason is not None:
        return f"the run is to stop: {runtime.stop_reason}"
    status = runtime.trainer_status
    return "this model is not trained" if status is None else f"after step {status.step}: {status.state}"


@task(name="first version", task_run_name="first version", cache_policy=NO_CACHE, persist_result=False)
async def first_version(runtime: ModelAsyncRuntime) -> int | None:
    """Wait for the version this life of the model starts from: v0, or the newest in the store on resume."""
    return await runtime.next_version()
