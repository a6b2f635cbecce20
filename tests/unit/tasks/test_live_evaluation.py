"""A run is evaluated while it trains, by a live gateway before a fake rollout server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runtime.config import RunConfig, StoreConfig
from model_runtime.coordinator import begin_run, update_run
from model_runtime.errors import ConflictError, RunFailedError
from model_runtime.evaluation import ModelVersion
from model_runtime.layout import RunLayout
from model_runtime.store import open_store
from tasks import live_evaluation
from tasks.gateway_admin import GatewayAdmin
from tasks.live_evaluation import LiveHold, evaluate_live, live_hold
from tasks.rollout import drive
from tests.gateway_harness import ADMIN_KEY, RUN_ID, GatewayHarness, live_gateway, make_config

LAYOUT = RunLayout(RUN_ID)
WORKFLOW = """
async def run(task, session):
    answer = await session.chat("planner", [{"role": "user", "content": task["question"]}])
    return float(answer.content == "hello")
"""


class Reporter:
    """Shows nothing: there is no Prefect here."""

    def __init__(self, *_: Any) -> None:
        self.note = lambda _: None

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def show(self, **_: Any) -> None:
        return None


@pytest.fixture(autouse=True)
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPERTORY_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setattr(live_evaluation, "drive", drive.fn)
    monkeypatch.setattr(live_evaluation, "RolloutReporter", Reporter)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "held_out_workflow.py").write_text(WORKFLOW)
    (tmp_path / "held_out.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    base = make_config()
    workflow = base.workflow.model_copy(
        update={
            "function": "held_out_workflow:run",
            "python_path": str(tmp_path),
            "tasks": "unused",
            "held_out_tasks": str(tmp_path / "held_out.jsonl"),
        }
    )
    return base.model_copy(update={"workflow": workflow})


@pytest.fixture
def live(tmp_path: Path, config: RunConfig) -> Iterator[GatewayHarness]:
    """A run under way: `plan` publishes version 3, `solve` version 5."""
    store = open_store(StoreConfig(url=str(tmp_path / "store")))
    with live_gateway(store) as harness:
        harness.make_ready()
        harness.renew("plan", published_version=3, live_versions=[3])
        harness.renew("solve", published_version=5, live_versions=[5])
        begin_run(store, LAYOUT, config, epoch=1)
        update_run(store, LAYOUT, epoch=1, gateway_url=harness.url)
        yield harness


async def test_the_versions_current_at_the_start_answer_to_the_end_and_leave_no_training_rows(
    live: GatewayHarness, config: RunConfig
) -> None:
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is not None
        chosen = [(c.model_id, c.version) for c in hold.choices(config)]
        assert chosen == [("plan", 3), ("solve", 5)]
        await asyncio.to_thread(live.renew, "plan", published_version=4, live_versions=[3, 4])
        report = await evaluate_live(hold, config, run_id=RUN_ID, store=live.store)
    assert report.executions == {"finalized": 2}
    assert report.mean_reward == 1.0
    assert {request["model"] for request in live.server.requests} == {"plan@v3"}
    rows = live.rows("plan", evaluation=True)
    assert [row.policy_version for row in rows] == [3, 3]
    assert live.rows("plan") == []
    assert live.gateway.holds.versions == {}, "released at the end"


@pytest.mark.parametrize(
    "wanted",
    [
        [ModelVersion(model_id="plan", version="base")],
        [ModelVersion(model_id="plan", version=1)],
    ],
)
async def test_versions_that_the_run_does_not_serve_are_not_asked_of_it(
    live: GatewayHarness, config: RunConfig, wanted: list[ModelVersion]
) -> None:
    async with live_hold(live.store, LAYOUT, config, wanted) as hold:
        assert hold is None


async def test_a_run_that_is_over_is_not_live(live: GatewayHarness, config: RunConfig) -> None:
    update_run(live.store, LAYOUT, epoch=1, state="completed", gateway_url=None)
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is None


async def test_a_dead_run_is_not_evaluated_by_another_run_s_gateway_at_its_address(
    live: GatewayHarness, config: RunConfig
) -> None:
    dead = RunLayout("whose-parent-was-killed")
    begin_run(live.store, dead, config, epoch=1)
    update_run(live.store, dead, epoch=1, gateway_url=live.url)
    async with live_hold(live.store, dead, config, []) as hold:
        assert hold is None
    assert live.gateway.holds.versions == {}


async def test_an_evaluation_ends_when_another_run_s_gateway_has_the_address(
    live: GatewayHarness, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_evaluation, "RENEW_EVERY_S", 0.01)
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is not None
        monkeypatch.setattr(live.gateway, "run_id", "another")
        with pytest.raises(ConflictError, match="this gateway serves run 'another'"):
            await asyncio.wait_for(hold.keep(), 10)


async def test_an_evaluation_outlasts_a_gateway_that_has_not_heard_of_its_models_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_evaluation, "RENEW_EVERY_S", 0.01)
    message = "model 'plan' is not ready: it has no published version yet"
    not_ready = httpx.Response(503, json={"error": {"message": message, "code": "model_not_ready"}})
    held = httpx.Response(200, json={"evaluation_id": "e", "versions": {"plan": 3}})
    gone = httpx.Response(409, json={"error": {"message": "version 3 is not in service"}})
    answers = iter([not_ready, not_ready, held, gone])
    transport = httpx.MockTransport(lambda request: next(answers))
    hold = LiveHold(GatewayAdmin("http://g", key="k", transport=transport), "e", {"plan": 3}, RUN_ID)
    with pytest.raises(ConflictError, match="version 3 is not in service"):
        await asyncio.wait_for(hold.keep(), 10)
    assert next(answers, None) is None


async def test_a_gateway_that_is_gone_or_has_another_key_is_not_waited_for(
    live: GatewayHarness, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPERTORY_ADMIN_KEY", "a-key-of-another-machine")
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is None
    update_run(live.store, LAYOUT, epoch=1, gateway_url="http://127.0.0.1:9")
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is None


async def test_members_wait_until_a_gateway_that_lost_the_hold_has_it_again(
    live: GatewayHarness, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_evaluation, "RENEW_EVERY_S", 0.1)
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is not None
        live.gateway.holds.release(hold.evaluation_id)  # what a restart of the gateway loses
        report = await evaluate_live(hold, config, run_id=RUN_ID, store=live.store)
    assert report.executions == {"finalized": 2}


async def test_an_evaluation_whose_versions_left_service_fails_and_says_so(
    live: GatewayHarness, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(self: LiveHold) -> None:
        raise ConflictError("version 3 of model 'plan' is not in service")

    monkeypatch.setattr(LiveHold, "keep", lost)
    live.server.delay_s = 5.0
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is not None
        with pytest.raises(RunFailedError, match="version 3 of model 'plan' is not in service"):
            await evaluate_live(hold, config, run_id=RUN_ID, store=live.store)


async def test_an_evaluation_whose_versions_leave_service_before_its_end_fails_whatever_was_finished(
    live: GatewayHarness, config: RunConfig
) -> None:
    async with live_hold(live.store, LAYOUT, config, []) as hold:
        assert hold is not None
        await asyncio.to_thread(live.renew, "plan", published_version=4, live_versions=[4])
        with pytest.raises(RunFailedError, match="version 3 of model 'plan' is not in service"):
            await evaluate_live(hold, config, run_id=RUN_ID, store=live.store)
    assert live.server.requests == []
    assert live.gateway.holds.versions == {}, "released at the end"
