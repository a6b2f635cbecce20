"""The gateway's APIs before a real vLLM server with a tool parser: exact records however a call came, and
rendering and parsing equal to the server's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import numpy as np
import openai
import pytest

from gateway.codec import ChatCodec
from gateway.routes.anthropic_messages import parse_messages_request, to_call
from gateway.routes.openai_messages import normal_message, offered_tools
from model_runtime.config import ModelConfig, StoreConfig
from model_runtime.layout import RunLayout, served_name
from model_runtime.llm_client import AskedChat, LLMServerClient
from model_runtime.rollout_server import RolloutRuntime
from model_runtime.store import open_store
from model_runtime.tokenizer_bundle import build_tokenizer_document, publish_tokenizer
from tests.gateway_harness import RUN_ID, GatewayHarness, live_gateway
from tests.integration.conftest import ROLLOUT, VLLMServer
from tests.tiny_models import make_model, reference_logprobs
from tests.tool_gateway import COMPACT_CALL, SAMPLED_CALL, tool_config
from tests.tool_use import CLOCK, CONVERSATIONS, SEARCH, TOOL_TEMPLATE, user

pytestmark = pytest.mark.integration

TOOL: Any = {
    "name": "search",
    "description": SEARCH["function"]["description"],
    "input_schema": SEARCH["function"]["parameters"],
}


TOOLS: Any = [SEARCH]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("models") / "tools")
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    return path


def model_config(base: Path) -> ModelConfig:
    fields = {
        "model_id": "plan",
        "model_path": str(base),
        "kind": "frozen",
        "rollout": {**ROLLOUT, "tool_call_parser": "hermes"},
    }
    return ModelConfig.model_validate(fields)


@pytest.fixture(scope="module")
def server(
    vllm_environment: None, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """The base alone, as version 0."""
    servers = RolloutRuntime(model_config(base), logs=tmp_path_factory.mktemp("vllm-logs"))
    (replica,) = servers.replicas

    async def start() -> None:
        await servers.start()
        await replica.disconnect()

    asyncio.run(start())
    try:
        yield VLLMServer(replica.url, replica.api_key, servers.base_name, base)
    finally:
        asyncio.run(servers.stop())


@pytest.fixture(scope="module")
def gateway(server: VLLMServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store"))))
    uri = publish_tokenizer(store, RunLayout(RUN_ID).model("plan"), model_config(server.base))
    with live_gateway(store, config=tool_config()) as harness:
        harness.make_ready()
        replica = {"replica_id": "vllm", "url": server.url, "api_key": server.api_key}
        harness.defaults["plan"] = {"replicas": [replica], "tokenizer_uri": uri}
        harness.renew("plan")
        harness.wait_for_tokenizer("plan", uri)
        yield harness


@pytest.fixture
def harness(gateway: GatewayHarness) -> GatewayHarness:
    gateway.group_id = f"g{next(gateway._seq)}"
    gateway.open_group()
    return gateway


def test_streamed_turns_by_either_sdk_are_one_exact_chain(
    harness: GatewayHarness, server: VLLMServer
) -> None:
    session = harness.open_session()
    messages: list[Any] = [user("What is the sum of seven and five?")]
    base_url = f"{session.base_url}/agents/planner"
    with (
        openai.OpenAI(base_url=f"{base_url}/v1", api_key=session.api_key) as client,
        anthropic.Anthropic(base_url=base_url, api_key=session.api_key) as other,
    ):
        pieces = []
        for chunk in client.chat.completions.create(
            model="m", messages=messages, stream=True, max_tokens=40, seed=1
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert len(pieces) > 5
        messages += [{"role": "assistant", "content": "".join(pieces)}, user("and then?")]
        with other.messages.stream(model="m", messages=messages, max_tokens=40) as stream:
            answer = stream.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
        messages += [{"role": "assistant", "content": text}, user("so?")]
        client.chat.completions.create(model="m", messages=messages, max_tokens=40)
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    assert len(row.turns) == 3
    assert largest_error(row, server.base) <= 1e-4


def test_an_agent_with_tools_is_recorded_exactly(harness: GatewayHarness, server: VLLMServer) -> None:
    session = harness.open_session()
    client = openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)
    messages: list[Any] = [user("What is there?")]
    with client:
        for seed in range(2):
            reply = client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, max_tokens=24, seed=seed
            )
            messages += [reply.choices[0].message, user("look again")]
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    assert len(row.turns) == 2
    assert largest_error(row, server.base) <= 1e-4


def largest_error(row: Any, base: Path) -> float:
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    expected = np.asarray(reference_logprobs(base, None, ids))[len(row.prompt_ids) - 1 :]
    mine = row.response_mask == 1
    return float(np.abs(expected[mine] - row.behavior_logprobs[mine]).max())


@pytest.fixture
def http(server: VLLMServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        yield client


def test_tool_prompts_equal_the_servers_own_rendering(server: VLLMServer, http: httpx.Client) -> None:
    codec = ChatCodec(build_tokenizer_document(model_config(server.base)))
    for messages in CONVERSATIONS:
        for tools in ([], [SEARCH], [SEARCH, CLOCK]):
            body = {"model": server.base_name, "messages": messages} | ({"tools": tools} if tools else {})
            rendered = http.post("/v1/chat/completions/render", json=body)
            rendered.raise_for_status()
            normal = [normal_message(message, i) for i, message in enumerate(messages)]
            ids = codec.render_prompt(normal, offered_tools(tools, None)).ids.tolist()
            assert ids == rendered.json()["token_ids"], messages


def test_anthropic_prompts_equal_the_servers_own_rendering(server: VLLMServer, http: httpx.Client) -> None:
    codec = ChatCodec(build_tokenizer_document(model_config(server.base)))
    use = {"type": "tool_use", "id": "i", "name": "search", "input": {"query": "naïve"}}
    found = {"type": "tool_result", "tool_use_id": "i", "content": "tea"}
    conversations: list[list[dict[str, Any]]] = [
        [user("x")],
        [user("x"), {"role": "assistant", "content": "y"}, user("z")],
        [
            user("x"),
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, use]},
            {"role": "user", "content": [found]},
        ],
        [user("x"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}],
    ]
    for messages in conversations:
        for extra in ({}, {"system": "be brief"}, {"tools": [TOOL]}, {"system": "be brief", "tools": [TOOL]}):
            body = {"model": server.base_name, "messages": messages, "max_tokens": 9} | extra
            rendered = http.post("/v1/messages/render", json=body)
            rendered.raise_for_status()
            call = to_call("a", parse_messages_request(msgspec.json.encode(body)))
            ids = codec.render_prompt(call.messages, call.tools).ids.tolist()
            assert ids == rendered.json()["token_ids"], body


@pytest.mark.parametrize(
    "sampled", [SAMPLED_CALL, COMPACT_CALL, f"Let me look.\n{SAMPLED_CALL}", "no call", "<tool_call>{"]
)
async def test_the_servers_parser_reads_calls_out_of_ids(server: VLLMServer, sampled: str) -> None:
    codec = ChatCodec(build_tokenizer_document(model_config(server.base)))
    ids = codec.encode(sampled)
    async with LLMServerClient(server.url, server.api_key) as client:
        parsed = await client.parse_answer(
            prompt_ids=[1, 2, 3],
            token_ids=ids,
            asked=AskedChat(tools=offered_tools([SEARCH], None)),
            request_id="r",
            timeout_s=10,
        )
    calls = [(name, json.loads(arguments)) for _, name, arguments in parsed.calls]
    assert calls == ([("search", {"query": "tea"})] if "search" in sampled else [])
    expected = sampled.split("<tool_call>")[0] if calls else sampled
    assert parsed.content.strip() == expected.strip()


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    "sampled", [f"Let me look.\nnaïve 🙂 {SAMPLED_CALL}", "no call, and no end <tool", "<tool_call>{"]
)
async def test_pieces_the_server_parses_amount_to_the_whole_up_to_a_call(
    server: VLLMServer, sampled: str, size: int
) -> None:
    codec = ChatCodec(build_tokenizer_document(model_config(server.base)))
    ids = codec.encode(sampled).tolist()
    common: Any = {
        "prompt_ids": [1, 2, 3],
        "asked": AskedChat(tools=offered_tools([SEARCH], None)),
        "request_id": "r",
        "timeout_s": 10,
    }
    heard, state, begun = "", None, False
    async with LLMServerClient(server.url, server.api_key) as client:
        whole = await client.parse_answer(token_ids=ids, **common)
        for start in range(0, len(ids), size):
            delta = await client.parse_piece(token_ids=ids[start : start + size], state=state, **common)
            heard, state, begun = heard + delta.content, delta.state, delta.begins_call
            if begun:
                break
    assert begun == bool(whole.calls)
    assert whole.content.startswith(heard)
    assert len(heard) >= len(sampled.split("<tool")[0].rstrip())


UNIT: Any = {
    "type": "function",
    "function": {
        "name": "unit",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "unit"}}])
def test_the_servers_own_grammar_forces_a_call(harness: GatewayHarness, choice: Any) -> None:
    session = harness.open_session(mode="eval", group_id="forced")
    with openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key) as client:
        replies = (
            client.chat.completions.create(
                model="m", messages=ASKED, tools=[UNIT], tool_choice=choice, max_tokens=250, seed=seed
            )
            for seed in range(8)
        )
        # The grammar lets the model make one call after another until it is cut.
        reply = next(reply for reply in replies if reply.choices[0].finish_reason != "length")
    made: Any = (reply.choices[0].message.tool_calls or [])[0]
    assert made.function.name == "unit"
    assert json.loads(made.function.arguments)["unit"] in ("c", "f")
    assert reply.choices[0].finish_reason == "tool_calls"


ASKED: Any = [user("What is the sum of seven and five?")]


def test_choices_stop_strings_and_likeliest_tokens_are_the_servers_own_and_recorded_exactly(
    harness: GatewayHarness, server: VLLMServer
) -> None:
    session = harness.open_session()
    with openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key) as client:
        reply = client.chat.completions.create(
            model="m",
            messages=ASKED,
            n=3,
            seed=1,
            stop=["e", "o"],
            logprobs=True,
            top_logprobs=4,
            max_tokens=60,
        )
        stream = client.chat.completions.create(
            model="m", messages=ASKED, stream=True, seed=1, stop=["e", "o"], max_tokens=60
        )
        text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    texts = [choice.message.content or "" for choice in reply.choices]
    assert text == texts[0]
    assert len(set(texts)) > 1, "every choice has a seed of its own"
    assert any(choice.finish_reason == "stop" for choice in reply.choices)
    assert not any(letter in text for text in texts for letter in "eo")
    for choice in reply.choices:
        for entry in (choice.logprobs and choice.logprobs.content) or []:
            likeliest = [top.logprob for top in entry.top_logprobs]
            assert likeliest == sorted(likeliest, reverse=True)
            assert max(likeliest) >= entry.logprob
    assert session.finalize(1.0)["num_rows"] == {"plan": 4}
    for row in harness.rows("plan"):
        assert largest_error(row, server.base) <= 1e-4


async def test_a_stream_that_is_left_ends_the_generation_on_the_server(server: VLLMServer) -> None:
    async def running() -> float:
        async with httpx.AsyncClient(base_url=server.url) as http:
            text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.split()[-1]) for line in lines)

    async with LLMServerClient(server.url, server.api_key) as client:
        stream = client.generate_stream(
            model=served_name("plan", 0),
            token_ids=[1, 50, 60],
            sampling={"max_tokens": 2000, "temperature": 1.0, "ignore_eos": True},
            request_id="left",
            timeout_s=60,
        )
        chunks = [await anext(stream) for _ in range(3)]
        assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
        assert await running() == 1
        await stream.aclose()
        async with asyncio.timeout(5):
            while await running():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
