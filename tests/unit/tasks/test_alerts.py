"""The signs automations watch for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from model_runtime.alerts_config import AlertsConfig
from model_runtime.evaluation import EvaluationDocument, EvaluationPlan, estimate
from model_runtime.metrics import _finite
from model_runtime.protocol import TrainerStatus
from tasks import alerts
from tasks.alerts import TrainingWatch, regression, reward_fall, tell_of_regression

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    heard: Told = []
    monkeypatch.setattr(alerts, "announce", lambda event, **payload: heard.append((event, payload)))
    return heard


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now[0])
    return now


def watch() -> TrainingWatch:
    return TrainingWatch(AlertsConfig(), model_id="m", run_id="run-1", config="c")


def status(step: int, state: str = "running") -> TrainerStatus:
    return TrainerStatus.model_validate({"pid": 1, "state": state, "heartbeat_at": 0.0, "step": step})


def rows(*rewards: float) -> list[dict[str, Any]]:
    return [{"step": i, "agent/x/reward/mean": _finite(reward)} for i, reward in enumerate(rewards, 1)]


def test_progress_is_told_at_the_beginning_and_at_most_once_a_minute(told: Told, clock: list[float]) -> None:
    model = watch()
    model.see(None)
    for second, step in ((0, 0), (1, 1), (30, 2), (61, 3), (62, 4), (200, 4)):
        clock[0] = 1000.0 + second
        model.see(status(step))
    assert [(event, payload["step"]) for event, payload in told] == [
        ("training.progress", 0),
        ("training.progress", 3),
        ("training.progress", 4),
    ]


def test_a_step_that_takes_long_is_no_progress(told: Told, clock: list[float]) -> None:
    model = watch()
    for minute in range(30):
        clock[0] = 1000.0 + 60 * minute
        model.see(status(7))
    assert len(told) == 1


@pytest.mark.parametrize("state", ["drained", "finished", "no_signal", "failed"])
def test_the_end_of_training_is_told_once(told: Told, clock: list[float], state: str) -> None:
    model = watch()
    model.see(status(1))
    model.see(status(2, state))
    model.see(status(2, state))
    model.end()
    assert [event for event, _ in told] == ["training.progress", "training.ended"]


def test_a_reward_that_fell_by_half_is_told_once_and_again_after_it_recovered(told: Told) -> None:
    model, good = watch(), [0.8] * 12
    fallen = [*good, *[0.3] * 10]
    model.see_steps(rows(*good))
    model.see_steps(rows(*fallen))
    model.see_steps(rows(*fallen, 0.3))
    recovered = [*fallen, *[0.8] * 10]
    model.see_steps(rows(*recovered))
    model.see_steps(rows(*recovered, *[0.1] * 10))
    assert [(event, payload["step"]) for event, payload in told] == [
        ("reward.collapsed", 22),
        ("reward.collapsed", 42),
    ]
    assert told[0][1]["reason"] == "mean reward of the last 10 steps is 0.3, of the best ten it was 0.8"


@pytest.mark.parametrize(
    ("rewards", "share", "falls"),
    [
        ([0.8] * 10 + [0.5] * 10, 0.5, False),  # not far enough
        ([0.8] * 10 + [0.4] * 10, 0.5, True),
        ([0.8] * 9 + [0.1] * 9, 0.5, False),  # too few to tell
        ([0.0] * 30, 0.5, False),  # never learned anything: not a fall
        ([-1.0] * 10 + [-1.6] * 10, 0.5, True),  # rewards below zero fall too
        ([-1.6] * 10 + [-1.0] * 10, 0.5, False),
        ([0.8] * 10 + [0.0] * 10, None, False),  # not wanted
        ([0.8, math.nan], 0.5, True),
        ([math.nan, 0.8], 0.5, False),  # over since
        ([], 0.5, False),
    ],
)
def test_what_counts_as_a_fall(rewards: list[float], share: float | None, falls: bool) -> None:
    assert (reward_fall(rows(*rewards), share=share) is not None) == falls


def test_a_loss_that_is_not_a_number_is_named() -> None:
    row = {"step": 3, "actor/pg_loss": None, "agent/x/reward/mean": 0.5}
    assert reward_fall([row], share=0.5) == "actor/pg_loss of step 3 is not a number"


def document(reward: float, **versions: int | None) -> EvaluationDocument:
    plan = EvaluationPlan(
        run_id="run-1",
        versions=versions,
        function="m:f",
        tasks_sha256="0",
        samples_per_task=1,
        temperature=0,
        seed=0,
    )
    return EvaluationDocument(
        plan=plan,
        executions={"finalized": 1},
        reward=estimate({"t": [reward]}),
        task_rewards={"t": [reward]},
        created_at=float(versions["a"] or 0),
        duration_s=1,
    )


def test_a_worse_evaluation_of_newer_versions_is_told_for_each_model(told: Told) -> None:
    now, before = document(0.5, a=5, b=5), document(0.8, a=4, b=5)
    tell_of_regression(now, [document(0.1, a=None, b=None), before, now], drop=0.1, config="c")
    assert [(event, payload["model_id"]) for event, payload in told] == [
        ("evaluation.regressed", "a"),
        ("evaluation.regressed", "b"),
    ]
    assert told[0][1]["reason"] == "mean reward 0.5, 0.3 below a v4, b v5"


def test_an_evaluation_is_held_against_the_one_before_over_the_tasks_both_have_a_reward_of() -> None:
    def of(version: int, **rewards: list[float]) -> EvaluationDocument:
        found = {"reward": estimate(rewards), "task_rewards": rewards}
        return document(0.0, a=version).model_copy(update=found)

    before = of(4, easy=[1.0], hard=[])
    assert regression(of(5, easy=[1.0], hard=[0.0]), before, drop=0.1) is None, "nothing fell"
    assert regression(of(5, easy=[0.8], hard=[1.0]), before, drop=0.1) is not None
    assert regression(of(5, hard=[0.0]), before, drop=0.1) is None


@pytest.mark.parametrize(
    ("now", "before", "drop"),
    [
        (document(0.75, a=5), document(0.8, a=4), 0.1),  # within the margin
        (document(0.1, a=3), document(0.8, a=4), 0.1),  # an older version, looked at on purpose
        (document(0.1, a=None), document(0.8, a=4), 0.1),  # the base model
        (document(0.1, a=5), None, 0.1),
        (document(0.1, a=5), document(0.8, a=4), None),
    ],
)
def test_what_is_no_regression(
    now: EvaluationDocument, before: EvaluationDocument | None, drop: float | None
) -> None:
    assert regression(now, before, drop=drop) is None
