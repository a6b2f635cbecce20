"""Checkpoints: what a trainer saved, and what the parent names together."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_runtime.checkpoints import read_manifest
from model_runtime.coordinator import CheckpointCoordinator
from model_runtime.documents import SnapshotDocument
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from tasks.reporting import announce


@task(name="checkpoint", task_run_name="checkpoint step {step}", cache_policy=NO_CACHE, persist_result=False)
async def record_checkpoint(store: Store, layout: RunLayout, model_id: str, step: int) -> str:
    """Read the manifest the trainer saved at this step, so that a broken one is seen at once; its URI."""
    manifest = await asyncio.to_thread(read_manifest, store, layout.model(model_id), step)
    uri = store.uri(layout.model(model_id).checkpoint(step))
    announce(
        "checkpoint.saved",
        model_id=model_id,
        run_id=layout.run_id,
        step=step,
        version=manifest.version,
        uri=uri,
    )
    return uri


@task(name="snapshot", task_run_name="snapshot", cache_policy=NO_CACHE, persist_result=False)
async def take_snapshot(coordinator: CheckpointCoordinator) -> SnapshotDocument | None:
    """Name the last checkpoint and version of every model together at the end of the run."""
    return await asyncio.to_thread(coordinator.snapshot, final=True)
