"""LLMServerClient against a server in this process that answers what each test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.llm_client import LLMServerClient
from model_runtime.processes import free_port

KEY = "the-servers-own-key"


class Backend:
    """Answers every request with `reply`, and remembers what it was sent."""

    def __init__(self) -> None:
        self.url = ""
        self.reply: Callable[[web.Request], Any] | dict | None = None
        self.requests: list[tuple[str, str, dict | None, dict[str, str]]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body, dict(request.headers)))
        reply = await self.reply(request) if callable(self.reply) else self.reply
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    fake = Backend()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def client(backend) -> AsyncIterator[LLMServerClient]:
    async with LLMServerClient(backend.url, KEY) as client:
        yield client


def answer(token_ids: list[int], logprobs: list[float], *, counted: int | None = None, **fields) -> dict:
    content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(token_ids, logprobs, strict=False)]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "weight_versions": None,
    }
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": len(token_ids) if counted is None else counted,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    return {"request_id": "generate-tokens-r", "model": "m@v1", "choices": [choice], "usage": usage, **fields}


async def generate(client: LLMServerClient, **changes):
    arguments: dict[str, Any] = {
        "model": "m@v1",
        "token_ids": [1, 2, 3],
        "sampling": {"temperature": 0.7, "max_tokens": 8},
        "request_id": "r",
        "timeout_s": 5.0,
    }
    return await client.generate(**(arguments | changes))


async def test_an_answer_comes_back_as_arrays(backend, client):
    backend.reply = answer([5, 6, 2], [-0.5, -1.25, -0.125])
    got = await generate(client)
    assert got.token_ids.dtype == np.int32
    assert got.token_ids.tolist() == [5, 6, 2]
    assert got.logprobs.dtype == np.float32
    assert got.logprobs.tolist() == [-0.5, -1.25, -0.125]
    assert (got.finish_reason, got.stop_reason, got.num_prompt_tokens, got.num_cached_tokens) == (
        "stop",
        2,
        3,
        32,
    )


async def test_the_request_names_model_ids_sampling_and_key(backend, client):
    backend.reply = answer([5], [-0.5])
    await generate(client, token_ids=np.asarray([1, 2, 3], dtype=np.int32), cache_salt="s")
    ((method, path, body, headers),) = backend.requests
    assert (method, path) == ("POST", "/inference/v1/generate")
    assert body == {
        "model": "m@v1",
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.7, "max_tokens": 8, "logprobs": 0},
        "request_id": "r",
        "cache_salt": "s",
    }
    assert headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer([5, 6], [-0.5]), "2 token ids, 1 logprobs and a usage of 2"),
        (answer([5, 6], [-0.5, -0.5], counted=3), "2 token ids, 2 logprobs and a usage of 3"),
        (answer([5], [-9999.0]), "no logprob for a sampled token"),
        (answer([5], [-0.5], model="m@base"), "asked 'm@v1', was answered by 'm@base'"),
        (answer([5], [-0.5], choices=[]), "expected one choice, got 0"),
        ({"choices": "nonsense", "usage": {}}, "can't be read"),
    ],
)
async def test_an_answer_that_is_not_whole_is_refused(backend, client, reply, message):
    backend.reply = reply
    with pytest.raises(BackendUnavailableError, match=message):
        await generate(client)


async def test_logprobs_of_other_tokens_are_refused(backend, client):
    reply = answer([5, 6], [-0.5, -0.5])
    reply["choices"][0]["logprobs"]["content"][1]["token_id"] = 9
    backend.reply = reply
    with pytest.raises(BackendUnavailableError, match="not those of the token ids"):
        await generate(client)


async def test_a_4xx_is_a_rejection_with_the_servers_words(backend, client):
    message = "This model's maximum context length is 128 tokens"
    backend.reply = lambda _: respond(web.json_response({"error": {"message": message}}, status=400))
    with pytest.raises(BackendRejectedError, match="maximum context length") as rejection:
        await generate(client)
    assert rejection.value.status_code == 400


async def test_a_5xx_is_unavailable(backend, client):
    backend.reply = lambda _: respond(web.Response(status=500, text="engine is dead"))
    with pytest.raises(BackendUnavailableError, match="500 engine is dead"):
        await generate(client)


async def test_a_server_that_is_not_there_is_unavailable():
    async with LLMServerClient(f"http://127.0.0.1:{free_port()}", KEY) as client:
        with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1"):
            await generate(client)
        assert not await client.health()


async def test_a_connection_broken_off_is_unavailable(backend, client):
    async def break_off(request: web.Request) -> None:
        request.transport.close()
        await asyncio.sleep(1)

    backend.reply = break_off
    with pytest.raises(BackendUnavailableError, match="closed the connection"):
        await generate(client)


async def test_a_slow_answer_is_unavailable_after_its_limit(backend, client):
    backend.reply = lambda _: asyncio.sleep(30)
    with pytest.raises(BackendUnavailableError, match=r"no answer within 0\.2 s"):
        await generate(client, timeout_s=0.2)


async def test_cancelling_closes_the_connection_so_that_the_server_aborts(backend, client):
    begun, aborted = asyncio.Event(), asyncio.Event()

    async def wait_forever(_request: web.Request) -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            aborted.set()
            raise

    backend.reply = wait_forever
    task = asyncio.create_task(generate(client))
    await asyncio.wait_for(begun.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(aborted.wait(), 5)


async def test_probed_logprobs_come_in_the_order_asked(backend, client):
    reply = answer([5], [-0.5])
    reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [
        {"token_id": 5, "logprob": -0.5},
        {"token_id": 4, "logprob": -1.0},
        {"token_id": 9, "logprob": -3.0},
    ]
    backend.reply = reply
    probe = {"model": "m@v1", "prompt_ids": [1], "cache_salt": "c", "timeout_s": 5.0}
    assert await client.next_token_logprobs(token_ids=[9, 4, 9], **probe) == [-3.0, -1.0, -3.0]
    sampling = backend.requests[0][2]["sampling_params"]
    assert sampling["temperature"] == 1.0
    assert sampling["logprobs"] == len(sampling["logprob_token_ids"]) == 4
    with pytest.raises(BackendUnavailableError, match=r"no logprob for token ids \[8\]"):
        await client.next_token_logprobs(token_ids=[8, 4], **probe)


async def test_adapters_are_loaded_and_listed(backend, client):
    backend.reply = lambda _: respond(web.Response(text="Success"))
    await client.load_adapter("m@v2", "/adapters/v2", timeout_s=5)
    assert backend.requests[0][1:3] == (
        "/v1/load_lora_adapter",
        {"lora_name": "m@v2", "lora_path": "/adapters/v2"},
    )
    backend.reply = {"object": "list", "data": [{"id": "m@base", "root": "x"}, {"id": "m@v2"}]}
    assert await client.list_models() == ["m@base", "m@v2"]


async def test_unloading_an_adapter_that_is_gone_is_no_error(backend, client):
    backend.reply = lambda _: respond(web.json_response({"error": {"message": "not found"}}, status=404))
    await client.unload_adapter("m@v1")
    backend.reply = lambda _: respond(web.json_response({"error": {"message": "bad"}}, status=400))
    with pytest.raises(BackendRejectedError):
        await client.unload_adapter("m@v1")


async def test_processed_tokens_are_summed_from_the_metrics(backend, client):
    text = (
        "# HELP vllm:prompt_tokens_total x\n"
        'vllm:prompt_tokens_total{engine="0"} 12.0\n'
        'vllm:generation_tokens_total{engine="0"} 1e+03\n'
        'vllm:request_prompt_tokens_sum{engine="0"} 99\n'
    )
    backend.reply = lambda _: respond(web.Response(text=text))
    assert await client.num_tokens_processed() == 1012.0


async def test_a_server_says_how_busy_it_is(backend, client):
    text = (
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
        'vllm:num_preemptions_total{engine="0"} 4.0\n'
    )
    backend.reply = lambda _: respond(web.Response(text=text))
    load = await client.load()
    assert load.model_dump() == {
        "num_running": 3,
        "num_waiting": 2,
        "kv_cache_use": 0.25,
        "num_preemptions": 4,
    }


async def test_a_given_session_is_used_and_left_open(backend):
    backend.reply = answer([5], [-0.5])
    async with aiohttp.ClientSession() as http:
        client = LLMServerClient(backend.url, KEY, http=http)
        await generate(client)
        await client.close()
        assert not http.closed


async def test_the_key_appears_in_no_message_and_no_log(backend, client, caplog):
    caplog.set_level(logging.DEBUG)
    backend.reply = lambda _: respond(web.Response(status=500, text="no"))
    with pytest.raises(BackendUnavailableError) as failure:
        await generate(client)
    assert KEY not in str(failure.value) + repr(client) + caplog.text


async def respond(response: web.Response) -> web.Response:
    return response
