"""Child flow runs: created once, looked at patiently, started again when lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Completed, Crashed, Failed

from tasks import children as module
from tasks.children import MAX_CRASH_RESTARTS, STABLE_S, Child, look, restart_if_lost, start_child


def child() -> Child:
    return Child(
        role="a",
        deployments=("model-runtime/a", "model-runtime/default"),
        parameters={"model_id": "a", "incarnation": 1},
        tags=["run:r"],
        idempotency_key="r:a:1",
    )


class Deployments:
    """Takes runs as arun_deployment does; `failures` are raised first, one a call."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, known: set[str], failures: list[Exception] | None = None
    ):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._known, self._failures = known, failures or []
        monkeypatch.setattr(module, "arun_deployment", self._run)

    async def _run(self, name: str, **options: Any) -> FlowRun:
        if self._failures:
            raise self._failures.pop(0)
        if name not in self._known:
            raise ObjectNotFound(Exception(name))
        self.calls.append((name, options))
        return FlowRun.model_construct(id=uuid4())


async def test_a_model_runs_through_its_own_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(monkeypatch, known={"model-runtime/a", "model-runtime/default"})
    started = child()
    await start_child(started)
    name, options = deployments.calls[0]
    assert name == "model-runtime/a"
    assert options["idempotency_key"] == "r:a:1"
    assert options["timeout"] == 0
    assert started.flow_run_id is not None


async def test_a_model_without_a_deployment_runs_through_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(monkeypatch, known={"model-runtime/default"})
    await start_child(child())
    assert [name for name, _ in deployments.calls] == ["model-runtime/default"]


async def test_an_outage_is_waited_for_with_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(
        monkeypatch,
        known={"model-runtime/a"},
        failures=[httpx.ConnectError("refused"), httpx.ReadTimeout("slow")],
    )
    await start_child(child())
    assert len(deployments.calls) == 1


async def test_a_server_that_takes_the_call_and_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def run_deployment(name: str, **options: Any) -> FlowRun:
        asked.append(options["idempotency_key"])
        if len(asked) == 1:
            await asyncio.sleep(3600)
        return FlowRun.model_construct(id=uuid4())

    monkeypatch.setattr(module, "arun_deployment", run_deployment)
    monkeypatch.setattr(module, "ATTEMPT_LIMIT_S", 0.05)
    await start_child(child())
    assert asked == ["r:a:1", "r:a:1"]


@pytest.mark.parametrize(("status", "calls"), [(503, 2), (429, 2), (422, 1)])
async def test_only_what_may_pass_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, status: int, calls: int
) -> None:
    request = httpx.Request("POST", "http://prefect/api")
    refusal = PrefectHTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
    asked: list[str] = []

    async def run_deployment(name: str, **options: Any) -> FlowRun:
        asked.append(name)
        if len(asked) == 1:
            raise refusal
        return FlowRun.model_construct(id=uuid4())

    monkeypatch.setattr(module, "arun_deployment", run_deployment)
    with contextlib.suppress(PrefectHTTPStatusError):
        await start_child(child())
    assert len(asked) == calls


def ended(monkeypatch: pytest.MonkeyPatch, states: dict[UUID, Any]) -> None:
    async def final_runs(ids: Any) -> dict[UUID, FlowRun]:
        return {i: FlowRun.model_construct(id=i, state=states[i]) for i in ids if i in states}

    monkeypatch.setattr(module, "final_runs", final_runs)


async def test_an_end_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done, running = child(), child()
    done.flow_run_id, running.flow_run_id = uuid4(), uuid4()
    ended(monkeypatch, {done.flow_run_id: Completed()})
    assert await look([done, running]) == [done]
    assert done.completed
    assert await look([done, running]) == []


async def test_only_a_lost_child_is_started_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(monkeypatch, known={"model-runtime/a"})
    lost = child()
    lost.flow_run_id = uuid4()
    lost.final = FlowRun.model_construct(id=lost.flow_run_id, state=Failed(message="own fault"))
    assert not await restart_if_lost(lost)
    for start in range(MAX_CRASH_RESTARTS):
        lost.final = FlowRun.model_construct(id=lost.flow_run_id, state=Crashed())
        assert await restart_if_lost(lost)
        _, options = deployments.calls[start]
        assert options["idempotency_key"] == f"r:a:1:{start + 2}"
        assert options["parameters"]["incarnation"] == start + 2
    lost.final = FlowRun.model_construct(id=lost.flow_run_id, state=Crashed(message="again"))
    assert not await restart_if_lost(lost)
    assert lost.outcome == "Crashed: again"


async def test_a_child_that_lived_long_before_it_was_lost_has_its_restarts_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployments = Deployments(monkeypatch, known={"model-runtime/a"})
    lost, starts = child(), 4 * MAX_CRASH_RESTARTS
    for _ in range(starts):
        lost.final = FlowRun.model_construct(id=uuid4(), state=Crashed())
        lost.started_at = time.monotonic() - STABLE_S - 1
        assert await restart_if_lost(lost)
    assert len(deployments.calls) == starts
    assert lost.incarnation == starts + 1
