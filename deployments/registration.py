"""The deployments of one config, the same for a runner of our own (`repertory up`) and for a work pool
(`repertory deploy`)."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.types.entrypoint import EntrypointType

from flows.evaluate import evaluate
from flows.model_runtime import model_runtime
from flows.multi_model_training import multi_model_training
from flows.rollout import rollout
from flows.run_form import prefilled
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError

DEFAULT = "default"
"""What runs a model or a rollout that has no deployment of its own, as when the UI's form names a new one."""

SCHEDULE = "evaluation"
"""Slug of the schedule that a config's `evaluation.cron` or `interval_s` makes."""
CHECKPOINT_SCHEDULE = "checkpoints"
"""Slug of the schedule that looks for checkpoints to evaluate (`evaluation.every_checkpoints`)."""
LOOK_EVERY = timedelta(minutes=1)


RETIRED = "retired"
"""Tag of what a config registered once and wants no more."""


def config_tag(name: str) -> str:
    """Marks what a config of this name registered."""
    return f"config:{name}"


def deployments_of(
    config: RunConfig,
    *,
    version: str,
    scheduled: bool,
    models_pool: str | None = None,
    **common: Any,
) -> list[RunnerDeployment]:
    """All deployments of a config, the parent last: once it is there, so are those that it starts.

    `scheduled`: evaluations begin by themselves as the config says. `common` goes to each: a work pool, its
    queue, job variables. `models_pool`: the work pool of the models, where they have one of their own.
    """
    # By module: every flow process imports the installed package, whatever folder it runs in.
    common |= {"version": version, "entrypoint_type": EntrypointType.MODULE_PATH}
    ours = config_tag(config.name)
    of_models = common
    if models_pool is not None:
        of_models = common | {"work_pool_name": models_pool, "work_queue_name": None}
    made: list[Any] = [  # to_deployment is typed as if it might be awaited
        model_runtime.to_deployment(m.model_id, tags=[ours, f"model:{m.model_id}"], **of_models)
        for m in config.models
    ]
    made.append(model_runtime.to_deployment(DEFAULT, **of_models))
    made += [rollout.to_deployment(name, **common) for name in dict.fromkeys((config.name, DEFAULT))]
    # The forms of the UI start from this config.
    parameters = {"run_id": "", "config": config.model_dump(mode="json", exclude_defaults=True)}
    newest = [{"model_id": model.model_id, "version": "latest"} for model in config.models]
    evaluation: Any = evaluate.to_deployment(
        config.name,
        parameters=parameters,
        tags=[ours],
        # While one evaluation is at work another would find the same versions: it is cancelled, and what it
        # was to find is found by the next, in the store.
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
        ),
        schedules=_schedules(config, newest) if scheduled else [],
        triggers=_triggers(config) if scheduled else [],
        **common,
    )
    _show(evaluation, {"versions": newest})
    training: Any = multi_model_training.to_deployment(
        config.name, parameters=parameters, tags=[ours], **common
    )
    _show(training, prefilled(config))
    return [*made, evaluation, training]


def _show(deployment: RunnerDeployment, values: dict[str, Any]) -> None:
    """Let the form's fields begin with these values.

    They are defaults of the schema and not parameters of the deployment, so that a run started with a
    `config` alone gets that config. Prefect has no public way to a deployment's own schema.
    """
    schema = deployment._parameter_openapi_schema
    properties = copy.deepcopy(schema.properties)
    for name, value in values.items():
        properties[name]["default"] = value
    deployment._parameter_openapi_schema = schema.model_copy(update={"properties": properties})


def cron_schedule(expression: str) -> CronSchedule:
    """As Prefect reads it. Raises ConfigError for what is no cron expression."""
    try:
        return CronSchedule(cron=expression)
    except ValueError as error:
        raise ConfigError(f"evaluation.cron: {expression!r} is no cron expression: {error}") from None


def _schedules(config: RunConfig, newest: list[dict[str, str]]) -> list[DeploymentScheduleCreate]:
    """Under names by which deploying again replaces them. Raises ConfigError as `cron_schedule` does."""
    wanted, found = config.evaluation, []
    if wanted.cron is not None:
        found.append((SCHEDULE, cron_schedule(wanted.cron), {"versions": newest}))
    if wanted.interval_s is not None:
        every = IntervalSchedule(interval=timedelta(seconds=wanted.interval_s))
        found.append((SCHEDULE, every, {"versions": newest}))
    if wanted.every_checkpoints is not None:  # without versions it looks for checkpoints that are due
        found.append((CHECKPOINT_SCHEDULE, IntervalSchedule(interval=LOOK_EVERY), {}))
    return [
        DeploymentScheduleCreate(schedule=schedule, slug=slug, parameters=parameters)
        for slug, schedule, parameters in found
    ]


def _triggers(config: RunConfig) -> list[Any]:
    """A checkpoint that was saved has the store looked at before the minute is over."""
    if config.evaluation.every_checkpoints is None:
        return []
    models = [f"repertory.model.{model.model_id}" for model in config.trainable_models]
    return [
        DeploymentEventTrigger(
            name=f"{config.name}: a checkpoint was saved",
            expect={"checkpoint.saved"},
            match={"prefect.resource.id": models},
        )
    ]
