"""A real vLLM server whose weights change in the middle of long answers, in both modes of partial_rollout:
each token's logprob is that of the version the record names for it, recomputed by transformers + PEFT."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from model_runtime.errors import BackendUnavailableError
from model_runtime.layout import RunLayout
from model_runtime.llm_client import Generation, LLMServerClient
from model_runtime.store import Store
from model_runtime.tokenizer_bundle import publish_tokenizer
from model_runtime.types import Trajectory
from tests.gateway_harness import RUN_ID, GatewayHarness, live_gateway, make_config
from tests.integration.conftest import VLLMServer
from tests.integration.test_gateway import errors_by_version, load_versions, model_config
from tests.waiting import until

pytestmark = pytest.mark.integration

NUM_TOKENS = 400


@contextmanager
def gateway_before(
    server: VLLMServer, adapters: list[Path], store: Store, *, partial_rollout: bool
) -> Iterator[GatewayHarness]:
    fields = {
        "async_training": {"partial_rollout": partial_rollout},
        "max_response_tokens": NUM_TOKENS,
    }
    asyncio.run(load_versions(server, adapters, load=True))
    uri = publish_tokenizer(store, RunLayout(RUN_ID).model("plan"), model_config(server.base))
    config = make_config(of_each_model=fields, request_timeout_s=60.0)
    try:
        with live_gateway(store, config=config) as harness:
            harness.make_ready()
            replica = {"replica_id": "vllm", "url": server.url, "api_key": server.api_key}
            harness.defaults["plan"] = {"replicas": [replica], "tokenizer_uri": uri}
            harness.renew("plan")
            harness.wait_for_tokenizer("plan", uri)
            harness.open_group()
            yield harness
    finally:
        asyncio.run(load_versions(server, adapters, load=False))


def ask_through_a_flip(harness: GatewayHarness, session: Any, *, streamed: bool = False) -> Any:
    """One long answer of a policy that never ends by itself; version 1 is published while it is sampled."""
    client = openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)

    def ask() -> Any:
        fields: dict[str, Any] = {"model": "m", "max_tokens": NUM_TOKENS, "seed": 11}
        fields["messages"] = [{"role": "user", "content": "count"}]
        with client:
            if not streamed:
                return client.chat.completions.create(**fields)
            return list(client.chat.completions.create(**fields, stream=True))

    binding = harness.gateway.bindings.get("plan")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        until(lambda: binding.running, "the answer was not begun")
        time.sleep(0.4)
        harness.renew("plan", published_version=1)
        return answer.result(60)


def versions_of(row: Trajectory) -> list[int]:
    return np.unique(row.token_versions[row.response_mask == 1]).tolist()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_interrupted_answer_goes_on_under_the_new_weights_and_both_parts_are_exact(
    vllm_server: VLLMServer, tiny_adapters: list[Path], local_store: Store, streamed: bool
) -> None:
    with gateway_before(vllm_server, tiny_adapters, local_store, partial_rollout=True) as harness:
        session = harness.open_session()
        answer = ask_through_a_flip(harness, session, streamed=streamed)
        finish = answer[-1].choices[0].finish_reason if streamed else answer.choices[0].finish_reason
        session.finalize(1.0)
        [row] = harness.rows("plan")
    assert versions_of(row) == [0, 1]
    assert finish == row.turns[0].finish_reason
    assert finish in ("stop", "length")
    assert finish == "stop" or len(row.response_ids) == NUM_TOKENS
    found = errors_by_version(row, vllm_server.base, tiny_adapters)
    assert max(found.values()) <= 1e-4, found
    # The tokens were not scored anew by the weights that went on from them, nor the other way round.
    swapped = errors_by_version(row, vllm_server.base, tiny_adapters[1::-1])
    assert min(swapped.values()) > 1e-2


def test_a_generation_that_is_not_interrupted_finishes_under_its_own_weights_exactly(
    vllm_server: VLLMServer, tiny_adapters: list[Path], local_store: Store
) -> None:
    with gateway_before(vllm_server, tiny_adapters, local_store, partial_rollout=False) as harness:
        session = harness.open_session()
        answer = ask_through_a_flip(harness, session)
        assert answer.model_extra["policy_version"] == 0
        again = session.chat("after the flip", max_tokens=4).json()
        assert again["policy_version"] == 1
        session.finalize(1.0)
        rows = harness.rows("plan")
    assert [versions_of(row) for row in rows] == [[0], [1]]
    for row in rows:
        assert max(errors_by_version(row, vllm_server.base, tiny_adapters).values()) <= 1e-4


@pytest.fixture
def broken_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Breaks the next stream of a server off after so many tokens."""
    stream, left = LLMServerClient.generate_stream, [-1]

    async def breaking(client: LLMServerClient, **arguments: Any) -> AsyncIterator[Any]:
        num_tokens, left[0] = left[0], -1
        async for chunk in stream(client, **arguments):
            yield chunk
            num_tokens -= len(chunk.token_ids)
            if num_tokens == 0:
                raise BackendUnavailableError("the connection is gone")

    monkeypatch.setattr(LLMServerClient, "generate_stream", breaking)
    return lambda num_tokens: left.__setitem__(0, num_tokens)


def test_a_stream_that_breaks_off_goes_on_as_one_exact_answer(
    vllm_server: VLLMServer,
    tiny_adapters: list[Path],
    local_store: Store,
    broken_after: Callable[[int], None],
) -> None:
    with gateway_before(vllm_server, tiny_adapters, local_store, partial_rollout=False) as harness:
        session = harness.open_session()
        broken_after(7)
        session.chat("count", max_tokens=40, seed=3, stream=True)
        session.finalize(1.0)
        [row] = harness.rows("plan")
        [turn] = row.turns
        assert turn.end - turn.start > 7
        assert max(errors_by_version(row, vllm_server.base, tiny_adapters).values()) <= 1e-4
        retries = 'repertory_gateway_backend_retries_total{model="plan"} 1.0'
        assert retries in harness.http.get("/metrics").text


def test_a_stop_string_across_a_seam_ends_the_answer_where_the_server_itself_would(
    vllm_server: VLLMServer,
    tiny_adapters: list[Path],
    local_store: Store,
    broken_after: Callable[[int], None],
) -> None:
    """Greedily, so that what goes on is what would have come anyway."""
    with gateway_before(vllm_server, tiny_adapters, local_store, partial_rollout=False) as harness:
        session = harness.open_session(mode="eval")
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
        whole = session.chat("count", logprobs=True, **fields).json()["choices"][0]
        texts = [entry["token"] for entry in whole["logprobs"]["content"]]
        number, stop = first_pair(texts)
        by_server = session.chat("count", stop=[stop], **fields)
        broken_after(number)
        by_gateway = session.chat("count", stop=[stop], stream=True, **fields)
        assert by_gateway.text.rstrip().endswith("[DONE]")
        session.finalize(1.0)
        _, one, seamed = harness.rows("plan", evaluation=True)
        assert 'retries_total{model="plan"} 1.0' in harness.http.get("/metrics").text
    assert by_server.json()["choices"][0]["finish_reason"] == "stop"
    assert seamed.response_ids.tolist() == one.response_ids.tolist()
    assert len(one.response_ids) == number + 1
    assert np.allclose(seamed.behavior_logprobs, one.behavior_logprobs, atol=1e-4)


def first_pair(texts: list[str]) -> tuple[int, str]:
    """Two tokens that first stand beside each other here: how many come up to the first, and their text."""
    for number in range(4, len(texts)):
        stop = texts[number - 1] + texts[number]
        so_far = "".join(texts[: number + 1])
        if stop.isprintable() and "\ufffd" not in stop and so_far.find(stop) == len(so_far) - len(stop):
            return number, stop
    raise AssertionError(f"no two tokens of {texts} are new")


async def test_the_server_ends_a_request_that_waits_as_one_without_tokens(
    vllm_server: VLLMServer, vllm_client: LLMServerClient
) -> None:
    """More requests than the server runs at once: what waits in its line can be interrupted too."""
    sampling = {"max_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
    name, prompt = vllm_server.base_name, [5, 6, 7]

    async def begin(ids: Sequence[str], *, num_running: int, num_waiting: int) -> list[asyncio.Task[Any]]:
        calls = [
            vllm_client.generate(
                model=name, token_ids=prompt, sampling=sampling, request_id=id_, timeout_s=60
            )
            for id_ in ids
        ]
        begun = [asyncio.create_task(call) for call in calls]
        async with asyncio.timeout(30):
            while True:
                load = await vllm_client.load()
                if (load.num_running, load.num_waiting) == (num_running, num_waiting):
                    return begun
                await asyncio.sleep(0.02)

    async def end(ids: Sequence[str], calls: Sequence[asyncio.Task[Any]]) -> list[Generation]:
        await asyncio.gather(*(vllm_client.abort(id_, timeout_s=10) for id_ in ids))
        return await asyncio.gather(*calls)

    first, later = [f"first-{i}" for i in range(16)], [f"later-{i}" for i in range(4)]
    running = await begin(first, num_running=16, num_waiting=0)
    waiting = await begin(later, num_running=16, num_waiting=4)
    never_ran, ran = await end(later, waiting), await end(first, running)
    assert {answer.finish_reason for answer in [*never_ran, *ran]} == {"abort"}
    assert [len(answer.token_ids) for answer in never_ran] == [0] * 4
    assert all(0 < len(answer.token_ids) == len(answer.logprobs) < 1500 for answer in ran)
