"""What a person fills in to start a run: the few fields that change from run to run, then the whole config.

The schema of these parameters is the form of Prefect's dashboard, and what its server checks before a process
starts. What fields say about one another is checked by `settled_config`, the first thing a run does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from model_runtime.config import ModelConfig, RunConfig, Slug
from model_runtime.config_file import describe_mistakes, load_config, parse_config
from model_runtime.config_section import Section
from model_runtime.errors import ConfigError, PrefectError
from model_runtime.trainer_config import TrainerConfig
from tasks.credentials import load_credentials

TRAINING_FLOW = "multi-model-training"
CALL_LIMIT_S = 30.0

RunId = Annotated[str, StringConstraints(pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?$")]

# The dashboard submits an empty field as null and draws "a number or null" as a pair of tabs, so each has a
# number that stands for "as the config says".
Seed = Annotated[int, Field(ge=-1)]
StepLimit = Annotated[int, Field(ge=0)]
TimeLimit = Annotated[float, Field(ge=0)]


class _AsJson:
    """Drawn as one box of JSON instead of hundreds of fields, but checked by the server like them.

    The dashboard makes a box of an object without `properties`; it does not look into if/then.
    """

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        whole, _nothing = handler(core_schema)["anyOf"]
        return {"type": "object", "if": {"minProperties": 1}, "then": whole}


ConfigBox = Annotated[RunConfig | dict[str, Any], _AsJson()]
"""The type of a flow's `config` in its form. Flows get it as Prefect holds it, a mapping."""


class ModelChoice(Section):
    """One policy, by what usually changes. The rest is said by the model of this name in the config, if there
    is one, else by the defaults."""

    model_id: Slug
    """Name of the policy."""
    model_path: str
    """Folder of the base model in Hugging Face's format."""
    kind: Annotated[str, WithJsonSchema({"enum": ["trainable", "frozen"], "type": "string"})] = "trainable"
    """frozen: served, never trained."""
    batch_size: int = Field(default=ModelConfig.model_fields["batch_size"].default, ge=1)
    """Usable groups per batch."""
    learning_rate: float = Field(default=TrainerConfig.model_fields["learning_rate"].default, ge=0)
    """Peak learning rate of its trainer."""

    def over(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """The section of the config: what was given here over what it said `before`."""
        given = self.model_dump(exclude_unset=True)
        section = dict(before or {})
        if "learning_rate" in given:
            trainer = dict(section.get("trainer") or {})
            section["trainer"] = trainer | {"learning_rate": given.pop("learning_rate")}
        return section | given

    @classmethod
    def of(cls, model: ModelConfig) -> ModelChoice:
        """As the form shows a model of a config."""
        return cls(
            model_id=model.model_id,
            model_path=model.model_path,
            kind=model.kind,
            batch_size=model.batch_size,
            learning_rate=model.trainer.learning_rate,
        )


def prefilled(config: RunConfig) -> dict[str, Any]:
    """What the fields above `config` show in the form of this config's deployment."""
    limits = {model.max_steps for model in config.trainable_models}
    shown: dict[str, Any] = {
        "models": [ModelChoice.of(model).model_dump(mode="json") for model in config.models],
        "agents": [route.model_dump(mode="json") for route in config.agent_model_mapping],
        "seed": config.seed,
        "max_steps": limits.pop() if len(limits) == 1 else None,
        "max_duration_s": config.max_duration_s,
    }
    return {name: value for name, value in shown.items() if value is not None}


async def settled_config(
    config: RunConfig | Mapping[str, Any] | None = None,
    *,
    config_from: str = "",
    models: Sequence[Any] = (),
    agents: Sequence[Any] | Mapping[str, str] = (),
    seed: int = -1,
    max_steps: int = 0,
    max_duration_s: float = 0,
) -> RunConfig:
    """The config of a run: `config`, or what `config_from` names, with each other field that is given put in
    its place; and the keys of its store in the environment. Raises ConfigError with one line a mistake."""
    raw = await _base(config, config_from)
    if models:
        before = {m.get("model_id"): m for m in _models_of(raw)}
        chosen = checked("models", list[ModelChoice], models)
        _put_models(raw, [choice.over(before.get(choice.model_id)) for choice in chosen])
    if agents:
        raw["agent_model_mapping"] = agents if isinstance(agents, Mapping) else list(agents)
    if seed >= 0:
        raw["seed"] = seed
    if max_duration_s:
        raw["max_duration_s"] = max_duration_s
    if max_steps:
        _put_models(
            raw,
            [m if m.get("kind") == "frozen" else {**m, "max_steps": max_steps} for m in _models_of(raw)],
        )
    settled = parse_config(raw, source="the run's settings")
    await load_credentials(settled.store)
    return settled


def _models_of(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    section = raw.get("multi_model")
    models = section.get("models") if isinstance(section, Mapping) else None
    return [dict(m) if isinstance(m, Mapping) else {} for m in (models if isinstance(models, list) else [])]


def _put_models(raw: dict[str, Any], models: Sequence[Any]) -> None:
    """In place of those there are, beside what else the section says."""
    section = raw.get("multi_model")
    raw["multi_model"] = {**(section if isinstance(section, Mapping) else {}), "models": list(models)}


def checked(field: str, wanted: Any, values: Sequence[Any]) -> Any:
    """The values of one field as what they are wanted to be. Raises ConfigError with one line a mistake."""
    plain = [v.model_dump(exclude_unset=True) if isinstance(v, BaseModel) else v for v in values]
    try:
        return TypeAdapter(wanted).validate_python(plain)
    except ValidationError as error:
        lines = describe_mistakes(error, field)
        raise ConfigError("the run's settings:\n  " + "\n  ".join(lines)) from None


async def _base(config: RunConfig | Mapping[str, Any] | None, config_from: str) -> dict[str, Any]:
    if config_from:
        return (await _named_config(config_from)).model_dump(mode="json", exclude_unset=True)
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", exclude_unset=True)
    return dict(config or {})


async def _named_config(name: str) -> RunConfig:
    """A file of this machine, or the config of a deployment of this server."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return await asyncio.to_thread(load_config, name)
    try:
        async with get_client() as client, asyncio.timeout(CALL_LIMIT_S):
            deployment = await client.read_deployment_by_name(f"{TRAINING_FLOW}/{name}")
    except ObjectNotFound:
        raise ConfigError(
            f"config_from: no config {name!r} is registered (`repertory deploy` does); a file's name ends in "
            ".yaml"
        ) from None
    except (httpx.HTTPError, TimeoutError) as error:
        raise PrefectError(f"config_from: {name!r} could not be read: {type(error).__name__}") from error
    return parse_config(deployment.parameters.get("config") or {}, source=f"config {name!r}")
