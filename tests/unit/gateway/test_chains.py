"""Chains grow by whole turns; masks, logprobs and versions stay aligned; trajectories are exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from gateway.chains import (
    AgentChains,
    Chain,
    ConversationKey,
    ExecutionRecord,
    SampledTurn,
    VersionSpan,
    materialise,
)
from gateway.codec import TextMark
from model_runtime.types import trajectory_id
from tests.fakes import make_member

MARK = TextMark.of("text")


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def sampled(
    context: list[int],
    ids: list[int],
    *,
    version: int = 0,
    request_id: str = "r",
    spans: tuple[VersionSpan, ...] | None = None,
) -> SampledTurn:
    return SampledTurn(
        context_ids=np.asarray(context, np.int32),
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray([-0.5 * (i + 1) for i in range(len(ids))], np.float32),
        versions=(VersionSpan(version, len(ids)),) if spans is None else spans,
        request_id=request_id,
        finish_reason="stop",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        started_at=1.0,
        ended_at=2.0,
    )


def talk(owner: AgentChains, messages: list[dict[str, Any]], turn: SampledTurn, answer: str) -> Chain:
    key = ConversationKey(messages)
    chain = owner.longest_prefix(key) or Chain()
    owner.commit(chain, turn, key=key, answer=answer, mark=MARK)
    return chain


def record(**overrides: Any) -> ExecutionRecord:
    fields: dict[str, Any] = {
        "run_id": "run",
        "member": make_member(),
        "session_id": "s",
        "train": {"m": True},
        "workflow_rewards": {"reward": 1.0},
        "agent_rewards": {},
        "turn_rewards": {},
    }
    return ExecutionRecord(**fields | overrides)


def two_turns(owner: AgentChains) -> Chain:
    opening = [message("user", "a")]
    talk(owner, opening, sampled([1, 2], [10, 11], version=3, request_id="r1"), "A")
    follow = [*opening, message("assistant", "A"), message("tool", "t")]
    return talk(owner, follow, sampled([20, 21, 22], [12], version=4, request_id="r2"), "B")


def test_a_linear_conversation_is_one_chain_with_masked_context() -> None:
    owner = AgentChains("agent", "m")
    two_turns(owner)
    [row], refused = materialise([owner], record())
    assert not refused
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert row.response_mask.tolist() == [1, 1, 0, 0, 0, 1]
    assert row.behavior_logprobs.tolist() == [-0.5, -1.0, 0, 0, 0, -0.5]
    assert row.token_versions.tolist() == [3, 3, -1, -1, -1, 4]
    assert [(t.start, t.end, t.request_id) for t in row.turns] == [(0, 2, "r1"), (5, 6, "r2")]
    assert (row.policy_version, row.policy_version_max, row.request_id) == (3, 4, "r2")


def test_another_system_prompt_is_another_chain_and_the_first_goes_on() -> None:
    owner = AgentChains("agent", "m")
    main = two_turns(owner)
    sub = talk(owner, [message("system", "sub"), message("user", "a")], sampled([5], [13]), "C")
    assert sub is not main
    follow = [
        *[message("user", "a"), message("assistant", "A"), message("tool", "t"), message("assistant", "B")],
        message("user", "more"),
    ]
    assert owner.longest_prefix(ConversationKey(follow)) is main
    rows, _ = materialise([owner], record())
    assert [row.chain_index for row in rows] == [0, 1]
    assert len({row.trajectory_id for row in rows}) == 2


def test_the_longest_prefix_wins_and_the_newest_among_equals() -> None:
    owner = AgentChains("agent", "m")
    opening = [message("user", "a")]
    first = Chain()
    owner.commit(first, sampled([1], [10]), key=ConversationKey(opening), answer="A", mark=MARK)
    second = Chain()
    owner.commit(second, sampled([1], [11]), key=ConversationKey(opening), answer="A", mark=MARK)
    follow = ConversationKey([*opening, message("assistant", "A"), message("user", "b")])
    assert owner.longest_prefix(follow) is second
    owner.commit(first, sampled([7], [12]), key=follow, answer="B", mark=MARK)
    longer = [*opening, message("assistant", "A"), message("user", "b"), message("assistant", "B")]
    assert owner.longest_prefix(ConversationKey([*longer, message("user", "c")])) is first


def test_a_reserved_chain_is_not_continued_by_another_call() -> None:
    owner = AgentChains("agent", "m")
    chain = talk(owner, [message("user", "a")], sampled([1], [10]), "A")
    key = ConversationKey([message("user", "a"), message("assistant", "A"), message("user", "b")])
    chain.reserved = True
    assert owner.longest_prefix(key) is None
    chain.reserved = False
    assert owner.longest_prefix(key) is chain


def test_an_edited_answer_or_an_unchanged_request_continues_nothing() -> None:
    owner = AgentChains("agent", "m")
    talk(owner, [message("user", "a")], sampled([1], [10]), "A")
    edited = [message("user", "a"), message("assistant", "B"), message("user", "b")]
    assert owner.longest_prefix(ConversationKey(edited)) is None
    assert owner.longest_prefix(ConversationKey([message("user", "a")])) is None


def digests(messages: list[dict[str, str]]) -> list[bytes]:
    key = ConversationKey(messages)
    return [key.digest(index) for index in range(len(messages))]


def test_the_key_tells_roles_contents_and_names_apart() -> None:
    base = digests([message("user", "a")])
    assert digests([message("system", "a")]) != base
    assert digests([message("user", "b")]) != base
    assert digests([{**message("user", "a"), "name": "x"}]) != base
    # the boundary between messages counts too
    split = digests([message("user", "ab"), message("user", "c")])[-1]
    assert split != digests([message("user", "a"), message("user", "bc")])[-1]


def test_the_key_of_a_longer_conversation_has_the_digests_of_its_beginnings() -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "assistant", "user", "tool"]
    messages = [message(role, str(place)) for place, role in enumerate(roles)]
    whole = digests(messages)
    assert len(set(whole)) == len(messages)
    for length in range(1, len(messages) + 1):
        assert digests(messages[:length]) == whole[:length]
    key = ConversationKey(messages[:4])
    assert key.with_answer("4") == whole[4]
    assert [key.digest(index) for index in (3, 1, 0, 2)] == [whole[index] for index in (3, 1, 0, 2)]


def test_rewards_stand_at_their_level_and_missing_ones_stay_missing() -> None:
    owner, other = AgentChains("agent", "m"), AgentChains("other", "m")
    two_turns(owner)
    talk(other, [message("user", "z")], sampled([1], [10]), "A")
    rows, _ = materialise(
        [owner, other],
        record(
            workflow_rewards={}, agent_rewards={"agent": {"style": 0.5}}, turn_rewards={"r2": {"reward": 2.0}}
        ),
    )
    assert dict(rows[0].workflow_rewards) == {}
    assert [dict(row.agent_rewards) for row in rows] == [{"style": 0.5}, {}]
    assert [dict(turn.rewards) for turn in rows[0].turns] == [{}, {"reward": 2.0}]


def test_partner_versions_name_the_other_models_of_the_execution() -> None:
    planner, solver = AgentChains("planner", "p"), AgentChains("solver", "m")
    two_turns(solver)
    talk(planner, [message("user", "z")], sampled([1], [10], version=7), "A")
    rows, _ = materialise([planner, solver], record(train={"p": True, "m": False}))
    assert [dict(row.partner_versions) for row in rows] == [{"m": (3, 4)}, {"p": (7, 7)}]
    assert [row.train for row in rows] == [True, False]


def test_a_chain_that_breaks_an_invariant_is_refused_and_its_neighbours_are_not() -> None:
    owner = AgentChains("agent", "m")
    broken = sampled([1], [10])
    broken.logprobs[0] = np.nan
    talk(owner, [message("user", "broken")], broken, "A")
    talk(owner, [message("user", "whole")], sampled([1], [11]), "B")
    rows, refused = materialise([owner], record())
    assert [row.response_ids.tolist() for row in rows] == [[11]]
    assert len(refused) == 1
    assert "not finite" in str(refused[0])


def test_trajectory_ids_are_those_of_the_execution_so_a_repeated_write_is_seen() -> None:
    owner = AgentChains("agent", "m")
    two_turns(owner)
    [row], _ = materialise([owner], record())
    [again], _ = materialise([owner], record())
    assert row.trajectory_id == again.trajectory_id == trajectory_id("run", make_member(), "agent", 0)
