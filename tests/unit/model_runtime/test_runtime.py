"""ModelAsyncRuntime over real processes that stand in for vLLM and the trainer, and a gateway over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from model_runtime import trainer_process
from model_runtime.config import RunConfig, StoreConfig
from model_runtime.config_file import parse_config
from model_runtime.coordinator import claim_epoch, write_desired
from model_runtime.documents import TokenizerDocument
from model_runtime.errors import (
    ConfigError,
    PublishError,
    RolloutServerError,
    SupersededError,
    TrainerError,
)
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.protocol import ADMIN_KEY_ENV, RenewalAnswer, RuntimeStatus
from model_runtime.runtime import ModelAsyncRuntime, trainer_environment
from model_runtime.store import Store, open_store
from model_runtime.synchronizer import SyncLimits
from model_runtime.trainer_process import TrainerLimits
from model_runtime.workspace import HOME_ENV, Workspace
from tests.fake_servers import FakeGateway, make_adapter_files, until
from tests.fake_vllm import make_fake_vllm
from tests.tiny_models import make_tokenizer

LAYOUT = RunLayout("run").model("m")


class Setup:
    """Folders, config and stand-ins of one run."""

    def __init__(self, tmp_path: Path, gateway: FakeGateway) -> None:
        self.gateway = gateway
        self.vllm = tmp_path / "env"
        self.model_path = tmp_path / "model"
        make_tokenizer(self.model_path)
        config = {"vocab_size": 400, "max_position_embeddings": 512, "eos_token_id": 2}
        (self.model_path / "config.json").write_text(json.dumps(config))
        self.store_url = str(tmp_path / "store")

    @property
    def store(self) -> Store:
        return open_store(StoreConfig(url=self.store_url))

    @property
    def mailbox(self) -> Path:
        return Workspace("run").mailbox("m")

    def config(self, **model: Any) -> RunConfig:
        return parse_config(
            {
                "multi_model": {
                    "models": [{"model_id": "m", "model_path": str(self.model_path), "batch_size": 4} | model]
                },
                "agent_model_mapping": {"a": "m"},
                "store": {"url": self.store_url},
                "gateway": {"renew_interval_s": 0.3, "lease_s": 2},
            }
        )

    def runtime(self, **model: Any) -> ModelAsyncRuntime:
        return ModelAsyncRuntime(
            config=self.config(**model),
            model_id="m",
            run_id="run",
            epoch=1,
            incarnation=0,
            gateway_url=self.gateway.url,
            sync_limits=SyncLimits(flip_s=2, retry_wait_s=0.05),
            trainer_limits=TrainerLimits(max_restarts=1, backoff_s=0.05, grace_s=2),
        )

    @asynccontextmanager
    async def started(self, **model: Any) -> AsyncIterator[ModelAsyncRuntime]:
        runtime = self.runtime(**model)
        try:
            await asyncio.gather(runtime.start_rollout_servers(), runtime.start_trainer())
            yield runtime
        finally:
            await asyncio.wait_for(runtime.close(), 20)

    def statuses(self) -> list[RuntimeStatus]:
        """Statuses the gateway heard, without repetitions."""
        told = [renewal.status for renewal in self.gateway.renewals]
        return [one for one, before in zip(told, [None, *told], strict=False) if one != before]


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setenv(ADMIN_KEY_ENV, "admin-key-of-the-test")
    monkeypatch.setenv(HOME_ENV, str(tmp_path / "home"))
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(make_fake_vllm(tmp_path / "env")))
    monkeypatch.setattr(trainer_process, "TRAINER_ARGV", (sys.executable, "-m", "tests.fake_trainer"))
    async with FakeGateway().serving() as gateway:
        yield Setup(tmp_path, gateway)


def answer_with(gateway: FakeGateway, **fields: Any) -> None:
    gateway.answer = lambda renewal: RenewalAnswer.model_validate({"desired": "run", "epoch": 1} | fields)


def is_alive(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_story_of_a_run_from_start_to_stop(setup: Setup) -> None:
    async with setup.started() as runtime:
        (setup.mailbox / "versions").write_text("3")
        for expected in (0, 1, 2):
            version = await asyncio.wait_for(runtime.next_version(), 10)
            assert version == expected
            report = await runtime.publish(version)
            assert report.canary_max_diff == 0.0
            assert runtime.published_version == setup.gateway.last.published_version == expected
        answer_with(setup.gateway, desired="drain")
        assert await asyncio.wait_for(runtime.next_version(), 10) is None
        assert runtime.trainer_status is not None
        assert runtime.trainer_status.state == "drained"
        assert runtime.checkpoint_step == 20
        answer_with(setup.gateway, desired="stop")
        assert await asyncio.wait_for(runtime.serve_until_stopped(), 10) == "asked by the parent"
    assert [row["version"] for row in read_metrics(setup.store, LAYOUT, "syncs")] == [0, 1, 2]
    assert setup.statuses()[0] == "starting"
    assert setup.statuses()[-1] == "stopped"
    assert {"syncing", "ready"} <= set(setup.statuses())


async def test_renewals_say_what_the_gateway_needs(setup: Setup) -> None:
    async with setup.started(max_steps=9) as runtime:
        assert setup.gateway.last.replicas == []
        await runtime.publish(await runtime.next_version() or 0)
        await until(lambda: setup.gateway.last.status == "ready")
        renewal = setup.gateway.last
        (replica,) = renewal.replicas
        (server,) = runtime.rollout_runtime.replicas
        assert (replica.url, replica.api_key.get_secret_value()) == (server.url, server.api_key)
        assert (renewal.published_version, renewal.live_versions, renewal.committed_version) == (0, [0], 0)
        assert renewal.limit == runtime.model.admission_limit
        assert renewal.queue.untrained_groups == 3
        assert (renewal.kind, renewal.trainer_state, renewal.base_served) == ("trainable", "running", False)
        assert renewal.tokenizer_uri is not None
        document = TokenizerDocument.parse(setup.store.get(renewal.tokenizer_uri), source="tokenizer")
        assert document.max_model_len == 512


async def test_the_trainer_hears_what_is_published_wanted_and_still_open(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        answer_with(setup.gateway, desired="run", oldest_open_version=0)

        def control() -> dict[str, Any]:
            return json.loads((setup.mailbox / "trainer_control.json").read_text())

        await until(lambda: control()["oldest_open_version"] == 0)
        assert control() == {"desired": "run", "published_version": 0, "oldest_open_version": 0}


async def test_an_old_version_is_unloaded_when_the_gateway_counts_no_request_of_it(setup: Setup) -> None:
    async with setup.started() as runtime:
        (setup.mailbox / "versions").write_text("2")
        answer_with(setup.gateway, inflight_versions={0: 1})
        for _ in range(2):
            await runtime.publish(await asyncio.wait_for(runtime.next_version(), 10) or 0)
        await asyncio.sleep(0.7)
        assert runtime.version_tracker.live == [0, 1]
        answer_with(setup.gateway)
        await until(lambda: runtime.version_tracker.live == [1])
        (server,) = runtime.rollout_runtime.replicas
        await until(lambda: setup.gateway.last.live_versions == [1])
        assert "m@v0" not in await server.client.list_models()


async def test_a_model_to_which_nothing_happens_renews_at_its_interval(setup: Setup) -> None:
    async with setup.started() as runtime:
        (setup.mailbox / "versions").write_text("2")
        answer_with(setup.gateway, inflight_versions={0: 1})
        for _ in range(2):
            await runtime.publish(await asyncio.wait_for(runtime.next_version(), 10) or 0)
        await asyncio.sleep(0.5)
        before = len(setup.gateway.renewals)
        await asyncio.sleep(1.5)
        assert len(setup.gateway.renewals) - before <= 1.5 / 0.3 + 1


async def test_a_later_life_publishes_the_newest_committed_version_first(setup: Setup) -> None:
    async with setup.started() as runtime:
        (setup.mailbox / "versions").write_text("2")
        for _ in range(2):
            await runtime.publish(await asyncio.wait_for(runtime.next_version(), 10) or 0)
    runtime = setup.runtime()
    try:
        assert await asyncio.wait_for(runtime.next_version(), 5) == 1
    finally:
        await runtime.close()


async def test_a_killed_server_comes_back_with_the_version_before_the_gateway_hears_of_it(
    setup: Setup,
) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        (server,) = runtime.rollout_runtime.replicas
        before = server.url
        os.kill(server.pid or 0, signal.SIGKILL)
        await until(lambda: setup.gateway.last.replicas == [])
        await until(lambda: setup.gateway.last.replicas)
        assert setup.gateway.last.replicas[0].url == server.url != before
        assert "m@v0" in await server.client.list_models()


async def test_a_publish_outlasts_a_call_that_takes_its_time_and_a_gateway_without_its_store(
    setup: Setup,
) -> None:
    raw = setup.config().model_dump(mode="json")
    raw["gateway"]["request_timeout_s"], raw["store"]["max_outage_s"] = 3000, 700
    config = RunConfig.model_validate(raw)
    places: dict[str, Any] = {"run_id": "run", "epoch": 1, "incarnation": 0, "gateway_url": setup.gateway.url}
    limits = ModelAsyncRuntime(config=config, model_id="m", **places)._sync_limits
    assert limits.flip_s > 700
    assert limits.room_s > 3000 + 700


async def test_a_version_is_published_once_a_server_that_died_is_back(setup: Setup) -> None:
    async with setup.started() as runtime, asyncio.timeout(20):
        await runtime.publish(await runtime.next_version() or 0)
        (setup.mailbox / "versions").write_text("2")
        version = await runtime.next_version()
        assert version == 1
        (server,) = runtime.rollout_runtime.replicas
        os.kill(server.pid or 0, signal.SIGKILL)
        await until(lambda: not server.ready)
        with pytest.raises(PublishError, match="no rollout server of m is ready"):
            await runtime.publish(version)
        await runtime.until_servable()
        await runtime.publish(version)
        assert runtime.published_version == 1


async def test_nobody_waits_for_a_server_of_a_model_that_failed_or_is_to_stop(setup: Setup) -> None:
    async with setup.started(rollout={"max_restarts": 0}) as runtime, asyncio.timeout(10):
        (server,) = runtime.rollout_runtime.replicas
        os.kill(server.pid or 0, signal.SIGKILL)
        await until(lambda: not server.ready)
        with pytest.raises(RolloutServerError):
            await runtime.until_servable()
    async with setup.started() as runtime, asyncio.timeout(10):
        runtime.rollout_runtime.replicas[0].ready = False
        answer_with(setup.gateway, desired="stop")
        await runtime.until_servable()
        assert runtime.stop_reason == "asked by the parent"


async def test_a_killed_trainer_goes_on_and_the_versions_with_it(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        assert runtime.trainer is not None
        os.kill(runtime.trainer.pid or 0, signal.SIGKILL)
        (setup.mailbox / "versions").write_text("2")
        assert await asyncio.wait_for(runtime.next_version(), 15) == 1


async def test_a_trainer_that_keeps_failing_fails_the_model_with_its_reason(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        (setup.mailbox / "fail").write_text("out of memory")
        with pytest.raises(TrainerError, match="out of memory"):
            await asyncio.wait_for(runtime.next_version(), 20)
        with pytest.raises(TrainerError, match="out of memory"):
            await runtime.serve_until_stopped()
        await until(lambda: setup.gateway.last.status == "failed")
        assert "out of memory" in setup.gateway.last.reason
    assert setup.gateway.last.status == "failed"


async def test_a_model_whose_renewals_end_by_an_error_fails_with_it_and_leaves_no_process(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compose(seq: int) -> Any:
        raise OSError("no renewal can be made")

    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        monkeypatch.setattr(runtime.registrar, "_compose", compose)
        with pytest.raises(OSError, match="no renewal can be made"):
            await asyncio.wait_for(runtime.serve_until_stopped(), 10)
        assert runtime.status == "failed"
        pids = [runtime.trainer.pid if runtime.trainer else None]
        pids += [server.child.pid for server in runtime.rollout_runtime.replicas if server.child]
    assert not any(is_alive(pid) for pid in pids)


async def test_a_trainer_that_fails_at_its_start_fails_the_start(setup: Setup) -> None:
    setup.mailbox.joinpath("fail").write_text("no such model")
    with pytest.raises(TrainerError, match="no such model"):
        async with setup.started():
            pass


async def test_a_server_that_does_not_start_fails_the_start_and_the_gateway_hears_why(setup: Setup) -> None:
    (setup.vllm / "die").write_text("ValueError: something about the KV cache")
    with pytest.raises(RolloutServerError, match="KV cache"):
        async with setup.started():
            pass
    assert setup.gateway.last.status == "failed"
    assert "KV cache" in setup.gateway.last.reason


async def test_a_newer_life_of_the_model_stops_this_one(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        answer_with(setup.gateway, superseded=True, epoch=2)
        assert await asyncio.wait_for(runtime.next_version(), 5) is None
        assert "superseded" in (runtime.stop_reason or "")


async def test_while_the_gateway_is_silent_the_store_ends_the_run(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        setup.gateway.refuse = 503
        claim_epoch(setup.store, RunLayout("run"))
        write_desired(setup.store, RunLayout("run"), epoch=1, state="stop", reason="the user said so")
        assert await asyncio.wait_for(runtime.next_version(), 15) is None
        assert runtime.stop_reason == "asked in the store: the user said so"


async def test_a_superseded_trainer_stops_the_model_and_does_not_fail_it(setup: Setup) -> None:
    async with setup.started() as runtime:
        (setup.mailbox / "supersede").write_text("")
        assert "epoch 9 leads" in await asyncio.wait_for(runtime.serve_until_stopped(), 10)
        assert runtime.status == "starting"


async def test_a_newer_life_of_the_model_ends_a_publish_that_waits_for_a_slot(setup: Setup) -> None:
    async with setup.started(rollout={"max_live_versions": 2}) as runtime:
        runtime.parameter_synchronizer._limits = SyncLimits(room_s=60)
        answer_with(setup.gateway, inflight_versions={"0": 1, "1": 1})
        (setup.mailbox / "versions").write_text("3")
        for _ in range(2):
            await runtime.publish(await runtime.next_version() or 0)
        publishing = asyncio.create_task(runtime.publish(await runtime.next_version() or 0))
        await asyncio.sleep(0.2)
        assert not publishing.done()
        answer_with(setup.gateway, superseded=True)
        with pytest.raises(SupersededError, match="superseded"):
            await asyncio.wait_for(publishing, 15)


async def test_a_silent_gateway_fails_the_flip_and_the_publish_can_be_repeated(setup: Setup) -> None:
    async with setup.started() as runtime:
        version = await runtime.next_version()
        assert version == 0
        setup.gateway.refuse = 503
        with pytest.raises(PublishError, match="not acknowledged"):
            await runtime.publish(version)
        assert runtime.published_version is None
        assert await runtime.next_version() == 0
        setup.gateway.refuse = None
        await runtime.publish(0)
        assert runtime.published_version == 0


async def test_closing_leaves_no_process_and_may_be_repeated(setup: Setup) -> None:
    async with setup.started() as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        assert runtime.trainer is not None
        pids = [runtime.trainer.pid, *(server.pid for server in runtime.rollout_runtime.replicas)]
        assert all(is_alive(pid) for pid in pids)
        await runtime.close()
        assert not any(is_alive(pid) for pid in pids)
        await runtime.close()
    assert setup.gateway.last.status == "stopped"
    assert setup.gateway.last.replicas == []


async def test_closing_goes_on_when_its_caller_is_cancelled(setup: Setup) -> None:
    async with setup.started() as runtime:
        assert runtime.trainer is not None
        pids = [runtime.trainer.pid, *(server.pid for server in runtime.rollout_runtime.replicas)]
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await until(lambda: not any(is_alive(pid) for pid in pids))


def cancel_all_but(spared: set[asyncio.Task[Any]]) -> None:
    """What Prefect's SIGTERM does to the tasks of a flow run's loop."""
    for task in asyncio.all_tasks() - spared:
        task.cancel()


@pytest.mark.parametrize("begun", [False, True], ids=["before", "during"])
async def test_a_runtime_is_closed_when_its_processes_are_gone_though_every_task_was_cancelled(
    setup: Setup, begun: bool
) -> None:
    spared = asyncio.all_tasks()
    async with setup.started() as runtime:
        (setup.mailbox / "slow").write_text("1.5")
        assert runtime.trainer is not None
        pids = [runtime.trainer.pid, *(server.pid for server in runtime.rollout_runtime.replicas)]
        closing = [asyncio.create_task(runtime.close())] if begun else []
        await asyncio.sleep(0.1)
        cancel_all_but(spared)
        await asyncio.sleep(0.05)
        await runtime.close()
        assert not any(is_alive(pid) for pid in pids)
        assert all(task.cancelled() for task in closing)


async def test_cancelling_during_the_start_leaves_no_process(setup: Setup) -> None:
    (setup.vllm / "hang").write_text("")
    runtime = setup.runtime()
    starting = asyncio.create_task(runtime.start_rollout_servers())
    (server,) = runtime.rollout_runtime.replicas
    await until(lambda: server.pid)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await runtime.close()
    assert not is_alive(server.pid)


async def test_a_frozen_base_is_published_as_version_0_without_a_trainer(setup: Setup) -> None:
    async with setup.started(kind="frozen") as runtime:
        assert await runtime.next_version() == 0
        await runtime.publish(0)
        assert await runtime.next_version() is None
        assert runtime.trainer is None
        await until(lambda: setup.gateway.last.status == "ready")
        renewal = setup.gateway.last
        assert (renewal.kind, renewal.base_served, renewal.limit) == ("frozen", True, 0)
        assert len(renewal.replicas) == 1


async def test_a_frozen_adapter_is_committed_and_published_as_version_0(setup: Setup, tmp_path: Path) -> None:
    files = make_adapter_files(5)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(files.weights)
    (folder / "adapter_config.json").write_bytes(files.config)
    async with setup.started(kind="frozen", adapter_path=str(folder)) as runtime:
        await runtime.publish(await runtime.next_version() or 0)
        await until(lambda: setup.gateway.last.published_version == 0)
        assert not setup.gateway.last.base_served
        assert setup.store.exists(LAYOUT.version_marker(0))


async def test_missing_devices_are_named_at_the_start(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    runtime = setup.runtime(rollout={"n_gpus": 1}, trainer={"n_gpus": 1})
    with pytest.raises(ConfigError, match=r"m\.trainer: needs GPU 1, but this machine shows 1"):
        await runtime.start_rollout_servers()
    await runtime.close()


async def test_the_trainers_environment_has_its_devices_and_not_the_gateways_key(setup: Setup) -> None:
    environ = {ADMIN_KEY_ENV: "secret", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    env = trainer_environment(environ, setup.config(trainer={"num_threads": 2}).model("m"), [2])
    assert env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2", "OMP_NUM_THREADS": "2"}
