"""A new version beside the old one on a real vLLM server."""

from __future__ import annotations

import asyncio
import json
import shutil

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.served import LONG_PROMPT, PROMPT, largest_difference, sample, until
from tests.tiny_models import make_adapter

pytestmark = pytest.mark.integration


async def test_swap_keeps_inflight_requests_on_the_old_version(vllm_server, vllm_client, tiny_adapters):
    old_adapter, new_adapter = tiny_adapters[:2]
    await vllm_client.load_adapter("swap@v1", str(old_adapter), timeout_s=30)
    started = await vllm_client.num_tokens_processed()
    spanning = [asyncio.create_task(sample(vllm_client, "swap@v1", max_tokens=1500)) for _ in range(2)]

    async def under_way() -> bool:
        return await vllm_client.num_tokens_processed() > started + 100

    await until(under_way, 20)

    await vllm_client.load_adapter("swap@v2", str(new_adapter), timeout_s=30)
    assert {"swap@v1", "swap@v2"} <= set(await vllm_client.list_models())
    new = await sample(vllm_client, "swap@v2")
    await vllm_client.unload_adapter("swap@v1")
    newer = await sample(vllm_client, "swap@v2")
    assert not any(task.done() for task in spanning), "the old requests must span the swap and the unloading"

    assert "swap@v1" not in await vllm_client.list_models()
    for answer in (new, newer):
        assert largest_difference(vllm_server.base, new_adapter, PROMPT, answer) < 1e-4
    for answer in await asyncio.gather(*spanning):
        assert len(answer.token_ids) == 1500
        assert largest_difference(vllm_server.base, old_adapter, PROMPT, answer) < 1e-4
        assert largest_difference(vllm_server.base, new_adapter, PROMPT, answer) > 0.1
    await vllm_client.unload_adapter("swap@v2")


async def test_a_new_version_never_meets_the_old_ones_prefix_cache(vllm_server, vllm_client, tiny_adapters):
    await vllm_client.load_adapter("cache@v1", str(tiny_adapters[0]), timeout_s=30)
    await sample(vllm_client, "cache@v1", prompt=LONG_PROMPT)
    hit = await sample(vllm_client, "cache@v1", prompt=LONG_PROMPT)
    assert hit.num_cached_tokens == 32, "the test needs a prefix cache that works"
    await vllm_client.load_adapter("cache@v2", str(tiny_adapters[1]), timeout_s=30)
    miss = await sample(vllm_client, "cache@v2", prompt=LONG_PROMPT)
    assert miss.num_cached_tokens == 0
    assert largest_difference(vllm_server.base, tiny_adapters[1], LONG_PROMPT, miss) < 1e-4
    for name in ("cache@v1", "cache@v2"):
        await vllm_client.unload_adapter(name)


async def test_many_versions_in_flight_at_once_wait_for_a_slot_and_stay_exact(
    vllm_server, vllm_client, tiny_adapters
):
    names = [f"crowd@v{i}" for i in range(4)]  # one more than the server has slots
    for name, adapter in zip(names, tiny_adapters, strict=True):
        await vllm_client.load_adapter(name, str(adapter), timeout_s=30)
    answers = await asyncio.gather(*(sample(vllm_client, name, max_tokens=200) for name in names))
    for adapter, answer in zip(tiny_adapters, answers, strict=True):
        assert largest_difference(vllm_server.base, adapter, PROMPT, answer) < 1e-4
    for name in names:
        await vllm_client.unload_adapter(name)


async def test_files_overwritten_after_a_load_in_place_change_nothing(vllm_server, vllm_client, tmp_path):
    """Stock vLLM reads an adapter loaded in place from disk again at every engine step."""
    path = make_adapter(tmp_path / "current", base=vllm_server.base, seed=11)
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)
    body = {"lora_name": "inplace", "lora_path": str(path), "load_inplace": True}
    headers = {"Authorization": f"Bearer {vllm_server.api_key}"}
    url = f"{vllm_server.url}/v1/load_lora_adapter"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as response:
        assert response.status == 200
    make_adapter(path, base=vllm_server.base, seed=12)
    answer = await sample(vllm_client, "inplace")
    assert largest_difference(vllm_server.base, kept, PROMPT, answer) < 1e-4
    assert largest_difference(vllm_server.base, path, PROMPT, answer) > 0.1
    await vllm_client.unload_adapter("inplace")


async def test_an_adapter_of_the_output_head_is_refused_and_the_server_lives_on(
    vllm_server, vllm_client, tiny_adapters, tmp_path
):
    path = make_adapter(tmp_path / "head", base=vllm_server.base, seed=1)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = np.ones((8, 64), dtype=np.float32)
    tensors["base_model.model.lm_head.lora_B.weight"] = np.ones((384, 8), dtype=np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    config["target_modules"].append("lm_head")
    (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="lm_head"):
        await vllm_client.load_adapter("head@v1", str(path), timeout_s=30)
    await vllm_client.load_adapter("head@v2", str(tiny_adapters[0]), timeout_s=30)
    answer = await sample(vllm_client, "head@v2")
    assert largest_difference(vllm_server.base, tiny_adapters[0], PROMPT, answer) < 1e-4
    await vllm_client.unload_adapter("head@v2")
