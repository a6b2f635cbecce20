"""Addresses that are known only where a process runs, as in a pod: `auto` in a config."""

from __future__ import annotations

import os
import socket

from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError

AUTO = "auto"
HOST_ENV = "REPERTORY_HOST"
"""This machine's or pod's address, when its name does not say it."""


def own_address() -> str:
    """The address others reach this machine at. Raises ConfigError when nothing says it."""
    given = os.environ.get(HOST_ENV)
    if given:
        return given
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        raise ConfigError(
            f"a host is `auto`, but the name {name!r} has no address: set {HOST_ENV} to this machine's"
        ) from None


def place_gateway(config: RunConfig) -> RunConfig:
    """The config with the gateway's `auto` hosts being this machine's."""
    hosts = {
        field: own_address() for field in ("host", "admin_host") if getattr(config.gateway, field) == AUTO
    }
    return config.model_copy(update={"gateway": config.gateway.model_copy(update=hosts)}) if hosts else config


def place_servers(config: RunConfig, model_id: str) -> RunConfig:
    """The config with the `auto` host of this model's rollout servers being this machine's."""
    if config.model(model_id).rollout.host != AUTO:
        return config
    here = {"host": own_address()}
    models = [
        m.model_copy(update={"rollout": m.rollout.model_copy(update=here)}) if m.model_id == model_id else m
        for m in config.models
    ]
    return config.model_copy(update={"multi_model": config.multi_model.model_copy(update={"models": models})})
