"""Group-relative advantages, in plain numpy.

`grpo` is the published formula with the references' rule for a group of one; what a training batch uses is
`group_advantages`, which refuses groups that carry no signal instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""

# Rewards that differ by less are equal: dividing rounding noise by itself would give advantages near 1.
_SAME_REWARD = 1e-8

NoBaseline = Literal["too_few_values", "zero_variance"]


def grpo(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> npt.NDArray[np.float64]:
    """Advantage of each row against the rows of its group (arXiv 2402.03300; without the standard
    deviation arXiv 2503.20783). Rows of a group need not be adjacent.

    A group of one has mean 0 and standard deviation 1, as in verl: its reward is its advantage.
    """
    rewards_B = np.asarray(rewards, dtype=np.float64)
    _, group_B = np.unique(np.asarray(group_index), return_inverse=True)
    size_G = np.bincount(group_B)
    mean_G = np.where(size_G > 1, np.bincount(group_B, weights=rewards_B) / size_G, 0.0)
    centered_B = rewards_B - mean_G[group_B]
    if not normalize_by_std:
        return centered_B
    square_G = np.bincount(group_B, weights=centered_B**2)
    std_G = np.where(size_G > 1, np.sqrt(square_G / np.maximum(size_G - 1, 1)), 1.0)
    return centered_B / (std_G[group_B] + epsilon)


def group_advantages(
    values: Sequence[float], *, normalize_by_std: bool, negative_scale: float = 1.0
) -> npt.NDArray[np.float64] | NoBaseline:
    """Advantages of one group's values (one per member), or why they have none.

    `negative_scale` multiplies negative advantages.
    """
    if len(values) < 2:
        return "too_few_values"
    if max(values) - min(values) <= _SAME_REWARD:
        return "zero_variance"
    advantages = grpo(values, np.zeros(len(values), dtype=np.int64), normalize_by_std=normalize_by_std)
    return np.where(advantages < 0, advantages * negative_scale, advantages)
