"""Work that is watched, and flow runs that are asked to stop."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Completed, Running, Scheduled

from tasks import lifecycle
from tasks.lifecycle import Finished, Stopped, run_watched, to_the_end


async def _stays() -> str:
    await asyncio.Event().wait()
    return "never"


async def _work_until_stopped(cleaned: list[bool]) -> None:
    """Its cleanup takes a moment, and tells `cleaned` that it came to its end."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.05)
        cleaned.append(True)


async def test_work_that_ends_gives_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "stop_asked", _stays)
    assert await run_watched(asyncio.sleep(0, result=3)) == Finished(3)


async def test_work_that_fails_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "stop_asked", _stays)

    async def fail() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await run_watched(fail())


async def test_a_stop_cancels_the_work_and_waits_for_its_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop() -> str:
        await asyncio.sleep(0.01)
        return "the parent flow run is Crashed"

    monkeypatch.setattr(lifecycle, "stop_asked", stop)
    cleaned: list[bool] = []
    assert await run_watched(_work_until_stopped(cleaned)) == Stopped("the parent flow run is Crashed")
    assert cleaned == [True]


async def test_cancelling_the_flow_cleans_up_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "stop_asked", _stays)
    cleaned: list[bool] = []
    flow = asyncio.create_task(run_watched(_work_until_stopped(cleaned)))
    await asyncio.sleep(0.01)
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    assert cleaned == [True]


async def test_a_signal_that_cancels_every_task_at_once_lets_the_cleanup_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "stop_asked", _stays)
    cleaned: list[bool] = []
    flow = asyncio.create_task(run_watched(_work_until_stopped(cleaned)))
    await asyncio.sleep(0.01)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    assert cleaned == [True]


async def test_a_cleanup_that_is_cancelled_begins_again_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop() -> str:
        return "the flow run was cancelled"

    monkeypatch.setattr(lifecycle, "stop_asked", stop)
    steps: list[str] = []
    begun = asyncio.Event()

    async def cleanup() -> None:
        steps.append("begun")
        begun.set()
        await asyncio.sleep(0.05)
        steps.append("ended")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await to_the_end(cleanup)

    flow = asyncio.create_task(run_watched(work()))
    await begun.wait()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:  # the runner's SIGTERM, a moment later
        task.cancel()
    assert await flow == Stopped("the flow run was cancelled")
    assert steps == ["begun", "begun", "ended"]


async def test_a_signal_in_the_middle_of_a_cleanups_step_lets_the_cleanup_end() -> None:
    steps: list[str] = []

    async def cleanup() -> None:
        steps.append("begun")
        if len(steps) == 1:
            raise TerminationSignal(signal.SIGTERM)
        steps.append("ended")

    await to_the_end(cleanup)
    assert steps == ["begun", "begun", "ended"]


async def test_a_cleanup_that_fails_is_not_begun_again() -> None:
    async def cleanup() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await to_the_end(cleanup)


async def test_a_dead_runner_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = iter([100, 100, 1])
    monkeypatch.setattr(lifecycle.os, "getppid", lambda: next(pids))
    monkeypatch.setattr(lifecycle, "RUNNER_POLL_S", 0.001)
    assert await lifecycle._runner_died() == "the runner process 100 died"


class FakeClient:
    """Answers read_flow_run from a table."""

    def __init__(self, states: dict[str, object]) -> None:
        self._states = states

    async def read_flow_run(self, flow_run_id: object) -> SimpleNamespace:
        return SimpleNamespace(state=self._states[str(flow_run_id)])


@pytest.mark.parametrize(
    ("own", "parent", "reason"),
    [
        (Running(), Running(), None),
        (Cancelling(), Running(), "the flow run was cancelled"),
        (Running(), Completed(), "the parent flow run is Completed"),
        (Completed(name="Over"), Running(), "the flow run was set to Over"),
    ],
)
async def test_a_flow_run_stops_for_its_own_state_or_its_parents(
    own: object, parent: object, reason: str | None
) -> None:
    own_id, parent_id = str(uuid4()), str(uuid4())
    client = FakeClient({own_id: own, parent_id: parent})
    assert await lifecycle._stop_reason(client, own_id, parent_id) == reason  # type: ignore[arg-type]


def test_a_run_without_a_process_is_cancelled_at_once_and_an_ending_one_left_alone() -> None:
    def wanted(state: object) -> StateType | None:
        run = FlowRun.model_construct(id=uuid4(), state=state)
        found = lifecycle._cancel_state(run, "why")
        return found.type if found else None

    assert wanted(Scheduled()) == StateType.CANCELLED
    assert wanted(Running()) == StateType.CANCELLING
    assert wanted(Cancelling()) is None
    assert wanted(Completed()) is None


def test_a_locked_database_is_asked_again() -> None:
    calls: list[object] = []

    class Locked:
        def set_flow_run_state(self, flow_run_id: object, state: object) -> None:
            calls.append(state)
            if len(calls) < 3:
                raise RuntimeError("database is locked")

    assert lifecycle._set_state(Locked(), uuid4(), Cancelling())
    assert len(calls) == 3


@pytest.mark.parametrize(("state", "told"), [("Cancelling", ["Cancelled"]), ("Running", [])])
async def test_a_cancelled_flow_run_says_that_it_has_ended_once_its_cleanup_is_over(
    monkeypatch: pytest.MonkeyPatch, state: str, told: list[str]
) -> None:
    order: list[str] = []

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
            now = Cancelling() if state == "Cancelling" else Running()
            return SimpleNamespace(state=now)

        def set_flow_run_state(self, flow_run_id: UUID, wanted: Any) -> None:
            order.append(wanted.name)

    monkeypatch.setattr(lifecycle, "stop_asked", _stays)
    monkeypatch.setattr(lifecycle, "get_client", lambda **_: Client())
    monkeypatch.setattr(lifecycle, "this_run", SimpleNamespace(id=str(uuid4())))

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            order.append("cleaned")

    flow = asyncio.create_task(run_watched(work()))
    await asyncio.sleep(0.01)
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    assert order == ["cleaned", *told]
