"""The few things the launcher asks of a Prefect server, by its address: independent of any Prefect settings
of the process it runs in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Cancelling, Crashed

from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError, PrefectError

PARENT_FLOW = "multi-model-training"
FLOWS = [PARENT_FLOW, "model-runtime", "rollout", "evaluate"]
CALL_LIMIT_S = 15.0

_FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
_ACTIVE = [t for t in StateType if t not in _FINAL]


class PrefectApi:
    """Flow runs of one server."""

    def __init__(self, api_url: str) -> None:
        self.api_url = api_url

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/").removesuffix("/api")

    async def healthy(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
                return (await http.get(f"{self.api_url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def served(self, deployment: str, version: str) -> bool:
        """Is this deployment there, registered by the runner that calls itself `version`?"""
        try:
            async with self._client() as client, asyncio.timeout(CALL_LIMIT_S):
                found = await client.read_deployment_by_name(deployment)
                return found.version == version
        except (ObjectNotFound, httpx.HTTPError, TimeoutError):
            return False

    async def launch(self, config: RunConfig, run_id: str) -> FlowRun:
        """Create the parent's flow run."""
        with _translated("the run could not be created"):
            return await self._launch(config, run_id)

    async def _launch(self, config: RunConfig, run_id: str) -> FlowRun:
        async with self._client() as client:
            deployment = await client.read_deployment_by_name(f"{PARENT_FLOW}/{config.name}")
            return await client.create_flow_run_from_deployment(
                deployment.id,
                name=run_id,
                parameters={"run_id": run_id, "config": config.model_dump(mode="json")},
                tags=[f"run:{run_id}"],
            )

    async def state(self, flow_run_id: UUID) -> State | None:
        """The flow run's state; None while the server can't be asked. One that was deleted has crashed."""
        try:
            async with self._client() as client, asyncio.timeout(CALL_LIMIT_S):
                return (await client.read_flow_run(flow_run_id)).state
        except ObjectNotFound:
            return Crashed(message="its flow run was deleted from Prefect")
        except (httpx.HTTPError, TimeoutError):
            return None

    async def active_runs(self, run_id: str) -> list[FlowRun]:
        """Flow runs of this run that are not final."""
        return await self._active(FlowRunFilterTags(all_=[f"run:{run_id}"]))

    async def cancel(self, run_id: str) -> int:
        """Ask the run's parent to stop, or its children where the parent is gone; how many were asked."""
        runs = await self.active_runs(run_id)
        parents = [run for run in runs if run.parent_task_run_id is None]
        asked = parents or runs
        with _translated("the run could not be cancelled"):
            await self._cancel(asked)
        return len(asked)

    async def _cancel(self, runs: list[FlowRun]) -> None:
        async with self._client() as client:
            for run in runs:
                early = run.state is not None and run.state.type in (StateType.SCHEDULED, StateType.PAUSED)
                wanted = Cancelled if early else Cancelling
                with suppress(ObjectNotFound):  # deleted meanwhile
                    await client.set_flow_run_state(run.id, wanted(message="stopped by the user"))

    async def wait_until_none_active(self, run_id: str, *, limit_s: float) -> list[FlowRun]:
        """Wait until every flow run of this run is final; those that are not after `limit_s`."""
        until = time.monotonic() + limit_s
        while True:
            try:
                left = await self.active_runs(run_id)
            except PrefectError:
                left = None
            if left == [] or time.monotonic() > until:
                return left or []
            await asyncio.sleep(0.5)

    async def bury(self) -> list[str]:
        """Set every active flow run to Crashed. Only for a server whose runner is known to be dead; names."""
        dead = await self._active(None)
        async with self._client() as client:
            for run in dead:
                state = Crashed(message="its runner had died before this server was started again")
                with suppress(ObjectNotFound):  # deleted meanwhile
                    await client.set_flow_run_state(run.id, state, force=True)
        return [run.name for run in dead]

    async def _active(self, tags: FlowRunFilterTags | None) -> list[FlowRun]:
        with _translated("its flow runs could not be read"):
            return await self._read_active(tags)

    async def _read_active(self, tags: FlowRunFilterTags | None) -> list[FlowRun]:
        async with self._client() as client, asyncio.timeout(CALL_LIMIT_S):
            return await client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=FLOWS)),
                flow_run_filter=FlowRunFilter(
                    tags=tags, state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ACTIVE))
                ),
            )

    def _client(self) -> PrefectClient:
        given = get_current_settings()
        # A server that is started here asks for what its own setting says, and so must we.
        secret = given.api.auth_string or given.server.api.auth_string
        return PrefectClient(
            api=self.api_url,
            auth_string=secret.get_secret_value() if secret else None,
            api_key=given.api.key.get_secret_value() if given.api.key else None,
        )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """A client's error as one of ours, with the server's own words."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise PrefectError(f"Prefect: {what}: {error.response.status_code} {error.response.text}") from error
    except ObjectNotFound as error:
        raise PrefectError(f"Prefect: {what}: it is not there ({error.http_exc})") from error
    except (httpx.HTTPError, TimeoutError) as error:
        raise PrefectError(f"Prefect: {what}: {type(error).__name__} {error}") from error


async def require_api(api: PrefectApi) -> None:
    """Raise ConfigError when no server answers there."""
    if not await api.healthy():
        raise ConfigError(
            f"PREFECT_API_URL: no Prefect server answers at {api.api_url}/health; "
            "start it, or unset the variable to use one of our own"
        )
