"""The life of one model: serve it, train it, publish each version, until the run wants it no more."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled

from model_runtime.config import RunConfig
from model_runtime.errors import SupersededError
from model_runtime.layout import RunLayout
from model_runtime.own_address import place_servers
from model_runtime.patient_store import open_patient_store
from model_runtime.runtime import ModelAsyncRuntime
from tasks.alerts import TrainingWatch
from tasks.checkpoint import record_checkpoint
from tasks.credentials import load_credentials
from tasks.lifecycle import Stopped, run_watched, to_the_end
from tasks.metrics import ModelReporter
from tasks.narrator import Narrator, narrating
from tasks.publish import publish
from tasks.reporting import announce
from tasks.rollout_server import serve, start_server, start_trainer
from tasks.staggering import make_limit
from tasks.training import first_version, next_version


def _run_name() -> str:
    given = this_run.parameters
    again = f" (start {given['incarnation']})" if given.get("incarnation", 1) > 1 else ""
    return f"{given['run_id']} · {given['model_id']}{again}"


@flow(name="model-runtime", flow_run_name=_run_name, persist_result=False)
async def model_runtime(
    run_id: str, model_id: str, epoch: int, gateway_url: str, config: RunConfig, incarnation: int = 1
) -> Any:
    """Serves and trains one model of a run. Started by `multi-model-training`.

    Args:
        run_id: The run this model belongs to.
        model_id: Which of the config's models this is.
        epoch: The life of the parent that started this.
        gateway_url: The gateway's control API, where the model's lease is kept.
        config: The whole run's configuration.
        incarnation: Counts the starts of this model within the epoch.
    """
    await load_credentials(config.store)
    config = place_servers(config, model_id)
    core = ModelAsyncRuntime(
        config=config,
        model_id=model_id,
        run_id=run_id,
        epoch=epoch,
        incarnation=incarnation,
        gateway_url=gateway_url,
    )
    outcome = await run_watched(live(core, config))
    if isinstance(outcome, Stopped):
        return Cancelled(message=f"stopped: {outcome.reason}")
    return outcome.value


async def live(core: ModelAsyncRuntime, config: RunConfig) -> str:
    """Start, train and publish until no more versions come, then serve until stopped; the reason."""
    async with narrating() as narrator:
        return await _live(core, config, narrator)


async def _live(core: ModelAsyncRuntime, config: RunConfig, narrator: Narrator) -> str:
    model = config.model(core.model_id)
    store, layout = open_patient_store(config.store), RunLayout(core.run_id)
    who = {"model_id": core.model_id, "run_id": core.run_id, "config": config.name}
    watch = TrainingWatch(config.alerts, **who)
    reporter = ModelReporter(core, store.at_once(), layout, model, watch)
    reporting = asyncio.create_task(reporter.run())
    try:
        await asyncio.gather(start_server(core), start_trainer(core), make_limit(config))
        await _train_and_publish(core, narrator, store, layout)
        reason = await serve(core)
    except Exception as error:
        announce("model.failed", **who, reason=str(error)[:2000])
        raise
    finally:  # also when cancelled: within seconds, so nothing here waits for Prefect
        store.give_up()
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        watch.end()
        await to_the_end(core.close)
    await reporter.finish()
    return reason


async def _train_and_publish(
    core: ModelAsyncRuntime, narrator: Narrator, store: Any, layout: RunLayout
) -> None:
    recorded = core.checkpoint_step
    version = await first_version(core)
    while version is not None:
        try:
            await narrator.run(publish, core, version)
        except SupersededError:
            return  # whoever serves next is told why
        version = await next_version(narrator, core, target=version + 1)
        if core.checkpoint_step is not None and core.checkpoint_step != recorded:
            recorded = core.checkpoint_step
            await narrator.run(record_checkpoint, store, layout, core.model_id, recorded)
