"""Tasks that Prefect is told of by their states alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import task
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Completed

from tasks import narrator as module
from tasks.narrator import Narrator, narrating

FLOW_RUN = "00000000-0000-0000-0000-000000000001"


class FakeApi:
    """Task runs of a Prefect server that may be away, refuse, or lose its answers."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}
        self.messages: list[str | None] = []
        self.away = False
        self.refuses: str | None = None
        self.loses_answers = 0
        self.num_asked = 0
        self._names: dict[UUID, str] = {}

    async def create_task_run(
        self, task: Any, flow_run_id: UUID, dynamic_key: str, id: UUID, name: str, *, state: State
    ) -> None:
        self._answer(name)
        assert str(flow_run_id) == FLOW_RUN
        if id not in self._names:
            self._names[id] = name
            self._set(name, state)
        self._lose_answer()

    async def set_task_run_state(self, id: UUID, state: State, *, force: bool) -> None:
        self._answer(self._names[id])
        assert force, "no rule of the server's may keep a task from having ended"
        self._set(self._names[id], state)
        self._lose_answer()

    def _answer(self, name: str) -> None:
        self.num_asked += 1
        name.encode()  # as a request's body is
        if self.away:
            raise httpx.ConnectError("refused")
        if self.refuses == name:
            request = httpx.Request("POST", "http://prefect")
            error = httpx.HTTPStatusError("", request=request, response=httpx.Response(404, request=request))
            raise PrefectHTTPStatusError.from_httpx_error(error)

    def _set(self, name: str, state: State) -> None:
        (state.message or "").encode()
        self.states.setdefault(name, []).append(state.name or "")
        self.messages.append(state.message)

    def _lose_answer(self) -> None:
        if self.loses_answers:
            self.loses_answers -= 1
            raise httpx.ReadError("the connection broke")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()

    @asynccontextmanager
    async def client() -> AsyncIterator[FakeApi]:
        yield fake

    class Flow:
        id = FLOW_RUN

    monkeypatch.setattr(module, "get_client", client)
    monkeypatch.setattr(module, "this_run", Flow)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    return fake


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not reached():  # noqa: ASYNC110 - the fake knows of no event
            await asyncio.sleep(0.01)


@task(name="double", task_run_name="double {number}")
async def double(number: int) -> int:
    return 2 * number


@task(name="stop", task_run_name="stop")
async def find_nothing() -> Any:
    return Completed(name="Nothing more", message="after step 4")


async def test_a_task_is_run_and_told_under_its_name(api: FakeApi) -> None:
    async with narrating() as narrator:
        assert await narrator.run(double, 2) == 4
        assert await narrator.run(double, number=3) == 6
    assert api.states == {"double 2": ["Running", "Completed"], "double 3": ["Running", "Completed"]}


async def test_a_task_shows_as_running_while_it_runs(api: FakeApi) -> None:
    done = asyncio.Event()

    @task(name="wait")
    async def wait() -> None:
        await done.wait()

    async with narrating() as narrator:
        running = asyncio.create_task(narrator.run(wait))
        await until(lambda: "wait" in api.states)
        assert api.states["wait"] == ["Running"]
        done.set()
        await running
    assert api.states["wait"] == ["Running", "Completed"]


async def test_a_state_that_a_task_returns_is_its_last(api: FakeApi) -> None:
    async with narrating() as narrator:
        outcome = await narrator.run(find_nothing)
    assert isinstance(outcome, State)
    assert api.states["stop"] == ["Running", "Nothing more"]
    assert api.messages[-1] == "after step 4"


def failing(num_failures: int, error: type[Exception]) -> Any:
    """A task that is retried twice after a ConnectionError, and nothing else."""
    left = [num_failures]

    @task(
        name="try",
        retries=2,
        retry_delay_seconds=[0, 0],
        retry_condition_fn=lambda _task, _run, state: isinstance(state.data, ConnectionError),
    )
    async def attempt() -> str:
        if left[0]:
            left[0] -= 1
            raise error(f"{left[0]} more")
        return "done"

    return attempt


async def test_what_another_attempt_may_cure_is_tried_again(api: FakeApi) -> None:
    async with narrating() as narrator:
        assert await narrator.run(failing(2, ConnectionError)) == "done"
    again = ["AwaitingRetry", "Retrying"]
    assert api.states["try"] == ["Running", *again, *again, "Completed"]
    assert api.messages[1] == "ConnectionError: 1 more"


@pytest.mark.parametrize(
    ("num_failures", "error", "states"),
    [
        (3, ConnectionError, ["Running", *["AwaitingRetry", "Retrying"] * 2, "Failed"]),
        (1, ValueError, ["Running", "Failed"]),
    ],
)
async def test_a_failure_without_a_further_attempt_is_raised_and_told(
    api: FakeApi, num_failures: int, error: type[Exception], states: list[str]
) -> None:
    with pytest.raises(error, match="0 more"):
        async with narrating() as narrator:
            await narrator.run(failing(num_failures, error))
    assert api.states["try"] == states
    assert api.messages[-1] == f"{error.__name__}: 0 more"


async def test_a_task_that_is_stopped_is_told_as_cancelled(api: FakeApi) -> None:
    @task(name="wait")
    async def wait() -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        async with narrating() as narrator:
            await narrator.run(wait)

    living = asyncio.create_task(live())
    await asyncio.sleep(0.05)
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living
    assert api.states["wait"] == ["Running", "Cancelled"]


async def test_tasks_go_on_while_prefect_is_away_and_are_told_in_order_when_it_is_back(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.away = True
    with caplog.at_level(logging.WARNING):
        async with narrating() as narrator:
            for number in range(3):
                assert await narrator.run(double, number) == 2 * number
            await until(lambda: api.num_asked >= 5)  # that many times it was tried
            assert api.states == {}
            api.away = False
    assert list(api.states) == ["double 0", "double 1", "double 2"]
    assert set(map(tuple, api.states.values())) == {("Running", "Completed")}
    assert caplog.text.count("Prefect did not take a task") == 1, "an outage is one warning"


async def test_what_is_told_late_says_when_it_was(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.now(UTC)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now + timedelta(minutes=5)

    monkeypatch.setattr(module, "datetime", Later)
    async with narrating() as narrator:
        await narrator.run(find_nothing)
    running, over = api.messages
    assert running is not None
    assert running.startswith("at ")
    assert running.endswith(" UTC, told when Prefect was back")
    assert over == f"after step 4; {running}"


async def test_a_lost_answer_tells_nothing_twice(api: FakeApi) -> None:
    api.loses_answers = 1
    async with narrating() as narrator:
        await narrator.run(double, 2)
        await until(lambda: api.states.get("double 2") == ["Running", "Completed"])


async def test_a_task_that_prefect_refuses_holds_up_no_other(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.refuses = "double 2"
    async with narrating() as narrator:
        assert await narrator.run(double, 2) == 4
        assert await narrator.run(double, 3) == 6
    assert api.states == {"double 3": ["Running", "Completed"]}
    assert "Prefect refused the task double 2" in caplog.text


async def test_a_reason_that_utf_8_does_not_know_is_told_and_holds_up_no_other(api: FakeApi) -> None:
    @task(name="read")
    async def read() -> None:
        raise ValueError("adapter \udcff is damaged")

    async with narrating() as narrator:
        with pytest.raises(ValueError, match="is damaged"):
            await narrator.run(read)
        assert await narrator.run(double, 3) == 6
        await until(lambda: "double 3" in api.states)
    assert api.states == {"read": ["Running", "Failed"], "double 3": ["Running", "Completed"]}
    assert r"ValueError: adapter \udcff is damaged" in api.messages


async def test_a_task_whose_name_utf_8_does_not_know_is_told_with_it_written_out(api: FakeApi) -> None:
    @task(name="read", task_run_name="read {path}")
    async def read(path: str) -> None:
        return

    async with narrating() as narrator:
        await narrator.run(read, "\udcff")
        assert await narrator.run(double, 3) == 6
    assert api.states == {name: ["Running", "Completed"] for name in (r"read \udcff", "double 3")}


async def test_a_flow_ends_in_seconds_while_prefect_does_not_answer(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(api, "create_task_run", never)
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.05)
    async with asyncio.timeout(5), narrating() as narrator:
        assert await narrator.run(double, 2) == 4
    assert "did not take the last 1 tasks" in caplog.text


async def test_of_a_long_outage_the_oldest_tasks_stay_untold(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNTOLD", 2)
    api.away = True
    async with narrating() as narrator:
        for number in range(5):
            await narrator.run(double, number)
        api.away = False
    assert list(api.states) == ["double 3", "double 4"]


async def test_outside_of_a_flow_run_tasks_only_run(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFlow:
        id = None

    monkeypatch.setattr(module, "this_run", NoFlow)
    async with narrating() as narrator:
        assert isinstance(narrator, Narrator)
        assert await narrator.run(double, 2) == 4
    assert api.num_asked == 0
