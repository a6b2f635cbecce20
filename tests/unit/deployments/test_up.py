"""Following a run from outside of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.states import Running

from deployments import up
from deployments.up import PARENT_SILENT_LIMIT_S, follow
from model_runtime.protocol import GatewayStatus
from tests.fakes import make_gateway_status


class FakeGateway:
    """Its parent falls silent: each look finds it a minute later."""

    def __init__(self) -> None:
        self.silent_s = 0.0

    async def status(self) -> GatewayStatus:
        self.silent_s += 60.0
        return make_gateway_status(heard_s={"parent": self.silent_s})

    async def close(self) -> None:
        return


async def test_a_parent_that_hangs_is_ended_and_the_way_to_go_on_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, cancelled = FakeGateway(), list[float]()

    async def nothing(*_: Any) -> None:
        return

    async def gateway_of(*_: Any) -> FakeGateway:
        return gateway

    async def state(_: Any) -> Any:
        return Running()

    async def cancel() -> list[str]:
        cancelled.append(gateway.silent_s)
        return []

    monkeypatch.setattr(up, "_gateway_of", gateway_of)
    monkeypatch.setattr(up, "POLL_S", 0.0)
    launch: Any = SimpleNamespace(
        flow_run_id=uuid4(),
        run_id="run-1",
        cancel=cancel,
        stack=SimpleNamespace(tend=nothing, api=SimpleNamespace(state=state)),
    )
    said: list[str] = []
    view: Any = SimpleNamespace(say=said.append, show=lambda status, phase: None)
    outcome = await follow(launch, view)
    assert outcome is not None
    assert "its parent hung" in outcome
    assert "repertory up --resume run-1" in outcome
    assert cancelled == [PARENT_SILENT_LIMIT_S + 60.0]
    assert said == ["the run's parent has given no sign of life for 240 s: ending it"]
