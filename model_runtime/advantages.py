"""Advantages, in plain numpy: one pure function for each published estimator.

Each takes one reward per response (NaN: it never came), the group of each, and where the formula asks for
it the number of trained tokens of each; rows of a group need not be adjacent. A missing reward enters no
mean, no deviation and no count, and its advantage is 0, as in TRL. Everywhere else where the references
differ these follow verl: a group of one has mean 0 and standard deviation 1, so its reward is its advantage.

The trainer never uses a group that carries no signal: `group_advantages` refuses it. What an estimator needs
the whole batch for (`batch_advantages`) comes after that, over what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Estimator = Literal[
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "grpo_passk",
    "opo",
    "gpg",
    "gdpo",
]
NoBaseline = Literal["too_few_values", "zero_variance"]
StdScope = bool | Literal["batch"]

EPSILON = 1e-6
"""Added to the standard deviation, as verl does; TRL adds 1e-4."""

_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
# Added to the variance, by both references.
_WHITEN_EPSILON = 1e-8
# Rewards that differ by less are equal: dividing rounding noise by itself would give advantages near 1.
_SAME_REWARD = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards sorted into groups; what is missing counts 0 in every sum."""

    rewards_B: Float64Array
    group_B: npt.NDArray[np.intp]
    valid_B: npt.NDArray[np.bool_]
    size_G: npt.NDArray[np.intp]

    @classmethod
    def of(cls, rewards: npt.ArrayLike, group_index: npt.ArrayLike) -> _Groups:
        rewards_B = np.asarray(rewards, dtype=np.float64)
        ids, group_B = np.unique(np.asarray(group_index), return_inverse=True)
        valid_B = ~np.isnan(rewards_B)
        size_G = np.bincount(group_B[valid_B], minlength=len(ids))
        return cls(np.where(valid_B, rewards_B, 0.0), group_B, valid_B, size_G)

    def sums(self, values_B: Float64Array) -> Float64Array:
        values_B = np.where(self.valid_B, values_B, 0.0)
        return np.bincount(self.group_B, weights=values_B, minlength=len(self.size_G)).astype(np.float64)

    def centered(self) -> Float64Array:
        mean_G = np.where(self.size_G > 1, self.sums(self.rewards_B) / np.maximum(self.size_G, 1), 0.0)
        return np.where(self.valid_B, self.rewards_B - mean_G[self.group_B], 0.0)

    def std_B(self) -> Float64Array:
        """Unbiased, of each row's group."""
        square_G = self.sums(self.centered() ** 2)
        return np.where(self.size_G > 1, np.sqrt(square_G / np.maximum(self.size_G - 1, 1)), 1.0)[
            self.group_B
        ]


def grpo(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    normalize_by_std: StdScope = True,
    epsilon: float = EPSILON,
) -> Float64Array:
    """(r − mean) / (std + ε) of the group (arXiv 2402.03300); without the standard deviation Dr. GRPO
    (arXiv 2503.20783); `"batch"`: with that of all rewards (TRL's scale_rewards)."""
    groups = _Groups.of(rewards, group_index)
    centered_B = groups.centered()
    if normalize_by_std == "batch":
        return by_batch_std(centered_B, rewards, epsilon=epsilon)
    return centered_B / (groups.std_B() + epsilon) if normalize_by_std else centered_B


def rloo(rewards: npt.ArrayLike, group_index: npt.ArrayLike) -> Float64Array:
    """Reward less the mean of the others in its group (arXiv 2402.14740)."""
    groups = _Groups.of(rewards, group_index)
    size_B = groups.size_G[groups.group_B]
    return groups.centered() * np.where(size_B > 1, size_B / np.maximum(size_B - 1, 1), 1.0)


def opo(rewards: npt.ArrayLike, group_index: npt.ArrayLike, num_tokens: npt.ArrayLike) -> Float64Array:
    """Reward less the group's mean weighted by response length (arXiv 2505.23585)."""
    groups = _Groups.of(rewards, group_index)
    tokens_B = np.asarray(num_tokens, dtype=np.float64)
    length_G = groups.sums(tokens_B)
    weighted_G = groups.sums(tokens_B * groups.rewards_B) / np.where(length_G > 0, length_G, 1.0)
    baseline_G = np.where(groups.size_G > 1, weighted_G, 0.0)
    return np.where(groups.valid_B, groups.rewards_B - baseline_G[groups.group_B], 0.0)


def grpo_passk(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> Float64Array:
    """The best of a group gets its lead over the second, every other 0 (arXiv 2503.19595).

    Raises ValueError for a group with fewer than two rewards.
    """
    groups = _Groups.of(rewards, group_index)
    advantages_B, std_B = np.zeros_like(groups.rewards_B), groups.std_B()
    for group, size in enumerate(groups.size_G):
        if size < 2:
            raise ValueError(f"pass@k compares the two best of a group; this one has {size} rewards")
        members = np.flatnonzero((groups.group_B == group) & groups.valid_B)
        second, best = members[np.argsort(groups.rewards_B[members], kind="stable")[-2:]]
        lead = groups.rewards_B[best] - groups.rewards_B[second]
        advantages_B[best] = lead / (std_B[best] + epsilon) if normalize_by_std else lead
    return advantages_B


def gpg(rewards: npt.ArrayLike, group_index: npt.ArrayLike) -> Float64Array:
    """(r − mean of the group) × responses / responses whose reward is not 0 (arXiv 2504.02546)."""
    return by_nonzero_share(_Groups.of(rewards, group_index).centered(), rewards)


def reinforce_plus_plus(rewards: npt.ArrayLike, num_tokens: npt.ArrayLike) -> Float64Array:
    """Rewards whitened over all trained tokens; no group baseline (arXiv 2501.03262, no discount)."""
    return whiten(rewards, num_tokens)


def reinforce_plus_plus_baseline(
    rewards: npt.ArrayLike, group_index: npt.ArrayLike, num_tokens: npt.ArrayLike
) -> Float64Array:
    """Reward less the group's mean, then whitened over all trained tokens (arXiv 2501.03262)."""
    return whiten(_missing_as_nan(_Groups.of(rewards, group_index).centered(), rewards), num_tokens)


def gdpo(
    component_rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    *,
    weights: Sequence[float] | None = None,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
    std_epsilon: float | None = None,
) -> Float64Array:
    """Each reward component normalised in its group, their weighted sum whitened over all trained tokens
    (arXiv 2601.05242). `component_rewards` is [components, responses]; `std_epsilon` as in `whiten`."""
    mixed_B = mixed_components(
        component_rewards, group_index, weights=weights, normalize_by_std=normalize_by_std, epsilon=epsilon
    )
    return whiten(mixed_B, num_tokens, std_epsilon=std_epsilon)


def mixed_components(
    component_rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    weights: Sequence[float] | None = None,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> Float64Array:
    """Weighted sum of each component's own `grpo`; NaN where every component is missing. A component that
    only one member of a larger group has is compared with nothing, and adds 0, as in TRL."""
    rewards_KB = np.asarray(component_rewards, dtype=np.float64)
    _, group_B, group_size_G = np.unique(np.asarray(group_index), return_inverse=True, return_counts=True)
    mixed_B = np.zeros(rewards_KB.shape[1])
    for weight, rewards_B in zip(weights or [1.0] * len(rewards_KB), rewards_KB, strict=True):
        lone_G = (_Groups.of(rewards_B, group_index).size_G == 1) & (group_size_G > 1)
        part_B = grpo(rewards_B, group_index, normalize_by_std=normalize_by_std, epsilon=epsilon)
        mixed_B += weight * np.where(lone_G[group_B], 0.0, part_B)
    return np.where(np.isnan(rewards_KB).all(axis=0), np.nan, mixed_B)


def whiten(
    values: npt.ArrayLike, num_tokens: npt.ArrayLike, *, std_epsilon: float | None = None
) -> Float64Array:
    """Mean 0 and variance 1 over tokens: each row counts as often as it has trained tokens.

    NaN rows are left out and become 0. `std_epsilon`: divide by (std + this), as TRL does, in place of the
    square root of (variance + 1e-8). A single token has no variance: everything is 0.
    """
    values_B = np.asarray(values, dtype=np.float64)
    tokens_B = np.where(np.isnan(values_B), 0.0, np.asarray(num_tokens, dtype=np.float64))
    count = tokens_B.sum()
    if count < 2:
        return np.zeros_like(values_B)
    values_B = np.where(np.isnan(values_B), 0.0, values_B)
    centered_B = values_B - (tokens_B * values_B).sum() / count
    variance = (tokens_B * centered_B**2).sum() / (count - 1)
    scale = np.sqrt(variance + _WHITEN_EPSILON) if std_epsilon is None else np.sqrt(variance) + std_epsilon
    return np.where(np.isnan(np.asarray(values, dtype=np.float64)), 0.0, centered_B / scale)


def by_batch_std(advantages: npt.ArrayLike, rewards: npt.ArrayLike, *, epsilon: float) -> Float64Array:
    """Divided by the unbiased standard deviation of all rewards + ε."""
    rewards_B = np.asarray(rewards, dtype=np.float64)
    rewards_B = rewards_B[~np.isnan(rewards_B)]
    std = rewards_B.std(ddof=1) if len(rewards_B) > 1 else 0.0
    return np.asarray(advantages, dtype=np.float64) / (std + epsilon)


def by_nonzero_share(advantages: npt.ArrayLike, rewards: npt.ArrayLike) -> Float64Array:
    """Multiplied by rewards / rewards that are not 0."""
    rewards_B = np.asarray(rewards, dtype=np.float64)
    rewards_B = rewards_B[~np.isnan(rewards_B)]
    return np.asarray(advantages, dtype=np.float64) * len(rewards_B) / max(1, np.count_nonzero(rewards_B))


def _missing_as_nan(values_B: Float64Array, rewards: npt.ArrayLike) -> Float64Array:
    return np.where(np.isnan(np.asarray(rewards, dtype=np.float64)), np.nan, values_B)


# ---------------------------------------------------------------------- what a batch is trained with


def group_advantages(
    values: Sequence[float] | Float64Array,
    *,
    normalize_by_std: StdScope,
    negative_scale: float = 1.0,
    estimator: Estimator = "grpo",
    num_tokens: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> Float64Array | NoBaseline:
    """Advantages of one group's values (one per member), or why they have none.

    `num_tokens` per member is what `opo` weighs by. For `gdpo` values are [members, components], and
    `weights` theirs. Estimators that need the whole batch get from here what `batch_advantages` goes on
    with. `reinforce_plus_plus` compares over the batch alone, so that any group teaches.
    `negative_scale` multiplies negative advantages once they are final.
    """
    values_M = np.asarray(values, dtype=np.float64)
    if estimator == "reinforce_plus_plus":
        return values_M
    if len(values_M) < 2:
        return "too_few_values"
    missing = np.isnan(values_M)
    highest = np.where(missing, -np.inf, values_M).max(axis=0)
    flat = highest - np.where(missing, np.inf, values_M).min(axis=0) <= _SAME_REWARD
    if np.all(flat):
        return "zero_variance"
    one_group = np.zeros(len(values_M), dtype=np.int64)
    by_std = normalize_by_std is True
    if estimator == "gdpo":
        # A component whose values are all the same says nothing; its rounding noise must not either.
        components_KM = np.where(flat, 0.0, values_M).T
        return mixed_components(components_KM, one_group, weights=weights, normalize_by_std=by_std)
    if estimator == "grpo":
        advantages = grpo(values_M, one_group, normalize_by_std=by_std)
    elif estimator == "rloo":
        advantages = rloo(values_M, one_group)
    elif estimator == "grpo_passk":
        advantages = grpo_passk(values_M, one_group, normalize_by_std=by_std)
        if not advantages.any():
            return "zero_variance"  # the two best are equal: nobody leads
    elif estimator == "opo":
        advantages = opo(values_M, one_group, num_tokens if num_tokens is not None else one_group + 1)
    else:
        advantages = grpo(values_M, one_group, normalize_by_std=False)
    if needs_batch(estimator, normalize_by_std):
        return advantages
    return _scaled(advantages, negative_scale)


def needs_batch(estimator: Estimator, normalize_by_std: StdScope) -> bool:
    """Whether advantages are final only once the batch is known."""
    return estimator in (*_WHITENED, "gpg") or (estimator == "grpo" and normalize_by_std == "batch")


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of one batch that are compared with one another, in its order.

    `first_of_member_B` marks one row of each member: a member counts once, however many rows it has.
    """

    advantages_B: Float64Array  # from group_advantages
    rewards_B: Float64Array
    num_tokens_B: npt.NDArray[np.int64]
    first_of_member_B: npt.NDArray[np.bool_]


def batch_advantages(
    rows: BatchRows, *, estimator: Estimator, normalize_by_std: StdScope, negative_scale: float = 1.0
) -> Float64Array:
    """Final advantages of a batch's rows. Unchanged where the estimator doesn't need the batch."""
    if not needs_batch(estimator, normalize_by_std):
        return rows.advantages_B
    rewards_M = rows.rewards_B[rows.first_of_member_B]
    if estimator in _WHITENED:
        advantages = whiten(rows.advantages_B, rows.num_tokens_B)
    elif estimator == "gpg":
        advantages = by_nonzero_share(rows.advantages_B, rewards_M)
    else:
        advantages = by_batch_std(rows.advantages_B, rewards_M, epsilon=EPSILON)
    return _scaled(advantages, negative_scale)


def _scaled(advantages: Float64Array, negative_scale: float) -> Float64Array:
    return np.where(advantages < 0, advantages * negative_scale, advantages)
