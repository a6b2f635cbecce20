"""The rows of one batch, and what their advantages need the whole batch for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model_runtime.advantages import BatchRows, batch_advantages, needs_batch
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.types import Int8Array, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One trajectory of a batch. `loss_mask` is its response mask without tokens that have aged out and
    turns that had nothing to be compared with."""

    trajectory: Trajectory
    reward: float
    advantage: float
    loss_mask: Int8Array
    turn_advantages: tuple[float, ...] | None = None  # one per turn, in place of `advantage`


def without_lone_turns(
    mask: Int8Array, trajectory: Trajectory, turn_advantages: tuple[float, ...] | None
) -> Int8Array:
    """The mask without turns whose advantage is NaN."""
    lone = [t for t, a in zip(trajectory.turns, turn_advantages or (), strict=False) if math.isnan(a)]
    if lone:
        mask = mask.copy()
        for turn in lone:
            mask[turn.start : turn.end] = 0
    return mask


def with_batch_advantages(rows: Sequence[TrainingRow], objective: ObjectiveConfig) -> list[TrainingRow]:
    """The rows with final advantages. Agents are never mixed, unless they share a baseline: then all rows
    are whitened or scaled together."""
    if not needs_batch(objective.advantage, objective.normalize_by_std):
        return list(rows)
    apart = objective.baseline_key == "group_agent"
    agents = sorted({row.trajectory.agent_id for row in rows}) if apart else [None]
    final = list(rows)
    for agent_id in agents:
        places = [i for i, row in enumerate(rows) if agent_id in (None, row.trajectory.agent_id)]
        advantages = batch_advantages(
            _batch_rows([rows[i] for i in places]),
            estimator=objective.advantage,
            normalize_by_std=objective.normalize_by_std,
            negative_scale=objective.negative_advantage_scale,
        )
        for i, advantage in zip(places, advantages.tolist(), strict=True):
            final[i] = replace(rows[i], advantage=advantage)
    return final


def _batch_rows(rows: Sequence[TrainingRow]) -> BatchRows:
    seen: set[tuple[str, int]] = set()
    first = []
    for row in rows:
        member = (row.trajectory.member.group_id, row.trajectory.member.member_index)
        first.append(member not in seen)
        seen.add(member)
    return BatchRows(
        advantages_B=np.asarray([row.advantage for row in rows], dtype=np.float64),
        rewards_B=np.asarray([row.reward for row in rows], dtype=np.float64),
        num_tokens_B=np.asarray([int(row.loss_mask.sum()) for row in rows], dtype=np.int64),
        first_of_member_B=np.asarray(first, dtype=bool),
    )
