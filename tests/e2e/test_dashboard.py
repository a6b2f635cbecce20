"""A run from Prefect's dashboard alone: forms and buttons in a real browser, a worker, real vLLM.

REPERTORY_PICTURES=docs/ui keeps what was seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from model_runtime.adapters import latest_version
from model_runtime.config import StoreConfig
from model_runtime.evaluation import read_evaluations
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.store import open_store
from model_runtime.summary import read_summary
from tests.e2e.dashboard import Dashboard, open_dashboard
from tests.integration.test_deploy import ADMIN_KEY, POOL, Process, until_healthy
from tests.integration.test_prefect_lifecycle import QUICKSTART, short_config
from tests.marked_processes import MARK, marked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN_ID = "from-the-dashboard"
LAYOUT = RunLayout(RUN_ID)
MODELS = ("planner_model", "solver_model")
CHILDREN_LIMIT_S = 10.0


@dataclass(frozen=True)
class Site:
    """A Prefect server with a config deployed and a worker."""

    url: str
    folder: Path
    mark: str  # borne by whatever the worker started

    def versions(self) -> list[int]:
        store = open_store(StoreConfig(url=str(self.folder / "runs")))
        newest = [latest_version(store, LAYOUT.model(model_id)) for model_id in MODELS]
        return [-1 if version is None else version for version in newest]

    def processes(self) -> list[str]:
        """Command lines of all that works for a flow run; not of Prefect's worker and its supervisors."""
        found = []
        for process in marked(self.mark, self.folder / "home"):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "prefect worker start" not in command and "prefect.runner" not in command:
                    found.append(command[:160])
        return found

    def ask(self, path: str, body: Any) -> Any:
        answer = httpx.post(f"{self.url}/api/{path}", json=body, timeout=15, trust_env=False)
        return answer.raise_for_status().json()

    def unfinished(self) -> list[str]:
        """Flow runs of the training run that have not ended."""
        wanted = {"flow_runs": {"tags": {"all_": [f"run:{RUN_ID}"]}}}
        final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        runs = self.ask("flow_runs/filter", wanted)
        return [f"{run['name']}: {run['state_name']}" for run in runs if run["state_type"] not in final]

    def schedules(self) -> list[bool]:
        """Is each schedule of the config's evaluation active?"""
        wanted = {"flows": {"name": {"any_": ["evaluate"]}}}
        (deployment,) = self.ask("deployments/filter", wanted)
        return [schedule["active"] for schedule in deployment["schedules"]]


def until(reached: Callable[[], object], what: str, *, limit_s: float) -> float:
    """Seconds until it was reached."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    port = free_port()
    url, mark = f"http://127.0.0.1:{port}", tmp_path.name
    env = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "REPERTORY_HOME": str(tmp_path / "home"),
        "REPERTORY_ADMIN_KEY": ADMIN_KEY,
        "OMP_NUM_THREADS": "1",
    }
    config = short_config(tmp_path, evaluation={"interval_s": 3600})
    raw = yaml.safe_load(config.read_text())
    raw["workflow"]["held_out_tasks"] = str(QUICKSTART / "tasks/held_out.jsonl")
    config.write_text(yaml.safe_dump(raw))
    prefect = [sys.executable, "-m", "prefect"]
    server = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Process(server, env, tmp_path / "server.log"):
        until_healthy(f"{url}/api/health")
        for command in (
            [*prefect, "work-pool", "create", POOL, "--type", "process"],
            [sys.executable, "-m", "deployments.cli", "deploy", str(config), "--pool", POOL],
        ):
            subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
        worker = [*prefect, "worker", "start", "--pool", POOL]
        with Process(worker, env | {MARK: mark}, tmp_path / "worker.log"):
            yield Site(url, tmp_path, mark)


@pytest.mark.timeout(900)
def test_a_run_is_started_watched_cancelled_resumed_scheduled_and_evaluated_by_hand(site: Site) -> None:
    with open_dashboard(site.url) as dashboard:
        start_with_two_changed_fields(site, dashboard)
        cancel(site, dashboard)
        resume(site, dashboard)
        pause_and_resume_the_schedule(site, dashboard)
        evaluate_version_one(site, dashboard)


def start_with_two_changed_fields(site: Site, dashboard: Dashboard) -> None:
    """And watch it: the run's page, from there the model's, whose tasks are its versions."""
    dashboard.custom_run(
        "multi-model-training", "quickstart", {"run_id": RUN_ID, "seed": 3, "max_steps": 200}
    )
    dashboard.open_run(RUN_ID, limit_s=90)
    dashboard.until_state("Running", limit_s=90)
    until(lambda: min(site.versions()) >= 1, "a version of each model", limit_s=180)
    dashboard.picture("run")
    dashboard.open_subflow(f"{RUN_ID} · planner_model")
    dashboard.until_task("publish v1", limit_s=60)
    dashboard.picture("model-run")


def cancel(site: Site, dashboard: Dashboard) -> None:
    """The children stop within ten seconds, by their states and by their processes."""
    dashboard.open_run(RUN_ID)
    dashboard.menu("Cancel")
    dashboard.picture("cancel")
    dashboard.page.get_by_role("button", name="Cancel Flow Run").click()

    def children() -> list[str]:
        return [run for run in site.unfinished() if not run.startswith(f"{RUN_ID}: ")]

    states_s = until(lambda: not children(), "the children's states", limit_s=60)
    work_s = states_s + until(lambda: not site.processes(), "the processes' end", limit_s=60)
    print(f"cancelled: children final after {states_s:.1f} s, no process after {work_s:.1f} s")
    assert states_s <= CHILDREN_LIMIT_S
    dashboard.until_state("Cancelled", limit_s=30)
    assert site.unfinished() == []


def resume(site: Site, dashboard: Dashboard) -> None:
    before = min(site.versions())
    fields = {"run_id": RUN_ID, "seed": 3, "max_steps": max(site.versions()) + 3}
    dashboard.custom_run("multi-model-training", "quickstart", fields)
    until(lambda: len(site.unfinished()) > 1, "the children's start", limit_s=120)
    dashboard.open_run(RUN_ID)
    dashboard.until_state("Completed", limit_s=300)
    summary = read_summary(open_store(StoreConfig(url=str(site.folder / "runs"))), LAYOUT)
    assert summary is not None
    assert [m.latest_version for m in summary.models] == [fields["max_steps"]] * 2
    assert before >= 1
    assert all(m.balanced for m in summary.models)
    dashboard.picture("run-completed")


def pause_and_resume_the_schedule(site: Site, dashboard: Dashboard) -> None:
    dashboard.open_deployment("evaluate", "quickstart")
    switch = dashboard.page.get_by_role("switch", name=re.compile("^toggle Every"))
    assert site.schedules() == [True]
    switch.click()
    until(lambda: site.schedules() == [False], "the schedule's pause", limit_s=20)
    dashboard.picture("schedule-paused")
    switch.click()
    until(lambda: site.schedules() == [True], "the schedule's return", limit_s=20)


def evaluate_version_one(site: Site, dashboard: Dashboard) -> None:
    """Of one model; the other's is the latest, as its form says."""
    page = dashboard.page
    dashboard.open_form("evaluate", "quickstart")
    page.get_by_label("run_id (Optional)", exact=True).fill(RUN_ID)
    page.get_by_role("tab", name="number").first.click()
    page.get_by_role("tabpanel", name="number").first.get_by_role("spinbutton").fill("1")
    dashboard.picture("evaluation-of-a-version")
    dashboard.submit()
    dashboard.open_run(f"evaluation · {RUN_ID}", limit_s=60)
    dashboard.until_state("Completed", limit_s=240)
    evaluations = read_evaluations(open_store(StoreConfig(url=str(site.folder / "runs"))), LAYOUT)
    latest = max(site.versions())
    assert [e.plan.versions for e in evaluations] == [{"planner_model": 1, "solver_model": latest}]
    page.get_by_role("tab", name="Artifacts").click()
    dashboard.picture("evaluation-run")
