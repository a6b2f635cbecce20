"""Bringing up what serves a model."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_runtime.runtime import ModelAsyncRuntime


@task(name="start server", task_run_name="start server", cache_policy=NO_CACHE, persist_result=False)
async def start_server(runtime: ModelAsyncRuntime) -> None:
    """Start the model's vLLM servers and wait until each has generated once."""
    await runtime.start_rollout_servers()


@task(name="start trainer", task_run_name="start trainer", cache_policy=NO_CACHE, persist_result=False)
async def start_trainer(runtime: ModelAsyncRuntime) -> None:
    """Start the model's trainer process; it commits version 0, or goes on from its checkpoint."""
    await runtime.start_trainer()


@task(name="serve", task_run_name="serve the last version", cache_policy=NO_CACHE, persist_result=False)
async def serve(runtime: ModelAsyncRuntime) -> str:
    """No more versions will come: serve the last one until told to stop; the reason."""
    return await runtime.serve_until_stopped()
