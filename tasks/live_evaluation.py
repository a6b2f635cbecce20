"""Evaluating a run while it trains: by its own gateway and servers, with the versions that are current at the
start held in service until the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from model_runtime.config import RunConfig
from model_runtime.coordinator import read_run
from model_runtime.errors import BackendUnavailableError, ConflictError, RunFailedError
from model_runtime.evaluation import ModelVersion
from model_runtime.layout import RunLayout
from model_runtime.protocol import HoldRequest
from model_runtime.store import Store
from model_runtime.workflow import DriverReport
from tasks.gateway_admin import GatewayAdmin
from tasks.rollout import RolloutReporter, drive

log = logging.getLogger(__name__)

HOLD_TTL_S = 60.0
"""What nobody renews leaves service after this."""
RENEW_EVERY_S = 15.0


@dataclass(slots=True)
class LiveHold:
    """Versions of a live run that its gateway keeps in service for one evaluation."""

    admin: GatewayAdmin
    evaluation_id: str
    versions: dict[str, int]
    run_id: str

    def choices(self, config: RunConfig) -> list[ModelVersion]:
        """What is held, as an evaluation's plan is asked for."""
        trained = (m.model_id for m in config.trainable_models)
        return [ModelVersion(model_id=m, version=self.versions[m]) for m in trained]

    async def hold(self, versions: dict[str, int]) -> dict[str, int]:
        """Ask the gateway to hold these, and what it publishes of other models; what it holds. Raises as
        GatewayAdmin.hold does."""
        request = HoldRequest(ttl_s=HOLD_TTL_S, versions=versions, run_id=self.run_id)
        return (await self.admin.hold(self.evaluation_id, request)).versions

    async def keep(self) -> None:
        """Renew until cancelled. Raises ConflictError once the versions are not in service any more."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            await self.renew()

    async def renew(self) -> None:
        """Once. Raises ConflictError when the versions are not in service any more."""
        try:
            await self.hold(self.versions)
        except BackendUnavailableError as error:  # it may be starting anew: sessions wait for it too
            log.warning("%s", error)


@asynccontextmanager
async def live_hold(
    store: Store, layout: RunLayout, config: RunConfig, wanted: Sequence[ModelVersion]
) -> AsyncIterator[LiveHold | None]:
    """Hold the wanted versions, `latest` being what the gateway publishes. None: the run is not live, or does
    not serve them."""
    document = await asyncio.to_thread(read_run, store, layout)
    if document is None or document.state != "running" or document.gateway_url is None:
        yield None
        return
    if any(choice.version == "base" for choice in wanted):
        yield None
        return
    named = {choice.model_id: choice.version for choice in wanted if isinstance(choice.version, int)}
    hold = LiveHold(GatewayAdmin(document.gateway_url), uuid4().hex, {}, layout.run_id)
    try:
        try:
            hold.versions = await hold.hold(named)
        except (ConflictError, BackendUnavailableError) as error:
            log.info("run %s is not evaluated while it trains: %s", layout.run_id, error)
            yield None
            return
        missing = [m.model_id for m in config.models if m.model_id not in hold.versions]
        yield None if missing else hold
    finally:
        await hold.admin.release(hold.evaluation_id)
        await hold.admin.close()


async def evaluate_live(hold: LiveHold, config: RunConfig, *, run_id: str, store: Store) -> DriverReport:
    """Work on the held-out tasks through the run's gateway. Raises RunFailedError when the versions left
    service before the end."""
    reporter = RolloutReporter(config, "eval")
    driving = drive(
        config,
        run_id=run_id,
        gateway_url=hold.admin.url,
        store=store,
        mode="eval",
        reporter=reporter,
        versions=hold.versions,
    )
    working = asyncio.ensure_future(driving)
    keeping, reporting = asyncio.create_task(hold.keep()), asyncio.create_task(reporter.run())
    try:
        await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RunFailedError(f"the evaluation failed: {keeping.exception()}")
        report = working.result()
        await _require_kept(hold)
    finally:
        for task in (working, keeping, reporting):
            task.cancel()
        await asyncio.gather(working, keeping, reporting, return_exceptions=True)
    await reporter.show(done=True)
    return report


async def _require_kept(hold: LiveHold) -> None:
    """Executions that find no version any more end without a reward. Raises RunFailedError."""
    try:
        await hold.renew()
    except ConflictError as error:
        raise RunFailedError(f"the evaluation failed: {error}") from error
