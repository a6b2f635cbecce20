"""Real servers for the integration tests, started once a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from model_runtime.config import ModelConfig, StoreConfig
from model_runtime.errors import ProcessError
from model_runtime.layout import RunLayout
from model_runtime.llm_client import LLMServerClient
from model_runtime.rollout_server import RolloutRuntime
from model_runtime.store import open_store
from model_runtime.tokenizer_bundle import publish_tokenizer
from model_runtime.vllm_environment import find_vllm
from tests.gateway_harness import RUN_ID, live_gateway
from tests.tiny_models import make_adapter, make_model

if TYPE_CHECKING:
    from tests.clerk import Shop  # brings torch, which most of these tests do without

ROLLOUT = {"kv_cache_bytes": 64 * 2**20, "max_num_seqs": 16, "max_live_versions": 3}


@dataclass(frozen=True, slots=True)
class VLLMServer:
    """A running server and what it serves."""

    url: str
    api_key: str
    base_name: str
    base: Path  # the model's folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 model."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> list[Path]:
    """Folders of four adapters for `tiny_base` that differ much from one another."""
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / f"v{seed}", base=tiny_base, seed=seed) for seed in range(4)]


@pytest.fixture(scope="session")
def vllm_environment() -> None:
    """Skips where vLLM's environment is not installed."""
    try:
        find_vllm()
    except ProcessError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def vllm_server(
    vllm_environment: None, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """One real vLLM server of `tiny_base`. Tests share it, so each names its adapters for itself."""
    model = ModelConfig.model_validate(
        {"model_id": "tiny", "model_path": str(tiny_base), "lora": {"rank": 8}, "rollout": ROLLOUT}
    )
    servers = RolloutRuntime(model, logs=tmp_path_factory.mktemp("vllm-logs"))
    (replica,) = servers.replicas

    async def start() -> None:
        await servers.start()
        await replica.disconnect()  # its connections belong to this loop

    asyncio.run(start())
    try:
        yield VLLMServer(replica.url, replica.api_key, servers.base_name, tiny_base)
    finally:
        asyncio.run(servers.stop())


@pytest.fixture
async def vllm_client(vllm_server: VLLMServer) -> AsyncIterator[LLMServerClient]:
    async with LLMServerClient(vllm_server.url, vllm_server.api_key) as client:
        yield client


@pytest.fixture(scope="session")
def live_shop(vllm_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A gateway before a real vLLM server of the model that calls tools."""
    from tests.clerk import Shop, shop_config, shop_model

    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store"))))
    uri = publish_tokenizer(store, RunLayout(RUN_ID).model("shop"), shop_model())
    servers = RolloutRuntime(shop_model(), logs=tmp_path_factory.mktemp("vllm-logs"))
    (replica,) = servers.replicas

    async def start() -> None:
        await servers.start()
        await replica.disconnect()

    asyncio.run(start())
    try:
        with live_gateway(store, config=shop_config()) as harness:
            served = {"replica_id": "vllm", "url": replica.url, "api_key": replica.api_key}
            harness.defaults["shop"] = {"replicas": [served], "tokenizer_uri": uri}
            harness.renew("shop")
            harness.wait_for_tokenizer("shop", uri)
            yield Shop(harness)
    finally:
        asyncio.run(servers.stop())


@pytest.fixture
def shop(live_shop: Shop) -> Shop:
    """The same, with a group of its own."""
    harness = live_shop.harness
    harness.renew("shop")
    harness.group_id = f"g{next(harness._seq)}"
    harness.open_group()
    return live_shop
