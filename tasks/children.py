"""Child flow runs: start them through their deployments, look at them without caring for outages."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

from tasks.lifecycle import final_runs
from tasks.reporting import may_pass

START_LIMIT_S = 300.0
"""Longest time one child's creation is tried: Prefect may be away for minutes, and be started again."""
ATTEMPT_LIMIT_S = 30.0
"""Longest time one attempt may take, of a server that takes the call and does not answer."""
MAX_CRASH_RESTARTS = 3
"""Times in a row one child is started again after its process was lost. A child that failed by itself is
not."""
STABLE_S = 600.0
"""A child that lived this long begins a new row."""


@dataclass(slots=True)
class Child:
    """One role of the run (`planner_model`, `rollout`) and the flow run that fills it now."""

    role: str
    deployments: tuple[str, ...]  # tried in this order: the model's own, then the default
    parameters: dict[str, Any]
    tags: list[str]
    idempotency_key: str
    flow_run_id: UUID | None = None
    incarnation: int = 1
    final: FlowRun | None = None
    started_at: float = 0.0  # monotonic
    num_lost: int = 0  # in a row
    history: list[str] = field(default_factory=list)
    silent_s: float = 0.0  # nothing was heard of it, while there was somebody to hear it
    busy_limit_s: float = 0.0  # it may be busy and silent for this long
    ending: bool = False  # it hangs, and is being ended to be started again

    @property
    def completed(self) -> bool:
        return self.final is not None and self.final.state is not None and self.final.state.is_completed()

    @property
    def lost(self) -> bool:
        """Its process is gone without a word of its own, or was ended because it hung."""
        if self.final is None or self.final.state is None:
            return False
        return self.final.state.is_crashed() or (self.ending and not self.completed)

    @property
    def outcome(self) -> str:
        """`Failed: …` as Prefect shows it."""
        if self.final is None or self.final.state is None:
            return "still running"
        return f"{self.final.state.name}: {self.final.state.message or 'no message'}"


async def start_child(child: Child) -> None:
    """Create the child's flow run, as a subflow of this one. Creating it twice gives the same run."""
    key = child.idempotency_key if child.incarnation == 1 else f"{child.idempotency_key}:{child.incarnation}"
    parameters = dict(child.parameters)
    if "incarnation" in parameters:
        parameters["incarnation"] = child.incarnation
    attempts = AsyncRetrying(
        retry=retry_if_exception(may_pass),
        wait=wait_exponential_jitter(multiplier=0.5, max=5.0),
        stop=stop_after_delay(START_LIMIT_S),
        reraise=True,
    )
    async for attempt in attempts:
        with attempt:
            async with asyncio.timeout(ATTEMPT_LIMIT_S):
                child.flow_run_id = (await _create(child, parameters, key)).id
    child.final, child.silent_s, child.ending = None, 0.0, False
    child.started_at = time.monotonic()


async def _create(child: Child, parameters: dict[str, Any], key: str) -> FlowRun:
    *first, last = child.deployments
    options: dict[str, Any] = {
        "parameters": parameters,
        "timeout": 0,
        "tags": child.tags,
        "idempotency_key": key,
    }
    for name in first:
        try:
            return await arun_deployment(name, **options)
        except ObjectNotFound:
            continue  # no deployment of its own: a model that a run of the UI brought new
    return await arun_deployment(last, **options)


async def look(children: list[Child]) -> list[Child]:
    """Note which children are final by now; those that became so since the last look."""
    waiting = {c.flow_run_id: c for c in children if c.final is None and c.flow_run_id is not None}
    ended = []
    for flow_run_id, run in (await final_runs(waiting)).items():
        child = waiting[flow_run_id]
        child.final = run
        child.history.append(child.outcome)
        ended.append(child)
    return ended


async def restart_if_lost(child: Child) -> bool:
    """Start a child whose process was lost again, within the budget. It goes on from what is in the store."""
    if not child.lost:
        return False
    lived_long = time.monotonic() - child.started_at > STABLE_S
    child.num_lost = 1 if lived_long else child.num_lost + 1
    if child.num_lost > MAX_CRASH_RESTARTS:
        return False
    child.incarnation += 1
    await start_child(child)
    return True
