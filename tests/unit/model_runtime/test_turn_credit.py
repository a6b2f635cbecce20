"""Rewards of single turns and discounting: what each turn is credited with, from the record to the token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.advantages import grpo, rloo
from model_runtime.batch_metrics import batch_metrics
from model_runtime.batch_rows import TrainingRow
from model_runtime.batching import micro_batches
from model_runtime.config import ModelConfig
from model_runtime.groups import Group, GroupBook, LogRow, Verdict
from model_runtime.layout import RunLayout
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.training_queue import TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.turn_credit import MemberTurns, returns, turn_advantages
from model_runtime.types import Shard, Trajectory
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

_HERE = ("e00001-00001", 0)
NO_STD = {"normalize_by_std": False}
TURN_REWARDS = {"reward_weights": {"reward": 1.0, "turn:format": 0.5}, **NO_STD}


def member(outcome: float | None, *rewards: float | None) -> MemberTurns:
    values = [math.nan if r is None else r for r in (outcome, *rewards)]
    return MemberTurns(values[0], np.asarray(values[1:], dtype=np.float64))


def advantages(members: Sequence[MemberTurns], **objective) -> list[list[float]]:
    found = turn_advantages(members, ObjectiveConfig(**objective))
    assert not isinstance(found, str)
    return [a_T.tolist() for a_T in found]


def test_a_return_is_what_comes_from_here_on_discounted_and_the_outcome_comes_with_the_last_turn():
    got = returns(8.0, np.asarray([1.0, math.nan, 3.0]), discount=0.5)
    np.testing.assert_allclose(got, [1 + 0.5 * 0 + 0.25 * 11, 0.5 * 11, 11])
    np.testing.assert_allclose(returns(8.0, np.asarray([1.0, 2.0]), discount=0.0), [1, 10])
    assert len(returns(8.0, np.asarray([]), discount=0.5)) == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=2, max_size=8),
    st.sampled_from(["grpo", "rloo"]),
)
def test_without_turn_rewards_and_discount_every_turn_has_its_members_advantage(members, estimator):
    outcomes = [outcome for outcome, _ in members]
    objective = ObjectiveConfig(advantage=estimator)
    got = turn_advantages([member(o, *[None] * turns) for o, turns in members], objective)
    if max(outcomes) - min(outcomes) <= 1e-7:
        return  # rounding decides whether these are the same
    assert not isinstance(got, str)
    want = {"grpo": grpo, "rloo": rloo}[estimator](outcomes, [0] * len(outcomes))
    for (_, turns), a, a_T in zip(members, want, got, strict=True):
        np.testing.assert_allclose(a_T, [a] * turns, rtol=1e-9, atol=1e-9)


def test_a_discounted_outcome_is_centered_before_it_is_discounted():
    """No turn is pushed down in all members only for standing early."""
    got = advantages([member(1.0, None, None, None), member(0.0, None, None)], turn_discount=0.5, **NO_STD)
    assert got == [[0.125, 0.25, 0.5], [-0.25, -0.5]]


def test_a_turns_reward_counts_for_it_and_the_turns_before_it():
    got = advantages([member(0.0, 0.0, 1.0), member(0.0, 0.0, 0.0)], **TURN_REWARDS)
    # The mean of the members' means is 1/4.
    assert got == [[0.5, 0.75], [-0.5, -0.25]]


def test_a_member_counts_once_in_a_turns_baseline_however_many_turns_it_has():
    few, many = advantages([member(None, 1.0), member(None, *[0.0] * 9)], turn_discount=0.0, **NO_STD)
    assert (few, many) == ([0.5], [-0.5] * 9)


def test_a_missing_turn_reward_is_no_value_and_a_lone_one_is_compared_with_nothing():
    got = advantages([member(1.0, None, 1.0), member(0.0, None, 0.0)], turn_discount=0.0, **NO_STD)
    assert got == [[0.0, 1.0], [0.0, -1.0]]
    got = advantages([member(1.0, 7.0), member(0.0, None)], **NO_STD)
    assert got == [[0.5], [-0.5]]


def test_the_deviation_is_that_of_all_returns_each_member_counted_once():
    members = [member(1.0, 0.0, 1.0), member(0.0, 0.0), member(1.0, 1.0, 1.0, 0.0)]
    plain = advantages(members, turn_discount=0.5, **NO_STD)
    scaled = advantages(members, turn_discount=0.5)
    std = math.sqrt(sum(np.mean(np.square(a_T)) for a_T in plain) / 2)
    for a_T, b_T in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(b_T, np.asarray(a_T) / (std + 1e-6))


def test_negative_advantages_are_damped_once_they_are_final():
    got = advantages([member(1.0, None), member(0.0, None)], negative_advantage_scale=0.1, turn_discount=0.5,
                     **NO_STD)  # fmt: skip
    assert got == [[0.5], [-0.05]]


def test_equal_members_teach_nothing_and_different_turns_of_equal_sum_do():
    objective = ObjectiveConfig(**TURN_REWARDS)
    assert turn_advantages([member(1.0, 0.5)] * 3, objective) == "zero_variance"
    assert turn_advantages([member(1.0, 0.5)], objective) == "too_few_values"
    first, second = advantages([member(1.0, 1.0, 0.0), member(1.0, 0.0, 1.0)], turn_discount=0.0)
    assert first[0] > 0 > first[1]
    assert second[0] < 0 < second[1]


# ------------------------------------------------------------------ from the record on


def row(index: int, *rewards: float | None, reward: float | None = 0.0, chain: int = 0, began: float = 1.0,
        **more) -> Trajectory:  # fmt: skip
    """A trajectory of two-token turns with a token between them."""
    mask = [m for _ in rewards for m in (1, 1, 0)][:-1]
    trajectory = make_trajectory(member_index=index, reward=reward, mask=mask, chain_index=chain, **more)
    turns = tuple(
        replace(turn, rewards={} if r is None else {"format": r}, started_at=began + t)
        for t, (turn, r) in enumerate(zip(trajectory.turns, rewards, strict=True))
    )
    return replace(trajectory, turns=turns)


def judged(objective: ObjectiveConfig, *members: Sequence[Trajectory]) -> tuple[Group, Verdict]:
    book = GroupBook(objective)
    completed = None
    for index, rows in enumerate(members):
        settlement = make_settlement(member_index=index, group_size=len(members))
        rows = [replace(t, member=settlement.member) for t in rows]
        completed = book.settle(_HERE, settlement, [LogRow.of(t, _HERE, objective) for t in rows]).completed
    assert completed is not None
    assert completed.verdict is not None
    return completed, completed.verdict


def test_turns_of_several_chains_follow_one_another_as_they_began():
    objective = ObjectiveConfig(turn_discount=0.5, **NO_STD)
    later, first = row(0, None, reward=1.0, began=5.0), row(0, None, None, reward=1.0, chain=1, began=1.0)
    _, verdict = judged(objective, [later, first], [row(1, None)])
    assert verdict.turn_advantages[later.trajectory_id] == (0.5,)
    assert verdict.turn_advantages[first.trajectory_id] == (0.125, 0.25)
    assert verdict.baselines[0].values == (1.0, 0.0)


def test_weights_mix_turn_and_workflow_and_a_row_without_any_is_missing():
    objective = ObjectiveConfig(**TURN_REWARDS)
    rows = [row(0, 1.0, None, reward=None), row(1, None, reward=None), row(2, 0.0, reward=1.0)]
    group, verdict = judged(objective, *[[r] for r in rows])
    assert verdict.excluded == {rows[1].trajectory_id: "missing_reward"}
    assert verdict.baselines[0].values == (0.5, 1.0)
    # Turn rewards 0.5 and 0 around 0.25; the workflow's reward is a lone one.
    assert verdict.turn_advantages == {rows[0].trajectory_id: (0.25, 0.0), rows[2].trajectory_id: (-0.25,)}
    assert verdict.advantages == {rows[0].trajectory_id: 0.125, rows[2].trajectory_id: -0.25}
    assert [r.reward for r in group.rows] == [0.5, None, 1.0]


def test_agents_are_never_compared_and_rows_not_for_training_stay_out():
    objective = ObjectiveConfig(**TURN_REWARDS)
    own = [[row(i, float(i == 0)), row(i, 5.0, agent_id="other")] for i in range(3)]
    own[2] = [replace(t, train=False) for t in own[2]]
    _, verdict = judged(objective, *own)
    reasons = [verdict.excluded.get(t.trajectory_id) for rows in own for t in rows]
    assert reasons == [None, "zero_variance", None, "zero_variance", "not_for_training", "not_for_training"]


def test_turns_are_compared_only_where_their_prompts_are_the_same_token_by_token():
    objective = ObjectiveConfig(baseline_key="group_agent_turn", **NO_STD)
    rows = [row(i, None, None, reward=float(i == 0)) for i in range(3)]
    # All begin alike; member 2 said something else in its first turn, so that its second stands alone.
    other = rows[2].response_ids.copy()
    other[0] = 99
    rows[2] = replace(rows[2], response_ids=other)
    group, verdict = judged(objective, *[[r] for r in rows])
    got = [verdict.turn_advantages[r.trajectory_id] for r in rows]
    np.testing.assert_allclose(got[0], [2 / 3, 0.5])
    np.testing.assert_allclose(got[1], [-1 / 3, -0.5])
    np.testing.assert_allclose(got[2], [-1 / 3, math.nan])
    assert verdict.baselines[0].num_lone_turns == 1
    assert batch_metrics([], [group], [], published_version=0)["agent/planner_agent/lone_turns"] == 1.0


def test_a_group_without_two_equal_prompts_is_closed():
    objective = ObjectiveConfig(baseline_key="group_agent_turn")
    rows = [row(i, None, reward=float(i), prompt_ids=np.asarray([i + 1], np.int32)) for i in range(3)]
    _, verdict = judged(objective, *[[r] for r in rows])
    assert verdict.closed_reason == "too_few_values"
    assert set(verdict.excluded.values()) == {"too_few_values"}


def test_every_token_is_trained_with_its_turns_advantage():
    trajectory = row(0, None, None)
    training = TrainingRow(trajectory, 0.0, 9.0, trajectory.response_mask, (0.25, -1.0))
    (batch,) = micro_batches([training], micro_batch_tokens=64)
    assert batch.advantages_T.tolist() == [0.25, 0.25, -1.0, -1.0]


@pytest.mark.parametrize("key", ["group_agent", "group_agent_turn"])
def test_the_queue_deals_turns_out_and_a_replay_gives_the_same(key: str):
    store, layout = MemoryStore(), RunLayout("run").model("planner_model")
    section = {
        "model_id": "planner_model", "model_path": "/m", "batch_size": 1,
        "objective": {"baseline_key": key, "turn_discount": 0.5},
    }  # fmt: skip
    model = ModelConfig.model_validate(section)
    rows = [row(i, None, None, reward=float(i % 2)) for i in range(4)]
    odd = rows[3].response_ids.copy()
    odd[0] = 99
    rows[3] = replace(rows[3], response_ids=odd)
    settlements = tuple(make_settlement(member_index=i) for i in range(4))
    store.put(layout.log_shard("e00001-00001", 0), encode_shard(Shard(tuple(rows), settlements)))

    def queue() -> TrainingQueue:
        queue = TrainingQueue(store, layout, model, epoch=1, resume=None)
        queue.poll()
        return queue

    batch = queue().next_batch(
        1, published_version=0, training_version=0, oldest_open_version=None, final=False
    )
    assert batch is not None
    trained = [int(r.loss_mask.sum()) for r in batch.rows]
    assert trained == ([4, 4, 4, 2] if key == "group_agent_turn" else [4] * 4)
    again = queue().replay(batch.document)
    assert again is not None
    for one, other in zip(batch.rows, again.rows, strict=True):
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        np.testing.assert_array_equal(one.turn_advantages or (), other.turn_advantages or ())
