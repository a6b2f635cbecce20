"""What a model's flow run is called, and which evaluations become part of its story."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from model_runtime.alerts_config import AlertsConfig
from model_runtime.config import ModelConfig
from model_runtime.evaluation import Estimate, EvaluationDocument, EvaluationPlan, write_evaluation
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.store import Store
from tasks import metrics
from tasks.alerts import TrainingWatch
from tasks.metrics import ModelReporter
from tasks.story import evaluation_title, run_title

LAYOUT = RunLayout("run-1")
WATCH = TrainingWatch(AlertsConfig(), model_id="a", run_id="run-1", config="c")


def rows(*rewards: float) -> list[dict[str, Any]]:
    return [{"step": step, "agent/x/reward/mean": reward} for step, reward in enumerate(rewards)]


def title(**known: Any) -> str:
    given: dict[str, Any] = {"run_id": "run-1", "model_id": "planner_model", "versions": None, "rows": []}
    return run_title(**given | known)


def test_a_run_is_called_by_what_is_known_of_it() -> None:
    assert title() == "run-1 · planner_model"
    assert title(versions=(0, 12)) == "run-1 · planner_model · v0→v12"
    known = title(versions=(0, 12), rows=rows(0.41, 0.6, 0.83))
    assert known == "run-1 · planner_model · v0→v12 · reward 0.41→0.83"
    assert title(incarnation=2) == "run-1 · planner_model (start 2)"


def test_rewards_in_a_name_are_means_over_a_tenth_of_the_steps() -> None:
    assert title(rows=rows(*[0.0, 0.2] * 10, *[0.9, 1.0] * 10)).endswith("reward 0.10→0.95")


def test_steps_without_a_reward_leave_it_out() -> None:
    assert title(rows=[{"step": 1}]) == "run-1 · planner_model"


def document(version: int | None, *, at: float, mean: float = 0.812) -> EvaluationDocument:
    plan = EvaluationPlan(
        run_id="run-1",
        versions={"a": version},
        function="m:f",
        tasks_sha256="0",
        samples_per_task=1,
        temperature=0.0,
        seed=0,
    )
    reward = Estimate(mean=mean, low=0.7, high=0.9, num_tasks=9)
    return EvaluationDocument(
        plan=plan, executions={"finalized": 9}, reward=reward, created_at=at, duration_s=1.0
    )


def test_an_evaluation_is_named_by_version_and_reward() -> None:
    assert evaluation_title(document(7, at=1.0), "a") == "v7: 0.81"
    assert evaluation_title(document(None, at=1.0), "a") == "base: 0.81"


async def test_each_new_evaluation_is_told_once_and_those_of_earlier_lives_not(
    local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def note(title: str, evaluation_id: str) -> None:
        told.append(title)

    class Runtime:
        trainer_status, published_version, incarnation = None, None, 1

    monkeypatch.setattr(metrics, "note_evaluation", note)
    model = ModelConfig.model_validate({"model_id": "a", "model_path": "/a"})
    reporter = ModelReporter(Runtime(), local_store, LAYOUT, model, WATCH)
    write_evaluation(local_store, LAYOUT, document(1, at=1.0))
    await reporter.evaluations()
    assert told == []
    write_evaluation(local_store, LAYOUT, document(7, at=3.0))
    write_evaluation(local_store, LAYOUT, document(3, at=2.0))
    await reporter.evaluations()
    await reporter.evaluations()
    assert told == ["v3: 0.81", "v7: 0.81"]


async def test_a_name_has_the_versions_of_this_life_alone(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    async def rename(flow_run_id: Any, title: str) -> None:
        named.append(title)

    class Runtime:
        trainer_status, published_version, incarnation = None, 9, 2

    class Flow:
        id = "00000000-0000-0000-0000-000000000001"

    monkeypatch.setattr(metrics, "rename_run", rename)
    monkeypatch.setattr(metrics, "this_run", Flow)
    syncs = MetricsWriter(local_store, LAYOUT.model("a"), "syncs", epoch=1, incarnation=1)
    syncs.append({"version": 6, "at": time.time() - 100})
    model = ModelConfig.model_validate({"model_id": "a", "model_path": "/a"})
    reporter = ModelReporter(Runtime(), local_store, LAYOUT, model, WATCH)
    await reporter.name()
    for row in ({"version": 7}, {"version": 8, "error": "no server was ready"}, {"version": 9}):
        syncs.append(row | {"at": time.time() + 1})
    await reporter.name()
    await reporter.name()
    assert named == ["run-1 · a (start 2)", "run-1 · a · v7→v9 (start 2)"]
