"""A run from Prefect's dashboard alone: forms and buttons in a real browser, a worker, real vLLM.

REPERTORY_PICTURES=docs/ui keeps what was seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_runtime.evaluation import read_evaluations
from model_runtime.summary import read_summary
from tests.e2e.dashboard import Dashboard, open_dashboard
from tests.e2e.site import Site, deployed_site, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN_ID = "from-the-dashboard"
CHILDREN_LIMIT_S = 10.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with deployed_site(tmp_path, RUN_ID, evaluation={"interval_s": 3600}) as site:
        yield site


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
    summary = read_summary(site.store, site.layout)
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
    evaluations = read_evaluations(site.store, site.layout)
    latest = max(site.versions())
    assert [e.plan.versions for e in evaluations] == [{"planner_model": 1, "solver_model": latest}]
    page.get_by_role("tab", name="Artifacts").click()
    dashboard.picture("evaluation-run")
