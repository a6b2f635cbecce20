"""A rewritten last answer takes its turn back; siblings and sub-agents never overwrite each other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.chains import AgentChains, Chain, Match
from gateway.conversation import ConversationKey
from model_runtime.store import Store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.unit.gateway.test_chains import MARK, message, sampled


def user(text: str) -> dict[str, Any]:
    return message("user", text)


def said(text: str) -> dict[str, Any]:
    return message("assistant", text)


TWO_TURNS = [user("a"), said("A"), user("b")]


def counters(harness: GatewayHarness) -> dict[str, float]:
    lines = harness.http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    names = ("rollbacks", "rolled_back_tokens", "chain_breaks")
    return {n: float(values.get(f'repertory_gateway_{n}_total{{model="plan"}}', 0)) for n in names}


def two_turns(harness: GatewayHarness, session: LiveSession) -> None:
    harness.server.answers = ["A", "B", "C", "D"]
    session.chat([user("a")])
    session.chat(TWO_TURNS)


# ------------------------------------------------------------------ over HTTP


def test_a_rewritten_last_answer_takes_its_turn_back_and_is_counted(harness: GatewayHarness) -> None:
    before = counters(harness)
    session = harness.open_session()
    two_turns(harness, session)
    session.chat([*TWO_TURNS, said("B, in other words"), user("c")])
    after = counters(harness)
    dropped = len(harness.server.answer_ids("B"))
    assert {k: after[k] - before[k] for k in after} == {
        "rollbacks": 1,
        "rolled_back_tokens": dropped,
        "chain_breaks": 0,
    }
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    mask = row.response_mask.astype(bool)
    own = [*harness.server.answer_ids("A"), *harness.server.answer_ids("C")]
    assert row.response_ids[mask].tolist() == own
    given = harness.server.requests[2]["token_ids"]
    assert [*row.prompt_ids.tolist(), *row.response_ids.tolist()][: len(given)] == given
    text = harness.server.tokenizer.decode(given, skip_special_tokens=False)
    assert "assistant\nB, in other words<|im_end|>\n<|im_start|>user\nc<|im_end|>" in text
    assert [turn.turn_index for turn in row.turns] == [0, 1]


def test_a_rollback_that_fails_leaves_the_turn_where_it_was(harness: GatewayHarness) -> None:
    session = harness.open_session()
    two_turns(harness, session)
    harness.server.fail_next = [400]
    rewritten = [*TWO_TURNS, said("other words"), user("c")]
    assert session.chat(rewritten).status_code == 400
    session.chat([*TWO_TURNS, said("B"), user("c")])
    assert session.finalize()["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    assert len(row.turns) == 3


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), said("A, in other words"), user("b")],  # the first answer: nothing to preserve
        [user("a, edited"), said("A"), user("b"), said("B"), user("c")],
        [user("a"), said("A"), user("b, edited"), said("B, edited"), user("c")],
        [user("a"), said("A"), user("b")],  # the same prompt again: a sibling
    ],
)
def test_other_edits_start_a_chain_of_their_own(
    harness: GatewayHarness, messages: list[dict[str, Any]]
) -> None:
    before = counters(harness)
    session = harness.open_session()
    two_turns(harness, session)
    session.chat(messages, headers={"x-stainless-retry-count": "0"})
    assert session.finalize()["num_rows"] == {"plan": 2}
    assert counters(harness) == before


def test_rolling_back_can_be_switched_off(local_store: Store) -> None:
    config = make_config(roll_back_rewritten_turns=False)
    with live_gateway(local_store, config=config) as harness:
        harness.start_afresh()
        session = harness.open_session()
        two_turns(harness, session)
        session.chat([*TWO_TURNS, said("other words"), user("c")])
        assert session.finalize()["num_rows"] == {"plan": 2}


def test_a_sub_agent_and_a_compacted_context_leave_the_main_chain_alone(harness: GatewayHarness) -> None:
    session = harness.open_session()
    two_turns(harness, session)
    session.chat([message("system", "sub-agent"), user("a")])
    session.chat([message("system", "so far: much"), user("go on")])
    harness.server.answers = ["E"]
    session.chat([*TWO_TURNS, said("B"), user("c")])
    assert session.finalize()["num_rows"] == {"plan": 3}
    assert [len(row.turns) for row in harness.rows("plan")] == [3, 1, 1]


def test_parallel_continuations_of_one_chain_are_siblings(harness: GatewayHarness) -> None:
    session = harness.open_session()
    two_turns(harness, session)
    harness.server.delay_s = 0.2
    longer = [*TWO_TURNS, said("B"), user("c")]
    with ThreadPoolExecutor(3) as pool:
        fresh = {"x-stainless-retry-count": "0"}
        answers = list(pool.map(lambda _: session.chat(longer, headers=fresh).status_code, range(3)))
    assert answers == [200] * 3
    assert session.finalize()["num_rows"] == {"plan": 3}
    rows = harness.rows("plan")
    assert sorted(len(row.turns) for row in rows) == [1, 1, 3]
    num_sampled = sum(int(row.response_mask.sum()) for row in rows)
    assert num_sampled == sum(len(harness.server.answer_ids(text)) for text in "ABCDD")


def test_a_session_that_ends_meanwhile_takes_no_late_turn(harness: GatewayHarness) -> None:
    session = harness.open_session()
    two_turns(harness, session)
    harness.server.delay_s = 0.4
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: session.chat([*TWO_TURNS, said("B"), user("c")], stream=True).status_code)
        time.sleep(0.1)
        assert session.finalize()["num_rows"] == {"plan": 1}
        assert late.result(5) == 409
    [row] = harness.rows("plan")
    assert len(row.turns) == 2


# ------------------------------------------------------------------ which chain


def talk(owner: AgentChains, texts: list[str], *, fresh: bool = False) -> Chain:
    """The conversation a, A, b, B, …; the last is the answer. `fresh`: as a chain of its own."""
    messages = [user(t) if i % 2 == 0 else said(t) for i, t in enumerate(texts[:-1])]
    key = ConversationKey(messages)
    found = None if fresh else owner.match(key)
    match = found or Match(Chain(), 0)
    ids = sampled([1], [10, 11])
    owner.commit(match.chain, ids, key=key, answer=texts[-1], mark=MARK, num_turns=match.num_turns)
    return match.chain


def find(owner: AgentChains, *texts: str) -> tuple[Chain, int] | None:
    messages = [user(t) if i % 2 == 0 else said(t) for i, t in enumerate(texts)]
    match = owner.match(ConversationKey(messages))
    return None if match is None else (match.chain, match.num_turns)


def line(owner: AgentChains, *texts: str) -> Chain:
    """A chain with a turn for each answer."""
    chain = talk(owner, list(texts[:2]), fresh=True)
    for end in range(4, len(texts) + 1, 2):
        messages = [user(t) if i % 2 == 0 else said(t) for i, t in enumerate(texts[: end - 1])]
        key = ConversationKey(messages)
        owner.commit(chain, sampled([1], [10, 11]), key=key, answer=texts[end - 1], mark=MARK)
    return chain


def test_two_chains_with_the_same_deepest_boundary_are_ambiguous() -> None:
    owner = AgentChains("agent", "m")
    line(owner, "a", "A", "b", "B")
    line(owner, "a", "A", "b", "B2")
    assert find(owner, "a", "A", "b", "X", "c") is None
    assert owner.num_ambiguous == 1


def test_the_deepest_boundary_wins_over_a_shallow_one_and_over_a_shorter_exact_match() -> None:
    owner = AgentChains("agent", "m")
    line(owner, "a", "A", "b", "B")
    deep = line(owner, "a", "A", "b", "B", "c", "C")
    short = line(owner, "a", "A")
    assert find(owner, "a", "A", "b", "B", "c", "X", "d") == (deep, 2)
    assert find(owner, "a", "A", "y") == (short, 1)


def test_an_exact_match_is_preferred_to_a_rollback_of_the_same_depth_or_less() -> None:
    owner = AgentChains("agent", "m")
    line(owner, "a", "A", "b", "B")
    exact = line(owner, "a", "A", "b", "B2")
    assert find(owner, "a", "A", "b", "B2", "c") == (exact, 2)


def test_a_reserved_chain_is_never_rolled_back_nor_another_in_its_place() -> None:
    owner = AgentChains("agent", "m")
    chain = line(owner, "a", "A", "b", "B")
    chain.reserved = True
    assert find(owner, "a", "A", "b", "X", "c") is None
    line(owner, "a", "A", "b", "B2")
    # The conversation is `chain`'s own, which is under way: the other is no rewrite of it.
    assert find(owner, "a", "A", "b", "B", "c") is None


def test_a_chain_can_be_rolled_back_again_and_again() -> None:
    owner = AgentChains("agent", "m")
    chain = line(owner, "a", "A", "b", "B")
    for texts in (["a", "A", "b", "X", "c", "C"], ["a", "A", "b", "X", "c", "Y", "d", "D"]):
        assert talk(owner, texts) is chain
        assert len(chain.turns) == 2
        assert chain.token_ids(2).tolist() == [1, 10, 11, 1, 10, 11]
        assert [(turn.start, turn.end) for turn in chain.turns] == [(0, 2), (3, 5)]
    assert find(owner, "a", "A", "b", "X", "c", "Y", "d", "D", "e") == (chain, 2)
