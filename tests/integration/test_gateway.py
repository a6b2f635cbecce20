"""The gateway before a real vLLM server: exact records, and rendering equal to the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from gateway.codec import ChatCodec
from model_runtime.config import ModelConfig
from model_runtime.layout import RunLayout, served_name
from model_runtime.llm_client import LLMServerClient
from model_runtime.store import Store
from model_runtime.tokenizer_bundle import build_tokenizer_document, publish_tokenizer
from model_runtime.types import Trajectory
from tests.gateway_harness import RUN_ID, GatewayHarness, live_gateway
from tests.integration.conftest import VLLMServer
from tests.tiny_models import reference_logprobs

pytestmark = pytest.mark.integration

VERSIONS = (0, 1)


def model_config(base: Path) -> ModelConfig:
    return ModelConfig.model_validate({"model_id": "plan", "model_path": str(base)})


async def load_versions(server: VLLMServer, adapters: list[Path], *, load: bool) -> None:
    async with LLMServerClient(server.url, server.api_key) as client:
        for version in VERSIONS:
            name = served_name("plan", version)
            if load:
                await client.load_adapter(name, str(adapters[version]), timeout_s=30)
            else:
                await client.unload_adapter(name)


@pytest.fixture
def harness(
    vllm_server: VLLMServer, tiny_adapters: list[Path], local_store: Store
) -> Iterator[GatewayHarness]:
    """A gateway whose model `plan` is served by real vLLM in two versions."""
    asyncio.run(load_versions(vllm_server, tiny_adapters, load=True))
    uri = publish_tokenizer(local_store, RunLayout(RUN_ID).model("plan"), model_config(vllm_server.base))
    with live_gateway(local_store) as harness:
        harness.make_ready()
        replica = {"replica_id": "vllm", "url": vllm_server.url, "api_key": vllm_server.api_key}
        harness.defaults["plan"] = {"replicas": [replica], "tokenizer_uri": uri}
        harness.renew("plan")
        harness.wait_for_tokenizer("plan", uri)
        harness.open_group()
        yield harness
    asyncio.run(load_versions(vllm_server, tiny_adapters, load=False))


def errors_by_version(row: Trajectory, base: Path, adapters: list[Path]) -> dict[int, float]:
    """Largest difference to transformers + PEFT at the sampled tokens, by the version that sampled them."""
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    found = {}
    for version in np.unique(row.token_versions[row.response_mask == 1]).tolist():
        expected = np.asarray(reference_logprobs(base, adapters[version], ids))[len(row.prompt_ids) - 1 :]
        mine = (row.response_mask == 1) & (row.token_versions == version)
        found[version] = float(np.abs(expected[mine] - row.behavior_logprobs[mine]).max())
    return found


def test_two_turns_under_two_versions_are_recorded_exactly(
    harness: GatewayHarness, vllm_server: VLLMServer, tiny_adapters: list[Path]
) -> None:
    session = harness.open_session()
    client = openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)
    messages: list[Any] = [
        {"role": "system", "content": "You are a planner."},
        {"role": "user", "content": "What is the sum of seven and five?"},
    ]
    with client:
        for version, after in ((0, {"role": "tool", "content": "found: 12"}), (1, None)):
            harness.renew("plan", published_version=version)
            reply = client.chat.completions.create(model="m", messages=messages, max_tokens=24, seed=version)
            assert (reply.model_extra or {})["policy_version"] == version
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, after]
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    assert len(row.turns) == 2
    assert set(row.token_versions[row.response_mask == 1].tolist()) == {0, 1}
    found = errors_by_version(row, vllm_server.base, tiny_adapters)
    assert max(found.values()) <= 1e-4
    # The wrong version's adapter would be noticed.
    swapped = errors_by_version(row, vllm_server.base, tiny_adapters[1::-1])
    assert min(swapped.values()) > 1e-2
    # Context between the turns is masked, and is exactly what the template writes there.
    context = row.response_ids[row.turns[0].end : row.turns[1].start]
    assert (row.response_mask[row.turns[0].end : row.turns[1].start] == 0).all()
    text = harness.gateway.bindings.get("plan").ready_codec().token_texts(context)
    closing = "" if row.turns[0].finish_reason == "stop" else "<|im_end|>"
    assert "".join(text) == f"{closing}\n<|im_start|>tool\nfound: 12<|im_end|>\n<|im_start|>assistant\n"


def test_a_tempered_conversation_is_recorded_with_the_sampled_distribution(
    harness: GatewayHarness, vllm_server: VLLMServer, tiny_adapters: list[Path]
) -> None:
    session = harness.open_session()
    session.chat("What is the sum?", temperature=0.7, max_tokens=16, seed=3)
    session.finalize(1.0)
    [row] = harness.rows("plan")
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    expected = reference_logprobs(vllm_server.base, tiny_adapters[0], ids, temperature=0.7)
    difference = np.asarray(expected)[len(row.prompt_ids) - 1 :] - row.behavior_logprobs
    assert np.abs(difference).max() <= 1e-4
    assert row.turns[0].temperature == pytest.approx(0.7)


def test_concurrent_agents_are_all_recorded_exactly(
    harness: GatewayHarness, vllm_server: VLLMServer, tiny_adapters: list[Path]
) -> None:
    session = harness.open_session()

    async def ask_all() -> None:
        url = f"{session.base_url}/agents/planner/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=session.api_key) as client:
            await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": f"plan {i}"}], max_tokens=8 + i
                    )
                    for i in range(6)
                )
            )

    asyncio.run(ask_all())
    assert session.finalize(1.0)["num_rows"] == {"plan": 6}
    for row in harness.rows("plan"):
        assert max(errors_by_version(row, vllm_server.base, tiny_adapters).values()) <= 1e-4


def test_rendering_in_process_equals_the_servers_own(vllm_server: VLLMServer) -> None:
    codec = ChatCodec(build_tokenizer_document(model_config(vllm_server.base)))
    texts = [
        "hello",
        "",
        "  spaced  ",
        "two\nlines\n",
        "naïve 漢字 🙂 <b>",
        "in <|im_end|> between",
        "x" * 500,
    ]
    roles = ("system", "user", "assistant", "tool", "user", "assistant", "user")
    with httpx.Client(
        base_url=vllm_server.url, headers={"Authorization": f"Bearer {vllm_server.api_key}"}, timeout=30
    ) as client:
        for shift in range(len(texts)):
            for length in (1, 2, 4, 7):
                contents = [texts[(shift + i) % len(texts)] for i in range(length)]
                messages = [
                    {"role": role, "content": content}
                    for role, content in zip(roles[-length:], contents, strict=True)
                ]
                body = {"model": vllm_server.base_name, "messages": messages}
                rendered = client.post("/v1/chat/completions/render", json=body)
                rendered.raise_for_status()
                assert codec.render_prompt(messages).ids.tolist() == rendered.json()["token_ids"], messages


def test_a_prompt_longer_than_the_model_ends_as_length_and_the_server_stays_well(
    harness: GatewayHarness,
) -> None:
    session = harness.open_session()
    full = session.chat("0 1 2 3 " * 1000).json()
    assert full["choices"][0]["finish_reason"] == "length"
    assert session.chat("hello", max_tokens=4).status_code == 200
