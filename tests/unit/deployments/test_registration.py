"""When evaluations begin by themselves, as Prefect is told of it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.deploy import deploy
from deployments.registration import CHECKPOINT_SCHEDULE, SCHEDULE, deployments_of
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError
from model_runtime.processes import free_port

NEWEST = {"versions": [{"model_id": "a", "version": "latest"}]}


def config(**settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "shop",
            "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
            "agent_model_mapping": {"x": "a"},
            "evaluation": settings,
        }
    )


def evaluation(*, scheduled: bool = True, **settings: Any) -> Any:
    made = deployments_of(config(**settings), version="1", scheduled=scheduled)
    return next(d for d in made if d.flow_name == "evaluate")


def test_cron_and_interval_evaluate_the_newest_versions() -> None:
    (by_cron,) = evaluation(cron="*/10 * * * *").schedules
    assert isinstance(by_cron.schedule, CronSchedule)
    (by_interval,) = evaluation(interval_s=600).schedules
    assert isinstance(by_interval.schedule, IntervalSchedule)
    assert by_interval.schedule.interval == timedelta(minutes=10)
    for schedule in (by_cron, by_interval):
        assert (schedule.slug, schedule.parameters) == (SCHEDULE, NEWEST)


def test_checkpoints_are_looked_for_each_minute_and_when_one_is_saved() -> None:
    deployment = evaluation(cron="0 * * * *", every_checkpoints=5)
    looked = {schedule.slug: schedule for schedule in deployment.schedules}
    assert set(looked) == {SCHEDULE, CHECKPOINT_SCHEDULE}
    assert looked[CHECKPOINT_SCHEDULE].schedule.interval == timedelta(minutes=1)
    assert looked[CHECKPOINT_SCHEDULE].parameters == {}, "without versions: what is due the store says"
    (trigger,) = deployment.triggers
    assert trigger.expect == {"checkpoint.saved"}
    assert trigger.match.root["prefect.resource.id"] == ["repertory.model.a"]


def test_nothing_begins_by_itself_unless_it_is_asked_for() -> None:
    assert not evaluation().schedules
    assert not evaluation().triggers
    quiet = evaluation(scheduled=False, cron="* * * * *", every_checkpoints=1)
    assert not quiet.schedules
    assert not quiet.triggers


def test_models_may_have_a_work_pool_of_their_own() -> None:
    config = RunConfig.model_validate(
        {
            "name": "shop",
            "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
            "agent_model_mapping": {"x": "a"},
        }
    )
    made = deployments_of(
        config,
        version="1",
        scheduled=False,
        models_pool="gpus",
        work_pool_name="machines",
        work_queue_name="high",
    )
    of_models = {d.work_pool_name for d in made if d.flow_name == "model-runtime"}
    others = {(d.work_pool_name, d.work_queue_name) for d in made if d.flow_name != "model-runtime"}
    assert of_models == {"gpus"}
    assert others == {("machines", "high")}


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    wanted = deployments_of(config(), version="1", scheduled=False, work_pool_name="machines")
    url = f"http://127.0.0.1:{free_port()}/api"
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(ConfigError, match=f"PREFECT_API_URL: no Prefect server answers at {url}; start it"),
    ):
        asyncio.run(deploy(config(), wanted))
