"""ParameterSynchronizer with a real vLLM server: the served adapter is the committed one, exactly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_runtime.adapters import read_folder, write_version
from model_runtime.config import ModelConfig
from model_runtime.documents import CanaryProbe
from model_runtime.errors import AdapterLoadError, BackendRejectedError, CanaryMismatchError
from model_runtime.layout import RunLayout
from model_runtime.llm_client import Generation, LLMServerClient
from model_runtime.store import Store
from model_runtime.synchronizer import ParameterSynchronizer, PublishReport
from model_runtime.versions import VersionTracker
from tests.integration.conftest import ROLLOUT, VLLMServer
from tests.tiny_models import reference_logprobs

pytestmark = pytest.mark.integration

PROMPT = [1, 50, 60, 70, 80, 90, 100, 2, 1, 33]
CANARY_PROMPT = [1, 40, 41, 42, 43, 44]
CANARY_TOKENS = [5, 77, 120]


@dataclass
class OneReplica:
    client: LLMServerClient
    replica_id: str = "r0"
    attempt: int = 1
    ready: bool = True

    def request_restart(self, reason: str) -> None:
        raise AssertionError(f"no server should have to be restarted: {reason}")


class SkippingClient(LLMServerClient):
    """Says that it loaded the adapter and did nothing."""

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        return None


class StaleClient(LLMServerClient):
    """Serves the new name with the version before it."""

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        stale = Path(path).with_name(f"v{int(Path(path).name.removeprefix('v')) - 1}")
        await super().load_adapter(name, str(stale), timeout_s=timeout_s)


class Bench:
    """A model of its own name on the shared server."""

    def __init__(
        self, model_id: str, server: VLLMServer, adapters: list[Path], store: Store, folder: Path
    ) -> None:
        self.model_id = model_id
        self.server = server
        self.adapters = adapters
        self.store = store
        self.layout = RunLayout("run").model(model_id)
        self.versions = VersionTracker(model_id)
        self.replica = OneReplica(LLMServerClient(server.url, server.api_key))
        self.rows: list[Any] = []
        model = {"model_id": model_id, "model_path": str(server.base), "lora": {"rank": 8}}
        self.synchronizer = ParameterSynchronizer(
            model=ModelConfig.model_validate(model | {"rollout": ROLLOUT}),
            store=store,
            layout=self.layout,
            folder=folder,
            replicas=[self.replica],
            versions=self.versions,
            record=self.rows.append,
            flip=self.flip,
        )

    async def flip(self, version: int) -> None:
        return None

    async def publish(self, version: int) -> PublishReport:
        before = self.logprobs(version - 1) if version else None
        probe = CanaryProbe(
            prompt_ids=CANARY_PROMPT,
            token_ids=CANARY_TOKENS,
            logprobs=self.logprobs(version),
            previous_logprobs=before,
        )
        files = read_folder(self.adapters[version])
        write_version(self.store, self.layout, files, version=version, step=version, epoch=1, canary=[probe])
        return await self.synchronizer.publish(version)

    def logprobs(self, version: int) -> list[float]:
        base, adapter = self.server.base, self.adapters[version]
        return [reference_logprobs(base, adapter, [*CANARY_PROMPT, t])[-1] for t in CANARY_TOKENS]

    async def sample(self, version: int, max_tokens: int = 48) -> Generation:
        return await self.replica.client.generate(
            model=f"{self.model_id}@v{version}",
            token_ids=PROMPT,
            sampling={"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True},
            request_id=f"{self.model_id}-{time.monotonic_ns()}",
            timeout_s=120,
        )

    def difference(self, version: int, answer: Generation) -> float:
        """Between the answer's logprobs and the version's by transformers + PEFT."""
        ids = PROMPT + answer.token_ids.tolist()
        wanted = reference_logprobs(self.server.base, self.adapters[version], ids)[len(PROMPT) - 1 :]
        return float(np.abs(np.asarray(wanted) - answer.logprobs).max())

    def use(self, client: LLMServerClient) -> None:
        self.replica.client = client


@pytest.fixture
async def bench(
    request: pytest.FixtureRequest,
    vllm_server: VLLMServer,
    tiny_adapters: list[Path],
    local_store: Store,
    tmp_path: Path,
) -> AsyncIterator[Bench]:
    number = abs(hash(request.node.name)) % 10**6
    made = Bench(f"publish-{number}", vllm_server, tiny_adapters, local_store, tmp_path / "adapters")
    async with LLMServerClient(vllm_server.url, vllm_server.api_key) as client:
        made.use(client)
        yield made
        await made.synchronizer.close()
        for name in await client.list_models():
            if name.startswith(made.model_id):
                await client.unload_adapter(name)


async def test_published_versions_serve_the_trainers_weights(bench: Bench) -> None:
    for version in range(3):
        report = await bench.publish(version)
        assert report.canary_max_diff is not None
        assert report.canary_max_diff <= 1e-4
        answer = await bench.sample(version)
        assert bench.difference(version, answer) < 1e-4
        if version:
            assert bench.difference(version - 1, answer) > 0.1  # the check can tell them apart
        await bench.synchronizer.unload_idle({})
    assert bench.versions.live == [2]
    assert [row["version"] for row in bench.rows] == [0, 1, 2]


async def test_a_request_that_spans_the_flip_finishes_with_the_old_weights(bench: Bench) -> None:
    await bench.publish(0)
    spanning = asyncio.create_task(bench.sample(0, max_tokens=1500))
    await asyncio.sleep(0.3)
    await bench.publish(1)
    assert not spanning.done()
    await bench.synchronizer.unload_idle({0: 1})
    fresh = await bench.sample(1)
    assert not spanning.done()
    old = await spanning
    assert len(old.token_ids) == 1500
    assert bench.difference(0, old) < 1e-4
    assert bench.difference(1, fresh) < 1e-4
    await bench.synchronizer.unload_idle({})
    with pytest.raises(BackendRejectedError):
        await bench.sample(0)


async def test_unloading_a_version_in_flight_would_still_finish_it_exactly(bench: Bench) -> None:
    """A count that misses a request costs nothing as long as its adapter stays in the server's memory."""
    await bench.publish(0)
    await bench.publish(1)
    spanning = asyncio.create_task(bench.sample(0, max_tokens=600))
    await asyncio.sleep(0.2)
    await bench.synchronizer.unload_idle({})
    assert not spanning.done()
    assert bench.difference(0, await spanning) < 1e-4


async def test_a_server_that_skips_loading_is_caught(bench: Bench) -> None:
    await bench.publish(0)
    async with SkippingClient(bench.server.url, bench.server.api_key) as client:
        bench.use(client)
        with pytest.raises(AdapterLoadError, match="does not list"):
            await bench.publish(1)
    assert bench.versions.published == 0


async def test_a_server_that_serves_the_version_before_under_the_new_name_is_caught(bench: Bench) -> None:
    good = bench.replica.client
    await bench.publish(0)
    async with StaleClient(bench.server.url, bench.server.api_key) as client:
        bench.use(client)
        with pytest.raises(CanaryMismatchError, match="other weights"):
            await bench.publish(1)
    assert bench.versions.published == 0
    bench.use(good)
    report = await bench.publish(1)
    assert report.canary_max_diff is not None
    assert report.canary_max_diff <= 1e-4
