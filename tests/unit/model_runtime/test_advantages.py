"""Group-relative advantages agree with verl's on its own numbers (tests/data/grpo_advantages.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runtime.advantages import group_advantages, grpo

_VECTORS = json.loads((Path(__file__).parents[2] / "data" / "grpo_advantages.json").read_text())


@pytest.mark.parametrize("case", _VECTORS["cases"], ids=lambda case: case["name"])
def test_grpo_gives_the_references_numbers(case):
    batch = _VECTORS["batches"][case["batch"]]
    got = grpo(
        batch["rewards"],
        batch["group_index"],
        normalize_by_std=case["params"]["norm_adv_by_std_in_grpo"],
        epsilon=case["params"]["epsilon"],
    )
    mask = np.asarray(batch["response_mask"], dtype=np.float64)
    want = np.asarray(case["expected"]["advantages"], dtype=np.float64)
    error = np.abs(got[:, None] * mask - want) / np.maximum(1, np.abs(want))
    assert error.max() <= case["tolerance"]


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
