"""The signs that automations watch for: a model trains on, its reward fell, an evaluation came out worse."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from model_runtime.alerts_config import AlertsConfig
from model_runtime.evaluation import EvaluationDocument, comparable, difference
from model_runtime.protocol import TrainerStatus
from model_runtime.summary import mean_reward
from tasks.reporting import announce

PROGRESS_EVERY_S = 60.0
"""Least time between two signs of progress of one model."""
WINDOW_STEPS = 10

TRAINING_ENDED = ("drained", "finished", "no_signal", "failed")

Row = Mapping[str, Any]


class TrainingWatch:
    """Tells Prefect that a model's training goes on, that it is over, and that its reward fell."""

    def __init__(self, alerts: AlertsConfig, *, model_id: str, run_id: str, config: str) -> None:
        self._alerts = alerts
        self._who = {"model_id": model_id, "run_id": run_id, "config": config}
        self._step: int | None = None
        self._told_at = 0.0
        self._over = False
        self._fallen = False

    def see(self, status: TrainerStatus | None) -> None:
        """One sign when training begins and, at most once a minute, when it got further."""
        if status is None or self._over:
            return
        if status.state in TRAINING_ENDED:
            self.end()
            return
        now = time.monotonic()
        if status.step != self._step and (self._step is None or now - self._told_at >= PROGRESS_EVERY_S):
            self._step, self._told_at = status.step, now
            announce("training.progress", **self._who, step=status.step)

    def end(self) -> None:
        """Nothing more is to be expected of this model. Idempotent."""
        if not self._over:
            self._over = True
            announce("training.ended", **self._who, step=self._step)

    def see_steps(self, rows: Sequence[Row]) -> None:
        """Tell of a fall once, and again only after the reward had recovered."""
        reason = reward_fall(rows, share=self._alerts.reward_drop)
        if reason is not None and not self._fallen:
            announce("reward.collapsed", **self._who, step=rows[-1].get("step"), reason=reason)
        self._fallen = reason is not None


def reward_fall(rows: Sequence[Row], *, share: float | None) -> str | None:
    """Why these steps' rewards call for a look; None: they don't."""
    if share is None or not rows:
        return None
    figures = [name for name in rows[-1] if name.endswith("/reward/mean") or name == "actor/pg_loss"]
    broken = [name for name in figures if rows[-1][name] is None]  # as NaN is stored
    if broken:
        return f"{', '.join(sorted(broken))} of step {rows[-1].get('step')} is not a number"
    rewards = [reward for row in rows if (reward := mean_reward(row)) is not None]
    if len(rewards) < 2 * WINDOW_STEPS:
        return None
    means = [
        sum(rewards[i : i + WINDOW_STEPS]) / WINDOW_STEPS for i in range(len(rewards) - WINDOW_STEPS + 1)
    ]
    best, now = max(means), means[-1]
    if now > best - share * abs(best) or now == best:
        return None
    return f"mean reward of the last {WINDOW_STEPS} steps is {now:.3g}, of the best ten it was {best:.3g}"


def tell_of_regression(
    document: EvaluationDocument, before: Sequence[EvaluationDocument], *, drop: float | None, config: str
) -> None:
    """An event for each model of an evaluation that came out worse than the one before."""
    plan = document.plan
    _, last = comparable(before, plan)
    reason = regression(document, last, drop=drop)
    if reason is not None:
        for model_id in plan.versions:
            announce(
                "evaluation.regressed", model_id=model_id, run_id=plan.run_id, config=config, reason=reason
            )


def regression(
    document: EvaluationDocument, last: EvaluationDocument | None, *, drop: float | None
) -> str | None:
    """How much worse than the one before an evaluation is, if that is worth telling: over the tasks both have
    a reward of."""
    if drop is None or last is None or last.reward is None or document.reward is None:
        return None
    if any(_age(v) < _age(last.plan.versions.get(m)) for m, v in document.plan.versions.items()):
        return None  # somebody looks at older versions on purpose
    gain = difference(document.task_rewards, last.task_rewards)
    fell = 0.0 if gain is None else -gain.mean
    if fell < drop:
        return None
    return f"mean reward {document.reward.mean:.3g}, {fell:.3g} below {last.plan.named_versions()}"


def _age(version: int | None) -> int:
    return -1 if version is None else version
