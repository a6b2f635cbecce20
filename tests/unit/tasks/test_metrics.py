"""What a model's page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from model_runtime.alerts_config import AlertsConfig
from model_runtime.config import ModelConfig
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.protocol import QueueReport, TrainerStatus
from model_runtime.store import Store
from tasks import alerts, metrics
from tasks.alerts import TrainingWatch
from tasks.metrics import (
    ModelReporter,
    describe_progress,
    learning_curve,
    progress_percent,
    reward_series,
    step_table,
    sync_table,
)

LAYOUT = RunLayout("run-1")
WATCH = TrainingWatch(AlertsConfig(), model_id="planner_model", run_id="run-1", config="c")
MODEL = ModelConfig(model_id="planner_model", model_path="/models/planner")


@pytest.fixture(autouse=True)
def _without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "announce", lambda event, **payload: None)


def status(**fields: Any) -> TrainerStatus:
    defaults: dict[str, Any] = {"pid": 1, "state": "running", "heartbeat_at": 0.0}
    return TrainerStatus.model_validate(defaults | fields)


def row(step: int, **rewards: float) -> dict[str, Any]:
    return {"step": step, "actor/lr": 1e-5} | {f"agent/{a}/reward/mean": r for a, r in rewards.items()}


def test_progress_is_the_share_of_the_steps_when_they_are_bounded() -> None:
    assert progress_percent(status(step=5, steps_left=15)) == 25.0
    assert progress_percent(status(step=5, steps_left=None)) == 0.0
    assert progress_percent(status(step=0, steps_left=0)) == 0.0
    assert progress_percent(None) == 0.0


def test_progress_reads_as_a_sentence() -> None:
    now = status(step=5, queue=QueueReport(untrained_groups=3), state="waiting", reason="for work")
    assert (
        describe_progress("m", now, 4) == "m: step 5, serving v4, trainer waiting (for work); 3 groups wait"
    )
    assert describe_progress("m", None, None) == "m: serving nothing yet"


def test_the_step_table_is_newest_first_and_has_the_models_mean_reward() -> None:
    table = step_table([row(1, a=0.0, b=0.5), row(2, a=0.5, b=1.0)])
    assert [(line["step"], line["reward"]) for line in table] == [(2, 0.75), (1, 0.25)]
    assert "loss" not in table[0]


def test_the_sync_table_leaves_nested_values_out() -> None:
    assert sync_table([{"version": 1, "load_s": 0.123456789, "replicas": ["r0"]}]) == [
        {"version": 1, "load_s": 0.12346}
    ]


def test_the_curve_has_a_line_per_agent_and_is_a_picture() -> None:
    rows = [row(s, a=s / 10, b=1.0) for s in range(1, 11)] + [row(11, a=1.0)]
    assert {agent: len(points) for agent, points in reward_series(rows).items()} == {"a": 11, "b": 10}
    assert learning_curve(rows, title="m").startswith(b"\x89PNG")
    assert learning_curve([row(1), row(2)], title="no reward yet").startswith(b"\x89PNG")


class Prefect:
    """Takes artifacts as Prefect's functions do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, Any]] = []
        self.updated: list[float] = []
        for name in ("acreate_progress_artifact", "acreate_table_artifact", "acreate_image_artifact"):
            monkeypatch.setattr(metrics, name, self._create)
        monkeypatch.setattr(metrics, "aupdate_progress_artifact", self._update)

    async def _create(self, content: Any, *, key: str, description: str) -> Any:
        self.made.append((key, content))
        return uuid4()

    async def _update(self, artifact: Any, progress: float, *, description: str) -> None:
        self.updated.append(progress)


class Runtime:
    trainer_status: TrainerStatus | None = status(step=2, steps_left=2)
    published_version: int | None = 2
    incarnation = 1


async def test_a_model_reports_under_keys_that_stay_the_same(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefect = Prefect(monkeypatch)
    own = LAYOUT.model("planner_model")
    for stream, rows in (("steps", [row(1, a=0.1), row(2, a=0.4)]), ("syncs", [{"version": 1}])):
        writer = MetricsWriter(local_store, own, stream, epoch=1, incarnation=1)
        for each in rows:
            writer.append(each)
    reporter = ModelReporter(Runtime(), local_store, LAYOUT, MODEL, WATCH)
    await reporter.progress()
    await reporter.finish()
    keys = [key for key, _ in prefect.made]
    assert keys == [f"planner-model-{what}" for what in ("progress", "metrics", "syncs", "curve")]
    assert prefect.made[0][1] == 50.0
    assert prefect.updated == [100.0]
    assert prefect.made[3][1].startswith("data:image/png;base64,")


async def test_nothing_is_drawn_before_there_is_something(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect = Prefect(monkeypatch)
    reporter = ModelReporter(Runtime(), local_store, LAYOUT, MODEL, WATCH)
    await reporter.tables()
    await reporter.curve()
    assert prefect.made == []
