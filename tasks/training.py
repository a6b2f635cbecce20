"""Training up to the next version, as one task."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_runtime.runtime import ModelAsyncRuntime


@task(name="train", task_run_name="train → v{target}", cache_policy=NO_CACHE, persist_result=False)
async def train_next(runtime: ModelAsyncRuntime, target: int) -> int | None:
    """Wait until the trainer has committed a version newer than the published one. None: no more will come.

    `target` only names the run; the version returned may be newer.
    """
    return await runtime.next_version()


@task(name="first version", task_run_name="first version", cache_policy=NO_CACHE, persist_result=False)
async def first_version(runtime: ModelAsyncRuntime) -> int | None:
    """Wait for the version this life of the model starts from: v0, or the newest in the store on resume."""
    return await runtime.next_version()
