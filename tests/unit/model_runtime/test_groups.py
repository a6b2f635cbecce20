"""Which executions count, when a group is complete, and what it teaches."""

from __future__ import annotations

import math

import numpy as np
import pytest

from model_runtime.groups import GroupBook, LogRow, Outcome, Verdict
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.types import Trajectory
from tests.fakes import make_settlement, make_trajectory

_HERE = ("e00001-00001", 0)


def _rows(*trajectories: Trajectory, level="workflow") -> list[LogRow]:
    return [LogRow.of(t, _HERE, ObjectiveConfig(reward_level=level)) for t in trajectories]


def _settle(book: GroupBook, *trajectories: Trajectory, level="workflow", **settlement) -> Outcome:
    return book.settle(_HERE, make_settlement(**settlement), _rows(*trajectories, level=level))


def _member(index: int, reward: float | None, **more) -> Trajectory:
    return make_trajectory(member_index=index, reward=reward, **more)


def test_a_group_is_complete_when_every_member_is_settled():
    book = GroupBook(ObjectiveConfig())
    for index in (2, 0, 3):
        assert _settle(book, _member(index, float(index)), member_index=index).completed is None
    group = _settle(book, _member(1, 1.0), member_index=1).completed
    assert group is not None
    assert group.verdict is not None
    assert group.verdict.closed_reason is None
    assert len(group.verdict.advantages) == 4


def test_members_with_no_one_and_three_chains_have_one_value_each():
    book = GroupBook(ObjectiveConfig())
    three = [_member(0, 1.0, chain_index=c) for c in range(3)]
    _settle(book, *three, member_index=0)
    one = _member(1, 0.0)
    _settle(book, one, member_index=1)
    _settle(book, member_index=2, num_rows={})
    group = _settle(book, _member(3, 0.0), member_index=3).completed
    assert group is not None
    verdict = group.verdict
    assert verdict is not None
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0)
    advantages = {verdict.advantages[t.trajectory_id] for t in three}
    assert len(advantages) == 1
    # values 1, 0, 0: mean 1/3, unbiased standard deviation 1/sqrt(3)
    assert math.isclose(advantages.pop(), (2 / 3) / (1 / math.sqrt(3)), rel_tol=1e-5)


def test_agents_are_never_compared_with_one_another():
    book = GroupBook(ObjectiveConfig(reward_level="agent"))
    for index in range(4):
        own = {
            agent: make_trajectory(
                member_index=index, agent_id=agent, agent_rewards={"reward": value}, reward=9.0
            )
            for agent, value in (("search_agent", float(index % 2)), ("answer_agent", 5.0))
        }
        outcome = _settle(book, *own.values(), member_index=index, level="agent")
    assert outcome.completed is not None
    verdict = outcome.completed.verdict
    assert verdict is not None
    assert {b.agent_id: b.excluded for b in verdict.baselines} == {
        "answer_agent": "zero_variance",
        "search_agent": None,
    }
    assert set(verdict.excluded.values()) == {"zero_variance"}
    assert len(verdict.advantages) == len(verdict.excluded) == 4


def test_an_agent_without_a_reward_of_its_own_has_the_workflows():
    book = GroupBook(ObjectiveConfig(reward_level="agent"))
    for index in range(4):
        outcome = _settle(book, _member(index, float(index == 0)), member_index=index, level="agent")
    assert outcome.completed is not None
    assert outcome.completed.verdict is not None
    assert outcome.completed.verdict.baselines[0].values == (1.0, 0.0, 0.0, 0.0)


def test_a_missing_reward_is_no_value_and_not_zero():
    book = GroupBook(ObjectiveConfig())
    rewards = (None, 1.0, 2.0, 3.0)
    for index, reward in enumerate(rewards):
        outcome = _settle(book, _member(index, reward), member_index=index)
    assert outcome.completed is not None
    verdict = outcome.completed.verdict
    assert verdict is not None
    assert verdict.baselines[0].values == (1.0, 2.0, 3.0)
    assert list(verdict.excluded.values()) == ["missing_reward"]


def test_the_first_final_settlement_of_a_member_counts():
    book = GroupBook(ObjectiveConfig())
    retried = _settle(book, _member(0, 0.0), member_index=0, status="retried")
    assert [reason for _, reason in retried.dropped] == ["retried"]
    assert _settle(book, _member(0, 1.0, attempt=1), member_index=0, attempt=1).dropped == ()
    again = _settle(book, _member(0, 0.0, attempt=2), member_index=0, attempt=2)
    assert [reason for _, reason in again.dropped] == ["duplicate_attempt"]
    assert again.completed is None


def test_members_that_broke_off_leave_no_rows_and_no_value():
    book = GroupBook(ObjectiveConfig())
    for index, status in enumerate(("infra", "aborted", "expired")):
        outcome = _settle(book, _member(index, 0.0), member_index=index, status=status)
        assert [reason for _, reason in outcome.dropped] == [status]
    group = _settle(book, _member(3, 1.0), member_index=3).completed
    assert group is not None
    assert group.verdict is not None
    assert group.verdict.closed_reason == "too_few_values"


def test_a_group_closes_with_the_reason_it_teaches_nothing():
    def closed_by(rewards, **settlement):
        book = GroupBook(ObjectiveConfig())
        for index, reward in enumerate(rewards):
            rows = [] if reward is None else [_member(index, reward, train=settlement.get("train", True))]
            outcome = _settle(book, *rows, member_index=index, **settlement)
        assert outcome.completed is not None
        assert outcome.completed.verdict is not None
        return outcome.completed.verdict.closed_reason

    assert closed_by([None] * 4) == "no_rows"
    assert closed_by([1.0] * 4) == "zero_variance"
    assert closed_by([1.0, None, None, None]) == "too_few_values"
    assert closed_by([0.0, 1.0, 0.0, 1.0], train=False) == "not_for_training"
    assert closed_by([0.0, 1.0, 0.0, 1.0], status="aborted") == "cancelled"
    assert closed_by([0.0, 1.0, 0.0, 1.0]) is None


def test_a_retired_group_never_opens_again():
    book = GroupBook(ObjectiveConfig(), retired={"g0"})
    outcome = _settle(book, _member(0, 1.0), member_index=0)
    assert [reason for _, reason in outcome.dropped] == ["duplicate_attempt"]
    assert not outcome.belongs
    assert list(book.open_groups()) == []


def test_a_member_of_a_group_of_another_size_is_refused():
    book = GroupBook(ObjectiveConfig())
    _settle(book, _member(0, 1.0), member_index=0)
    outcome = _settle(book, _member(1, 1.0, group_size=2), member_index=1, group_size=2)
    assert [reason for _, reason in outcome.dropped] == ["mismatched_group"]


def test_an_abandoned_group_drops_what_it_has():
    book = GroupBook(ObjectiveConfig())
    _settle(book, _member(0, 1.0), member_index=0)
    group = book.abandon("g0")
    assert group is not None
    assert group.verdict is not None
    assert group.verdict.closed_reason == "cancelled"
    late = _settle(book, _member(1, 1.0), member_index=1)
    assert [reason for _, reason in late.dropped] == ["duplicate_attempt"]


def _judged(objective: ObjectiveConfig, *members: list[Trajectory]) -> Verdict:
    book = GroupBook(objective)
    for index, own in enumerate(members):
        rows = [LogRow.of(t, _HERE, objective) for t in own]
        settlement = make_settlement(member_index=index, group_size=len(members))
        outcome = book.settle(_HERE, settlement, rows)
    assert outcome.completed is not None
    assert outcome.completed.verdict is not None
    return outcome.completed.verdict


def _two_agents(index: int, first: float, second: float, *, chains: int = 1) -> list[Trajectory]:
    return [
        make_trajectory(
            member_index=index, group_size=2, agent_id=agent, chain_index=c, agent_rewards={"reward": reward}
        )
        for agent, reward, count in (("a", first, chains), ("b", second, 1))
        for c in range(count)
    ]


def test_agents_that_share_a_baseline_are_one_value_per_member():
    objective = ObjectiveConfig(reward_level="agent", baseline_key="group", normalize_by_std=False)
    members = [_two_agents(0, 1.0, 0.0, chains=3), _two_agents(1, 0.0, 0.0)]
    verdict = _judged(objective, *members)
    # members: (1 + 0) / 2 and 0, however many chains; mean 1/4
    assert [verdict.advantages[t.trajectory_id] for t in members[0]] == [0.25] * 4
    assert [verdict.advantages[t.trajectory_id] for t in members[1]] == [-0.25] * 2
    assert {b.agent_id: b.values for b in verdict.baselines} == {"a": (1.0, 0.0), "b": (0.0, 0.0)}


def test_a_reward_is_the_weighted_sum_of_the_components_that_came():
    weights = {"reward": 1.0, "format": 0.5}
    objective = ObjectiveConfig(reward_weights=weights, normalize_by_std=False)
    both = make_trajectory(member_index=0, group_size=3, workflow_rewards={"reward": 1.0, "format": 1.0})
    one = make_trajectory(member_index=1, group_size=3, workflow_rewards={"format": 1.0})
    none = make_trajectory(member_index=2, group_size=3, workflow_rewards={"other": 9.0})
    verdict = _judged(objective, [both], [one], [none])
    assert verdict.advantages == {both.trajectory_id: 0.5, one.trajectory_id: -0.5}
    assert verdict.excluded == {none.trajectory_id: "missing_reward"}


def test_gdpo_normalises_each_component_on_its_own():
    objective = ObjectiveConfig(advantage="gdpo", reward_weights={"reward": 1.0, "format": 1.0})
    members = [
        [make_trajectory(member_index=i, group_size=2, workflow_rewards={"reward": r, "format": f})]
        for i, (r, f) in enumerate([(100.0, 0.0), (0.0, 1.0)])
    ]
    verdict = _judged(objective, *members)
    assert all(abs(a) < 1e-5 for a in verdict.advantages.values())  # opposite components cancel


def test_opo_weighs_a_member_by_all_tokens_it_sampled():
    objective = ObjectiveConfig(advantage="opo")
    long = [make_trajectory(member_index=0, group_size=2, reward=1.0, chain_index=c) for c in range(3)]
    short = [make_trajectory(member_index=1, group_size=2, reward=0.0)]
    verdict = _judged(objective, long, short)
    assert math.isclose(verdict.advantages[short[0].trajectory_id], -0.75)


def test_components_of_workflow_and_agent_are_mixed_by_their_weights():
    objective = ObjectiveConfig(
        reward_weights={"workflow:reward": 1.0, "agent:reward": 0.5}, normalize_by_std=False
    )
    shared, own = {"workflow_rewards": {"reward": 1.0}}, {"agent_rewards": {"reward": 1.0}}
    both = make_trajectory(member_index=0, group_size=2, **shared, **own)
    one = make_trajectory(member_index=1, group_size=2, **shared)
    verdict = _judged(objective, [both], [one])
    assert verdict.advantages == {both.trajectory_id: 0.25, one.trajectory_id: -0.25}


# ------------------------------------------------------------------ executions that did not finish


def _with_one_unfinished(status: str, reward: float | None, **objective) -> tuple[Verdict, list[Outcome]]:
    """Three finished members with rewards 1, 0, 0, and one that ended as `status`."""
    book = GroupBook(config := ObjectiveConfig(**objective))
    outcomes = []
    for index, (value, end) in enumerate(
        [(1.0, "finalized"), (0.0, "finalized"), (0.0, "finalized"), (reward, status)]
    ):
        row = LogRow.of(_member(index, value), _HERE, config)
        outcomes.append(book.settle(_HERE, make_settlement(member_index=index, status=end), [row]))
    group = outcomes[-1].completed
    assert group is not None
    assert group.verdict is not None
    return group.verdict, outcomes


def test_an_unfinished_execution_is_dropped_unless_it_is_to_be_compared_with():
    verdict, outcomes = _with_one_unfinished("expired", 0.5)
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0)
    assert [reason for _, reason in outcomes[-1].dropped] == ["expired"]


@pytest.mark.parametrize("turns", [{}, {"turn_discount": 0.5}])
@pytest.mark.parametrize("status", ["expired", "aborted"])
def test_an_unfinished_execution_counts_in_the_baseline_and_has_no_loss(status, turns):
    verdict, outcomes = _with_one_unfinished(status, 0.5, unfinished="baseline", **turns)
    assert outcomes[-1].dropped == ()
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0, 0.5)
    assert list(verdict.excluded.values()) == ["unfinished"]
    # values 1, 0, 0, 0.5: mean 0.375
    mean, std = 0.375, np.std([1, 0, 0, 0.5], ddof=1)
    expected = [(value - mean) / std for value in (1.0, 0.0, 0.0)]
    assert np.allclose(list(verdict.advantages.values()), expected, rtol=1e-4)


def test_an_unfinished_execution_without_a_reward_is_left_out_unless_the_config_says_its_value():
    verdict, _ = _with_one_unfinished("expired", None, unfinished="baseline")
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0)
    assert list(verdict.excluded.values()) == ["missing_reward"]
    verdict, _ = _with_one_unfinished("expired", None, unfinished="baseline", unfinished_reward=-1.0)
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0, -1.0)
    assert list(verdict.excluded.values()) == ["unfinished"]
    verdict, _ = _with_one_unfinished("expired", 0.5, unfinished="baseline", unfinished_reward=-1.0)
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0, 0.5)


@pytest.mark.parametrize("status", ["infra"])
def test_the_infrastructures_fault_is_never_compared_with(status):
    verdict, outcomes = _with_one_unfinished(status, 0.5, unfinished="baseline", unfinished_reward=0.0)
    assert verdict.baselines[0].values == (1.0, 0.0, 0.0)
    assert [reason for _, reason in outcomes[-1].dropped] == [status]


def test_a_group_of_unfinished_executions_alone_teaches_nothing():
    book = GroupBook(config := ObjectiveConfig(unfinished="baseline"))
    for index in range(4):
        row = LogRow.of(_member(index, float(index)), _HERE, config)
        outcome = book.settle(_HERE, make_settlement(member_index=index, status="expired"), [row])
    assert outcome.completed is not None
    assert outcome.completed.verdict is not None
    assert outcome.completed.verdict.closed_reason == "cancelled"
