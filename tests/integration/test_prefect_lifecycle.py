"""A run and everything that can end it, with real processes: no orphan is left, and the run goes on later.

Every process of a run inherits a mark in its environment; whoever still bears it is an orphan.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.prefect_client import PARENT_FLOW, PrefectApi
from model_runtime.adapters import latest_version
from model_runtime.config import StoreConfig
from model_runtime.coordinator import latest_epoch, read_run
from model_runtime.layout import RunLayout
from model_runtime.store import open_store
from model_runtime.summary import RunSummary
from tests.marked_processes import MARK, marked

pytestmark = pytest.mark.integration

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ORPHAN_LIMIT_S = 60
LAYOUT = RunLayout("run-1")


def short_config(folder: Path, *, max_steps: int | None = 12, **changes: Any) -> Path:
    """The quickstart, a few small steps long."""
    raw = yaml.safe_load((QUICKSTART / "config.yaml").read_text())
    for model in raw["multi_model"]["models"]:
        model["model_path"] = str(QUICKSTART / model["model_path"])
        model |= {"batch_size": 2, "max_steps": max_steps, "save_every": 1}
        # A falling rate needs max_steps; at the quickstart's, such small batches can spoil a policy, whose
        # groups then teach nothing any more, and the run ends before its steps are done.
        model["trainer"] |= {"learning_rate": 5.0e-4, "learning_rate_schedule": "constant"}
    raw["workflow"] |= {
        "tasks": str(QUICKSTART / "tasks/train.jsonl"),
        "python_path": str(QUICKSTART),
        "held_out_tasks": None,
        "group_size": 8,  # with fewer a batch's worth of groups may have equal rewards many times over
        "max_concurrent_executions": 16,
    }
    raw["store"] = {"url": str(folder / "runs")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw | changes))
    return path


@dataclass
class Up:
    """One `repertory up` in a session of its own."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path
    folder: Path

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, limit_s: float) -> int:
        return self.process.wait(limit_s)

    def marked(self) -> list[psutil.Process]:
        """Processes of this launch that are alive."""
        return marked(self.mark, self.folder)

    def flow_process(self, flow_run_id: str) -> psutil.Process:
        for process in self.marked():
            of_this_run = process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run_id
            if of_this_run and "prefect.engine" in process.cmdline():
                return process
        raise AssertionError(f"no process of flow run {flow_run_id}")

    def assert_nothing_left(self, limit_s: float = ORPHAN_LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while (left := self.marked()) and time.monotonic() < until:
            time.sleep(0.5)
        assert [" ".join(p.cmdline())[:200] for p in left] == []

    def until(self, reached: Callable[[], bool], what: str, limit_s: float = 420) -> None:
        until = time.monotonic() + limit_s
        while not reached():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < until, f"not within {limit_s} s: {what}\n{self.output()}"
            time.sleep(0.3)

    def version(self, model_id: str) -> int:
        store = open_store(StoreConfig(url=str(self.folder / "runs")))
        newest = latest_version(store, LAYOUT.model(model_id))
        return -1 if newest is None else newest

    def until_trained(self, version: int = 1) -> None:
        models = ("planner_model", "solver_model")
        self.until(lambda: all(self.version(m) >= version for m in models), f"v{version} of both models")

    def parent_run_id(self) -> str:
        stack = json.loads((self.folder / "home" / "stack.json").read_text())
        runs = asyncio_run(PrefectApi(stack["api_url"]).active_runs("run-1"))
        return next(str(run.id) for run in runs if run.parent_task_run_id is None)


def asyncio_run(work: Any) -> Any:
    import asyncio

    return asyncio.run(work)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    launched: list[Up] = []

    def start(*arguments: str) -> Up:
        mark, log = uuid.uuid4().hex, tmp_path / f"up-{len(launched)}.log"
        env = os.environ | {MARK: mark, "REPERTORY_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        env.pop("PREFECT_API_URL", None)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "up", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        launched.append(Up(process, mark, log, tmp_path))
        return launched[-1]

    yield start
    for up in launched:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        up.assert_nothing_left()


def test_ctrl_c_while_prefect_starts_leaves_nothing(launch: Callable[..., Up], tmp_path: Path) -> None:
    up = launch(str(short_config(tmp_path)), "--run-id", "run-1")
    up.until(lambda: "Prefect server: starting" in up.output(), "the server's start", 60)
    up.process.send_signal(signal.SIGINT)
    assert up.wait(45) == 130
    assert "--resume run-1" in up.output()
    assert "Traceback" not in up.output()
    up.assert_nothing_left(5)


@pytest.mark.timeout(1800)
def test_a_run_goes_on_after_its_parent_was_killed_and_after_ctrl_c(
    launch: Callable[..., Up], tmp_path: Path
) -> None:
    config = str(short_config(tmp_path))

    killed = launch(config, "--run-id", "run-1")
    killed.until_trained(2)
    killed.flow_process(killed.parent_run_id()).send_signal(signal.SIGKILL)
    assert killed.wait(ORPHAN_LIMIT_S) == 1
    assert "Crashed" in killed.output()
    killed.assert_nothing_left()
    at_kill = killed.version("solver_model")

    interrupted = launch("--resume", "run-1")
    interrupted.until_trained(at_kill + 2)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait(ORPHAN_LIMIT_S) == 130
    interrupted.assert_nothing_left(5)
    assert "no process is left" in interrupted.output()
    store = open_store(StoreConfig(url=str(tmp_path / "runs")))
    document = read_run(store, LAYOUT)
    assert document is not None
    assert document.state == "cancelled"

    finished = launch(config, "--resume", "run-1", "--json")
    assert finished.wait(600) == 0, finished.output()
    assert latest_epoch(store, LAYOUT) == 3
    summary = RunSummary.model_validate_json(store.get(LAYOUT.summary()))
    assert [(m.steps, m.latest_version, m.ended) for m in summary.models] == [(12, 12, "finished")] * 2
    assert all(m.balanced for m in summary.models)
    finished.assert_nothing_left(5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cancelling_from_prefects_api_ends_every_process(launch: Callable[..., Up], tmp_path: Path) -> None:
    up = launch(str(short_config(tmp_path)), "--run-id", "run-1")
    up.until_trained()
    stack = json.loads((tmp_path / "home" / "stack.json").read_text())
    assert asyncio_run(PrefectApi(stack["api_url"]).cancel("run-1")) == 1
    assert up.wait(ORPHAN_LIMIT_S) == 1
    assert "Cancelled" in up.output()
    up.assert_nothing_left(5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["launcher", "runner"])
def test_killing_what_stands_above_the_flows_ends_every_process(
    launch: Callable[..., Up], tmp_path: Path, victim: str
) -> None:
    up = launch(str(short_config(tmp_path)), "--run-id", "run-1")
    up.until_trained()
    if victim == "launcher":
        up.process.kill()
    else:
        command = "deployments.local serve"
        runner = next(
            p
            for p in up.marked()
            if command in " ".join(p.cmdline()) and "guardian" not in " ".join(p.cmdline())
        )
        runner.kill()
    up.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_model_is_started_again_and_the_run_completes(
    launch: Callable[..., Up], tmp_path: Path
) -> None:
    up = launch(str(short_config(tmp_path)), "--run-id", "run-1")
    up.until_trained(2)
    stack = json.loads((tmp_path / "home" / "stack.json").read_text())
    runs = asyncio_run(PrefectApi(stack["api_url"]).active_runs("run-1"))
    child = next(run for run in runs if "model:solver_model" in run.tags)
    up.flow_process(str(child.id)).send_signal(signal.SIGKILL)
    assert up.wait(600) == 0, up.output()
    assert PARENT_FLOW not in [p.name() for p in up.marked()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_rides_out_the_death_of_prefects_server(launch: Callable[..., Up], tmp_path: Path) -> None:
    up = launch(str(short_config(tmp_path)), "--run-id", "run-1")
    up.until_trained()
    servers = [p for p in up.marked() if "prefect server start" in " ".join(p.cmdline()[1:])]
    trainers = {p.pid for p in up.marked() if "model_runtime.trainer" in p.cmdline()}
    for server in servers:
        server.kill()
    at_kill = up.version("solver_model")
    up.until(lambda: up.version("solver_model") > at_kill, "a version after the server's death")
    assert trainers <= {p.pid for p in up.marked()}
    assert up.wait(600) == 0, up.output()
    assert "Prefect server: died; starting it again" in up.output()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_whose_time_is_up_settles_trains_and_publishes_what_it_has(
    launch: Callable[..., Up], tmp_path: Path
) -> None:
    up = launch(str(short_config(tmp_path, max_steps=None, max_duration_s=60)), "--run-id", "run-1")
    assert up.wait(600) == 0, up.output()
    store = open_store(StoreConfig(url=str(tmp_path / "runs")))
    summary = RunSummary.model_validate_json(store.get(LAYOUT.summary()))
    assert summary.num_executions > 0
    assert summary.num_executions % 4 == 0, "a group was left half done"
    assert all(m.balanced and m.in_log == 0 for m in summary.models)


# Loaded into every process of the launch: whoever is silent is found within seconds.
IMPATIENT = """
import sys

if any("prefect.engine" in a or "deployments.cli" in a for a in sys.orig_argv):
    import deployments.up
    import tasks.hang_watch

    tasks.hang_watch.SILENT_LIMIT_S = 40.0
    deployments.up.PARENT_SILENT_LIMIT_S = 40.0
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["runtime", "driver", "parent"])
def test_what_is_stopped_for_ever_is_found_and_the_run_goes_on(
    launch: Callable[..., Up], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(IMPATIENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(patch), str(Path.cwd())]))
    config = short_config(tmp_path)
    raw = yaml.safe_load(config.read_text())
    raw["workflow"]["execution_timeout_s"] = 40.0  # a driver may be busy for as long
    config.write_text(yaml.safe_dump(raw))
    up = launch(str(config), "--run-id", "run-1")
    up.until_trained()
    stack = json.loads((tmp_path / "home" / "stack.json").read_text())
    runs = asyncio_run(PrefectApi(stack["api_url"]).active_runs("run-1"))
    of = {
        "runtime": lambda run: "model:solver_model" in run.tags,
        "driver": lambda run: run.name.startswith("rollout"),
        "parent": lambda run: run.parent_task_run_id is None,
    }[victim]
    stopped = up.flow_process(str(next(run.id for run in runs if of(run))))
    stopped.send_signal(signal.SIGSTOP)
    if victim == "parent":
        assert up.wait(300) == 1, up.output()
        assert "its parent hung" in up.output()
        assert "--resume run-1" in up.output()
        up.assert_nothing_left()
        return
    assert up.wait(600) == 0, up.output()
    assert not stopped.is_running()
    said = "\n".join(path.read_text() for path in (tmp_path / "home" / "logs").glob("runner-*.log"))
    assert "nothing was heard of" in said
    up.assert_nothing_left(5)
