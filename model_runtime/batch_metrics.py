"""Figures of one batch, under verl's names where verl has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from model_runtime.documents import ReplayedGroup
from model_runtime.groups import Group

if TYPE_CHECKING:
    from model_runtime.batch_rows import TrainingRow


def batch_metrics(
    rows: Sequence[TrainingRow], groups: Sequence[Group], closed: Sequence[Group], *, published_version: int
) -> dict[str, float]:
    """Of the rows trained; per agent over every group that was settled since the last batch, those without
    a gradient too: without them a policy that is always right would seem to be right half the time."""
    metrics = {"batch/num_groups": float(len(groups)), "batch/num_rows": float(len(rows))}
    metrics["batch/num_groups_closed_untrained"] = float(len(closed))
    metrics |= _agent_metrics([*groups, *closed])
    if rows:
        metrics |= _row_metrics(rows, published_version) | _agent_row_metrics(rows)
    return metrics


def replay_metrics(replayed: Sequence[ReplayedGroup]) -> dict[str, float]:
    """What of a batch was trained before."""
    return {
        "batch/num_replayed_groups": float(len(replayed)),
        "batch/num_replayed_rows": float(sum(len(entry.rows) for entry in replayed)),
    }


def _agent_metrics(groups: Iterable[Group]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    flat: dict[str, list[bool]] = {}
    few: dict[str, list[bool]] = {}
    lone: Counter[str] = Counter()
    for group in groups:
        for baseline in group.verdict.baselines if group.verdict else ():
            values.setdefault(baseline.agent_id, []).extend(baseline.values)
            lone[baseline.agent_id] += baseline.num_lone_turns
            few.setdefault(baseline.agent_id, []).append(baseline.excluded == "too_few_values")
            if baseline.excluded != "too_few_values":
                flat.setdefault(baseline.agent_id, []).append(baseline.excluded == "zero_variance")
    metrics: dict[str, float] = {}
    for agent_id, rewards in sorted(values.items()):
        if rewards:
            metrics[f"agent/{agent_id}/reward/mean"] = float(np.mean(rewards))
            metrics[f"agent/{agent_id}/reward/std"] = float(np.std(rewards))
    for agent_id, of_groups in sorted(flat.items()):
        metrics[f"agent/{agent_id}/zero_variance_share"] = float(np.mean(of_groups))
    for agent_id, of_groups in sorted(few.items()):
        metrics[f"agent/{agent_id}/too_few_values"] = float(sum(of_groups))
    metrics |= {f"agent/{agent_id}/lone_turns": float(n) for agent_id, n in sorted(lone.items()) if n}
    return metrics


def _agent_row_metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Per agent: how far its advantages spread, and model calls per execution that was trained."""
    by_agent: dict[str, list[TrainingRow]] = {}
    for row in rows:
        by_agent.setdefault(row.trajectory.agent_id, []).append(row)
    metrics: dict[str, float] = {}
    for agent_id, own in sorted(by_agent.items()):
        executions = {(r.trajectory.member.group_id, r.trajectory.member.member_index) for r in own}
        num_calls = sum(len(r.trajectory.turns) for r in own)
        metrics[f"agent/{agent_id}/advantage/std"] = float(np.std([r.advantage for r in own]))
        metrics[f"agent/{agent_id}/calls"] = num_calls / len(executions)
    return metrics


def _row_metrics(rows: Sequence[TrainingRow], published_version: int) -> dict[str, float]:
    oldest = np.asarray([row.trajectory.policy_version for row in rows])
    newest = np.asarray([row.trajectory.policy_version_max for row in rows])
    lag_worst = np.maximum(0, published_version - oldest)
    trained_tokens = np.asarray([int(row.loss_mask.sum()) for row in rows])
    series = {
        "critic/score": [row.reward for row in rows],
        "critic/advantages": [row.advantage for row in rows],
        "training/off_policy/trajectory_staleness": np.maximum(0, published_version - newest),
        "training/off_policy/trajectory_staleness_worst": lag_worst,
        "training/off_policy/trajectory_spans": newest - oldest + 1,
        "response_length": [len(row.trajectory.response_ids) for row in rows],
        "prompt_length": [len(row.trajectory.prompt_ids) for row in rows],
    }
    return _summaries(series) | {
        "fully_async/count/stale_trajectory_processed": float((lag_worst >= 1).sum()),
        "batch/num_tokens": float(sum(row.trajectory.num_tokens for row in rows)),
        "batch/num_trained_tokens": float(trained_tokens.sum()),
        "batch/num_aged_out_tokens": float(
            sum(row.trajectory.num_sampled_tokens for row in rows) - trained_tokens.sum()
        ),
    }


def _summaries(series: Mapping[str, Sequence[float] | np.ndarray]) -> dict[str, float]:
    figures = {"mean": np.mean, "max": np.max, "min": np.min}
    return {
        f"{name}/{kind}": float(of(values)) for name, values in series.items() for kind, of in figures.items()
    }
