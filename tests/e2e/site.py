"""A site as a team has it: a Prefect server, a worker, the quickstart's config deployed; real vLLM."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.rig.prefect_api import ask
from model_runtime.adapters import latest_version
from model_runtime.config import StoreConfig
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.store import Store, open_store
from tests.integration.test_deploy import ADMIN_KEY, POOL, Process, until_healthy
from tests.integration.test_prefect_lifecycle import QUICKSTART, short_config
from tests.marked_processes import MARK, marked

MODELS = ("planner_model", "solver_model")
PREFECTS_OWN = ("prefect worker start", "prefect.runner", "_workspace_runtime_bootstrap.py hook")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True)
class Site:
    """What a test looks at from outside; all of it is of one training run."""

    url: str
    folder: Path
    mark: str  # borne by whatever the worker started
    run_id: str

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run_id)

    @property
    def store(self) -> Store:
        return open_store(StoreConfig(url=str(self.folder / "runs")))

    def versions(self) -> list[int]:
        newest = [latest_version(self.store, self.layout.model(model_id)) for model_id in MODELS]
        return [-1 if version is None else version for version in newest]

    def processes(self) -> list[str]:
        """Command lines of all that works for a flow run; not of Prefect's worker, its supervisors, and the
        process each of them starts when a cancelled flow run's is gone, to look for hooks in the flow."""
        found = []
        for process in marked(self.mark, self.folder / "home"):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if not any(word in command for word in PREFECTS_OWN):
                    found.append(command[:160])
        return found

    def ask(self, path: str, body: Any) -> Any:
        return ask("POST", f"{self.url}/api/{path}", body)

    def flow_runs(self, flow: str) -> list[dict[str, Any]]:
        return self.ask("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})

    def deployment(self, flow: str) -> dict[str, Any]:
        """The deployment of the config under this flow."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "deployments": {"name": {"any_": ["quickstart"]}}}
        (deployment,) = self.ask("deployments/filter", wanted)
        return deployment

    def unfinished(self) -> list[str]:
        """Flow runs of the training run that have not ended."""
        wanted = {"flow_runs": {"tags": {"all_": [f"run:{self.run_id}"]}}}
        runs = self.ask("flow_runs/filter", wanted)
        return [f"{run['name']}: {run['state_name']}" for run in runs if run["state_type"] not in FINAL]

    def schedules(self) -> list[bool]:
        """Is each schedule of the config's evaluation active?"""
        return [schedule["active"] for schedule in self.deployment("evaluate")["schedules"]]


def until(reached: Callable[[], object], what: str, *, limit_s: float) -> float:
    """Seconds until it was reached."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def deployed_site(
    folder: Path, run_id: str, *, models: dict[str, dict[str, Any]] | None = None, **sections: dict[str, Any]
) -> Iterator[Site]:
    """The quickstart in small steps; `models` are merged into their sections, `sections` into the run."""
    port = free_port()
    url, mark = f"http://127.0.0.1:{port}", folder.name
    env = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "REPERTORY_HOME": str(folder / "home"),
        "REPERTORY_ADMIN_KEY": ADMIN_KEY,
        "OMP_NUM_THREADS": "1",
    }
    config = short_config(folder)
    raw = yaml.safe_load(config.read_text())
    for section in raw["multi_model"]["models"]:
        _merge(section, (models or {}).get(section["model_id"], {}))
    held_out = str(QUICKSTART / "tasks/held_out.jsonl")
    _merge(raw, {"workflow": {"held_out_tasks": held_out}})
    _merge(raw, sections)
    config.write_text(yaml.safe_dump(raw))
    prefect = [sys.executable, "-m", "prefect"]
    server = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Process(server, env, folder / "server.log"):
        until_healthy(f"{url}/api/health")
        for command in (
            [*prefect, "work-pool", "create", POOL, "--type", "process"],
            [sys.executable, "-m", "deployments.cli", "deploy", str(config), "--pool", POOL],
        ):
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
        worker = [*prefect, "worker", "start", "--pool", POOL]
        with Process(worker, env | {MARK: mark}, folder / "worker.log"):
            yield Site(url, folder, mark, run_id)


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        into[name] = into[name] | value if isinstance(into.get(name), dict) else value
