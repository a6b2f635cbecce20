"""The parent's and the command line's side of the gateway's control API. Imports no Prefect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import httpx
from pydantic import ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from model_runtime.documents import DesiredState
from model_runtime.errors import BackendUnavailableError, ConflictError
from model_runtime.protocol import (
    DesiredRequest,
    GatewayStatus,
    HoldAnswer,
    HoldRequest,
    RunRole,
    SignOfLife,
    admin_key,
)

log = logging.getLogger(__name__)

ATTEMPT_LIMIT_S = 5.0
ALIVE_EVERY_S = 5.0
"""Between two signs of life."""


class GatewayAdmin:
    """Status and desired state of one gateway, over one connection pool."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        run_id: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`key` None: from the environment. `run_id` is for a URL out of a run's document, whose port may be
        another run's by now: that one's gateway does not answer for this one."""
        self.url = url
        self._run_id = run_id
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key or admin_key()}"},
            timeout=ATTEMPT_LIMIT_S,
            transport=transport,
            trust_env=False,  # a proxy of the environment never stands before our own gateway
        )

    async def healthy(self) -> bool:
        """Does it answer /health with 200?"""
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def status(self) -> GatewayStatus | None:
        """GET /admin/status; None while the run's gateway does not answer."""
        try:
            answer = await self._http.get("/admin/status")
            if answer.status_code != 200:
                return None
            status = GatewayStatus.model_validate_json(answer.content)
        except (httpx.HTTPError, ValidationError):
            return None
        return status if self._run_id in (None, status.run_id) else None

    async def alive(self, role: RunRole, *, failed_models: Iterable[str] = ()) -> None:
        """POST /admin/alive. One that does not arrive is followed by another."""
        sign = SignOfLife(role=role, failed_models=list(failed_models))
        try:
            await self._http.post("/admin/alive", json=sign.model_dump())
        except httpx.HTTPError as error:
            log.debug("a sign of life of %s did not reach the gateway: %r", role, error)

    async def want(self, state: DesiredState, *, reason: str = "", limit_s: float = 30.0) -> None:
        """PUT /admin/desired, again until it is taken. Raises BackendUnavailableError after `limit_s`."""
        body = DesiredRequest(state=state, reason=reason).model_dump()
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(httpx.HTTPError),
            wait=wait_exponential_jitter(multiplier=0.2, max=2.0),
            stop=stop_after_delay(limit_s),
            reraise=True,
        )
        try:
            async for attempt in attempts:
                with attempt:
                    (await self._http.put("/admin/desired", json=body)).raise_for_status()
        except httpx.HTTPError as error:
            raise BackendUnavailableError(
                f"the gateway at {self.url} did not take {state!r} within {limit_s:.0f} s: {error!r}"
            ) from error

    async def hold(self, evaluation_id: str, request: HoldRequest) -> HoldAnswer:
        """PUT /admin/evaluations/…: keep versions in service for an evaluation. Raises ConflictError when
        they can't be kept, BackendUnavailableError when the gateway does not answer, or has not heard of its
        models yet."""
        try:
            answer = await self._http.put(
                f"/admin/evaluations/{evaluation_id}", json=request.model_dump(mode="json")
            )
            if answer.is_client_error:
                raise ConflictError(f"the gateway holds no versions: {_message(answer)}")
            if answer.is_server_error:
                raise BackendUnavailableError(f"the gateway holds no versions yet: {_message(answer)}")
            return HoldAnswer.model_validate_json(answer.content)
        except (httpx.HTTPError, ValidationError) as error:
            raise BackendUnavailableError(f"the gateway at {self.url} did not answer: {error!r}") from error

    async def release(self, evaluation_id: str) -> None:
        """DELETE /admin/evaluations/…. What is not released ends by itself."""
        try:
            await self._http.delete(f"/admin/evaluations/{evaluation_id}")
        except httpx.HTTPError as error:
            log.info("evaluation %s was not released: %r", evaluation_id, error)

    async def close(self) -> None:
        await self._http.aclose()


async def give_signs_of_life(url: str, role: RunRole) -> None:
    """Until cancelled. They stop when this process does, or when its event loop is held up."""
    admin = GatewayAdmin(url)
    try:
        while True:
            await admin.alive(role)
            await asyncio.sleep(ALIVE_EVERY_S)
    finally:
        await admin.close()


def _message(answer: httpx.Response) -> str:
    """What a refusal says, in the shape of the gateway's errors."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
