"""Groups as one model's log tells them: which executions count, when a group is complete, what it teaches.

Rows find their group by its id, never by position. The first final settlement of a (group, member) counts;
what other attempts left behind is dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from model_runtime.advantages import group_advantages
from model_runtime.log_reader import Position, is_below
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.turn_credit import MemberTurns, TurnRecord, turn_advantages, turn_records
from model_runtime.types import DEFAULT_COMPONENT, UNFINISHED_STATUSES, MemberKey, Settlement, Trajectory

logger = logging.getLogger(__name__)

TurnValues = tuple[float, ...]
"""One advantage per turn of a trajectory; NaN: that turn is not trained."""

ClosedReason = Literal[
    "no_rows", "too_few_values", "zero_variance", "cancelled", "aged_out", "not_for_training"
]


@dataclass(slots=True, eq=False)
class LogRow:
    """One trajectory in the log. `trajectory` may be let go and read again from `position`."""

    trajectory_id: str
    position: Position
    member: MemberKey
    agent_id: str
    chain_index: int
    reward: float | None  # the weighted sum of the components that came, those of its turns among them
    outcome: float | None  # the same of workflow and agent alone
    components: tuple[float | None, ...]  # of workflow and agent, in the order of the configured weights
    turns: tuple[TurnRecord, ...]  # empty unless turns are credited
    num_sampled_tokens: int
    train: bool
    policy_version: int
    policy_version_max: int
    num_bytes: int
    trajectory: Trajectory | None
    unfinished: bool = False  # it counts in the baseline and has no loss

    @classmethod
    def of(cls, trajectory: Trajectory, position: Position, objective: ObjectiveConfig) -> LogRow:
        weights = objective.outcome_weights
        components = tuple(reward_of(trajectory, objective.reward_level, name) for name in weights)
        outcome = _weighted_sum(components, weights.values())
        turns = turn_records(trajectory, objective) if objective.credits_turns else ()
        own = [turn.reward for turn in turns if not math.isnan(turn.reward)]
        return cls(
            trajectory_id=trajectory.trajectory_id,
            position=position,
            member=trajectory.member,
            agent_id=trajectory.agent_id,
            chain_index=trajectory.chain_index,
            reward=(outcome or 0.0) + sum(own) if own else outcome,
            outcome=outcome,
            components=components,
            turns=turns,
            num_sampled_tokens=trajectory.num_sampled_tokens,
            train=trajectory.train,
            policy_version=trajectory.policy_version,
            policy_version_max=trajectory.policy_version_max,
            num_bytes=trajectory.nbytes,
            trajectory=trajectory,
        )

    def as_unfinished(self, reward: float | None) -> LogRow:
        """Of an execution that did not finish; `reward` is what it counts with if it was given none."""
        self.unfinished = True
        if self.reward is None and reward is not None:
            self.reward = self.outcome = reward
            self.components = (reward,) * len(self.components)
        return self

    @property
    def order(self) -> tuple[int, str, int]:
        """Place within its group's part of a batch."""
        return self.member.member_index, self.agent_id, self.chain_index


def reward_of(
    trajectory: Trajectory, level: Literal["workflow", "agent"], component: str = DEFAULT_COMPONENT
) -> float | None:
    """One component of the reward the objective compares; None when it never came.

    `workflow:<name>` and `agent:<name>` are that level's alone; a plain name is looked up as `level` says.
    """
    scope, _, name = component.rpartition(":")
    if (scope or level) == "agent":
        own = trajectory.agent_rewards.get(name)
        if own is not None or scope:
            return own
    return trajectory.workflow_rewards.get(name)


def _weighted_sum(components: Sequence[float | None], weights: Iterable[float]) -> float | None:
    """None when no component came; components that didn't are left out, as in TRL."""
    parts = [w * value for value, w in zip(components, weights, strict=True) if value is not None]
    return sum(parts) if parts else None


@dataclass(frozen=True, slots=True)
class AgentBaseline:
    """One agent's values in a group, one per member, and why they teach nothing (None: they do)."""

    agent_id: str
    values: tuple[float, ...]
    excluded: Literal["too_few_values", "zero_variance"] | None
    num_lone_turns: int = 0  # with nothing to be compared with, in rows that are trained


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a complete group teaches. Every row is in `advantages` or in `excluded`."""

    advantages: Mapping[str, float]  # trajectory id → advantage; its turns' mean where they differ
    excluded: Mapping[str, str]  # trajectory id → reason
    baselines: tuple[AgentBaseline, ...]
    closed_reason: ClosedReason | None  # None: usable
    turn_advantages: Mapping[str, TurnValues] = field(default_factory=dict)  # where turns are credited


@dataclass(slots=True, eq=False)
class Group:
    """One group as far as it has been read."""

    group_id: str
    group_size: int
    settled: dict[int, Settlement] = field(default_factory=dict)
    rows: list[LogRow] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)  # of every settlement, `retried` ones too
    first_read_at: float = 0.0
    verdict: Verdict | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.settled) == self.group_size

    @property
    def oldest_version(self) -> int | None:
        return min((row.policy_version for row in self.rows), default=None)


def judge(group: Group, objective: ObjectiveConfig) -> Verdict:
    """Advantages of a complete group: one baseline per agent (or one for all, by `baseline_key`), one
    value per member however many chains its work split into. A missing reward is no value; it is not 0.

    Where the estimator needs the batch, these are what `advantages.batch_advantages` goes on with.
    """
    if objective.credits_turns:
        return _judge_turns(group, objective)
    advantages: dict[str, float] = {}
    excluded: dict[str, str] = {}
    baselines: list[AgentBaseline] = []
    for rows in _compared(group.rows, objective):
        usable: list[LogRow] = []
        for row in sorted(rows, key=lambda r: r.order):
            if not row.train:
                excluded[row.trajectory_id] = "not_for_training"
            elif row.reward is None:
                excluded[row.trajectory_id] = "missing_reward"
            else:
                usable.append(row)
        taught = _advantages_by_member(usable, objective)
        no_baseline = taught if isinstance(taught, str) else None
        for agent_id, own in _by_agent(rows).items():
            values = _values_by_member([row for row in usable if row.agent_id == agent_id])
            baselines.append(AgentBaseline(agent_id, tuple(values.values()), no_baseline))
            for row in own:
                if row.trajectory_id in excluded:
                    continue
                if isinstance(taught, str):
                    excluded[row.trajectory_id] = taught
                elif row.unfinished:
                    excluded[row.trajectory_id] = "unfinished"
                else:
                    advantages[row.trajectory_id] = taught[row.member.member_index]
    reason = None if advantages else _closed_reason(group, set(excluded.values()))
    return Verdict(advantages, excluded, tuple(baselines), reason)


def _judge_turns(group: Group, objective: ObjectiveConfig) -> Verdict:
    """The same where each turn has an advantage of its own (turn_credit.py); agents are never mixed."""
    excluded: dict[str, str] = {}
    baselines: list[AgentBaseline] = []
    turn_values: dict[str, TurnValues] = {}
    for agent_id, rows in _by_agent(group.rows).items():
        of_member: dict[int, list[LogRow]] = {}
        for row in sorted(rows, key=lambda r: r.order):
            if row.train:
                of_member.setdefault(row.member.member_index, []).append(row)
            else:
                excluded[row.trajectory_id] = "not_for_training"
        members = {index: _member_turns(own) for index, own in of_member.items()}
        for index in [i for i, member in members.items() if math.isnan(member.total)]:
            del members[index]
            excluded |= {row.trajectory_id: "missing_reward" for row in of_member.pop(index)}
        taught = turn_advantages(list(members.values()), objective)
        if isinstance(taught, str):
            num_lone, reason = 0, taught
            excluded |= {row.trajectory_id: taught for own in of_member.values() for row in own}
        else:
            found: dict[str, TurnValues] = {}
            for own, advantages_T in zip(of_member.values(), taught, strict=True):
                if own[0].unfinished:
                    excluded |= {row.trajectory_id: "unfinished" for row in own}
                else:
                    found |= _by_row(own, advantages_T.tolist())
            lone = {i for i, values in found.items() if all(map(math.isnan, values))}
            excluded |= dict.fromkeys(lone, "too_few_values")
            turn_values |= {i: values for i, values in found.items() if i not in lone}
            num_lone = sum(math.isnan(v) for i, values in found.items() if i not in lone for v in values)
            reason = None
        totals = tuple(member.total for member in members.values())
        baselines.append(AgentBaseline(agent_id, totals, reason, num_lone))
    means = {i: _mean([v for v in values if not math.isnan(v)]) for i, values in turn_values.items()}
    closed = None if means else _closed_reason(group, set(excluded.values()))
    return Verdict(means, excluded, tuple(baselines), closed, turn_values)


def _in_order(rows: Sequence[LogRow]) -> list[tuple[TurnRecord, str]]:
    """The turns of one agent in one execution as they began, with the rows they stand in."""
    turns = [(turn, row.trajectory_id) for row in rows for turn in row.turns]
    return sorted(turns, key=lambda t: t[0].began)


def _member_turns(rows: Sequence[LogRow]) -> MemberTurns:
    turns = [turn for turn, _ in _in_order(rows)]
    outcome = rows[0].outcome  # every chain has the same
    return MemberTurns(
        outcome=math.nan if outcome is None else outcome,
        rewards_T=np.asarray([turn.reward for turn in turns], dtype=np.float64),
        prompt_digests=tuple(turn.prompt_digest for turn in turns),
    )


def _by_row(rows: Sequence[LogRow], advantages: Sequence[float]) -> dict[str, TurnValues]:
    """Values in the order the turns began → trajectory id → values in the order of its turns."""
    found = {row.trajectory_id: [math.nan] * len(row.turns) for row in rows}
    places = {row.trajectory_id: {t.began: i for i, t in enumerate(row.turns)} for row in rows}
    for (turn, trajectory_id), advantage in zip(_in_order(rows), advantages, strict=True):
        found[trajectory_id][places[trajectory_id][turn.began]] = advantage
    return {trajectory_id: tuple(values) for trajectory_id, values in found.items()}


def _compared(rows: Sequence[LogRow], objective: ObjectiveConfig) -> list[list[LogRow]]:
    """Rows that share a baseline."""
    if objective.baseline_key == "group":
        return [list(rows)] if rows else []
    return list(_by_agent(rows).values())


def _values_by_member(rows: Sequence[LogRow]) -> dict[int, float]:
    """member → its first row's reward: all chains of one agent have the same."""
    values: dict[int, float] = {}
    for row in rows:
        assert row.reward is not None
        values.setdefault(row.member.member_index, row.reward)
    return values


def _advantages_by_member(
    rows: Sequence[LogRow], objective: ObjectiveConfig
) -> dict[int, float] | Literal["too_few_values", "zero_variance"]:
    """One value per member: its reward, or the mean over its agents where they share a baseline."""
    of_member: dict[int, dict[str, LogRow]] = {}
    num_tokens: dict[int, int] = {}
    for row in rows:
        member = row.member.member_index
        of_member.setdefault(member, {}).setdefault(row.agent_id, row)
        num_tokens[member] = num_tokens.get(member, 0) + row.num_sampled_tokens
    by_component = objective.advantage == "gdpo"
    values = [_member_value(list(own.values()), by_component=by_component) for own in of_member.values()]
    taught = group_advantages(
        np.asarray(values, dtype=np.float64),
        estimator=objective.advantage,
        normalize_by_std=objective.normalize_by_std,
        negative_scale=objective.negative_advantage_scale,
        num_tokens=[num_tokens[member] for member in of_member],
        weights=list(objective.outcome_weights.values()),
    )
    return taught if isinstance(taught, str) else dict(zip(of_member, taught.tolist(), strict=True))


def _member_value(rows: Sequence[LogRow], *, by_component: bool) -> float | list[float]:
    if not by_component:
        return _mean([row.reward for row in rows])
    return [_mean([row.components[k] for row in rows]) for k in range(len(rows[0].components))]


def _mean(values: Sequence[float | None]) -> float:
    """Of what came; NaN when nothing did. One value is returned as it is."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else math.nan


def _by_agent(rows: Sequence[LogRow]) -> dict[str, list[LogRow]]:
    by_agent: dict[str, list[LogRow]] = {}
    for row in rows:
        by_agent.setdefault(row.agent_id, []).append(row)
    return dict(sorted(by_agent.items()))


def _closed_reason(group: Group, excluded: set[str]) -> ClosedReason:
    finalized = [s for s in group.settled.values() if s.status == "finalized"]
    if not finalized:
        return "cancelled"
    if not any(s.train for s in finalized):
        return "not_for_training"
    if not group.rows:
        return "no_rows"
    if excluded == {"not_for_training"}:
        return "not_for_training"
    return "zero_variance" if "zero_variance" in excluded else "too_few_values"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one settlement changed: rows dropped at once, and the group if it is complete now."""

    dropped: tuple[tuple[LogRow, str], ...] = ()
    completed: Group | None = None
    belongs: bool = True  # False: the group is done with; nothing waits for this settlement


class GroupBook:
    """Assembles groups from settlements in log order. A complete group stays until it is retired, and a
    retired one never opens again."""

    def __init__(self, objective: ObjectiveConfig, *, retired: Iterable[str] = ()) -> None:
        self._objective = objective
        self._retired = set(retired)
        self._open: dict[str, Group] = {}
        self._complete: dict[str, Group] = {}

    def settle(
        self, position: Position, settlement: Settlement, rows: Sequence[LogRow], *, now: float = 0.0
    ) -> Outcome:
        """Enter one execution's end with the rows it left."""
        member = settlement.member
        if member.group_id in self._retired:
            return Outcome(dropped=_all(rows, "duplicate_attempt"), belongs=False)
        group = self._complete.get(member.group_id) or self._open.get(member.group_id)
        if group is None:
            group = Group(member.group_id, member.group_size, first_read_at=now)
            self._open[member.group_id] = group
        group.positions.append(position)
        reason = self._refusal(group, settlement)
        if reason is not None:
            return Outcome(dropped=_all(rows, reason))
        group.settled[member.member_index] = settlement
        dropped = ()
        if settlement.status == "finalized":
            group.rows.extend(rows)
        elif settlement.status in UNFINISHED_STATUSES and self._objective.unfinished == "baseline":
            group.rows.extend(row.as_unfinished(self._objective.unfinished_reward) for row in rows)
        else:
            dropped = _all(rows, settlement.status)
        if not group.is_complete:
            return Outcome(dropped)
        group.verdict = judge(group, self._objective)
        self._complete[group.group_id] = self._open.pop(group.group_id)
        return Outcome(dropped, completed=group)

    @staticmethod
    def _refusal(group: Group, settlement: Settlement) -> str | None:
        """Why this settlement doesn't count, if it doesn't."""
        member = settlement.member
        if not settlement.is_final:
            return settlement.status
        if member.group_size != group.group_size or member.member_index >= group.group_size:
            logger.error(
                "execution %s says it is member %d of %d; its group has %d: refused",
                member.workflow_id, member.member_index, member.group_size, group.group_size,
            )  # fmt: skip
            return "mismatched_group"
        taken = group.verdict is not None or member.member_index in group.settled
        return "duplicate_attempt" if taken else None

    def abandon(self, group_id: str) -> Group | None:
        """Close a group that will never be complete: all it has is dropped as `cancelled`. None when no
        open group has this id."""
        group = self._open.pop(group_id, None)
        if group is not None:
            excluded = {row.trajectory_id: "cancelled" for row in group.rows}
            group.verdict = Verdict({}, excluded, (), "cancelled")
            self._complete[group_id] = group
        return group

    def abandon_as_of(self, group_id: str, read_positions: Mapping[str, int]) -> list[LogRow]:
        """Abandon a group as it stood when the log was read so far, though members that came since may have
        completed it; their rows. One whose members ended it as `cancelled` stays as it is."""
        group = self._open.get(group_id) or self._complete.get(group_id)
        if group is None:
            return []
        late = [row for row in group.rows if not is_below(row.position, read_positions)]
        if group.verdict is not None and group.verdict.closed_reason == "cancelled" and not late:
            return []
        group.rows = [row for row in group.rows if is_below(row.position, read_positions)]
        self._complete.pop(group_id, None)
        self._open[group_id] = group
        self.abandon(group_id)
        return late

    def retire(self, group_id: str) -> Group:
        """Done with: trained, or closed untrained. KeyError when it is not complete."""
        group = self._complete.pop(group_id)
        self._retired.add(group_id)
        return group

    def is_retired(self, group_id: str) -> bool:
        return group_id in self._retired

    def complete(self, group_id: str) -> Group | None:
        return self._complete.get(group_id)

    def open_groups(self) -> Iterator[Group]:
        return iter(self._open.values())


def _all(rows: Sequence[LogRow], reason: str) -> tuple[tuple[LogRow, str], ...]:
    return tuple((row, reason) for row in rows)
