"""A model that hangs is ended by its runner and started again; one that somebody cancelled is not."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from tasks import children
from tasks import hang_watch as module
from tasks.children import Child, restart_if_lost
from tasks.hang_watch import _end


async def test_a_child_that_was_ended_because_it_hung_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []

    async def run_deployment(name: str, **options: Any) -> FlowRun:
        started.append(options)
        return FlowRun.model_construct(id=uuid4())

    monkeypatch.setattr(children, "arun_deployment", run_deployment)
    asked: list[Any] = []

    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *exc: object) -> None:
            return None

        async def set_flow_run_state(self, flow_run_id: UUID, state: Any) -> None:
            asked.append((flow_run_id, state.type.value, state.message))

    monkeypatch.setattr(module, "get_client", Client)
    hung = Child(
        role="a",
        deployments=("model-runtime/a",),
        parameters={"model_id": "a", "incarnation": 1},
        tags=[],
        idempotency_key="r:a:1",
    )
    hung.flow_run_id, hung.silent_s = uuid4(), 200.0
    hung.final = FlowRun.model_construct(id=hung.flow_run_id, state=Cancelled(message="by the user"))
    assert not await restart_if_lost(hung), "cancelled by somebody else"
    hung.final = None
    await _end(hung)
    assert asked == [(hung.flow_run_id, "CANCELLING", "nothing was heard of a for 200 s; ending its process")]
    hung.final = FlowRun.model_construct(id=hung.flow_run_id, state=Cancelled())
    assert await restart_if_lost(hung)
    assert started[0]["parameters"]["incarnation"] == 2
    assert (hung.silent_s, hung.ending) == (0.0, False)
