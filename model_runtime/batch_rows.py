"""The rows of one batch, and what their advantages need the whole batch for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model_runtime.advantages import BatchRows, batch_advantages, needs_batch
from model_runtime.documents import BatchRow
from model_runtime.groups import Group
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


def rows_of(group: Group, loss_mask: Callable[[Trajectory], Int8Array]) -> Iterator[TrainingRow]:
    """What of a group is trained, in the order of members, agents and chains."""
    assert group.verdict is not None, f"group {group.group_id} is not complete"
    verdict = group.verdict
    for row in sorted(group.rows, key=lambda r: r.order):
        advantage = verdict.advantages.get(row.trajectory_id)
        if advantage is None or row.trajectory is None:
            continue
        turns = verdict.turn_advantages.get(row.trajectory_id)
        mask = _without_lone_turns(loss_mask(row.trajectory), row.trajectory, turns)
        if mask.any():
            yield TrainingRow(row.trajectory, row.reward or 0.0, advantage, mask, turns)


def _without_lone_turns(
    mask: Int8Array, trajectory: Trajectory, turn_advantages: tuple[float, ...] | None
) -> Int8Array:
    """The mask without turns whose advantage is NaN."""
    lone = [t for t, a in zip(trajectory.turns, turn_advantages or (), strict=False) if math.isnan(a)]
    if lone:
        mask = mask.copy()
        for turn in lone:
            mask[turn.start : turn.end] = 0
    return mask


def named_rows(rows: list[TrainingRow], groups: list[Group]) -> list[BatchRow]:
    """How a step's document names those of the rows that stand in these groups."""
    places = {row.trajectory_id: row.position for group in groups for row in group.rows}
    return [
        BatchRow(
            trajectory_id=row.trajectory.trajectory_id,
            writer=places[row.trajectory.trajectory_id][0],
            seq=places[row.trajectory.trajectory_id][1],
            agent_id=row.trajectory.agent_id,
            policy_version=row.trajectory.policy_version,
        )
        for row in rows
        if row.trajectory.trajectory_id in places
    ]


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
