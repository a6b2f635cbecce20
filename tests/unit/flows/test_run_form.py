"""The forms of the dashboard: what they show, what the server refuses by them, what a run makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.schema_tools.validation import ValidationError, validate

from deployments.registration import deployments_of
from flows.evaluate import evaluate
from flows.model_runtime import model_runtime
from flows.multi_model_training import multi_model_training
from flows.rollout import rollout
from flows.run_form import prefilled, settled_config
from model_runtime.config import RunConfig
from model_runtime.config_file import load_config
from model_runtime.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/config.yaml"
FLOWS: list[Flow[..., Any]] = [multi_model_training, evaluate, model_runtime, rollout]


def schema(flow: Flow[..., Any]) -> dict[str, Any]:
    return flow.parameters.model_dump()


def fields(flow: Flow[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = schema(flow)
    yield from whole["properties"].items()
    for section, definition in whole["definitions"].items():
        for name, field in definition.get("properties", {}).items():
            yield f"{section}.{name}", field


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_field_of_a_form_is_described(flow: Flow[..., Any]) -> None:
    found = dict(fields(flow))
    assert len(found) > 80, "the whole config is in the schema"
    assert [name for name, field in found.items() if not field.get("description")] == []


def test_the_training_form_is_flat_fields_then_lists_then_one_box() -> None:
    properties = schema(multi_model_training)["properties"]
    kinds = [(name, p["type"]) for name, p in sorted(properties.items(), key=lambda i: i[1]["position"])]
    assert kinds == [
        ("run_id", "string"),
        ("seed", "integer"),
        ("max_steps", "integer"),
        ("max_duration_s", "number"),
        ("config_from", "string"),
        ("models", "array"),
        ("agents", "array"),
        ("config", "object"),
    ]
    assert "properties" not in properties["config"], "drawn as one box of JSON"
    assert len(schema(multi_model_training)["definitions"]["ModelChoice"]["properties"]) == 5


def test_no_list_of_a_form_holds_a_map_which_the_dashboard_hides() -> None:
    definitions = schema(multi_model_training)["definitions"]
    for section in ("ModelChoice", "AgentRoute"):
        assert all(field.get("type") != "object" for field in definitions[section]["properties"].values())


def rest(**model: Any) -> dict[str, Any]:
    return {
        "multi_model": {"models": [{"model_id": "a", "model_path": "/a", **model}]},
        "agent_model_mapping": [{"agent_id": "x", "model_id": "a"}],
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": -2}, "'seed'. Failure reason: -2 is less than the minimum of -1"),
        ({"max_steps": -1}, "'max_steps'. Failure reason: -1 is less than the minimum of 0"),
        ({"max_steps": "many"}, "'max_steps'. Failure reason: 'many' is not of type 'integer'"),
        ({"max_duration_s": -1}, "'max_duration_s'. Failure reason: -1 is less than the minimum of 0"),
        ({"run_id": "My Run"}, "'run_id'. Failure reason: 'My Run' does not match"),
        (
            {"models": [{"model_id": "a", "model_path": "/a", "kind": "frosen"}]},
            "'models[0].kind'. Failure reason: 'frosen' is not one of ['trainable', 'frozen']",
        ),
        (
            {"models": [{"model_id": "A B", "model_path": "/a"}]},
            "'models[0].model_id'. Failure reason: 'A B'",
        ),
        ({"agents": [{"agent_id": "x"}]}, "'agents[0]'. Failure reason: 'model_id' is a required property"),
        (
            {"config": rest(trainer={"learning_rate": -1})},
            "'config.multi_model.models[0].trainer.learning_rate'. Failure reason: -1 is less than",
        ),
        ({"config": rest(bacth_size=8)}, "('bacth_size' was unexpected)"),
    ],
)
def test_the_server_refuses_a_bad_value_before_a_process_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validate(given, schema(multi_model_training), raise_on_error=True)
    assert message in str(refused.value)


def test_what_deploy_fills_in_passes_the_server_and_is_the_config_again() -> None:
    config = load_config(QUICKSTART)
    common: dict[str, Any] = {"version": "1", "scheduled": False}
    training = deployments_of(config, **common)[-1]
    shown = training._parameter_openapi_schema.model_dump()
    form = {name: p["default"] for name, p in shown["properties"].items()}
    assert form["max_steps"] == 24
    assert form["models"][1]["model_id"] == "solver_model"
    submitted = form | training.parameters
    validate(submitted, shown, raise_on_error=True)


@pytest.mark.parametrize("flow", [multi_model_training, evaluate], ids=lambda flow: flow.name)
def test_the_server_takes_a_form_that_nobody_filled_in(flow: Flow[..., Any]) -> None:
    """The dashboard submits every default, so none may be of another type than its field."""
    defaults = {name: field["default"] for name, field in schema(flow)["properties"].items()}
    assert None not in defaults.values()
    validate(defaults, schema(flow), raise_on_error=True)


async def test_a_form_submitted_as_it_was_shown_gives_the_config_itself() -> None:
    config = load_config(QUICKSTART)
    rest_of_it = config.model_dump(mode="json", exclude_defaults=True)
    assert await settled_config(rest_of_it, **prefilled(config)) == config
    assert await settled_config(rest_of_it) == config
    assert await settled_config(config) == config


async def test_fields_go_before_the_config_and_leave_the_rest_of_it() -> None:
    shown = load_config(QUICKSTART)
    section = shown.multi_model.model_copy(update={"on_model_failure": "stop"})
    config = shown.model_copy(update={"multi_model": section})
    changed = await settled_config(
        config,
        seed=7,
        max_steps=3,
        max_duration_s=60.0,
        models=[
            {"model_id": "planner_model", "model_path": "/other", "learning_rate": 0.1},
            {"model_id": "critic", "model_path": "/critic", "kind": "frozen"},
        ],
        agents={"planner_agent": "planner_model", "answer_agent": "critic"},
    )
    planner, critic = changed.models
    assert (changed.seed, changed.max_duration_s) == (7, 60.0)
    assert (planner.model_path, planner.trainer.learning_rate, planner.max_steps) == ("/other", 0.1, 3)
    assert planner.batch_size == config.models[0].batch_size == 8, "not given, so not changed"
    assert planner.trainer.max_grad_norm == 0.2
    assert (critic.kind, critic.max_steps) == ("frozen", None)
    assert changed.agent_to_model == {"planner_agent": "planner_model", "answer_agent": "critic"}
    assert changed.workflow == config.workflow
    assert changed.multi_model.on_model_failure == "stop", "the form has no field of it"


async def test_models_and_agents_are_enough() -> None:
    config = await settled_config(
        models=[{"model_id": "a", "model_path": "/a"}], agents=[{"agent_id": "x", "model_id": "a"}]
    )
    expected = {"multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]}}
    assert config == RunConfig.model_validate(expected | {"agent_model_mapping": {"x": "a"}})


async def test_a_config_comes_from_a_file() -> None:
    assert await settled_config({}, config_from=str(QUICKSTART), seed=5) == load_config(
        QUICKSTART
    ).model_copy(update={"seed": 5})


async def test_mistakes_between_fields_are_one_message_before_anything_starts() -> None:
    config = load_config(QUICKSTART).model_dump(mode="json")
    form: Any = {"config": config, "agents": [{"agent_id": "planner_agent", "model_id": "planer"}]}
    with pytest.raises(ConfigError) as refused:
        await multi_model_training.fn(**form)
    assert str(refused.value) == (
        "the run's settings:\n  agent_model_mapping.planner_agent: unknown model 'planer'; "
        "models are ['planner_model', 'solver_model']"
    )
    with pytest.raises(ConfigError, match=r"models\[0\]\.model_path: Field required"):
        await settled_config(config, models=[{"model_id": "a"}])
    form = {"config": config, "versions": [{"model_id": "a", "version": "newest"}]}
    with pytest.raises(ConfigError, match=r"versions\[0\]\.version"):
        await evaluate.fn(**form)


async def test_nothing_filled_in_is_told_by_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="multi_model: Field required"):
        await settled_config()
