"""A live gateway before a fake rollout server, started once per file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from model_runtime.config import StoreConfig
from model_runtime.store import open_store
from tests.gateway_harness import GatewayHarness, live_gateway
from tests.tool_gateway import prepare, tool_config


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    with live_gateway(open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store"))))) as harness:
        yield harness


@pytest.fixture
def harness(shared_gateway: GatewayHarness) -> GatewayHarness:
    """One gateway for all tests of a file; each has a group of its own."""
    shared_gateway.start_afresh()
    return shared_gateway


@pytest.fixture(scope="module")
def tool_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("tools"))))
    with live_gateway(store, config=tool_config()) as harness:
        yield harness


@pytest.fixture
def tools(tool_gateway: GatewayHarness) -> GatewayHarness:
    """One gateway for all tests of a file; its model `plan` speaks with tools."""
    return prepare(tool_gateway)
