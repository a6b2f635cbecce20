"""RolloutRuntime over real processes that speak vLLM's HTTP API (tests/fake_vllm.py)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from model_runtime.config import ModelConfig
from model_runtime.errors import AdapterLoadError, ProcessError, RolloutServerError
from model_runtime.llm_client import LLMServerClient
from model_runtime.rollout_server import ReplicaServer, RolloutRuntime, backoff_s, describe_log
from model_runtime.vllm_command import max_lora_rank, server_argv, server_env
from model_runtime.vllm_environment import VLLMEnvironment, check_build, find_vllm
from tests.fake_vllm import make_fake_vllm

CPU = VLLMEnvironment(Path("/env/bin/python"), "cpu", "0.32.0", True)
CUDA = VLLMEnvironment(Path("/env/bin/python"), "cuda", "0.33.0", True)


@pytest.fixture
def model_path(tmp_path) -> str:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    return str(tmp_path / "base")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """Folder of a stand-in environment in use."""
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(make_fake_vllm(tmp_path / "env")))
    return tmp_path / "env"


def model(model_path: str, *, rollout: dict | None = None, **fields) -> ModelConfig:
    return ModelConfig(model_id="m", model_path=model_path, rollout=rollout or {}, **fields)


def runtime(model_path: str, tmp_path: Path, **rollout) -> RolloutRuntime:
    config = model(model_path, rollout=rollout)
    return RolloutRuntime(config, logs=tmp_path / "logs", probe_interval_s=0.3, probe_timeout_s=0.5)


def starts(fake: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(fake.glob("started-*"))]


class Watched:
    """A runtime being watched, with what was reported."""

    def __init__(self, servers: RolloutRuntime, on_restarted=None) -> None:
        self.servers = servers
        self.restarted: list[str] = []
        self.changes: list[list[bool]] = []
        self._on_restarted = on_restarted

    async def __aenter__(self) -> Watched:
        await self.servers.start()
        self.task = asyncio.create_task(self.servers.watch(self._restarted, self._changed))
        return self

    async def __aexit__(self, *_) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.servers.stop()

    async def _restarted(self, replica: ReplicaServer) -> None:
        assert not replica.ready
        self.restarted.append(replica.replica_id)
        if self._on_restarted is not None:
            await self._on_restarted(replica)

    def _changed(self) -> None:
        self.changes.append([replica.ready for replica in self.servers.replicas])

    async def until(self, condition, limit_s: float = 15.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.02)


async def test_servers_start_in_parallel_answer_and_stop(fake, model_path, tmp_path):
    servers = runtime(model_path, tmp_path, replicas=2)
    await servers.start()
    try:
        assert [replica.ready for replica in servers.replicas] == [True, True]
        assert len({replica.url for replica in servers.replicas}) == 2
        assert len({replica.api_key for replica in servers.replicas}) == 2
        for replica in servers.replicas:
            assert await replica.client.list_models() == ["m@base"]
        pids = [replica.pid for replica in servers.replicas]
    finally:
        await servers.stop()
    assert [replica.ready for replica in servers.replicas] == [False, False]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: ASYNC240
    await servers.stop()


async def test_the_key_is_random_asked_for_and_not_on_the_command_line(fake, model_path, tmp_path):
    servers = runtime(model_path, tmp_path)
    await servers.start()
    try:
        (replica,) = servers.replicas
        (start,) = starts(fake)
        assert len(replica.api_key) >= 32
        assert start["env"]["VLLM_API_KEY"] == replica.api_key
        assert not any(replica.api_key in argument for argument in start["argv"])
        assert replica.api_key not in repr(replica) + repr(replica.client)
        assert replica.api_key not in replica.child.log_tail(1000)
        async with LLMServerClient(replica.url, "another key") as stranger:
            assert await stranger.health()
            with pytest.raises(Exception, match="Unauthorized"):
                await stranger.list_models()
    finally:
        await servers.stop()


async def test_a_killed_server_is_restarted_on_a_new_port_with_a_new_log(fake, model_path, tmp_path):
    async with Watched(runtime(model_path, tmp_path)) as watched:
        (replica,) = watched.servers.replicas
        url, log = replica.url, replica.child.log_path
        os.kill(replica.pid, signal.SIGKILL)
        await watched.until(lambda: replica.attempt == 2 and replica.ready)
        assert watched.restarted == ["m-0"]
        assert watched.changes == [[False], [True]]
        assert replica.url != url
        assert replica.child.log_path != log
        assert log.exists()
        assert await replica.client.list_models() == ["m@base"]


async def test_the_other_servers_stay_ready_meanwhile(fake, model_path, tmp_path):
    async with Watched(runtime(model_path, tmp_path, replicas=2)) as watched:
        killed, other = watched.servers.replicas
        os.kill(killed.pid, signal.SIGKILL)
        await watched.until(lambda: killed.attempt == 2 and killed.ready)
        assert watched.changes == [[False, True], [True, True]]
        assert other.attempt == 1


async def test_a_hung_server_is_restarted(fake, model_path, tmp_path):
    async with Watched(runtime(model_path, tmp_path)) as watched:
        (replica,) = watched.servers.replicas
        pid = replica.pid
        (fake / "hang").touch()
        await watched.until(lambda: not replica.ready)
        (fake / "hang").unlink()
        await watched.until(lambda: replica.ready)
        assert replica.attempt == 2
        assert replica.pid != pid


async def test_a_server_can_be_asked_to_restart(fake, model_path, tmp_path):
    async with Watched(runtime(model_path, tmp_path)) as watched:
        (replica,) = watched.servers.replicas
        replica.request_restart("it failed to load m@v3")
        assert not replica.ready
        await watched.until(lambda: replica.ready)
        assert replica.attempt == 2
        assert replica.restart_reason is None


async def test_a_server_whose_versions_fail_to_reload_is_restarted_again(fake, model_path, tmp_path):
    failures = [AdapterLoadError("no v3"), None]

    async def reload(_replica: ReplicaServer) -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    async with Watched(runtime(model_path, tmp_path), reload) as watched:
        (replica,) = watched.servers.replicas
        os.kill(replica.pid, signal.SIGKILL)
        await watched.until(lambda: replica.attempt == 3 and replica.ready)
        assert watched.changes == [[False], [True]]


async def test_a_server_that_keeps_dying_fails_the_model_with_its_last_words(fake, model_path, tmp_path):
    async with Watched(runtime(model_path, tmp_path, max_restarts=1)) as watched:
        (replica,) = watched.servers.replicas
        (fake / "die").write_text("ValueError: out of everything")
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(
            RolloutServerError, match=r"(?s)m-0.*after 1 restarts.*ValueError: out of everything"
        ):
            await asyncio.wait_for(watched.task, 15)


async def test_a_server_that_does_not_start_says_why_and_leaves_no_process(fake, model_path, tmp_path):
    (fake / "die").write_text(
        "ValueError: To serve at least one request, 3 GiB KV cache is needed\n"
        "RuntimeError: Engine core initialization failed. See root cause above."
    )
    servers = runtime(model_path, tmp_path, replicas=2)
    with pytest.raises(RolloutServerError, match="KV cache is needed") as failure:
        await servers.start()
    assert "rollout.kv_cache_bytes" in str(failure.value)
    assert "exit code 1" in str(failure.value)
    assert all(replica.child.returncode is not None for replica in servers.replicas)


async def test_a_server_whose_engine_failed_by_itself_is_not_started_again(fake, model_path, tmp_path):
    (fake / "die").write_text(
        "ERROR EngineCore failed to start.\nValueError: no such model\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    servers = runtime(model_path, tmp_path)
    with pytest.raises(RolloutServerError, match="no such model"):
        await servers.start()
    assert [replica.attempt for replica in servers.replicas] == [1]


@pytest.mark.parametrize("whom", ["api", "engine", "engine unseen"])
async def test_a_server_that_is_killed_while_it_starts_is_started_again(fake, model_path, tmp_path, whom):
    (fake / "killed").write_text(whom)
    servers = runtime(model_path, tmp_path)
    await servers.start()
    try:
        (replica,) = servers.replicas
        assert (replica.ready, replica.attempt) == (True, 2)
    finally:
        await servers.stop()


async def test_restarts_of_a_server_that_is_killed_while_it_starts_are_bounded(fake, model_path, tmp_path):
    (fake / "killed").write_text("api")
    with pytest.raises(RolloutServerError, match="exit code -9 before it was ready"):
        await runtime(model_path, tmp_path, max_restarts=0).start()


async def test_a_server_that_is_healthy_but_can_not_generate_is_not_ready(fake, model_path, tmp_path):
    (fake / "refuse").touch()
    with pytest.raises(RolloutServerError, match=r"does not generate.*refused for the test"):
        await runtime(model_path, tmp_path).start()


async def test_a_server_that_never_answers_is_given_up(fake, model_path, tmp_path):
    (fake / "hang").touch()
    with pytest.raises(RolloutServerError, match="does not generate"):
        await runtime(model_path, tmp_path, start_timeout_s=1.0).start()


async def test_a_port_taken_meanwhile_costs_one_more_attempt(fake, model_path, tmp_path):
    (fake / "taken").touch()
    servers = runtime(model_path, tmp_path)
    await servers.start()
    await servers.stop()
    first, second = (flags(s["argv"])["--port"] for s in starts(fake))
    assert first != second
    assert servers.replicas[0].attempt == 2


async def test_logs_of_an_earlier_life_are_kept(fake, model_path, tmp_path):
    for _ in range(2):
        servers = runtime(model_path, tmp_path)
        await servers.start()
        await servers.stop()
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["vllm-m-0-001.log", "vllm-m-0-002.log"]


async def test_a_missing_model_path_is_named_before_anything_starts(fake, tmp_path):
    with pytest.raises(RolloutServerError, match="model_path is '/nowhere'"):
        await runtime("/nowhere", tmp_path).start()
    assert starts(fake) == []


async def test_a_missing_adapter_is_named(fake, model_path, tmp_path):
    config = model(model_path, adapter_path="/nowhere")
    with pytest.raises(RolloutServerError, match="adapter_path is '/nowhere'"):
        await RolloutRuntime(config, logs=tmp_path).start()


# ------------------------------------------------------------------ the environment


def test_an_interpreter_that_is_not_there_names_the_fix(monkeypatch):
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(ProcessError, match=r"'/nowhere/python'.*make install"):
        find_vllm()


def test_an_environment_without_vllm_names_the_fix(monkeypatch, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("")
    python.chmod(0o755)
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(python))
    with pytest.raises(ProcessError, match=r"not installed.*make install"):
        find_vllm()


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_build_version_and_plugin_are_read_from_metadata(monkeypatch, tmp_path, build):
    python = make_fake_vllm(tmp_path / "env", build=build, version="0.31.1", plugin=build == "cpu")
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(python))
    found = find_vllm()
    assert (found.build, found.version, found.has_plugin) == (build, "0.31.1", build == "cpu")


@pytest.mark.parametrize(
    ("environment", "num_gpus", "message"),
    [
        (CPU, 1, "n_gpus is 1.*CPU build"),
        (CUDA, 0, "n_gpus is 0.*CUDA build"),
        (VLLMEnvironment(CPU.python, "cpu", "0.32.0", False), 0, "plugin is not installed.*make install"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(environment, num_gpus, message):
    with pytest.raises(ProcessError, match=message):
        check_build(environment, model_id="m", num_gpus=num_gpus)


# ------------------------------------------------------------------ command line and environment variables


def flags(argv: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(argv))


def test_a_cpu_server_keeps_room_for_the_live_versions(model_path):
    config = model(model_path, rollout={"max_live_versions": 4, "dtype": "bfloat16", "kv_cache_bytes": 2**24})
    argv = server_argv(config, CPU, port=1234)
    found = flags(argv)
    assert argv[:4] == ["/env/bin/python", "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    assert found["--max-loras"] == "4"
    assert int(found["--max-cpu-loras"]) > 4
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "1234")
    assert found["--kv-cache-memory-bytes"] == str(2**24)
    assert found["--dtype"] == "bfloat16"
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert found["--served-model-name"] == "m@base"
    assert "--tensor-parallel-size" not in argv


def test_parsers_of_the_config_are_the_servers(model_path):
    plain = server_argv(model(model_path), CPU, port=1)
    assert not {"--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"} & set(plain)
    config = model(model_path, rollout={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    argv = server_argv(config, CPU, port=1)
    assert "--enable-auto-tool-choice" in argv
    assert (flags(argv)["--tool-call-parser"], flags(argv)["--reasoning-parser"]) == ("hermes", "qwen3")


def test_a_frozen_base_serves_no_adapters_and_is_version_0(model_path):
    argv = server_argv(model(model_path, kind="frozen"), CPU, port=1)
    assert "--enable-lora" not in argv
    assert flags(argv)["--served-model-name"] == "m@v0"


def test_a_cuda_server_gets_its_devices_and_share(model_path):
    config = model(
        model_path,
        rollout={"n_gpus": 4, "tensor_parallel_size": 2, "gpu_memory_fraction": 0.4, "max_model_len": 512},
    )
    argv = server_argv(config, CUDA, port=1)
    assert argv[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", model_path]
    assert flags(argv)["--tensor-parallel-size"] == "2"
    assert flags(argv)["--gpu-memory-utilization"] == "0.4"
    assert flags(argv)["--max-model-len"] == "512"
    assert "--kv-cache-memory-bytes" not in argv
    env = server_env(config, api_key="k", gpu_ids=[2, 3])
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "TORCH_COMPILE_DISABLE" not in env


def test_each_server_gets_its_own_devices(model_path, tmp_path):
    config = model(model_path, rollout={"n_gpus": 4, "tensor_parallel_size": 2})
    servers = RolloutRuntime(config, logs=tmp_path, gpu_ids=[4, 5, 6, 7])
    assert [servers._gpus_of(i) for i in range(2)] == [[4, 5], [6, 7]]


def test_servers_do_not_inherit_secrets_or_settings_that_would_override_theirs(model_path, monkeypatch):
    for name in ("REPERTORY_ADMIN_KEY", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "an outer one")
    monkeypatch.setenv("REPERTORY_VLLM_PLUGIN", "0")
    env = server_env(model(model_path, rollout={"num_threads": 3}), api_key="k", gpu_ids=[])
    unwanted = {"REPERTORY_ADMIN_KEY", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "PYTHONPATH"}
    assert not (unwanted | {"VLLM_CPU_KVCACHE_SPACE"}) & set(env)
    assert env["VLLM_API_KEY"] == "k"
    assert env["REPERTORY_VLLM_PLUGIN"] == "0"
    assert env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (16, 16), (20, 32)])
def test_a_frozen_adapter_gets_the_room_its_rank_needs(model_path, tmp_path, rank, room):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert max_lora_rank(model(model_path, kind="frozen", adapter_path=str(tmp_path))) == room


def test_a_rank_vllm_can_not_serve_is_refused(model_path, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1024}))
    with pytest.raises(RolloutServerError, match="rank 1024"):
        max_lora_rank(model(model_path, kind="frozen", adapter_path=str(tmp_path)))


def test_restarts_wait_longer_each_time_up_to_a_bound():
    assert [backoff_s(n) for n in (1, 2, 3, 4, 20)] == [0.0, 1.0, 2.0, 4.0, 30.0]


def test_the_cause_is_found_above_the_last_words(tmp_path):
    log = tmp_path / "x.log"
    log.write_text(
        "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] FileNotFoundError: no weights here\n"
        + "noise\n" * 30
        + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert describe_log(log).startswith(": FileNotFoundError: no weights here\n")
