"""ModelAsyncRuntime with a real vLLM server and a real trainer; the gateway is a stand-in over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout, writer_id
from model_runtime.metrics import read_metrics
from model_runtime.protocol import ADMIN_KEY_ENV, RenewalAnswer
from model_runtime.runtime import ModelAsyncRuntime
from model_runtime.store import open_store
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Shard
from model_runtime.workspace import HOME_ENV
from tests.fake_servers import FakeGateway, until
from tests.fakes import make_settlement, make_trajectory
from tests.integration.conftest import ROLLOUT

pytestmark = pytest.mark.integration

GROUP_SIZE = 4


class Run:
    """A run of one model, and the agents' work for it."""

    def __init__(self, runtime: ModelAsyncRuntime, gateway: FakeGateway) -> None:
        self.runtime = runtime
        self.gateway = gateway
        self.store = open_store(runtime.config.store)
        self.layout = RunLayout("run").model("m")
        self.num_shards = 0

    def work(self, version: int) -> None:
        """One finished group, sampled by `version`, in the model's log."""
        group_id = f"g{self.num_shards}"
        members = range(GROUP_SIZE)
        names = {"group_id": group_id, "group_size": GROUP_SIZE}
        shard = Shard(
            tuple(
                make_trajectory(
                    **names, member_index=i, version=version, reward=float(i % 2), model_id="m", agent_id="a"
                )
                for i in members
            ),
            tuple(make_settlement(**names, member_index=i, num_rows={"a": 1}) for i in members),
        )
        self.store.put(self.layout.log_shard(writer_id(1, 0), self.num_shards), encode_shard(shard))
        self.num_shards += 1

    async def publish_next(self) -> int:
        version = await asyncio.wait_for(self.runtime.next_version(), 120)
        assert version is not None
        report = await self.runtime.publish(version)
        assert report.canary_max_diff is not None
        assert report.canary_max_diff <= 1e-4
        return version


@pytest.fixture
async def run(
    vllm_environment: None, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    monkeypatch.setenv(ADMIN_KEY_ENV, "admin-key-of-the-test")
    monkeypatch.setenv(HOME_ENV, str(tmp_path / "home"))
    model = {
        "model_id": "m",
        "model_path": str(tiny_base),
        "lora": {"rank": 8},
        "rollout": ROLLOUT,
        "trainer": {"learning_rate": 5e-3},
        "batch_size": 1,
        "save_every": 1,
        "async_training": {"trigger_parameter_sync_step": 1},
    }
    config = {
        "multi_model": {"models": [model]},
        "agent_model_mapping": {"a": "m"},
        "store": {"url": str(tmp_path / "store")},
        "gateway": {"renew_interval_s": 0.5},
    }
    async with FakeGateway().serving() as gateway:
        runtime = ModelAsyncRuntime(
            config=parse_config(config),
            model_id="m",
            run_id="run",
            epoch=1,
            incarnation=0,
            gateway_url=gateway.url,
        )
        try:
            await asyncio.gather(runtime.start_rollout_servers(), runtime.start_trainer())
            yield Run(runtime, gateway)
        finally:
            began = time.monotonic()
            await runtime.close()
            assert time.monotonic() - began < 20


async def test_a_model_trains_and_serves_through_the_death_of_its_server_and_of_its_trainer(
    run: Run,
) -> None:
    runtime = run.runtime
    assert await run.publish_next() == 0
    run.work(version=0)
    assert await run.publish_next() == 1
    (server,) = runtime.rollout_runtime.replicas

    # The server dies: the gateway hears of it again only with the current version loaded.
    first_url = server.url
    os.kill(server.pid or 0, signal.SIGKILL)
    await until(lambda: run.gateway.last.replicas == [], timeout_s=30)
    heard = len(run.gateway.renewals)
    await until(lambda: run.gateway.last.replicas, timeout_s=150)
    back = next(renewal for renewal in run.gateway.renewals[heard - 1 :] if renewal.replicas)
    assert back.replicas[0].url != first_url
    assert back.published_version == 1
    assert "m@v1" in await server.client.list_models()

    # The trainer dies: it goes on from its manifest, with the next version above the last one.
    assert runtime.trainer is not None
    await until(lambda: runtime.checkpoint_step == 1, timeout_s=30)
    first_pid = runtime.trainer.pid
    os.kill(first_pid or 0, signal.SIGKILL)
    run.work(version=1)
    assert await run.publish_next() == 2
    assert runtime.trainer.pid != first_pid
    assert runtime.trainer_status is not None
    assert runtime.trainer_status.step == 2

    # The run drains and ends.
    run.gateway.answer = lambda renewal: RenewalAnswer(desired="drain", epoch=1)
    assert await asyncio.wait_for(runtime.next_version(), 120) is None
    assert runtime.trainer_status.state == "drained"
    run.gateway.answer = lambda renewal: RenewalAnswer(desired="stop", epoch=1)
    await asyncio.wait_for(runtime.serve_until_stopped(), 30)
    assert [row["version"] for row in read_metrics(run.store, run.layout, "syncs")] == [0, 1, 2]
