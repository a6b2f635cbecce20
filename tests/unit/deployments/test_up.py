"""Following a run from outside of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.states import Completed, Running, Scheduled

from deployments import up
from deployments.up import PARENT_SILENT_LIMIT_S, SUMMARY_LIMIT_S, follow
from model_runtime.protocol import GatewayStatus
from model_runtime.workspace import HOME_ENV, Workspace
from tasks.gateway import START_LIMIT_S
from tests.fakes import make_gateway_status

LOOK_S = 10.0
MAX_OUTAGE_S = 600.0
UNSEEN_LIMIT_S = PARENT_SILENT_LIMIT_S + START_LIMIT_S + MAX_OUTAGE_S


class Followed:
    """A launch as `follow` sees it, ten seconds later at each look; of the gateway, what a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.url: str | None = "http://gateway"
        self.status_of: Callable[[float], GatewayStatus | None] = lambda now_s: None
        self.state_of: Callable[[float], Any] = lambda now_s: Running()
        self.cancelled_at_s: list[float] = []
        self.said: list[str] = []

    async def follow(self) -> str | None:
        async def nothing(*_: Any, **__: Any) -> None:
            return

        api = SimpleNamespace(state=self._state, wait_until_none_active=nothing)
        launch: Any = SimpleNamespace(
            flow_run_id=uuid4(),
            run_id="run-1",
            cancel=self._cancel,
            config=SimpleNamespace(store=SimpleNamespace(max_outage_s=MAX_OUTAGE_S)),
            stack=SimpleNamespace(tend=nothing, api=api),
        )
        view: Any = SimpleNamespace(say=self.said.append, show=lambda status, phase: None)
        return await follow(launch, view)

    async def gateway(self, *_: Any) -> Any:
        async def status() -> GatewayStatus | None:
            return self.status_of(self.now_s)

        async def close() -> None:
            return

        return SimpleNamespace(url=self.url, status=status, close=close) if self.url else None

    async def _state(self, _: Any) -> Any:
        self.now_s += LOOK_S
        assert self.now_s < 20_000, "a silent parent is waited for without end"
        return self.state_of(self.now_s)

    async def _cancel(self) -> list[str]:
        self.cancelled_at_s.append(self.now_s)
        return []


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    made = Followed()
    monkeypatch.setenv(HOME_ENV, str(tmp_path))
    monkeypatch.setattr(up, "_gateway_of", made.gateway)
    monkeypatch.setattr(up, "POLL_S", 0.0)
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


async def test_a_parent_that_hangs_is_ended_and_the_way_to_go_on_is_said(followed: Followed) -> None:
    followed.status_of = lambda now_s: make_gateway_status(heard_s={"parent": now_s})
    outcome = await followed.follow()
    assert outcome is not None
    assert "its parent hung" in outcome
    assert "repertory up --resume run-1" in outcome
    assert followed.cancelled_at_s == [PARENT_SILENT_LIMIT_S + LOOK_S]
    assert followed.said == ["the run's parent has given no sign of life for 190 s: ending it"]


@pytest.mark.parametrize("url", [None, "http://gateway"], ids=["none_was_begun", "its_process_is_dead"])
async def test_a_parent_that_hangs_without_a_gateway_is_ended_too(
    followed: Followed, url: str | None
) -> None:
    followed.url = url
    outcome = await followed.follow()
    assert outcome is not None
    assert "repertory up --resume run-1" in outcome
    assert UNSEEN_LIMIT_S < followed.cancelled_at_s[0] <= UNSEEN_LIMIT_S + 2 * LOOK_S


async def test_a_parent_that_hangs_before_the_gateway_heard_of_it_is_ended_too(followed: Followed) -> None:
    followed.status_of = lambda now_s: make_gateway_status(heard_s={})
    assert "its parent hung" in (await followed.follow() or "")


async def test_a_parent_that_begins_its_gateway_again_lives(followed: Followed) -> None:
    logs = Workspace("run-1").logs()

    def state_of(now_s: float) -> Any:
        if now_s % (UNSEEN_LIMIT_S - LOOK_S) == 0:  # the life before was given up
            (logs / f"gateway-1-{now_s:.0f}.log").touch()
        return Running() if now_s < 4 * UNSEEN_LIMIT_S else Completed()

    followed.state_of = state_of
    assert await followed.follow() is None
    assert followed.said == []


async def test_a_parent_that_waits_for_a_worker_or_whose_state_is_unknown_does_not_hang(
    followed: Followed,
) -> None:
    def state_of(now_s: float) -> Any:
        waits = Scheduled() if now_s < 2 * UNSEEN_LIMIT_S else None
        return waits if now_s < 4 * UNSEEN_LIMIT_S else Completed()

    followed.state_of = state_of
    assert await followed.follow() is None
    assert followed.said == []


async def test_a_parent_has_time_for_the_summary_when_its_gateway_has_gone(followed: Followed) -> None:
    def status_of(now_s: float) -> GatewayStatus:
        followed.url = None
        return make_gateway_status(heard_s={"parent": 0.0})

    followed.status_of = status_of
    followed.state_of = lambda now_s: Running() if now_s < SUMMARY_LIMIT_S else Completed()
    assert await followed.follow() is None
    assert followed.said == []


async def test_time_in_which_the_launcher_stood_still_is_no_silence(followed: Followed) -> None:
    def state_of(now_s: float) -> Any:
        if now_s == LOOK_S:
            followed.now_s += UNSEEN_LIMIT_S
        return Running() if now_s < UNSEEN_LIMIT_S + 30 * LOOK_S else Completed()

    followed.state_of = state_of
    assert await followed.follow() is None
