"""Evaluations that begin by themselves while a run trains: by interval, and when a checkpoint is saved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.prefect_api import ask
from deployments.registration import CHECKPOINT_SCHEDULE, SCHEDULE
from model_runtime.config import artifact_slug
from model_runtime.evaluation import EvaluationDocument, read_evaluations
from tests.e2e.site import MODELS, Site, deployed_site, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN_ID = "evaluated-as-it-trains"
SAVE_EVERY, EVERY_CHECKPOINTS = 10, 2
NUM_HELD_OUT = 40
LIMIT_S = 600


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with deployed_site(
        tmp_path,
        RUN_ID,
        models={
            "planner_model": {"max_steps": None, "save_every": SAVE_EVERY},
            "solver_model": {"max_steps": None, "save_every": 10_000},
        },
        evaluation={"interval_s": 60, "every_checkpoints": EVERY_CHECKPOINTS},
        workflow={"epochs": 100, "execution_timeout_s": 600, "group_timeout_s": 900},
    ) as site:
        yield site


@pytest.mark.timeout(1200)
def test_evaluations_begin_by_interval_and_by_checkpoint_while_the_run_trains(site: Site) -> None:
    leave_checkpoints_to_events(site)
    training = start(site)
    until(lambda: min(site.versions()) >= 1, "a version of each model", limit_s=240)
    until(lambda: seen(site), "an evaluation by interval, live, and one by checkpoint", limit_s=LIMIT_S)
    newest = max(site.versions())
    until(lambda: max(site.versions()) > newest, "another version: the run trains on", limit_s=120)
    until(lambda: "evaluate v" in " ".join(story(site)), "the model's own story to tell of one", limit_s=90)
    stop(site, training)

    left = documents(site)
    assert all(d.executions == {"finalized": NUM_HELD_OUT} for found in left.values() for d in found)
    assert all(is_of_nth_checkpoint(d) for d in left["checkpoint"])


def seen(site: Site) -> bool:
    left = documents(site)
    return "checkpoint" in left and any(d.where == "live" for d in left.get("interval", []))


def documents(site: Site) -> dict[str, list[EvaluationDocument]]:
    """What began them → the evaluations in the store that are under both models' artifacts."""
    under_models = shown(site)
    there = read_evaluations(site.store, site.layout)  # written before it is shown, so read after
    return {kind: [document_of(h, there) for h in found] for kind, found in under_models.items()}


def leave_checkpoints_to_events(site: Site) -> None:
    """Switch off the look of each minute, so that nothing but an event tells of a checkpoint."""
    deployment = site.deployment("evaluate")
    by_slug = {schedule["slug"]: schedule for schedule in deployment["schedules"]}
    assert set(by_slug) == {SCHEDULE, CHECKPOINT_SCHEDULE}
    address = f"{site.url}/api/deployments/{deployment['id']}/schedules/{by_slug[CHECKPOINT_SCHEDULE]['id']}"
    ask("PATCH", address, {"active": False})


def start(site: Site) -> str:
    """The training's flow run."""
    training = site.deployment("multi-model-training")["id"]
    wanted = {"parameters": {"run_id": RUN_ID}, "idempotency_key": RUN_ID}
    return site.ask(f"deployments/{training}/create_flow_run", wanted)["id"]


def stop(site: Site, training: str) -> None:
    site.ask(f"flow_runs/{training}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(lambda: not site.unfinished(), "the end of the run", limit_s=120)


def shown(site: Site) -> dict[str, list[str]]:
    """What began an evaluation that has ended → the headlines that it left under both models' artifacts."""
    found: dict[str, list[str]] = {}
    for run in site.flow_runs("evaluate"):
        if run["state_type"] != "COMPLETED":
            continue
        pages = headlines(site, run["id"])
        per_model = [pages.get(f"{artifact_slug(model_id)}-evaluation", []) for model_id in MODELS]
        assert per_model[0] == per_model[1]
        if per_model[0]:
            found.setdefault(kind_of(run), []).extend(per_model[0])
    return found


def kind_of(run: dict[str, Any]) -> str:
    by = run["created_by"]
    if by["type"] == "AUTOMATION":
        assert "a checkpoint was saved" in by["display_value"]
        return "checkpoint"
    assert (by["type"], by["display_value"]) == ("SCHEDULE", SCHEDULE)
    return "interval"


def headlines(site: Site, flow_run_id: str) -> dict[str, list[str]]:
    """Key → descriptions of the artifacts that a flow run left, in their order."""
    wanted = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "sort": "CREATED_DESC"}
    found: dict[str, list[str]] = {}
    for artifact in reversed(site.ask("artifacts/filter", wanted)):
        found.setdefault(artifact["key"] or "", []).append(artifact["description"])
    return found


def story(site: Site) -> list[str]:
    """Evaluations among the tasks of the planner's run; those from the store have runs of their own."""
    runs = site.flow_runs("model-runtime")
    (run,) = [run for run in runs if run["name"].startswith(f"{RUN_ID} · planner_model")]
    tasks = site.ask("task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}, "limit": 200})
    return [task["name"] for task in tasks if task["name"].startswith("evaluate ")]


def document_of(headline: str, there: list[EvaluationDocument]) -> EvaluationDocument:
    """`planner_model v12, solver_model v12: 0.81 (0.74 to 0.88)` → what the store has of these versions."""
    versions = {name: int(number) for name, number in re.findall(r"(\w+) v(\d+)", headline)}
    (found,) = [d for d in there if d.plan.versions == versions]
    return found


def is_of_nth_checkpoint(document: EvaluationDocument) -> bool:
    """A version follows every step here, so a checkpoint's version is its step."""
    version = document.plan.versions["planner_model"]
    return version is not None and version % (SAVE_EVERY * EVERY_CHECKPOINTS) == 0
