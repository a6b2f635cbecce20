"""How conversations become chains, over HTTP: which one goes on, which one starts, what failures leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model_runtime.store import Store
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway
from tests.tool_gateway import SAMPLED_CALL, prepare, tool_config
from tests.tool_use import SEARCH, call, calling, result
from tests.unit.gateway.test_rollback import said, user
from tests.waiting import until

FRESH = {"x-stainless-retry-count": "0"}
TWO_CALLS = SAMPLED_CALL + SAMPLED_CALL.replace("tea", "cake")


def answer(session: LiveSession, messages: list[Any], text: str, **fields: Any) -> None:
    """The agent asks, the policy says `text`."""
    server = session.harness.server
    server.answers, server._num_answers = [text], 0
    response = session.chat(messages, headers=FRESH, **fields)
    assert response.status_code == 200, response.text


def turns_of(harness: GatewayHarness) -> list[list[str]]:
    """What was sampled, turn by turn, for each row."""
    decode = harness.server.tokenizer.decode
    return [
        [decode(row.response_ids[turn.start : turn.end].tolist()) for turn in row.turns]
        for row in harness.rows("plan")
    ]


# ------------------------------------------------------------------ which chain goes on


def test_the_same_prompt_twice_makes_siblings_and_the_newest_of_equals_goes_on(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "same")
    answer(session, [user("a")], "same")
    answer(session, [user("a"), said("same"), user("b")], "next")
    session.finalize()
    assert turns_of(harness) == [["same"], ["same", "next"]]


def test_a_continuation_goes_to_the_sibling_it_quotes_be_it_the_older(harness: GatewayHarness) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "one")
    answer(session, [user("a")], "two")
    answer(session, [user("a"), said("one"), user("b")], "next")
    session.finalize()
    assert turns_of(harness) == [["one", "next"], ["two"]]


def test_while_siblings_are_under_way_a_call_takes_another_one_and_then_starts_anew(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "same")
    answer(session, [user("a")], "same")
    harness.server.answers, harness.server.delay_s = ["next"], 0.3
    follow = [user("a"), said("same"), user("b")]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: session.chat(follow, headers=FRESH).status_code, range(3)))
    assert answers == [200] * 3
    session.finalize()
    assert sorted(turns_of(harness)) == [["next"], ["same", "next"], ["same", "next"]]
    # Each was given the same ids: by splicing or anew, the prompt is one.
    assert len({tuple(request["token_ids"]) for request in harness.server.requests[2:]}) == 1


def test_a_rewrite_of_two_chains_at_one_boundary_starts_a_third(harness: GatewayHarness) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B1")
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B2")
    before = harness.http.get("/metrics").text
    answer(session, [user("a"), said("A"), user("b"), said("B rewritten"), user("c")], "C")
    session.finalize()
    assert turns_of(harness) == [["A", "B1"], ["A", "B2"], ["C"]]
    assert "repertory_gateway_ambiguous_rewrites_total" in before


def test_the_deepest_boundary_is_rolled_back_and_wins_over_a_shorter_exact_match(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B")
    answer(session, [user("a")], "A")  # a sibling that holds only the first turn
    answer(session, [user("a"), said("A"), user("b"), said("B rewritten"), user("c")], "C")
    session.finalize()
    assert turns_of(harness) == [["A", "C"], ["A"]]


def test_an_exact_match_is_preferred_to_a_rollback_of_another_chain(harness: GatewayHarness) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B1")
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B2")
    answer(session, [user("a"), said("A"), user("b"), said("B1"), user("c")], "C")
    session.finalize()
    assert turns_of(harness) == [["A", "B1", "C"], ["A", "B2"]]


def test_a_chain_under_way_is_not_rolled_back(harness: GatewayHarness) -> None:
    session = harness.open_session()
    answer(session, [user("a")], "A")
    answer(session, [user("a"), said("A"), user("b")], "B")
    harness.server.answers, harness.server.delay_s = ["C"], 0.3
    exact = [user("a"), said("A"), user("b"), said("B"), user("c")]
    rewritten = [user("a"), said("A"), user("b"), said("B rewritten"), user("c")]
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(session.chat, exact, headers=FRESH)
        until(lambda: len(harness.server.requests) == 3, "the first call did not reach the server")
        assert session.chat(rewritten, headers=FRESH).status_code == 200
        assert running.result().status_code == 200
    session.finalize()
    assert sorted(turns_of(harness)) == [["A", "B", "C"], ["C"]]


def test_a_rewritten_first_answer_with_tools_starts_a_chain_of_its_own(own_tools: GatewayHarness) -> None:
    session = own_tools.open_session()
    answer(session, [user("a")], SAMPLED_CALL, tools=[SEARCH])
    rewritten = calling(call("search", '{"query": "coffee"}'))
    answer(session, [user("a"), rewritten, result("coffee")], "ok", tools=[SEARCH])
    session.finalize()
    assert turns_of(own_tools) == [[SAMPLED_CALL], ["ok"]]


def test_swapped_ids_of_two_calls_continue_the_chain(own_tools: GatewayHarness) -> None:
    session = own_tools.open_session()
    answer(session, [user("a")], TWO_CALLS, tools=[SEARCH])
    made = [call("search", '{"query":"tea"}', "b"), call("search", '{"query":"cake"}', "a")]
    results = [result("tea", "b"), result("cake", "a")]
    answer(session, [user("a"), calling(*made), *results], "ok", tools=[SEARCH])
    session.finalize()
    assert turns_of(own_tools) == [[TWO_CALLS, "ok"]]


def test_a_sub_agents_row_stands_beside_the_mains_with_the_same_reward(harness: GatewayHarness) -> None:
    session = harness.open_session()
    answer(session, [user("main")], "M1")
    answer(session, [{"role": "system", "content": "sub"}, user("task")], "S")
    answer(session, [user("main"), said("M1"), user("go on")], "M2")
    assert session.finalize(0.75)["num_rows"] == {"plan": 2}
    assert turns_of(harness) == [["M1", "M2"], ["S"]]
    assert [dict(row.workflow_rewards) for row in harness.rows("plan")] == [{"reward": 0.75}] * 2


@pytest.fixture
def own_tools(local_store: Store) -> Any:
    with live_gateway(local_store, config=tool_config()) as harness:
        yield prepare(harness)


# ------------------------------------------------------------------ what failures leave


@pytest.mark.parametrize("failure", [400, "short", "parse", "hang up"])
def test_a_failed_call_releases_its_chain_and_may_be_repeated(
    own_tools: GatewayHarness, failure: int | str
) -> None:
    harness, server = own_tools, own_tools.server
    session = harness.open_session()
    answer(session, [user("a")], "A", tools=[SEARCH])
    follow = [user("a"), said("A"), user("b")]
    server.answers, server._num_answers = ["B"], 0
    if failure == "hang up":
        server.delay_s = 5.0
        with pytest.raises(Exception, match="timed out"):
            session.post("agents/planner/v1/chat/completions", {"messages": follow}, timeout=0.3)
        until(lambda: server.aborted, "the generation was not ended")
        server.delay_s = 0.0
    elif failure == "parse":  # an attempt whose answer can't be parsed is made again, elsewhere or here
        server.fail_derender = 500
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(session.chat, follow, headers=FRESH, tools=[SEARCH])
            until(lambda: len(server.derendered) > 1, "the parser was not asked")
            server.fail_derender = 0
            assert running.result().status_code == 200
        follow = [*follow, said("B"), user("c")]
    else:
        server.fail_next = [failure]
        status = session.chat(follow, headers=FRESH, tools=[SEARCH]).status_code
        assert status == (400 if failure == 400 else 200)
        if failure == "short":
            follow = [*follow, said("B"), user("c")]
    answer(session, follow, "next", tools=[SEARCH])
    assert session.finalize(1.0)["status"] == "finalized"
    middle = ["B"] if failure in ("short", "parse") else []
    assert turns_of(harness) == [["A", *middle, "next"]]


def test_a_failure_after_the_tools_changed_keeps_the_first_chain_and_starts_none(
    own_tools: GatewayHarness,
) -> None:
    session = own_tools.open_session()
    answer(session, [user("a")], "A", tools=[SEARCH])
    own_tools.server.fail_next = [400]
    follow = [user("a"), said("A"), user("b")]
    assert session.chat(follow, headers=FRESH).status_code == 400
    answer(session, follow, "B", tools=[SEARCH])
    session.finalize()
    assert turns_of(own_tools) == [["A", "B"]]


# ------------------------------------------------------------------ room


def test_a_full_context_ends_as_length_without_the_server_and_leaves_every_chain_as_it_was(
    local_store: Store,
) -> None:
    with live_gateway(local_store) as harness:
        harness.make_ready()
        uri = "run/models/plan/tokenizer/short.json"
        local_store.put(uri, make_tokenizer_document(max_model_len=60).to_bytes())
        harness.renew("plan", tokenizer_uri=uri)
        harness.wait_for_tokenizer("plan", uri)
        harness.open_group()
        session = harness.open_session()
        answer(session, [user("a")], "A")
        answer(session, [user("other")], "O")
        num_asked = len(harness.server.requests)
        grown = [user("a"), said("A"), user("long " * 20)]
        for messages in (grown, [user("long " * 40)]):
            full = session.chat(messages, headers=FRESH).json()
            assert full["choices"][0]["finish_reason"] == "length"
            assert full["choices"][0]["message"]["content"] == ""
            assert full["usage"]["completion_tokens"] == 0
        assert len(harness.server.requests) == num_asked
        answer(session, [user("other"), said("O"), user("b")], "P")
        answer(session, [user("a"), said("A"), user("b")], "B")
        session.finalize()
        assert turns_of(harness) == [["A", "B"], ["O", "P"]]
        assert 'out_of_room_total{model="plan"} 2.0' in harness.http.get("/metrics").text


def test_a_prompt_that_fills_the_context_exactly_asks_no_server(local_store: Store) -> None:
    with live_gateway(local_store) as harness:
        harness.make_ready()
        harness.open_group()
        session = harness.open_session()
        session.chat([user("abc")])
        [request] = harness.server.requests
        uri = "run/models/plan/tokenizer/exact.json"
        local_store.put(uri, make_tokenizer_document(max_model_len=len(request["token_ids"])).to_bytes())
        harness.renew("plan", tokenizer_uri=uri)
        harness.wait_for_tokenizer("plan", uri)
        other = harness.open_session(member=1)
        assert other.chat([user("abc")]).json()["choices"][0]["finish_reason"] == "length"
        assert len(harness.server.requests) == 1
        assert other.finalize()["num_rows"] == {}


# ------------------------------------------------------------------ versions


def test_a_chain_spans_the_versions_that_sampled_it_and_others_are_not_touched(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    history: list[Any] = [user("a")]
    for version in (3, 4, 5):
        harness.renew("plan", published_version=version, live_versions=[version])
        answer(session, history, f"A{version}")
        if version == 4:
            answer(session, [user("other")], "O")
        history += [said(f"A{version}"), user("go on")]
    session.finalize()
    main, other = harness.rows("plan")
    assert (main.policy_version, main.policy_version_max) == (3, 5)
    assert (other.policy_version, other.policy_version_max) == (4, 4)
    assert [(turn.version_min, turn.version_max) for turn in main.turns] == [(3, 3), (4, 4), (5, 5)]
    sampled = main.token_versions[main.response_mask == 1]
    counts = [len(harness.server.answer_ids(f"A{version}")) for version in (3, 4, 5)]
    assert sampled.tolist() == [3] * counts[0] + [4] * counts[1] + [5] * counts[2]
