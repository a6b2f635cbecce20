"""Taking turns: how many models of a run put a version into service at once.

A global concurrency limit of Prefect's, `repertory-sync-<name>`, has `sync.max_concurrent` slots. A publish
waits for one as long as the config says and then goes on without; Prefect being slow or away never holds it
up. How it went is in the publish's row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import concurrency

from model_runtime.config import RunConfig, artifact_slug
from tasks.reporting import tell

log = logging.getLogger(__name__)

LEASE_S = 120.0
"""A slot whose holder was killed is free after this long; the library renews it meanwhile."""
RELEASE_LIMIT_S = 3.0
"""Longest a slot's return may take, also of a model that is being cancelled."""
CALL_SLACK_S = 5.0
"""What the last answer of the server may take beyond the wait."""

Turn = Literal["taken", "passed", "unlimited", "away"]


@dataclass(frozen=True, slots=True)
class Slot:
    """How a publish came to its turn: `taken`; `passed`: none was free in time; `away`: Prefect did not
    answer; `unlimited`: none is asked for."""

    turn: Turn
    waited_s: float

    def as_columns(self) -> dict[str, object]:
        return {"turn": self.turn, "turn_wait_s": round(self.waited_s, 3)}


def limit_name(config: RunConfig) -> str:
    """The limit's name in Prefect, the same for every run of the config."""
    return f"repertory-sync-{artifact_slug(config.name)}"


async def make_limit(config: RunConfig) -> None:
    """Have Prefect hold the limit as the config says. Every model of a run does it, whoever is first."""
    slots = config.sync.max_concurrent
    if slots is None:
        return

    async def make() -> None:
        async with get_client() as client:
            try:
                await client.upsert_global_concurrency_limit_by_name(limit_name(config), slots)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.CONFLICT:  # another model was faster
                    raise

    await tell("the limit of concurrent syncs", make())


@contextlib.asynccontextmanager
async def turn(config: RunConfig) -> AsyncIterator[Slot]:
    """Hold one slot while the block runs, if there is one to be had."""
    slots, began = config.sync.max_concurrent, time.monotonic()
    if slots is None:
        yield Slot("unlimited", 0.0)
        return
    wait_s = config.sync.max_wait_s
    held = concurrency(
        limit_name(config),
        timeout_seconds=wait_s,
        lease_duration=LEASE_S,
        raise_on_lease_renewal_failure=False,
    )
    how: Turn = "taken"
    try:
        async with asyncio.timeout(wait_s + CALL_SLACK_S):
            await held.__aenter__()
    except TimeoutError:
        how = "passed"
        log.warning("no sync of the run ended within %.0f s: going on beside %d others", wait_s, slots)
    except (
        Exception
    ) as error:  # whatever the client raises when the server is away: a sync waits for no Prefect
        how = "away"
        log.warning("Prefect gave no turn (%s: %s): going on without", type(error).__name__, error)
    try:
        yield Slot(how, time.monotonic() - began)
    finally:
        if how == "taken":
            await tell("a sync's turn back", held.__aexit__(None, None, None), limit_s=RELEASE_LIMIT_S)
