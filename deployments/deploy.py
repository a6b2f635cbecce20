"""Registering a config's deployments on a Prefect server whose workers run them.

Again is an update in place. A model that left the config keeps its deployment, and with it the history of
its runs, but is paused and tagged `retired`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowFilter,
    FlowFilterName,
)
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings

from deployments.automations import Automated, automate
from deployments.infrastructure import DEFAULT_IMAGE, job_variables
from deployments.registration import CHECKPOINT_SCHEDULE, RETIRED, SCHEDULE, config_tag
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError, PrefectError

T = TypeVar("T")

CALL_LIMIT_S = 30.0
"""Longest wait for one answer of the server."""
MODEL_FLOW = "model-runtime"


@dataclass(frozen=True, slots=True)
class Deployed:
    """What one `deploy` did."""

    api_url: str
    work_pool: str
    models_pool: str
    pool_type: str
    registered: tuple[str, ...]  # flow/name
    retired: tuple[str, ...]
    automations: Automated


async def deploy(
    config: RunConfig, wanted: Sequence[RunnerDeployment], *, image: str = DEFAULT_IMAGE
) -> Deployed:
    """Register the deployments of this config, and retire models that it no longer names.

    `wanted`: `deployments_of(config, …)` on a work pool, made outside of an event loop, where Prefect would
    give coroutines. Raises ConfigError when no server is configured or the pool is not there, PrefectError
    when the server fails.
    """
    api_url = get_current_settings().api.url
    if not api_url:
        raise ConfigError(
            "no Prefect server is configured: set PREFECT_API_URL or use `prefect config set`; "
            "`repertory up` needs none, it brings its own"
        )
    work_pool = wanted[-1].work_pool_name  # the parent's; models may have one of their own
    assert work_pool is not None, "without a pool nobody would run them"
    try:
        async with get_client() as client:
            names = {d.work_pool_name for d in wanted if d.work_pool_name}
            pools = {name: await _require_pool(client, name) for name in sorted(names)}
            for deployment in wanted:
                pool = pools[deployment.work_pool_name or work_pool]
                deployment.job_variables = job_variables(
                    pool.type, config, flow_name=deployment.flow_name or "", name=deployment.name, image=image
                )
                await _register(client, deployment)
            retired = await _retire(client, config)
            async with asyncio.timeout(2 * CALL_LIMIT_S):
                automated = await automate(client, config)
    except PrefectHTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(
                f"Prefect at {api_url} asks for a password: set PREFECT_API_AUTH_STRING to user:password"
            ) from None
        raise PrefectError(f"Prefect at {api_url}: {error}") from error
    except httpx.ConnectError:
        raise ConfigError(
            f"PREFECT_API_URL: no Prefect server answers at {api_url}; start it (`prefect server start`), or "
            "correct the address"
        ) from None
    except (httpx.HTTPError, TimeoutError) as error:
        raise PrefectError(f"Prefect at {api_url}: {type(error).__name__} {error}".rstrip()) from error
    registered = tuple(f"{d.flow_name}/{d.name}" for d in wanted)
    models_pool = wanted[0].work_pool_name or work_pool
    pool_type = pools[work_pool].type
    return Deployed(str(api_url), work_pool, models_pool, pool_type, registered, tuple(retired), automated)


async def _require_pool(client: PrefectClient, name: str) -> WorkPool:
    try:
        return await _limited(client.read_work_pool(name))
    except ObjectNotFound:
        pools = sorted(pool.name for pool in await _limited(client.read_work_pools()))
        raise ConfigError(
            f"no work pool {name!r}; pools there: {pools or 'none'}. "
            f"Make one with: prefect work-pool create {name} --type process"
        ) from None


async def _register(client: PrefectClient, deployment: RunnerDeployment) -> None:
    """Create or update. Tags of other configs that share the model stay; one that was retired is back."""
    before = await _existing(client, f"{deployment.flow_name}/{deployment.name}")
    if before is not None:
        others = [tag for tag in before.tags if tag.startswith(config_tag(""))]
        deployment.tags = sorted({*(deployment.tags or []), *others})
        if RETIRED in before.tags:
            deployment.paused = False
    await _limited(deployment.aapply())
    if before is not None:  # Prefect keeps what the list does not name
        wanted = {schedule.slug for schedule in deployment.schedules or []}
        for schedule in before.schedules:
            if schedule.slug in {SCHEDULE, CHECKPOINT_SCHEDULE} - wanted:
                await _limited(client.delete_deployment_schedule(before.id, schedule.id))


async def _existing(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await _limited(client.read_deployment_by_name(name))
    except ObjectNotFound:
        return None


async def _retire(client: PrefectClient, config: RunConfig) -> list[str]:
    """Models this config registered once and no longer names; only those that no other config names are
    paused."""
    ours, named = config_tag(config.name), {model.model_id for model in config.models}
    found = await _limited(
        client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[MODEL_FLOW])),
            deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[ours])),
        )
    )
    retired = []
    for deployment in found:
        if deployment.name in named:
            continue
        tags = [tag for tag in deployment.tags if tag != ours]
        shared = any(tag.startswith(config_tag("")) for tag in tags)
        update = (
            DeploymentUpdate(tags=tags) if shared else DeploymentUpdate(tags=[*tags, RETIRED], paused=True)
        )
        await _limited(client.update_deployment(deployment.id, update))
        retired.append(f"{MODEL_FLOW}/{deployment.name}")
    return sorted(retired)


async def _limited(call: Awaitable[T]) -> T:
    async with asyncio.timeout(CALL_LIMIT_S):
        return await call
