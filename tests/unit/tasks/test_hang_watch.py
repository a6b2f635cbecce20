"""A model that hangs is ended by its runner and started again; one that somebody cancelled is not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from tasks import children
from tasks import hang_watch as module
from tasks.children import Child, restart_if_lost
from tasks.hang_watch import _end_if_begun


class Prefect:
    """Knows one flow run, which began `began_s` ago, and notes the states it is asked to set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, began_s: float | None) -> None:
        self.asked: list[tuple[UUID, str, str | None]] = []
        self.began_s, self.is_deleted = began_s, False
        monkeypatch.setattr(module, "get_client", lambda: self)

    async def __aenter__(self) -> Prefect:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        if self.is_deleted:
            raise ObjectNotFound(Exception(str(flow_run_id)))
        began_at = None if self.began_s is None else datetime.now(UTC) - timedelta(seconds=self.began_s)
        return FlowRun.model_construct(id=flow_run_id, start_time=began_at)

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any) -> None:
        self.asked.append((flow_run_id, state.type.value, state.message))


def silent_child(silent_s: float) -> Child:
    return Child(
        role="a",
        deployments=("model-runtime/a",),
        parameters={"model_id": "a", "incarnation": 1},
        tags=[],
        idempotency_key="r:a:1",
        flow_run_id=uuid4(),
        silent_s=silent_s,
    )


async def test_a_child_that_was_ended_because_it_hung_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []

    async def run_deployment(name: str, **options: Any) -> FlowRun:
        started.append(options)
        return FlowRun.model_construct(id=uuid4())

    monkeypatch.setattr(children, "arun_deployment", run_deployment)
    prefect = Prefect(monkeypatch, began_s=300.0)
    hung = silent_child(200.0)
    hung.final = FlowRun.model_construct(id=hung.flow_run_id, state=Cancelled(message="by the user"))
    assert not await restart_if_lost(hung), "cancelled by somebody else"
    hung.final = None
    await _end_if_begun(hung, 180.0)
    reason = "nothing was heard of a for 200 s; ending its process"
    assert prefect.asked == [(hung.flow_run_id, "CANCELLING", reason)]
    hung.final = FlowRun.model_construct(id=hung.flow_run_id, state=Cancelled())
    assert await restart_if_lost(hung)
    assert started[0]["parameters"]["incarnation"] == 2
    assert (hung.silent_s, hung.ending) == (0.0, False)


async def test_a_child_that_waits_for_a_worker_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    prefect = Prefect(monkeypatch, began_s=None)
    waiting = silent_child(4000.0)
    await _end_if_begun(waiting, 180.0)
    assert (waiting.silent_s, waiting.ending) == (0.0, False)
    prefect.began_s, waiting.silent_s = 20.0, 185.0
    await _end_if_begun(waiting, 180.0)
    assert waiting.silent_s < 30.0, "its silence counts from when its process began"
    assert prefect.asked == []


async def test_a_silent_child_whose_flow_run_was_deleted_does_not_end_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefect = Prefect(monkeypatch, began_s=300.0)
    prefect.is_deleted = True
    deleted = silent_child(200.0)
    await _end_if_begun(deleted, 180.0)
    assert (deleted.ending, prefect.asked) == (False, [])
