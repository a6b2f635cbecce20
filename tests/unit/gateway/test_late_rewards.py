"""Judges that answer late, and executions that never finish. Over HTTP."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from gateway.journal_events import RewardName
from model_runtime.store import Store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.waiting import until

HOUR = 3600.0


def finalize(session: LiveSession, deadline_s: float | None = HOUR, **fields: Any) -> httpx.Response:
    return session.post("finalize", {"reward_deadline_s": deadline_s} | fields)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_finished_execution_awaits_its_reward_and_settles_when_it_comes(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    answer = finalize(session)
    assert answer.status_code == 202
    assert answer.json()["status"] == "awaiting_reward"
    assert [a["component"] for a in answer.json()["awaits"]] == ["reward"]
    assert harness.settlements("plan") == []
    assert code(session.chat("y")) == (409, "conflict")  # it is finished
    assert session.post("reward", {"reward": 0.5}).status_code == 200
    until(lambda: harness.settlements("plan"))
    [row] = harness.rows("plan")
    assert dict(row.workflow_rewards) == {"reward": 0.5}
    assert harness.settlements("plan")[0].status == "finalized"
    assert finalize(session).json()["status"] == "finalized"  # asked again: how it ended
    assert code(session.post("reward", {"reward": 1.0})) == (409, "conflict")


def test_every_awaited_component_is_waited_for_whatever_its_level(harness: GatewayHarness) -> None:
    session = harness.open_session()
    call = session.chat("x").json()
    awaits = [
        {"component": "style"},
        {"agent_id": "planner"},
        {"request_id": call["id"], "component": "judge"},
    ]
    assert finalize(session, awaits=awaits, reward=1.0).status_code == 202
    for number, given in enumerate(awaits):
        assert harness.settlements("plan") == []
        again = finalize(session, awaits=awaits)  # says what is missing, and changes nothing
        assert (again.status_code, len(again.json()["awaits"])) == (202, 3 - number)
        assert session.post("reward", {"reward": float(number)} | given).status_code == 200
    until(lambda: harness.settlements("plan"))
    [row] = harness.rows("plan")
    assert dict(row.workflow_rewards) == {"reward": 1.0, "style": 0.0}
    assert dict(row.agent_rewards) == {"reward": 1.0}
    assert dict(row.turns[0].rewards) == {"judge": 2.0}


def test_rewards_stay_replaceable_until_the_last_one_came(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    assert finalize(session, awaits=[{"component": "a"}, {"component": "b"}]).status_code == 202
    for body in (
        {"reward": 1.0, "component": "a"},
        {"reward": None, "component": "a"},
        {"reward": 2.0, "component": "b"},
        {"reward": 3.0, "component": "a"},
    ):
        assert session.post("reward", body).status_code == 200
    until(lambda: harness.settlements("plan"))
    assert dict(harness.rows("plan")[0].workflow_rewards) == {"a": 3.0, "b": 2.0}


def test_past_the_deadline_what_did_not_come_is_missing_and_not_zero(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    assert finalize(session, 0.3, awaits=[{"component": "a"}, {"component": "b"}]).status_code == 202
    session.post("reward", {"reward": 1.0, "component": "a"})
    until(lambda: harness.settlements("plan"))
    [settlement], [row] = harness.settlements("plan"), harness.rows("plan")
    assert settlement.status == "finalized"
    assert settlement.reason == "rewards that never came: b"
    assert dict(row.workflow_rewards) == {"a": 1.0}


def test_an_execution_that_awaits_rewards_does_not_expire(harness: GatewayHarness) -> None:
    session = harness.open_session(timeout_s=0.3)
    session.chat("x")
    assert finalize(session).status_code == 202
    time.sleep(1.2)  # two sweeps past the execution's own time
    assert harness.settlements("plan") == []
    session.post("reward", {"reward": 1.0})
    until(lambda: harness.settlements("plan"))
    assert harness.settlements("plan")[0].status == "finalized"


def test_finalize_without_a_deadline_settles_at_once(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    assert finalize(session).status_code == 202
    answer = finalize(session, None)
    assert (answer.status_code, answer.json()["status"]) == (200, "finalized")
    assert dict(harness.rows("plan")[0].workflow_rewards) == {}


def test_nothing_is_awaited_that_is_there_or_can_not_count(harness: GatewayHarness) -> None:
    rewarded = harness.open_session(0)
    rewarded.chat("x")
    assert finalize(rewarded, reward=1.0).status_code == 200
    broken = harness.open_session(1)
    harness.gateway.sessions._sessions[broken.session_id].mark_infra("a 503")
    answer = finalize(broken)
    assert (answer.status_code, answer.json()["status"]) == (200, "infra")


def test_a_reward_that_can_not_come_is_refused_and_the_session_stays_open(harness: GatewayHarness) -> None:
    session = harness.open_session()
    assert code(finalize(session, awaits=[{"agent_id": "nobody"}])) == (404, "unknown_agent")
    assert code(finalize(session, awaits=[{"request_id": "r"}])) == (400, "invalid_request")
    assert session.chat("x").status_code == 200


def test_at_the_end_of_its_groups_time_a_finished_execution_settles_as_finished(
    harness: GatewayHarness,
) -> None:
    harness.group_id = "judged"
    harness.open_group(deadline_s=0.5)
    judged, running = harness.open_session(0), harness.open_session(1)
    for session in (judged, running):
        session.chat("x")
    assert finalize(judged).status_code == 202
    until(lambda: len(harness.settlements("plan")) == 2)
    found = {s.member.member_index: s.status for s in harness.settlements("plan")}
    assert found == {0: "finalized", 1: "expired"}


def test_a_reward_names_itself_for_people() -> None:
    assert str(RewardName("style")) == "style"
    assert str(RewardName("style", agent_id="planner")) == "style of planner"


# ------------------------------------------------------------------ executions that did not finish


@pytest.mark.parametrize("status", ["aborted", "expired", "infra", "retried"])
def test_unfinished_executions_leave_rows_for_models_that_compare_with_them(
    local_store: Store, status: str
) -> None:
    config = make_config(of_each_model={"objective": {"unfinished": "baseline"}})
    with live_gateway(local_store, config=config) as harness:
        harness.start_afresh()
        session = harness.open_session()
        session.chat("x")
        session.post("reward", {"reward": 0.25})
        answer = session.post("abort", {"status": status, "reason": "out of room"}).json()
        own_doing = status in ("aborted", "expired")
        assert answer["num_rows"] == ({"plan": 1} if own_doing else {})
        [settlement] = harness.settlements("plan")
        assert (settlement.status, settlement.reason) == (status, "out of room")
        assert dict(settlement.num_rows) == ({"planner": 1} if own_doing else {})
        assert [dict(row.workflow_rewards) for row in harness.rows("plan")] == [{"reward": 0.25}] * own_doing


def test_an_execution_past_its_time_leaves_rows_too_if_they_are_wanted(local_store: Store) -> None:
    config = make_config(of_each_model={"objective": {"unfinished": "baseline"}})
    with live_gateway(local_store, config=config) as harness:
        harness.start_afresh()
        harness.open_session(timeout_s=0.2).chat("x")
        until(lambda: harness.settlements("plan"))
        assert harness.settlements("plan")[0].status == "expired"
        assert len(harness.rows("plan")) == 1
