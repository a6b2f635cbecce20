"""What the flow `evaluate` works on: what is asked for, what is due, and nothing twice."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from model_runtime.adapters import write_version
from model_runtime.config import RunConfig
from model_runtime.coordinator import begin_run
from model_runtime.errors import RunFailedError
from model_runtime.evaluation import ModelVersion, read_evaluations
from model_runtime.layout import RunLayout
from model_runtime.store import open_store
from model_runtime.workflow import DriverReport
from tests.training_log import save_manifest
from tests.unit.model_runtime.test_adapters import adapter

LAYOUT = RunLayout("run-1")
module: Any = importlib.import_module("flows.evaluate")  # the package may hold the flow by that name


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "held_out.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    raw: dict[str, Any] = {
        "name": "shop",
        "multi_model": {"models": [{"model_id": "a", "model_path": "/a", "save_every": 1}]},
        "agent_model_mapping": {"x": "a"},
        "workflow": {
            "function": "m:f",
            "tasks": "/t",
            "held_out_tasks": str(tmp_path / "held_out.jsonl"),
        },
        "store": {"url": str(tmp_path / "store")},
    }
    return RunConfig.model_validate(raw)


def report(**changes: Any) -> DriverReport:
    """Two tasks, of which one is solved."""
    given: dict[str, Any] = {
        "mode": "eval",
        "groups_total": 2,
        "groups_opened": 2,
        "groups_done_before": 0,
        "ended": False,
        "executions": {"finalized": 2},
        "mean_reward": 0.5,
        "agent_success": {},
        "task_rewards": {"t1": [0.0], "t2": [1.0]},
        "errors": {},
        "num_calls": 2,
        "duration_s": 1.0,
    }
    return DriverReport(**given | changes)


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch, config: RunConfig) -> list[str]:
    """Versions 0 to 4 are committed, a checkpoint at each but the first; which adapters were served."""
    store = open_store(config.store)
    begin_run(store, LAYOUT, config, epoch=1)
    for version in range(5):
        files = adapter(seed=version)
        write_version(store, LAYOUT.model("a"), files, version=version, step=version, epoch=1)
        if version:
            save_manifest(store, LAYOUT.model("a"), version, version=version)
    served: list[str] = []

    async def run_frozen(frozen: RunConfig, work_id: str) -> DriverReport:
        path = frozen.model("a").adapter_path
        served.append("base" if path is None else Path(path).name)
        return report()

    async def show(*_: Any) -> None:
        return None

    monkeypatch.setattr(module, "run_frozen", run_frozen)
    monkeypatch.setattr(module, "show_evaluation", show)
    return served


async def test_the_newest_version_of_the_newest_run_is_evaluated_once(
    config: RunConfig, worked: list[str]
) -> None:
    first = await module._evaluate(config, "", [])
    again = await module._evaluate(config, "", [])
    assert first == again == "a v4: 0.50 (-0.48 to 1.48)"
    assert worked == ["v4"]
    (document,) = read_evaluations(open_store(config.store), LAYOUT)
    assert (document.plan.versions, document.where) == ({"a": 4}, "store")


async def test_a_version_that_is_named_is_what_is_evaluated(config: RunConfig, worked: list[str]) -> None:
    await module._evaluate(config, "run-1", [ModelVersion(model_id="a", version=2)])
    await module._evaluate(config, "run-1", [ModelVersion(model_id="a", version="base")])
    assert worked == ["v2", "base"]


async def test_every_checkpoint_that_is_due_is_evaluated_and_none_twice(
    config: RunConfig, worked: list[str]
) -> None:
    evaluation = config.evaluation.model_copy(update={"every_checkpoints": 2})
    config = config.model_copy(update={"evaluation": evaluation})
    assert await module._evaluate(config, "", []) == "run run-1: evaluated a v4, a v2"
    assert worked == ["v4", "v2"]
    assert await module._evaluate(config, "", []) == "run run-1: no checkpoint to evaluate"
    assert worked == ["v4", "v2"]


async def test_a_task_that_no_execution_finished_is_not_solved_and_has_no_reward(
    config: RunConfig, worked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(*_: Any) -> DriverReport:
        executions = {"finalized": 1, "aborted": 1, "infra": 1}
        rewards = {"t1": [1.0], "t2": [], "t3": []}
        return report(executions=executions, task_rewards=rewards, task_unknown={"t3": 1})

    monkeypatch.setattr(module, "run_frozen", half)
    await module._evaluate(config, "", [])
    (document,) = read_evaluations(open_store(config.store), LAYOUT)
    assert document.pass_at == {1: 0.5}
    assert document.reward is not None
    assert (document.reward.mean, document.reward.num_tasks) == (1.0, 1)


async def test_an_evaluation_that_came_to_no_end_is_not_kept_as_its_plan_s(
    config: RunConfig, worked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_off(*_: Any) -> DriverReport:
        return report(executions={"finalized": 1, "unsettled": 1})

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_frozen", broken_off)
        with pytest.raises(RunFailedError, match=r"came to no end \(1 finalized, 1 unsettled\)"):
            await module._evaluate(config, "", [])
    assert read_evaluations(open_store(config.store), LAYOUT) == []
    assert await module._evaluate(config, "", []) == "a v4: 0.50 (-0.48 to 1.48)"
