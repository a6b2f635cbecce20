"""The rollout driver on the real gateway: what it does to the models' logs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import RunConfig, StoreConfig, WorkflowConfig
from model_runtime.layout import RunLayout
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Settlement, Trajectory
from model_runtime.workflow import DriverReport, RolloutDriver, WorkflowSession
from model_runtime.workflow_execution import WorkflowExecutor
from tests.gateway_harness import ADMIN_KEY, RUN_ID, GatewayHarness, live_gateway, make_config
from tests.waiting import until

GROUP_SIZE = 3


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv(ADMIN_KEY_ENV, ADMIN_KEY)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(2)))
    workflow = WorkflowConfig(tasks=str(tasks), held_out_tasks=str(tasks), group_size=GROUP_SIZE)
    return make_config(max_restarts=0).model_copy(update={"workflow": workflow})


@pytest.fixture
def harness(tmp_path: Path, config: RunConfig) -> Iterator[GatewayHarness]:
    with live_gateway(open_store(StoreConfig(url=str(tmp_path / "store"))), config=config) as live:
        live.make_ready()
        yield live


def drive(harness: GatewayHarness, config: RunConfig, workflow: Any, mode: Any = "train") -> DriverReport:
    driver = RolloutDriver(
        config, run_id=RUN_ID, gateway_url=harness.url, store=harness.store, mode=mode, workflow=workflow
    )
    return asyncio.run(driver.run())


def log_of(harness: GatewayHarness, model_id: str) -> tuple[list[Settlement], list[Trajectory]]:
    layout = RunLayout(RUN_ID).model(model_id)
    shards = [decode_shard(harness.store.get(k), source=k) for k in harness.store.list(layout.log_writers())]
    return [s for x in shards for s in x.settlements], [t for x in shards for t in x.trajectories]


async def two_turns(task: dict[str, Any], session: WorkflowSession) -> float:
    messages = [{"role": "user", "content": str(task["n"])}]
    reply = await session.chat("searcher", messages, max_tokens=8)
    await session.reward(0.5, request_id=reply.request_id, component="style")
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "and?"}]
    await session.chat("searcher", messages, max_tokens=8)
    await session.reward(1.0, agent_id="searcher", component="success")
    return 0.25


def test_rows_rewards_and_settlements_of_every_execution_are_in_the_logs(
    harness: GatewayHarness, config: RunConfig
) -> None:
    report = drive(harness, config, two_turns)

    assert report.executions == {"finalized": 2 * GROUP_SIZE}
    settlements, rows = log_of(harness, "solve")
    assert Counter(s.member.group_id for s in settlements) == Counter(r.member.group_id for r in rows)
    assert len(rows) == 2 * GROUP_SIZE
    for row in rows:
        assert len(row.turns) == 2  # one trajectory, extended in place
        assert row.workflow_rewards == {"reward": 0.25}
        assert row.agent_rewards == {"success": 1.0}
        assert row.turns[0].rewards == {"style": 0.5}
        assert row.train
    without_rows, none = log_of(harness, "plan")
    assert len(without_rows) == 2 * GROUP_SIZE
    assert none == []


def test_a_judge_may_answer_after_the_workflow_returned(harness: GatewayHarness, config: RunConfig) -> None:
    judged: list[tuple[str, str, int]] = []

    async def work(task: dict[str, Any], session: WorkflowSession) -> None:
        await session.chat("searcher", [{"role": "user", "content": str(task["n"])}], max_tokens=8)
        session.await_reward(3600)
        session.await_reward(60, component="style", agent_id="searcher")
        judged.append((session.session_id, session.api_key, session.member.member_index))

    report = drive(harness, config, work)
    assert report.executions == {"awaiting_reward": 2 * GROUP_SIZE}
    assert log_of(harness, "solve") == ([], [])
    for session_id, key, member in judged:
        for body in (
            {"reward": float(member)},
            {"reward": 0.5, "component": "style", "agent_id": "searcher"},
        ):
            headers = {"Authorization": f"Bearer {key}"}
            harness.http.post(f"/sessions/{session_id}/reward", json=body, headers=headers).raise_for_status()
    for session_id, *_ in judged:  # asked again, it answers how it ended
        answer = harness.http.post(f"/sessions/{session_id}/finalize", headers=harness.admin)
        assert answer.json()["status"] == "finalized"
    _, rows = log_of(harness, "solve")
    assert {dict(row.workflow_rewards)["reward"] for row in rows} == {0.0, 1.0, 2.0}
    assert [dict(row.agent_rewards) for row in rows] == [{"style": 0.5}] * 2 * GROUP_SIZE


def test_a_driver_started_again_finds_everything_settled(harness: GatewayHarness, config: RunConfig) -> None:
    drive(harness, config, two_turns)
    again = drive(harness, config, two_turns)
    assert (again.groups_done_before, again.groups_opened, again.executions) == (2, 0, {})


async def until_stuck(harness: GatewayHarness, config: RunConfig) -> None:
    """Drive until all members are settled but the second of each group, which is between two calls; then end
    the driver."""

    between_calls: list[str] = []

    async def work(task: dict[str, Any], session: WorkflowSession) -> float:
        if session.member.member_index == 1:
            await session.chat("searcher", [{"role": "user", "content": str(task["n"])}], max_tokens=8)
            between_calls.append(session.session_id)
            await asyncio.sleep(60)
        return await two_turns(task, session)

    driver = RolloutDriver(config, run_id=RUN_ID, gateway_url=harness.url, store=harness.store, workflow=work)
    running = asyncio.ensure_future(driver.run())
    async with asyncio.timeout(20):
        while driver._tally.executions["finalized"] < 2 * GROUP_SIZE - 2 or len(between_calls) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("ends", ["stopped", "killed"])
def test_a_driver_that_is_gone_is_continued_by_the_next(
    harness: GatewayHarness, config: RunConfig, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """At once: what it left open does not run until its own limit."""
    with monkeypatch.context() as patch:
        if ends == "killed":  # it lets go of nothing

            async def dies(*_: object) -> None:
                return None

            patch.setattr(WorkflowExecutor, "_let_go", dies)
        asyncio.run(until_stuck(harness, config))

    async def next_driver() -> DriverReport:
        async with asyncio.timeout(config.workflow.execution_timeout_s / 10):
            return await RolloutDriver(
                config, run_id=RUN_ID, gateway_url=harness.url, store=harness.store, workflow=two_turns
            ).run()

    report = asyncio.run(next_driver())

    assert report.executions == {"finalized": 2}
    settlements, rows = log_of(harness, "solve")
    final = Counter((s.member.group_id, s.member.member_index) for s in settlements if s.is_final)
    assert len(final) == 2 * GROUP_SIZE
    assert set(final.values()) == {1}
    assert len(rows) == 2 * GROUP_SIZE
    assert {s.member.attempt for s in settlements if s.member.member_index == 1 and s.is_final} == {1}
    assert Counter(s.status for s in settlements) == {"finalized": 2 * GROUP_SIZE, "retried": 2}


def test_a_driver_started_again_does_not_wait_for_the_judges_of_the_one_before(
    harness: GatewayHarness, config: RunConfig
) -> None:
    judged: list[tuple[str, str]] = []

    async def work(task: dict[str, Any], session: WorkflowSession) -> None:
        await session.chat("searcher", [{"role": "user", "content": str(task["n"])}], max_tokens=8)
        session.await_reward(3600)
        judged.append((session.session_id, session.api_key))

    async def never(*_: Any) -> None:
        raise AssertionError("nothing is left to do")

    workflow = config.workflow.model_copy(update={"execution_timeout_s": 5.0})
    config = config.model_copy(update={"workflow": workflow})
    drive(harness, config, work)
    again = drive(harness, config, never)
    assert again.executions == {"done_before": 2 * GROUP_SIZE}
    for session_id, key in judged:
        headers = {"Authorization": f"Bearer {key}"}
        harness.http.post(f"/sessions/{session_id}/reward", json={"reward": 1.0}, headers=headers)
    until(lambda: len(log_of(harness, "solve")[1]) == 2 * GROUP_SIZE)
    assert Counter(s.status for s in log_of(harness, "solve")[0]) == {"finalized": 2 * GROUP_SIZE}


def test_a_failing_server_costs_an_attempt_and_no_low_reward(
    harness: GatewayHarness, config: RunConfig
) -> None:
    one_try = config.gateway.model_copy(update={"request_timeout_s": 1.0})
    harness.server.fail_next = [500] * 40
    report = drive(harness, config.model_copy(update={"gateway": one_try}), two_turns)

    settlements, rows = log_of(harness, "solve")
    assert report.executions == Counter(s.status for s in settlements)
    assert set(report.executions) <= {"finalized", "infra", "retried"}
    assert report.executions.get("retried", 0) > 0
    assert len(rows) == report.executions.get("finalized", 0)


def test_evaluation_leaves_the_training_logs_alone(harness: GatewayHarness, config: RunConfig) -> None:
    report = drive(harness, config, two_turns, mode="eval")
    assert report.executions == {"finalized": 2}
    assert log_of(harness, "solve") == ([], [])
    assert all(r["sampling_params"]["temperature"] == 0.0 for r in harness.server.requests)
