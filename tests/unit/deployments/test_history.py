"""What a store knows of its runs and models, without any memory of who launched them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import app
from deployments.history import model_history, show_history, show_runs, show_stored_run, stored_runs
from model_runtime.adapters import write_version
from model_runtime.config import RunConfig, StoreConfig
from model_runtime.coordinator import begin_run, update_run
from model_runtime.errors import ConfigError
from model_runtime.evaluation import Estimate, EvaluationDocument, EvaluationPlan, write_evaluation
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.removed_log import NOTHING_REMOVED
from model_runtime.store import Store, open_store
from tests.gateway_harness import ADMIN_KEY, RUN_ID, live_gateway, make_config
from tests.unit.model_runtime.test_adapters import adapter

URL = "store"


def config(*models: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "shop",
            "multi_model": {"models": [{"model_id": m, "model_path": "/m"} for m in models]},
            "agent_model_mapping": {f"{m}_agent": m for m in models},
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """`old` trained model a to version 3 and was evaluated; `new` has a and b, and nothing yet."""
    store = open_store(StoreConfig(url=str(tmp_path / URL)))
    layout = RunLayout("old")
    begin_run(store, layout, config("a"), epoch=1)
    for version in range(4):
        files = adapter(seed=version)
        write_version(store, layout.model("a"), files, version=version, step=version, epoch=1)
    steps = MetricsWriter(store, layout.model("a"), "steps", epoch=1, incarnation=1)
    for step, reward in enumerate((0.25, 0.5, 0.75)):
        steps.append({"step": step, "agent/a_agent/reward/mean": reward})
    store.put(layout.model("a").checkpoint_marker(2), b"{}")
    plan = EvaluationPlan(
        run_id="old",
        versions={"a": 3},
        function="m:f",
        tasks_sha256="0",
        samples_per_task=1,
        temperature=0.0,
        seed=0,
    )
    reward = Estimate(mean=0.8, low=0.7, high=0.9, num_tasks=9)
    document = EvaluationDocument(
        plan=plan, executions={"finalized": 9}, reward=reward, created_at=1.0, duration_s=1.0
    )
    write_evaluation(store, layout, document)
    update_run(store, layout, epoch=1, state="completed")
    begin_run(store, RunLayout("old.eval-123"), config("a"), epoch=1)
    begin_run(store, RunLayout("new"), config("a", "b"), epoch=1)
    return store


def screen() -> Console:
    return Console(file=io.StringIO(), width=160)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_runs_are_those_of_the_store_and_not_the_work_of_evaluations(store: Store) -> None:
    found = [(run.run_id, run.state, run.models) for run in stored_runs(store)]
    assert found == [("old", "completed", ["a"]), ("new", "running", ["a", "b"])]


def test_runs_say_what_they_take_and_what_retention_removed(store: Store) -> None:
    removal = msgspec.structs.replace(NOTHING_REMOVED, number=1, num_bytes=7_000_000)
    store.put(RunLayout("old").model("a").removal(1), removal.to_bytes())
    console = screen()
    show_runs(store, console, sizes=True, as_json=False)
    assert "7.0 MB" in text(console)
    answer = CliRunner().invoke(app, ["runs", "--sizes", "--json", "--store", store.url])
    old, new = json.loads(answer.stdout)
    assert (old["removed_log_bytes"], new["removed_log_bytes"]) == (7_000_000, 0)
    assert old["store_bytes"] == sum(store.sizes("old").values()) > new["store_bytes"] > 0
    assert "store_bytes" not in CliRunner().invoke(app, ["runs", "--json", "--store", store.url]).stdout


def test_a_models_history_goes_through_its_runs(store: Store) -> None:
    old, new = model_history(store, "a")
    assert (old.newest_version, old.num_steps, old.num_checkpoints) == (3, 3, 1)
    assert (old.first_reward, old.last_reward) == (0.25, 0.75)
    assert [e["version"] for e in old.evaluations] == [3]
    assert (new.newest_version, new.first_reward, new.adapter_uri) == (None, None, None)
    assert [run.run_id for run in model_history(store, "a", run_id="new")] == ["new"]


def test_a_history_can_be_read(store: Store) -> None:
    console = screen()
    show_history(store, "a", console, run_id="old", as_json=False)
    shown = text(console)
    for cell in ("v0→v3", "0.25→0.75", "v3: 0.80 (0.70 to 0.90)", "newest adapter: file://"):
        assert cell in shown


@pytest.mark.parametrize(
    ("model_id", "run_id", "message"),
    [("c", None, r"no model 'c' .*models there are \['a', 'b'\]"), ("a", "gone", "no run 'gone'")],
)
def test_what_is_not_there_is_named(store: Store, model_id: str, run_id: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_history(store, model_id, run_id=run_id)


@pytest.mark.parametrize("command", [("runs",), ("history", "a"), ("status", "old")])
def test_json_is_all_there_is_on_stdout(tmp_path: Path, store: Store, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command, "--store", str(tmp_path / URL), "--json"])
    assert done.exit_code == 0, done.output
    found: Any = json.loads(done.stdout)
    assert "old" in json.dumps(found)


def test_a_run_is_seen_live_from_its_store_with_the_runs_key(tmp_path: Path) -> None:
    store = open_store(StoreConfig(url=str(tmp_path)))
    layout = RunLayout(RUN_ID)
    with live_gateway(store) as harness:
        harness.make_ready()
        begin_run(store, layout, make_config(), epoch=1)
        update_run(store, layout, epoch=1, gateway_url=harness.url)
        live, blind = screen(), screen()
        show_stored_run(store, RUN_ID, live, as_json=False, key=ADMIN_KEY)
        show_stored_run(store, RUN_ID, blind, as_json=False, key=None)
    assert "training" in text(live)
    assert "in the store: 0.0 MB" in text(live)
    assert "running, as far as the store knows" in text(blind)
