"""Executions that met a failure which is not the policy's doing: they settle as `infra`, unless the agent
asked again and was answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from gateway.admission import GroupAdmission
from gateway.session import MAX_FAILURES
from gateway.slices import AT_ONCE
from model_runtime.config import StoreConfig
from model_runtime.store import Store, open_store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.waiting import until

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store"))))
    with live_gateway(store, config=make_config(request_timeout_s=0.6)) as harness:
        yield harness


@pytest.fixture
def harness(impatient: GatewayHarness) -> GatewayHarness:
    impatient.start_afresh()
    return impatient


def client_of(session: LiveSession, **options: Any) -> openai.OpenAI:
    url = f"{session.base_url}/agents/planner/v1"
    return openai.OpenAI(base_url=url, api_key=session.api_key, **options)


def as_sdk(attempt: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(attempt)}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_sdk_as_it_comes_outlasts_a_model_that_was_away_and_nothing_is_held_against_the_execution(
    harness: GatewayHarness, streamed: bool
) -> None:
    harness.renew("plan", status="starting")
    session = harness.open_session()
    live = harness.gateway.sessions._sessions[session.session_id]
    with ThreadPoolExecutor(1) as pool, client_of(session) as client:

        def ask() -> list[Any]:
            answer: Any = client.chat.completions.create(model="m", messages=HELLO, stream=streamed)
            return list(answer) if streamed else [answer]

        asking = pool.submit(ask)
        until(lambda: live.infra_reason, "the first answer, a 503")
        harness.renew("plan")
        assert asking.result(20)
    assert session.finalize(1.0) == {
        "session_id": session.session_id,
        "status": "finalized",
        "num_rows": {"plan": 1},
        "num_refused": 0,
        "awaits": [],
    }


def test_a_call_that_is_not_answered_in_the_end_makes_the_execution_infra(harness: GatewayHarness) -> None:
    session = harness.open_session()
    harness.server.fail_next = [500] * 30
    for attempt in range(2):
        assert session.chat(HELLO, headers=as_sdk(attempt)).status_code == 503
    harness.server.fail_next = []
    assert session.chat("another question", headers=as_sdk(0)).status_code == 200
    assert session.finalize(1.0)["status"] == "infra"
    assert harness.rows("plan") == []


def test_each_of_equal_calls_has_to_be_answered(harness: GatewayHarness) -> None:
    """Two samples of one prompt failed; the one that is asked again does not speak for the other."""
    session = harness.open_session()
    live = harness.gateway.sessions._sessions[session.session_id]
    harness.server.fail_next = [500] * 30
    with ThreadPoolExecutor(2) as pool:
        failed = list(pool.map(lambda _: session.chat(HELLO, headers=as_sdk(0)).status_code, range(2)))
    assert failed == [503, 503]
    assert len(live.failures) == 2
    harness.server.fail_next = []
    assert session.chat(HELLO, headers=as_sdk(1)).status_code == 200
    assert len(live.failures) == 1
    assert session.finalize(1.0)["status"] == "infra"


def test_failures_of_one_session_are_bounded_and_none_is_forgotten(harness: GatewayHarness) -> None:
    live = harness.gateway.sessions._sessions[harness.open_session().session_id]
    for number in range(2 * MAX_FAILURES):
        live.mark_infra("a 503", f"call {number}")
    assert len(live.failures) == MAX_FAILURES + 1
    for number in range(2 * MAX_FAILURES):
        live.lift_infra(f"call {number}")
    assert live.infra_reason == "a 503"


# ------------------------------------------------------------------ records that can't be written


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_execution_whose_record_can_not_be_written_settles_as_infra(
    harness: GatewayHarness, mode: str
) -> None:
    session = harness.open_session(mode=mode)
    session.chat(HELLO)
    live = harness.gateway.sessions._sessions[session.session_id]
    live.rewards.workflow["reward"] = "much"  # type: ignore[assignment]
    answer = session.finalize()
    assert (answer["status"], answer["num_rows"], answer["num_refused"]) == ("infra", {}, 1)
    assert session.finalize() == answer
    if mode == "train":
        [settlement] = harness.settlements("plan")
        assert settlement.status == "infra"
        assert "can't be encoded" in settlement.reason
        harness.open_session(1).finalize(1.0)
        assert harness.group_id not in harness.gateway.admission._state.open_groups
    counted = 'repertory_gateway_discarded_tokens_total{model="plan",reason="infra"}'
    assert counted in harness.http.get("/metrics").text


# ------------------------------------------------------------------ many at once


def test_the_ends_of_thousands_of_members_leave_others_their_turns(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two turns of the loop only some of them are dealt with."""
    size, settled_at = 2_000, []
    turns = 0
    with live_gateway(local_store) as harness:
        harness.make_ready()
        settle = GroupAdmission.member_settled

        def noting(self: GroupAdmission, *args: Any, **kwargs: Any) -> None:
            settled_at.append(turns)
            settle(self, *args, **kwargs)

        async def count_turns() -> None:
            nonlocal turns
            while len(settled_at) < size:
                turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(GroupAdmission, "member_settled", noting)
        harness.open_group("crowd", size=size, deadline_s=0.1)
        asyncio.run_coroutine_threadsafe(count_turns(), harness.live.loop).result(60)
        until(lambda: "crowd" not in harness.gateway.admission._state.open_groups)
        harness.group_id = "crowd"
        assert len(harness.settlements("plan")) == size
    assert max(Counter(settled_at).values()) <= 4 * AT_ONCE
