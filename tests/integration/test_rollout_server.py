"""RolloutRuntime and LLMServerClient with a real vLLM server, exact to transformers + PEFT."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from model_runtime.config import ModelConfig
from model_runtime.errors import BackendRejectedError, RolloutServerError
from model_runtime.llm_client import LLMServerClient
from model_runtime.rollout_server import ReplicaServer, RolloutRuntime
from tests.integration.conftest import ROLLOUT, VLLMServer
from tests.served import LONG_PROMPT, PROMPT, largest_difference, sample, until
from tests.tiny_models import reference_logprobs

pytestmark = pytest.mark.integration


async def test_sampled_logprobs_are_those_of_transformers_and_peft(vllm_server, vllm_client, tiny_adapters):
    await vllm_client.load_adapter("exact@v0", str(tiny_adapters[0]), timeout_s=30)
    answer = await sample(vllm_client, "exact@v0")
    assert len(answer.token_ids) == 64
    assert answer.num_prompt_tokens == len(PROMPT)
    assert largest_difference(vllm_server.base, tiny_adapters[0], PROMPT, answer) < 1e-4
    # The test would also pass if the adapter did nothing; it does much.
    assert largest_difference(vllm_server.base, None, PROMPT, answer) > 0.1
    await vllm_client.unload_adapter("exact@v0")


async def test_logprobs_are_of_the_tempered_distribution(vllm_server, vllm_client):
    answer = await sample(vllm_client, vllm_server.base_name, temperature=0.6)
    assert largest_difference(vllm_server.base, None, PROMPT, answer, temperature=0.6) < 1e-4
    assert largest_difference(vllm_server.base, None, PROMPT, answer) > 0.05


async def test_adapters_and_base_in_one_batch_keep_apart(vllm_server, vllm_client, tiny_adapters):
    names = ["mixed@v0", "mixed@v1", "mixed@v2"]
    for name, path in zip(names, tiny_adapters, strict=False):
        await vllm_client.load_adapter(name, str(path), timeout_s=30)
    adapters = dict(zip(names, tiny_adapters, strict=False)) | {vllm_server.base_name: None}
    jobs = [(name, LONG_PROMPT, 128) for name in adapters] * 2
    answers = await asyncio.gather(
        *(sample(vllm_client, name, prompt=prompt, max_tokens=n) for name, prompt, n in jobs)
    )
    for (name, prompt, _), answer in zip(jobs, answers, strict=True):
        assert largest_difference(vllm_server.base, adapters[name], prompt, answer) < 1e-4, name
    # What they left in the prefix cache is right as well.
    for name, adapter in adapters.items():
        again = await sample(vllm_client, name, prompt=LONG_PROMPT)
        assert again.num_cached_tokens == 32
        assert largest_difference(vllm_server.base, adapter, LONG_PROMPT, again) < 1e-4, name
    for name in names:
        await vllm_client.unload_adapter(name)


async def test_probed_logprobs_are_those_of_transformers_and_peft(vllm_server, vllm_client, tiny_adapters):
    await vllm_client.load_adapter("probe@v0", str(tiny_adapters[0]), timeout_s=30)
    asked = [5, 17, 300, 5, 2]
    got = await vllm_client.next_token_logprobs(
        model="probe@v0", prompt_ids=LONG_PROMPT, token_ids=asked, cache_salt="canary", timeout_s=30
    )
    wanted = [reference_logprobs(vllm_server.base, tiny_adapters[0], [*LONG_PROMPT, t])[-1] for t in asked]
    assert np.abs(np.asarray(got) - wanted).max() < 1e-4
    await vllm_client.unload_adapter("probe@v0")


async def test_an_end_token_is_part_of_the_answer(vllm_server, vllm_client):
    for seed in range(40):
        answer = await sample(vllm_client, vllm_server.base_name, ignore_eos=False, max_tokens=400, seed=seed)
        if answer.finish_reason == "stop":
            break
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == 2
    assert largest_difference(vllm_server.base, None, PROMPT, answer) < 1e-4


async def test_unknown_adapters_and_overlong_prompts_are_rejected(vllm_server, vllm_client):
    with pytest.raises(BackendRejectedError) as unknown:
        await sample(vllm_client, "nobody@v1")
    assert unknown.value.status_code == 404
    with pytest.raises(BackendRejectedError, match="2048") as overlong:
        await sample(vllm_client, vllm_server.base_name, prompt=[3] * 2100)
    assert overlong.value.status_code == 400
    with pytest.raises(BackendRejectedError) as missing:
        await vllm_client.load_adapter("missing@v1", "/nowhere", timeout_s=30)
    assert missing.value.status_code == 404
    async with LLMServerClient(vllm_server.url, "another key") as stranger:
        with pytest.raises(BackendRejectedError) as refused:
            await stranger.list_models()
    assert refused.value.status_code == 401


async def requests_running(server: VLLMServer) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as response:
        text = await response.text()
    found = re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)
    assert found
    return sum(map(float, found))


async def test_a_cancelled_request_is_aborted_on_the_server(vllm_server, vllm_client):
    task = asyncio.create_task(sample(vllm_client, vllm_server.base_name, max_tokens=2000))

    async def is_running() -> bool:
        return await requests_running(vllm_server) > 0

    async def is_idle() -> bool:
        return await requests_running(vllm_server) == 0

    await until(is_running, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(is_idle, 2)
    before = await vllm_client.num_tokens_processed()
    await asyncio.sleep(0.3)
    assert await vllm_client.num_tokens_processed() == before


async def test_a_real_server_says_how_busy_it_is(vllm_client):
    load = await vllm_client.load()
    assert load.kv_cache_use is not None
    assert (load.num_running, load.num_waiting, load.num_preemptions) == (0, 0, 0)


@pytest.mark.slow
async def test_a_killed_server_comes_back_on_a_new_port_and_leaves_nothing(
    vllm_environment, tiny_base, tiny_adapters, tmp_path
):
    model = ModelConfig.model_validate(
        {"model_id": "killed", "model_path": str(tiny_base), "rollout": ROLLOUT}
    )
    servers = RolloutRuntime(model, logs=tmp_path)
    (replica,) = servers.replicas

    async def reload(restarted: ReplicaServer) -> None:
        await restarted.client.load_adapter("killed@v3", str(tiny_adapters[3]), timeout_s=30)

    await servers.start()
    watching = asyncio.create_task(servers.watch(reload, lambda: None))
    try:
        url, first_pid = replica.url, replica.pid
        first_family = descendants(first_pid)
        assert len(first_family) >= 2, "the engine is a process of its own"
        os.kill(first_pid, signal.SIGKILL)
        async with asyncio.timeout(90):
            while not (replica.ready and replica.attempt == 2):
                assert not watching.done(), watching
                await asyncio.sleep(0.1)
        assert not [pid for pid in first_family if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240
        assert replica.url != url
        answer = await sample(replica.client, "killed@v3")
        assert largest_difference(tiny_base, tiny_adapters[3], PROMPT, answer) < 1e-4
        family = descendants(replica.pid)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await servers.stop()
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240


@pytest.mark.slow
async def test_a_cache_too_small_for_one_request_says_which_setting_to_change(
    vllm_environment, tiny_base, tmp_path
):
    model = ModelConfig.model_validate(
        {"model_id": "small", "model_path": str(tiny_base), "rollout": {"kv_cache_bytes": 2**20}}
    )
    with pytest.raises(RolloutServerError, match=r"rollout\.kv_cache_bytes"):
        await RolloutRuntime(model, logs=tmp_path).start()


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
