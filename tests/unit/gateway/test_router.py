"""What the model's server is asked, what is recorded, and what happens when it fails. Over HTTP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from model_runtime.layout import served_name
from model_runtime.store import Store
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import GatewayHarness, live_gateway, make_config
from tests.waiting import until


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ------------------------------------------------------------------ the request


def test_the_server_gets_the_rendered_ids_the_versioned_name_and_processed_sampling(
    harness: GatewayHarness,
) -> None:
    harness.renew("plan", published_version=3)
    answer = harness.open_session().chat("what is the answer?", max_tokens=9, seed=5).json()
    [request] = harness.server.requests
    text = "<|im_start|>user\nwhat is the answer?<|im_end|>\n<|im_start|>assistant\n"
    assert request["token_ids"] == harness.server.tokenizer.encode(text, add_special_tokens=False).ids
    assert request["model"] == served_name("plan", 3)
    sampling = request["sampling_params"]
    assert sampling == {
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 9,
        "stop_token_ids": [2, 0],
        "logprobs": 0,
    }
    assert answer["policy_version"] == 3
    assert request["request_id"].startswith(answer["request_id"])


def test_agents_are_answered_by_their_own_models(harness: GatewayHarness) -> None:
    session = harness.open_session()
    models = [
        session.chat("x", agent=agent).json()["model_id"] for agent in ("planner", "searcher", "answerer")
    ]
    assert models == ["plan", "solve", "solve"]
    assert [r["model"] for r in harness.server.requests] == ["plan@v0", "solve@v0", "solve@v0"]


def test_an_unknown_agent_is_a_404_and_reaches_no_model(harness: GatewayHarness) -> None:
    answer = harness.open_session().chat("x", agent="nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_agent"
    assert "planner" in answer.json()["error"]["message"]
    assert harness.server.requests == []


def test_max_tokens_is_clamped_to_the_model_and_to_the_room_left(local_store: Store) -> None:
    document = make_tokenizer_document(max_model_len=40)
    with live_gateway(local_store) as harness:
        harness.make_ready()
        harness.open_group()
        session = harness.open_session()
        session.chat("x", max_tokens=500)
        assert harness.server.requests[-1]["sampling_params"]["max_tokens"] == 64  # max_response_tokens
        uri = "run/models/plan/tokenizer/short.json"
        local_store.put(uri, document.to_bytes())
        harness.renew("plan", tokenizer_uri=uri)
        harness.wait_for_tokenizer("plan", uri)
        session.chat("abcdefgh", max_tokens=500)
        request = harness.server.requests[-1]
        assert request["sampling_params"]["max_tokens"] == 40 - len(request["token_ids"])
        num_asked = len(harness.server.requests)
        full = session.chat("abcdefghij" * 5).json()
        assert full["choices"][0]["finish_reason"] == "length"
        assert full["choices"][0]["message"]["content"] == ""
        assert full["usage"]["completion_tokens"] == 0
        assert len(harness.server.requests) == num_asked
        assert session.finalize(1.0)["num_rows"] == {"plan": 2}


def test_forced_sampling_beats_the_request_which_beats_the_sessions_defaults(harness: GatewayHarness) -> None:
    session = harness.open_session(
        sampling={"temperature": 0.5, "max_tokens": 7}, forced_sampling={"seed": 1}
    )
    session.chat("a")
    session.chat("b", temperature=0.9, seed=2)
    first, second = (r["sampling_params"] for r in harness.server.requests)
    assert (first["temperature"], first["max_tokens"], first["seed"]) == (0.5, 7, 1)
    assert (second["temperature"], second["seed"]) == (0.9, 1)


def test_a_stop_string_that_is_one_special_token_ends_the_turn_by_its_id(harness: GatewayHarness) -> None:
    session = harness.open_session()
    assert session.chat("x", stop=["<tool>"]).status_code == 200
    asked = harness.server.requests[-1]["sampling_params"]
    assert (asked["stop_token_ids"], "stop" in asked) == ([2, 0, 3], False)


# ------------------------------------------------------------------ the record


def test_a_conversation_is_one_trajectory_of_exactly_what_was_given_and_sampled(
    harness: GatewayHarness,
) -> None:
    harness.server.answers = ["the answer", "is 42"]
    session = harness.open_session()
    opening = [user("what is it?")]
    first = session.chat(opening).json()
    harness.renew("plan", published_version=1)
    second = session.chat([*opening, assistant("the answer"), {"role": "tool", "content": "t"}]).json()
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    given = harness.server.requests[1]["token_ids"]
    sampled = harness.server.answer_ids("is 42")
    assert [*row.prompt_ids.tolist(), *row.response_ids.tolist()] == [*given, *sampled]
    assert row.prompt_ids.tolist() == harness.server.requests[0]["token_ids"]
    mask = row.response_mask.astype(bool)
    assert row.response_ids[mask].tolist() == [*harness.server.answer_ids("the answer"), *sampled]
    first_logprobs = harness.server.logprobs(len(harness.server.answer_ids("the answer")))
    assert row.behavior_logprobs[mask].tolist() == [*first_logprobs, *harness.server.logprobs(len(sampled))]
    assert [(t.request_id, t.version_min, t.finish_reason) for t in row.turns] == [
        (first["request_id"], 0, "stop"),
        (second["request_id"], 1, "stop"),
    ]


def test_two_agents_of_one_model_have_chains_of_their_own(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat("x", agent="searcher")
    session.chat("x", agent="answerer")
    session.finalize(1.0)
    assert sorted(row.agent_id for row in harness.rows("solve")) == ["answerer", "searcher"]


def test_a_template_that_drops_earlier_thoughts_starts_a_new_chain_and_is_counted(
    local_store: Store,
) -> None:
    forgetting = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with live_gateway(local_store) as harness:
        harness.start_afresh()
        uri = "run/models/plan/tokenizer/forgetting.json"
        local_store.put(uri, make_tokenizer_document(chat_template=forgetting).to_bytes())
        harness.renew("plan", tokenizer_uri=uri)
        harness.wait_for_tokenizer("plan", uri)
        harness.server.answers = ["<think>why</think>because", "so"]
        session = harness.open_session()
        thoughtful = session.chat("x").json()["choices"][0]["message"]["content"]
        session.chat([user("x"), assistant(thoughtful), user("y")])
        assert session.finalize(1.0)["num_rows"] == {"plan": 2}
        first, second = harness.rows("plan")
        assert (len(first.turns), len(second.turns)) == (1, 1)
        assert second.prompt_ids.tolist() == harness.server.requests[1]["token_ids"]
        assert "why" not in harness.server.tokenizer.decode(second.prompt_ids.tolist())
        text = harness.http.get("/metrics").text
        assert 'repertory_gateway_chain_breaks_total{model="plan"} 1.0' in text


def test_calls_of_one_session_run_at_the_same_time(harness: GatewayHarness) -> None:
    harness.server.delay_s = 0.3
    session = harness.open_session()
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: session.chat(f"question {i}").status_code, range(4)))
    assert answers == [200] * 4
    assert time.monotonic() - began < 1.0
    assert session.finalize()["num_rows"] == {"plan": 4}


def test_a_slow_model_does_not_delay_another(local_store: Store) -> None:
    with live_gateway(local_store) as harness:
        harness.make_ready()
        harness.open_group()
        harness.renew("solve", status="starting", replicas=[])
        session = harness.open_session()
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(lambda: session.chat("x", agent="searcher"))
            time.sleep(0.1)
            began = time.monotonic()
            assert session.chat("x").status_code == 200
            assert time.monotonic() - began < 1.0
            harness.make_ready("solve")
            assert stuck.result(10).status_code == 200


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("failure", [500, 503, 404, 401, "drop", "abort"])
def test_an_attempt_that_breaks_is_repeated_and_leaves_no_trace(
    harness: GatewayHarness, failure: int | str
) -> None:
    harness.server.fail_next = [failure]
    session = harness.open_session()
    assert session.chat("x").json()["choices"][0]["message"]["content"] == "hello"
    assert len(harness.server.requests) == 2
    assert len({r["request_id"] for r in harness.server.requests}) == 2
    assert session.finalize(1.0)["status"] == "finalized"
    [row] = harness.rows("plan")
    assert len(row.turns) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_the_servers_own_refusal_is_passed_through_and_not_repeated(
    harness: GatewayHarness, status: int
) -> None:
    harness.server.fail_next = [status]
    session = harness.open_session()
    answer = session.chat("x")
    assert answer.status_code == status
    assert "refused with" in answer.json()["error"]["message"]
    assert len(harness.server.requests) == 1
    assert session.finalize()["status"] == "finalized"


def test_a_model_that_is_not_ready_by_the_deadline_is_a_503_and_the_execution_is_infra(
    local_store: Store,
) -> None:
    with live_gateway(local_store, config=make_config(request_timeout_s=0.3)) as harness:
        harness.make_ready()
        harness.open_group()
        harness.renew("solve", status="starting")
        session = harness.open_session()
        session.chat("x")
        answer = session.chat("x", agent="searcher")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["error"]["code"] == "model_not_ready"
        assert "is starting" in answer.json()["error"]["message"]
        assert session.finalize(0.0) | {"session_id": ""} == {
            "session_id": "",
            "status": "infra",
            "num_rows": {},
            "num_refused": 0,
            "awaits": [],
        }
        [settlement] = harness.settlements("plan")
        assert settlement.status == "infra"
        assert "503" in settlement.reason


def test_a_failed_or_cancelled_turn_leaves_the_chain_as_it_was(local_store: Store) -> None:
    with live_gateway(local_store, config=make_config(request_timeout_s=0.5)) as harness:
        harness.make_ready()
        harness.open_group()
        session = harness.open_session()
        session.chat("x")
        follow = [user("x"), assistant("hello"), user("y")]
        harness.server.fail_next = [500] * 20
        assert session.chat(follow).status_code == 503
        harness.server.fail_next = []
        harness.server.delay_s = 5.0
        with pytest.raises(httpx.ReadTimeout):
            session.post("agents/planner/v1/chat/completions", {"messages": follow}, timeout=0.1)
        deadline = time.monotonic() + 5
        while not harness.server.aborted:
            assert time.monotonic() < deadline, "the generation was not cancelled on the server"
            time.sleep(0.01)
        harness.server.delay_s = 0.0
        assert session.chat(follow).status_code == 200
        [owner] = harness.gateway.sessions._sessions[session.session_id].agents.values()
        [chain] = owner.chains
        assert len(chain.turns) == 2
        assert not chain.reserved


def test_the_version_of_a_request_in_flight_is_reported_and_open_work_holds_the_oldest(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    session.chat("x")
    harness.server.delay_s = 0.5
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: session.chat("y"))
        time.sleep(0.2)
        answer = harness.renew("plan", published_version=2)
        assert answer["inflight_versions"] == {"0": 1}
        assert answer["oldest_open_version"] == 0
        assert slow.result(5).json()["policy_version"] == 0
    assert harness.renew("plan", published_version=2)["inflight_versions"] == {}
    assert harness.renew("plan", published_version=2)["oldest_open_version"] == 0
    session.finalize(1.0)
    assert harness.renew("plan", published_version=2)["oldest_open_version"] is None


# ------------------------------------------------------------------ the same request again


def test_the_same_request_while_running_joins_it(harness: GatewayHarness) -> None:
    harness.server.delay_s = 0.3
    session = harness.open_session()
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: session.chat("x").json(), range(5)))
    assert len({a["request_id"] for a in answers}) == 1
    assert len(harness.server.requests) == 1
    assert session.finalize()["num_rows"] == {"plan": 1}


def test_the_same_request_again_is_answered_from_the_record(harness: GatewayHarness) -> None:
    session = harness.open_session()
    assert session.chat("x").json() == session.chat("x").json()
    assert len(harness.server.requests) == 1
    assert session.chat("x", agent="searcher").status_code == 200
    assert len(harness.server.requests) == 2


def test_an_idempotency_key_names_the_call_and_fits_one_body(harness: GatewayHarness) -> None:
    session = harness.open_session()
    first = session.chat("x", headers={"Idempotency-Key": "a"}).json()
    assert session.chat("x", headers={"Idempotency-Key": "a"}).json() == first
    assert session.chat("x", headers={"Idempotency-Key": "b"}).json()["request_id"] != first["request_id"]
    misused = session.chat("other", headers={"Idempotency-Key": "a"})
    assert misused.status_code == 400
    assert misused.json()["error"]["param"] == "Idempotency-Key"


def test_a_request_that_says_it_is_a_first_attempt_is_a_sample_of_its_own(harness: GatewayHarness) -> None:
    session = harness.open_session()
    fresh = {"x-stainless-retry-count": "0"}
    ids = {session.chat("x", headers=fresh).json()["request_id"] for _ in range(3)}
    assert len(ids) == 3
    again = session.chat("x", headers={"x-stainless-retry-count": "1"}).json()["request_id"]
    assert again in ids


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_answer_that_is_whole_while_its_client_is_away_is_recorded_when_it_comes_back_or_never(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr("gateway.calls.RETURN_WITHIN_S", 10.0 if comes_back else 0.5)
    session = harness.open_session()
    live = harness.gateway.sessions._sessions[session.session_id]
    harness.server.delay_s = 0.3
    path, body = "agents/planner/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(httpx.ReadTimeout):
        session.post(path, body, headers={"x-stainless-retry-count": "0"}, timeout=0.15)
    time.sleep(0.6)
    assert len(harness.server.gave) == 1
    assert not any(owner.chains for owner in live.agents.values())
    if comes_back:
        assert session.post(path, body, headers={"x-stainless-retry-count": "1"}).status_code == 200
    until(lambda: not live.calls.num_running, "the call goes on")
    session.finalize(1.0)
    assert [len(row.turns) for row in harness.rows("plan")] == ([1] if comes_back else [])
    assert len(harness.server.requests) == 1


def test_a_client_that_hangs_up_ends_the_generation_unless_another_waits_for_it(
    harness: GatewayHarness,
) -> None:
    harness.server.delay_s = 0.6
    session = harness.open_session()
    body = {"messages": [user("x")]}
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(lambda: session.post("agents/planner/v1/chat/completions", body))
        time.sleep(0.1)
        with pytest.raises(httpx.ReadTimeout):
            session.post("agents/planner/v1/chat/completions", body, timeout=0.1)
        assert patient.result(5).status_code == 200
    assert len(harness.server.requests) == 1
    assert harness.server.aborted == []
