"""Advantages agree with verl's and TRL's own numbers (tests/algorithm_vectors.py), and what a batch is
trained with follows from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runtime.advantages import (
    BatchRows,
    batch_advantages,
    gdpo,
    gpg,
    group_advantages,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)
from tests.algorithm_vectors import assert_close, batch, cases, numbers


def estimate(case, inputs, num_tokens):
    """The case's estimator on its inputs: one advantage a row."""
    name, params = case["estimator"], case["params"]
    rewards, groups = inputs["rewards"], inputs["group_index"]
    if name in ("grpo", "grpo_passk"):
        function = grpo if name == "grpo" else grpo_passk
        by_std = params["norm_adv_by_std_in_grpo"]
        return function(rewards, groups, normalize_by_std=by_std, epsilon=params["epsilon"])
    if name == "gdpo":
        weights = params.get("weights")
        components = inputs["component_rewards"]
        return gdpo(components, groups, num_tokens, weights=weights, epsilon=params["epsilon"])
    if name in ("rloo", "gpg"):
        return {"rloo": rloo, "gpg": gpg}[name](rewards, groups)
    return {"opo": opo, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline}[name](
        rewards, groups, num_tokens
    )


@pytest.mark.parametrize("case", cases("advantages"))
def test_advantages_are_verls(case):
    inputs = batch("advantages", case)
    mask = np.asarray(inputs["response_mask"], dtype=np.float64)
    if "error" in case["expected"]:
        with pytest.raises(ValueError, match="two best of a group"):
            estimate(case, inputs, mask.sum(axis=1))
        return
    got = estimate(case, inputs, mask.sum(axis=1))
    assert_close(got[:, None] * mask, case["expected"]["advantages"], case["tolerance"])


@pytest.mark.parametrize("case", cases("advantages_trl"))
def test_advantages_are_trls_with_its_epsilon(case):
    """TRL adds 1e-4 to standard deviations, whitens over responses instead of tokens, and divides by
    std + 1e-4 there too; that can all be asked for. Missing rewards leave every mean, in ours as well."""
    rewards, params = numbers(case["inputs"]["rewards"]), case["params"]
    groups = np.arange(len(rewards)) // params["num_generations"]
    weights, epsilon = params["reward_weights"], params["epsilon"]
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        ones = np.ones(len(rewards))
        got = gdpo(rewards.T, groups, ones, weights=weights, epsilon=epsilon, std_epsilon=epsilon)
    else:
        total = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * weights, axis=1))
        by_std = {"group": True, "none": False, "batch": "batch"}[params["scale_rewards"]]
        got = grpo(total, groups, normalize_by_std=by_std, epsilon=epsilon)
    assert_close(got, case["expected"]["advantages"], case["tolerance"])


def test_reinforce_plus_plus_whitens_rewards_over_tokens():
    """Without discount every token's return is the reward; expanding rows into tokens gives the same."""
    rewards, tokens = [1.0, 0.0, 0.5, -2.0], [3, 1, 5, 2]
    per_token = np.repeat(rewards, tokens)
    want = (per_token - per_token.mean()) / np.sqrt(per_token.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.repeat(reinforce_plus_plus(rewards, tokens), tokens), want, rtol=1e-12)


def test_whitening_leaves_missing_rows_and_single_tokens_at_0():
    np.testing.assert_array_equal(whiten([3.0], [1]), [0.0])
    got = whiten([1.0, np.nan, 0.0], [2, 9, 2])
    np.testing.assert_allclose(got, [*whiten([1.0, 0.0], [2, 2])[:1], 0.0, whiten([1.0, 0.0], [2, 2])[1]])


@given(st.permutations(list(range(9))))
def test_grpo_depends_on_group_ids_and_not_on_positions(order):
    rewards = np.asarray([0.0, 1.0, 0.5, 2.0, 3.0, 7.0, 1.0, 1.0, 0.0])
    groups = np.asarray([5, 5, 5, 2, 2, 2, 2, 9, 9])
    straight = grpo(rewards, groups)
    shuffled = grpo(rewards[list(order)], groups[list(order)])
    np.testing.assert_allclose(shuffled, straight[list(order)], atol=1e-12)


def test_a_group_with_one_value_has_no_baseline():
    assert group_advantages([1.0], normalize_by_std=True) == "too_few_values"
    assert group_advantages([], normalize_by_std=True) == "too_few_values"


def test_equal_values_have_no_baseline_even_with_rounding_noise():
    assert group_advantages([0.3, 0.1 + 0.2], normalize_by_std=True) == "zero_variance"


def test_negative_advantages_are_scaled_and_positive_ones_are_not():
    plain = group_advantages([0.0, 1.0], normalize_by_std=True)
    damped = group_advantages([0.0, 1.0], normalize_by_std=True, negative_scale=0.3)
    assert not isinstance(plain, str)
    assert not isinstance(damped, str)
    np.testing.assert_allclose(damped, [plain[0] * 0.3, plain[1]])
    np.testing.assert_allclose(plain, [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus_baseline", "grpo_passk", "opo", "gpg"]


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "gdpo"])
def test_a_group_without_signal_is_refused_by_every_estimator_with_a_baseline(estimator):
    def values(*rewards):
        return np.asarray([[r, r] for r in rewards]) if estimator == "gdpo" else list(rewards)

    def of(*rewards):
        return group_advantages(values(*rewards), estimator=estimator, normalize_by_std=True)

    assert isinstance(of(1.0, 0.0), np.ndarray)
    assert of(1.0, 1.0, 1.0) == "zero_variance"
    assert of(1.0) == "too_few_values"


def test_pass_at_k_without_a_leader_has_no_signal():
    assert group_advantages([1, 1, 0], estimator="grpo_passk", normalize_by_std=True) == "zero_variance"


def test_reinforce_plus_plus_learns_from_groups_of_equal_rewards():
    got = group_advantages([1.0, 1.0], estimator="reinforce_plus_plus", normalize_by_std=True)
    np.testing.assert_array_equal(got, [1.0, 1.0])


def test_a_component_nobody_has_and_one_that_is_flat_add_nothing():
    values = np.asarray([[1.0, np.nan, 0.1 + 0.2], [0.0, np.nan, 0.3]])
    got = group_advantages(values, estimator="gdpo", normalize_by_std=True, weights=[1.0, 1.0, 1.0])
    np.testing.assert_allclose(got, grpo([1.0, 0.0], [0, 0]))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=4, max_size=12))
def test_two_stages_give_what_the_whole_batch_function_gives(drawn):
    """Groups are judged one by one, long before a batch is put together; the result is the paper's."""
    rewards = np.asarray([float(r) for r, _ in drawn])
    tokens = np.asarray([t for _, t in drawn])
    groups = np.arange(len(drawn)) // 3
    rewards[groups == groups[-1]] += np.arange((groups == groups[-1]).sum())
    usable = {g: np.ptp(rewards[groups == g]) > 0 and (groups == g).sum() > 1 for g in set(groups)}
    keep = np.asarray([usable[g] for g in groups])
    rewards, tokens, groups = rewards[keep], tokens[keep], groups[keep]
    if not len(rewards):
        return
    whole = {
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline(rewards, groups, tokens),
        "reinforce_plus_plus": reinforce_plus_plus(rewards, tokens),
        "gpg": gpg(rewards, groups),
        "gdpo": gdpo(rewards[None], groups, tokens),
        "grpo": grpo(rewards, groups, normalize_by_std="batch"),
    }
    for estimator, want in whole.items():
        by_std = "batch" if estimator == "grpo" else True
        first = np.zeros(len(rewards))
        for g in set(groups):
            values = rewards[groups == g]
            values = values[:, None] if estimator == "gdpo" else values
            first[groups == g] = group_advantages(values, estimator=estimator, normalize_by_std=by_std)
        rows = BatchRows(first, rewards, tokens, np.ones(len(rewards), dtype=bool))
        got = batch_advantages(rows, estimator=estimator, normalize_by_std=by_std)
        np.testing.assert_allclose(got, want, atol=1e-12)
