"""Sessions from opening to settlement, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from model_runtime.errors import StoreUnavailableError
from model_runtime.store import Store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.waiting import until


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ------------------------------------------------------------------ opening


def test_a_training_session_needs_an_open_group_of_its_size(harness: GatewayHarness) -> None:
    opened = harness.ask_for_session
    assert refusal(opened(group_id="other")) == (409, "conflict")
    assert refusal(opened(group_size=3)) == (409, "conflict")
    assert refusal(opened(member_index=2)) == (400, "invalid_request")
    assert refusal(opened(sampling={"top_p": 0.5})) == (400, "invalid_request")
    assert refusal(opened(sampling={"temprature": 1})) == (400, "invalid_request")
    assert refusal(opened(group_id="")) == (422, "invalid_request")
    assert opened().status_code == 200


def test_opening_again_after_a_lost_answer_gives_the_same_session_and_a_busy_member_is_refused(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    assert harness.open_session().session_id == session.session_id
    session.chat("x")
    assert refusal(harness.ask_for_session()) == (409, "conflict")


def test_a_driver_takes_over_what_the_one_before_left_open(harness: GatewayHarness) -> None:
    left = harness.open_session()
    assert harness.open_session(takes_over=True).session_id == left.session_id  # nothing was asked of it
    left.chat("x")
    session = harness.open_session(takes_over=True)
    assert session.workflow_id == f"{harness.group_id}/0/1"
    assert refusal(left.chat("y")) == (409, "conflict")
    session.chat("x")
    session.finalize(1.0)
    assert [(s.member.attempt, s.status) for s in harness.settlements("plan")] == [
        (0, "retried"),
        (1, "finalized"),
    ]
    assert [row.member.attempt for row in harness.rows("plan")] == [1]


def test_what_is_finished_and_awaits_its_reward_is_not_taken_over(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    session.post("finalize", {"reward_deadline_s": 3600})
    assert refusal(harness.ask_for_session(takes_over=True)) == (409, "already_done")
    session.post("reward", {"reward": 0.5})
    until(lambda: harness.settlements("plan"))
    assert [s.status for s in harness.settlements("plan")] == ["finalized"]


@pytest.mark.parametrize("takes_over", [True, False])
def test_a_member_that_nothing_is_left_to_do_for_is_refused_by_a_code_of_its_own(
    harness: GatewayHarness, *, takes_over: bool
) -> None:
    def refused(member: int) -> tuple[int, str]:
        return refusal(harness.ask_for_session(member, takes_over=takes_over))

    awaiting, settled = harness.open_session(0), harness.open_session(1)
    awaiting.post("finalize", {"reward_deadline_s": 3600})  # of which nothing was asked
    settled.chat("x")
    settled.finalize(1.0)
    assert [refused(0), refused(1)] == [(409, "already_done")] * 2
    awaiting.post("reward", {"reward": 0.5})
    until(lambda: len(harness.settlements("plan")) == 2)  # and with it the group
    assert [refused(0), refused(1)] == [(409, "already_done")] * 2
    assert refusal(harness.ask_for_session(group_id="unheard-of")) == (409, "conflict")


def test_a_retried_member_opens_again_with_the_next_attempt_and_leaves_no_rows_of_the_first(
    harness: GatewayHarness,
) -> None:
    first = harness.open_session()
    first.chat("x")
    assert first.post("abort", {"status": "retried"}).json()["status"] == "retried"
    assert refusal(harness.ask_for_session(attempt=0)) == (409, "conflict")
    second = harness.open_session(attempt=1)
    second.chat("x")
    assert second.finalize(1.0)["status"] == "finalized"
    assert [row.member.attempt for row in harness.rows("plan")] == [1]
    assert [s.status for s in harness.settlements("plan")] == ["retried", "finalized"]
    assert refusal(harness.ask_for_session(attempt=2)) == (409, "already_done")


# ------------------------------------------------------------------ access


def test_a_session_key_opens_its_session_and_nothing_else(harness: GatewayHarness) -> None:
    one, two = harness.open_session(0), harness.open_session(1)
    stranger = LiveSession(harness, one.session_id, one.base_url, two.api_key, one.workflow_id)
    for answer in (
        stranger.chat("x"),
        stranger.post("reward", {"reward": 1.0}),
        stranger.post("finalize", {}),
        stranger.post("abort", {}),
        harness.http.post(f"/sessions/{one.session_id}/finalize"),
        harness.http.post("/sessions", json={"group_id": harness.group_id}, headers=one.headers),
        harness.http.post("/groups", json={"group_id": "h", "group_size": 2}, headers=one.headers),
        harness.http.get("/admin/status", headers=one.headers),
    ):
        assert refusal(answer) == (401, "invalid_api_key")
    unknown = LiveSession(harness, "nothing", "", one.api_key, "")
    assert refusal(unknown.chat("x")) == (404, "unknown_session")
    assert refusal(unknown.post("finalize", {})) == (404, "unknown_session")
    assert one.chat("x").status_code == 200


def test_the_admin_key_may_end_a_session_but_not_speak_in_it(harness: GatewayHarness) -> None:
    session = harness.open_session()
    admin = LiveSession(harness, session.session_id, "", "an-admin-key-for-tests", "")
    assert refusal(admin.chat("x")) == (401, "invalid_api_key")
    assert admin.finalize(1.0)["status"] == "finalized"


# ------------------------------------------------------------------ rewards


def test_rewards_are_kept_by_level_and_component_and_replaced_until_finalize(harness: GatewayHarness) -> None:
    session = harness.open_session()
    call = session.chat("x").json()
    for body in (
        {"reward": 0.25},
        {"reward": 0.75},
        {"reward": 1.0, "component": "style"},
        {"reward": 2.0, "agent_id": "planner"},
        {"reward": 9.0, "agent_id": "planner", "component": "withdrawn"},
        {"reward": None, "agent_id": "planner", "component": "withdrawn"},
        {"reward": 2.0, "request_id": call["request_id"]},
        {"reward": 3.0, "request_id": call["id"]},  # the same call, by the name its API gives it
    ):
        assert session.post("reward", body).status_code == 200
    session.finalize()
    [row] = harness.rows("plan")
    assert dict(row.workflow_rewards) == {"reward": 0.75, "style": 1.0}
    assert dict(row.agent_rewards) == {"reward": 2.0}
    assert dict(row.turns[0].rewards) == {"reward": 3.0}


def test_a_reward_that_never_came_is_missing_and_not_zero(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    session.finalize()
    assert dict(harness.rows("plan")[0].workflow_rewards) == {}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"high"'])
def test_a_reward_that_is_no_number_is_refused(harness: GatewayHarness, value: str) -> None:
    session = harness.open_session()
    answer = harness.http.post(
        f"/sessions/{session.session_id}/reward",
        content=f'{{"reward": {value}}}',
        headers=session.headers | {"Content-Type": "application/json"},
    )
    assert refusal(answer) == (422, "invalid_request")
    assert answer.json()["error"]["param"] == "reward"


def test_rewards_of_unknown_agents_and_calls_are_refused(harness: GatewayHarness) -> None:
    session = harness.open_session()
    assert refusal(session.post("reward", {"reward": 1.0, "agent_id": "nobody"})) == (404, "unknown_agent")
    assert refusal(session.post("reward", {"reward": 1.0, "request_id": "x"})) == (400, "invalid_request")


# ------------------------------------------------------------------ ends


def test_finalize_is_durable_when_it_answers_and_says_the_same_again(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    session.chat("y", agent="searcher")
    first = session.finalize(1.0)
    assert first["num_rows"] == {"plan": 1, "solve": 1}
    assert [len(harness.rows(m)) for m in ("plan", "solve")] == [1, 1]
    assert session.finalize(0.0) == first
    assert session.post("abort", {}).json() == first
    assert len(harness.settlements("plan")) == 1
    assert dict(harness.rows("plan")[0].workflow_rewards) == {"reward": 1.0}


def test_two_finalizes_at_once_settle_once(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: session.finalize(1.0), range(4)))
    assert all(answer == answers[0] for answer in answers)
    assert len(harness.settlements("plan")) == 1


def test_a_model_that_was_never_called_gets_a_settlement_too(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    session.finalize(1.0)
    [settlement] = harness.settlements("solve")
    assert (settlement.status, dict(settlement.num_rows)) == ("finalized", {})


def test_a_session_that_ended_takes_no_calls_and_no_rewards(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.finalize()
    assert refusal(session.chat("x")) == (409, "conflict")
    assert refusal(session.post("reward", {"reward": 1.0})) == (409, "conflict")


def test_a_call_that_runs_at_finalize_is_a_conflict_and_not_recorded(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x")
    harness.server.delay_s = 3.0
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: session.chat("y"))
        until(lambda: len(harness.server.requests) == 2)
        assert session.finalize(1.0)["num_rows"] == {"plan": 1}
        assert refusal(late.result(5)) == (409, "conflict")
    until(lambda: harness.server.aborted)


@pytest.mark.parametrize("status", ["aborted", "expired", "infra"])
def test_an_aborted_execution_settles_without_rows(harness: GatewayHarness, status: str) -> None:
    session = harness.open_session()
    session.chat("x")
    answer = session.post("abort", {"status": status, "reason": "the tool broke"}).json()
    assert (answer["status"], answer["num_rows"]) == (status, {})
    assert harness.rows("plan") == []
    [settlement] = harness.settlements("plan")
    assert (settlement.status, settlement.reason) == (status, "the tool broke")


def test_an_execution_past_its_time_expires(harness: GatewayHarness) -> None:
    session = harness.open_session(timeout_s=0.2)
    session.chat("x")
    until(lambda: harness.settlements("plan"))
    assert harness.settlements("plan")[0].status == "expired"
    assert session.finalize(1.0)["status"] == "expired"
    assert refusal(session.chat("x")) == (409, "conflict")


class Quiet:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def quiet(harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """Sessions expire after 60 s without a question, by the test's own clock."""
    monkeypatch.setattr(harness.gateway.sessions, "_idle_s", 60.0)
    monkeypatch.setattr(harness.gateway.sessions, "_clock", clock := Quiet())
    return clock


def test_a_session_is_idle_from_the_answer_to_its_last_call_on(harness: GatewayHarness, quiet: Quiet) -> None:
    session = harness.open_session(timeout_s=3600)
    harness.server.delay_s = 0.3
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.chat, "x")
        until(lambda: harness.server.requests)
        quiet.now += 100  # longer than it may be idle
        assert answer.result().status_code == 200
    quiet.now += 59
    harness.on_loop(harness.gateway.sessions.sweep())
    assert session.chat("y").status_code == 200
    quiet.now += 60
    harness.on_loop(harness.gateway.sessions.sweep())
    assert session.finalize()["status"] == "expired"


def test_a_session_whose_tokens_are_being_counted_is_not_idle(
    harness: GatewayHarness, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = Event(), Event()

    async def waits_for_its_model(*_: object) -> int:
        began.set()
        await asyncio.to_thread(may_end.wait, 10)
        return 7

    monkeypatch.setattr(harness.gateway.router, "count_tokens", waits_for_its_model)
    session, path = harness.open_session(timeout_s=3600), "agents/planner/v1/messages/count_tokens"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.post, path, {"messages": [{"role": "user", "content": "x"}]})
        assert began.wait(10)
        quiet.now += 100
        harness.on_loop(harness.gateway.sessions.sweep())
        may_end.set()
        assert answer.result().json() == {"input_tokens": 7}
    harness.on_loop(harness.gateway.sessions.sweep())
    assert session.finalize()["status"] == "finalized"


def test_a_group_past_its_time_settles_open_members_and_those_that_never_began(
    harness: GatewayHarness,
) -> None:
    harness.group_id = "short"
    harness.open_group(size=3, deadline_s=0.4)
    done = harness.open_session(0, group_size=3)
    done.finalize(1.0)
    harness.open_session(1, group_size=3).chat("x")
    until(lambda: len(harness.settlements("plan")) == 3)
    found = {s.member.member_index: s.status for s in harness.settlements("plan")}
    assert found == {0: "finalized", 1: "expired", 2: "expired"}
    until(lambda: "short" not in harness.gateway.sessions._groups)
    again = harness.http.post(
        "/groups", json={"group_id": "short", "group_size": 3, "wait_s": 0}, headers=harness.admin
    )
    assert refusal(again) == (409, "already_done")
    assert "short" not in harness.gateway.sessions._groups


def test_a_finalize_the_store_failed_is_answered_503_and_succeeds_when_asked_again(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = harness.open_session()
    session.chat("x")
    ingest = harness.gateway.ingestor.ingest

    async def failing(execution: object) -> int:
        raise StoreUnavailableError("put run/journal: no answer")

    monkeypatch.setattr(harness.gateway.ingestor, "ingest", failing)
    answer = session.post("finalize", {"reward": 1.0})
    assert refusal(answer) == (503, "store_unavailable")
    assert "retry-after" in answer.headers
    monkeypatch.setattr(harness.gateway.ingestor, "ingest", ingest)
    assert session.finalize(1.0)["status"] == "finalized"
    assert len(harness.rows("plan")) == 1


# ------------------------------------------------------------------ evaluation


def test_evaluation_sessions_stand_outside_groups_and_logs_and_may_be_greedy(harness: GatewayHarness) -> None:
    session = harness.open_session(mode="eval", group_id="never opened", forced_sampling={"temperature": 0})
    assert session.chat("x", top_p=0.5).status_code == 200
    assert harness.server.requests[-1]["sampling_params"]["temperature"] == 0
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    assert harness.rows("plan") == []
    assert harness.settlements("plan") == []
    [row] = harness.rows("plan", evaluation=True)
    assert (row.train, dict(row.workflow_rewards)) == (False, {"reward": 1.0})


def test_evaluations_that_work_on_one_task_at_once_each_have_their_rows_and_answers(
    local_store: Store,
) -> None:
    with live_gateway(local_store, config=make_config(commit_interval_s=0.3)) as harness:
        harness.make_ready()
        sessions = [harness.open_session(0, "held-out", mode="eval") for _ in range(2)]
        for num_calls, session in enumerate(sessions, start=1):
            for number in range(num_calls):
                session.chat(f"question {number}")
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda session: session.finalize(1.0), sessions))
        assert [answer["num_rows"] for answer in answers] == [{"plan": 1}, {"plan": 2}]
        written = Counter(row.session_id for row in harness.rows("plan", evaluation=True))
        assert written == {session.session_id: n for n, session in enumerate(sessions, start=1)}
        shown = [harness.http.get(f"/sessions/{s.session_id}", headers=s.headers) for s in sessions]
        assert [len(answer.json()["chains"]) for answer in shown] == [1, 2]


def test_rows_of_a_group_opened_without_training_a_model_say_so(local_store: Store) -> None:
    config = make_config()
    with live_gateway(local_store, config=config) as harness:
        harness.make_ready()
        harness.renew("solve", limit=1, queue={"untrained_groups": 1})
        assert harness.open_group()["train"] == {"plan": True, "solve": False}
        session = harness.open_session()
        session.chat("x")
        session.chat("x", agent="searcher")
        session.finalize(1.0)
        assert [harness.rows(m)[0].train for m in ("plan", "solve")] == [True, False]
