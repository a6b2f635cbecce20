"""Credit per turn: rewards of single turns, and discounting back through an agent's turns.

The turns of one agent in one execution follow one another in the order in which they began, whatever chains
they stand in. The return of turn t is Σ_{k≥t} γ^(k−t)·r_k + γ^(T−1−t)·R: its own and later turns' rewards,
and the reward of the execution, which comes with the last turn.

With one baseline per agent each reward is centered where it comes from, R by its mean over members and
turns' rewards by the mean over members of a member's mean, and then discounted. So no turn is pushed up or
down only for standing early or late, and a member counts once however many turns it has. With γ = 1 and no
turn rewards this is `advantages.grpo` and `advantages.rloo`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model_runtime.advantages import EPSILON, Float64Array, NoBaseline, group_advantages
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.types import Trajectory

_SAME_REWARD = 1e-8  # as in advantages.py: below it there is only rounding noise


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What credit needs to know of one turn."""

    began: tuple[float, int, int]  # its place among the agent's turns: (started_at, chain, turn)
    reward: float  # the weighted sum of its own components; NaN when none came
    prompt_digest: bytes  # of every token before it; empty unless turns are compared by prompt


@dataclass(frozen=True, slots=True, eq=False)
class MemberTurns:
    """One agent's turns in one execution, in order."""

    outcome: float  # reward of workflow and agent; NaN: it never came
    rewards_T: Float64Array  # NaN: it never came
    prompt_digests: tuple[bytes, ...] = ()

    @property
    def total(self) -> float:
        """All that came, undiscounted; NaN when nothing did."""
        parts = [v for v in (self.outcome, *self.rewards_T) if not math.isnan(v)]
        return sum(parts) if parts else math.nan


def turn_records(trajectory: Trajectory, objective: ObjectiveConfig) -> tuple[TurnRecord, ...]:
    weights = objective.turn_reward_weights
    by_prompt = objective.baseline_key == "group_agent_turn"
    return tuple(
        TurnRecord(
            began=(turn.started_at, trajectory.chain_index, turn.turn_index),
            reward=_weighted(turn.rewards, weights),
            prompt_digest=_digest(trajectory, turn.start) if by_prompt else b"",
        )
        for turn in trajectory.turns
    )


def _weighted(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    found = [w * value for name, w in weights.items() if (value := rewards.get(name)) is not None]
    return sum(found) if found else math.nan


def _digest(trajectory: Trajectory, start: int) -> bytes:
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids[:start]])
    return hashlib.sha256(ids.tobytes()).digest()


def turn_advantages(
    members: Sequence[MemberTurns], objective: ObjectiveConfig
) -> list[Float64Array] | NoBaseline:
    """Each member's advantages, one per turn; NaN for a turn that has nothing to be compared with.

    Every member has a reward. One without turns counts in the baselines and gets an empty array.
    """
    if objective.baseline_key == "group_agent_turn":
        found = _by_prompt(members, objective)
    elif len(members) < 2:
        return "too_few_values"
    else:
        found = _by_agent(members, objective)
    scale = objective.negative_advantage_scale
    return found if isinstance(found, str) else [np.where(a_T < 0, a_T * scale, a_T) for a_T in found]


def returns(outcome: float, rewards_T: Float64Array, *, discount: float) -> Float64Array:
    """Of each turn; what is missing adds nothing."""
    returns_T = np.where(np.isnan(rewards_T), 0.0, rewards_T)
    if len(returns_T) and not math.isnan(outcome):
        returns_T[-1] += outcome
    for t in reversed(range(len(returns_T) - 1)):
        returns_T[t] += discount * returns_T[t + 1]
    return returns_T


def _by_agent(members: Sequence[MemberTurns], objective: ObjectiveConfig) -> list[Float64Array] | NoBaseline:
    outcomes_M = _centered([m.outcome for m in members], [m.outcome for m in members])
    means = [_mean(m.rewards_T) for m in members]
    credit = [
        returns(outcome, _centered(m.rewards_T, means), discount=objective.turn_discount)
        for m, outcome in zip(members, outcomes_M, strict=True)
    ]
    if all(np.abs(g_T).max(initial=0.0) <= _SAME_REWARD for g_T in credit):
        return "zero_variance"
    size = len(members)
    if objective.advantage == "rloo":
        return [g_T * size / (size - 1) for g_T in credit]
    if not objective.normalize_by_std:
        return credit
    square = sum(float(np.mean(g_T**2)) if len(g_T) else 0.0 for g_T in credit)
    return [g_T / (math.sqrt(square / (size - 1)) + EPSILON) for g_T in credit]


def _by_prompt(members: Sequence[MemberTurns], objective: ObjectiveConfig) -> list[Float64Array] | NoBaseline:
    """Turns are compared with those of other members at the same place with the same prompt, token by
    token; of others nothing is known but that they began elsewhere."""
    returns_MT = [returns(m.outcome, m.rewards_T, discount=objective.turn_discount) for m in members]
    compared: dict[tuple[int, bytes], list[int]] = {}
    for m, member in enumerate(members):
        for t, digest in enumerate(member.prompt_digests):
            compared.setdefault((t, digest), []).append(m)
    found = [np.full(len(returns_T), np.nan) for returns_T in returns_MT]
    flat = False
    for (t, _), peers in compared.items():
        advantages = group_advantages(
            [float(returns_MT[m][t]) for m in peers],
            estimator=objective.advantage,
            normalize_by_std=objective.normalize_by_std,
        )
        if isinstance(advantages, str):
            flat |= advantages == "zero_variance"
            continue
        for m, advantage in zip(peers, advantages.tolist(), strict=True):
            found[m][t] = advantage
    if all(np.isnan(a_T).all() for a_T in found):
        return "zero_variance" if flat else "too_few_values"
    return found


def _centered(values: Iterable[float], baseline: Sequence[float]) -> Float64Array:
    """Less the mean of the baseline's values that came; a single one is compared with nothing: all 0."""
    values = np.asarray(list(values), dtype=np.float64)
    present = [v for v in baseline if not math.isnan(v)]
    if len(present) < 2:
        return np.where(np.isnan(values), np.nan, 0.0)
    return values - sum(present) / len(present)


def _mean(values: Float64Array) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else math.nan
