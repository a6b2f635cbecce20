"""Children that are alive and silent: ended, to be started again like one that was lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from model_runtime.protocol import GatewayStatus
from tasks.children import Child
from tasks.gateway_admin import GatewayAdmin
from tasks.lifecycle import CALL_LIMIT_S

log = logging.getLogger(__name__)

LISTEN_EVERY_S = 5.0
SILENT_LIMIT_S = 180.0
"""A model's runtime that renews no lease for this long hangs, or never came up; so does a driver that gives
no sign of life."""
HEARD_S = 30.0
"""A driver that gave a sign of life no longer ago works."""


class HangWatch:
    """Listens for the leases that the gateway sees renewed, and for the drivers' signs of life.

    Time in which the gateway could not be asked, or this process stood still, is held against nobody.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._listened_at = time.monotonic()

    async def end_hung(self, children: Iterable[Child], admin: GatewayAdmin) -> None:
        """Called again and again; looks every few seconds."""
        now = time.monotonic()
        passed_s = min(now - self._listened_at, 2 * LISTEN_EVERY_S)
        if now - self._listened_at < LISTEN_EVERY_S:
            return
        self._listened_at = now
        status = await admin.status()
        if status is None:
            return
        for child in children:
            heard = self._is_heard(child.role, status)
            child.silent_s = 0.0 if heard else child.silent_s + passed_s
            limit_s = max(SILENT_LIMIT_S, child.busy_limit_s)
            if child.final is None and not child.ending and child.silent_s > limit_s:
                await _end_if_begun(child, limit_s)

    def _is_heard(self, role: str, status: GatewayStatus) -> bool:
        model = status.models.get(role)
        if model is not None:
            return model.age_s is not None and model.age_s < self._lease_s
        return status.heard_s.get(role, HEARD_S) < HEARD_S


async def _end_if_begun(child: Child, limit_s: float) -> None:
    """Have its runner end the child's process: SIGTERM, then SIGKILL. Its parent starts it again after its
    end. A child is not silent before it has begun: it may wait for a worker, or for its image, for hours."""
    assert child.flow_run_id is not None
    try:
        async with asyncio.timeout(CALL_LIMIT_S), get_client() as client:
            began_at = (await client.read_flow_run(child.flow_run_id)).start_time
            lived_s = 0.0 if began_at is None else (datetime.now(UTC) - began_at).total_seconds()
            child.silent_s = min(child.silent_s, lived_s)
            if child.silent_s <= limit_s:
                return
            reason = f"nothing was heard of {child.role} for {child.silent_s:.0f} s; ending its process"
            log.error("%s", reason)
            await client.set_flow_run_state(child.flow_run_id, Cancelling(message=reason))
    except ObjectNotFound:  # deleted by somebody, with nothing left to end it by
        log.warning("%s is silent, and its flow run is gone from Prefect", child.role)
        return
    except (httpx.HTTPError, PrefectHTTPStatusError, TimeoutError) as error:  # Prefect is away: tried again
        log.warning("%s could not be ended yet: %s", child.role, error)
        return
    child.ending = True
