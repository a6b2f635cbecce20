"""Reading a configuration: YAML files, mappings, store URLs. Every mistake is told at once, each with the
path of its field, its value and what is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from model_runtime.config import AgentMapping, RunConfig, Slug, StoreConfig, mapping_mistakes
from model_runtime.config_hints import hint
from model_runtime.errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is a mistake and not the last one's win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # As written: once merge keys are resolved, an overridden key stands twice by right.
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given more than once", key_node.start_mark
                )
            seen.add(key_node.value)
        return node


def load_config(path: str | Path) -> RunConfig:
    """Read and validate a YAML file; relative paths in it are taken from its folder.

    Raises ConfigError naming the file, the path of each wrong field, its value and what is allowed.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(_not_yaml(path, error)) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping with multi_model and agent_model_mapping")
    return _absolute(parse_config(raw, source=str(path)), path.resolve().parent)


def _not_yaml(path: Path, error: yaml.YAMLError) -> str:
    """In one line, by the place of the mistake."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{path}: not valid YAML: {error}"
    problem = getattr(error, "problem", None) or str(error)
    if "'\\t'" in problem:
        problem += "; indent with spaces, not tabs"
    return f"{path}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {problem}"


def parse_config(raw: dict[str, Any], *, source: str = "config") -> RunConfig:
    """Validate a mapping. Raises ConfigError with one line per mistake."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        mistakes = [*describe_mistakes(error, of=RunConfig), *_mapping_mistakes_beside(error, raw)]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(mistakes)) from None


class _NamedModel(BaseModel):
    model_id: Slug


class _NamedModels(BaseModel):
    models: list[_NamedModel]


class _Names(BaseModel):
    """The part of a config that says which models there are and who uses them; the rest may be wrong."""

    multi_model: _NamedModels
    agent_model_mapping: AgentMapping


def _mapping_mistakes_beside(error: ValidationError, raw: dict[str, Any]) -> list[str]:
    """What models and agents say wrongly about one another while other fields are wrong too. Pydantic looks
    at it only when all else is right."""
    if any(not detail["loc"] for detail in error.errors(include_url=False)):
        return []  # then it did
    try:
        names = _Names.model_validate(raw)
    except ValidationError:
        return []  # told already, by the fields themselves
    routes = [(route.agent_id, route.model_id) for route in names.agent_model_mapping]
    return mapping_mistakes([model.model_id for model in names.multi_model.models], routes)


def parse_store(url: str) -> StoreConfig:
    """Settings of a store known by its URL alone. Raises ConfigError."""
    try:
        return StoreConfig(url=url if "://" in url else str(Path(url).expanduser().resolve()))
    except ValidationError as error:
        raise ConfigError("store: " + "; ".join(describe_mistakes(error))) from None


def describe_mistakes(
    error: ValidationError, path: str = "", *, of: type[BaseModel] | None = None
) -> list[str]:
    """One line a mistake: the path of the field, below `path`, what is allowed, and what was given. `of`, the
    section that was checked, knows what an unknown setting was meant to be."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        meant = hint(of, detail["loc"]) if of is not None and detail["type"] == "extra_forbidden" else ""
        lines += _describe({**detail, "loc": (*filter(None, [path]), *detail["loc"])}, meant)
    return lines


def _describe(detail: Any, meant: str) -> list[str]:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"]).lstrip(".")
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = f"unknown setting{meant}"
    elif detail["type"] == "model_type":
        message = "must be a section, a mapping of settings"
    value = detail.get("input")
    shown = (
        ""
        if isinstance(value, dict | list | BaseModel) or detail["type"] == "missing"
        else f" (got {value!r})"
    )
    return [f"{path}: {line}{shown}" if path else f"{line}{shown}" for line in message.split("\n")]


def _absolute(config: RunConfig, folder: Path) -> RunConfig:
    def anchor(value: str | None) -> str | None:
        return None if value is None else str((folder / Path(value).expanduser()).resolve())

    models = [
        m.model_copy(
            update={
                "model_path": anchor(m.model_path),
                "adapter_path": anchor(m.adapter_path),
                "sft": m.sft and m.sft.model_copy(update={"data": anchor(m.sft.data)}),
            }
        )
        for m in config.models
    ]
    workflow = config.workflow.model_copy(
        update={
            "tasks": anchor(config.workflow.tasks),
            "held_out_tasks": anchor(config.workflow.held_out_tasks),
            "python_path": anchor(config.workflow.python_path or "."),
        }
    )
    gateway = config.gateway.model_copy(
        update={field: anchor(getattr(config.gateway, field)) for field in ("tls_certificate", "tls_key")}
    )
    store = config.store
    if "://" not in store.url:
        store = store.model_copy(update={"url": anchor(store.url)})
    return config.model_copy(
        update={
            "multi_model": config.multi_model.model_copy(update={"models": models}),
            "workflow": workflow,
            "gateway": gateway,
            "store": store,
            "tracking": config.tracking.model_copy(update={"folder": anchor(config.tracking.folder)}),
        }
    )
