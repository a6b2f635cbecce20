"""Telling Prefect what happens, so that Prefect being slow or away never holds anything up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import httpx
from prefect.events import emit_event
from prefect.exceptions import PrefectHTTPStatusError

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_LIMIT_S = 10.0
"""Longest one report may take, Prefect's own retries included."""


async def tell(what: str, call: Awaitable[T], *, limit_s: float = CALL_LIMIT_S) -> T | None:
    """Await one call to Prefect. A failure or a timeout is logged once as a warning and answered with None:
    reports describe the run, they are not the run."""
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except TimeoutError:
        log.warning("Prefect did not take %s within %.0f s; going on without", what, limit_s)
    except Exception as error:  # any client error: the next report tries again
        log.warning("Prefect did not take %s: %s: %s", what, type(error).__name__, error)
    return None


def may_pass(error: BaseException) -> bool:
    """May another attempt do? What the server refuses for the request's own sake, it refuses again."""
    if isinstance(error, PrefectHTTPStatusError):
        return error.response.is_server_error or error.response.status_code in (408, 429)
    return isinstance(error, (httpx.TransportError, TimeoutError))


def announce(event: str, *, model_id: str, run_id: str, config: str = "", **payload: Any) -> None:
    """Emit a Prefect event about a model (`version.published`, `checkpoint.saved`, `model.failed`).

    Queued in this process and sent in the background; automations match on `repertory.model.<model_id>`, and
    those of a config on its name too: two configs may each have a model of that id.
    """
    try:
        emit_event(
            event,
            resource={
                "prefect.resource.id": f"repertory.model.{model_id}",
                "prefect.resource.name": model_id,
                "repertory.run-id": run_id,
                "repertory.config": config,
            },
            payload=payload,
        )
    except Exception as error:  # same as `tell`: an event never fails a run
        log.warning("Prefect did not take the event %s of %s: %s", event, model_id, error)
