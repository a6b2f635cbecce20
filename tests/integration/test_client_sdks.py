"""Unmodified SDKs on a live gateway before real vLLM, with a model that calls tools: OpenAI's Chat
Completions and Responses, Anthropic's Messages, plain and streamed. What each leaves is exact."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.clerk import PRICES, Shop, ask, openai_url, price_of
from tests.gateway_harness import GatewayHarness, LiveSession

pytestmark = pytest.mark.integration

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "What an item costs.", "parameters": ITEM}
CHAT_TOOL: Any = {"type": "function", "function": PRICE}
RESPONSES_TOOL: Any = {"type": "function", **PRICE}
ANTHROPIC_TOOL: Any = {"name": "price", "description": "What an item costs.", "input_schema": ITEM}


# ------------------------------------------------------------------ OpenAI: Chat Completions


def test_openai_calls_two_tools_at_once_and_answers(shop: Shop) -> None:
    session = shop.open()
    messages, num_sampled = ask("How much are the lamp and the desk?"), 0
    with openai.OpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        for _ in range(2):
            reply = client.chat.completions.create(model="clerk", messages=messages, tools=[CHAT_TOOL])
            [choice] = reply.choices
            assert reply.usage is not None
            num_sampled += reply.usage.completion_tokens
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                assert call.type == "function"
                content = price_of(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert choice.finish_reason == "stop"
    [row] = shop.finish(session)
    shop.check_tool_use(row, "lamp", "desk")
    assert num_sampled == row.response_mask.sum()


async def test_openai_s_async_client_speaks_with_several_customers_at_once(shop: Shop) -> None:
    session = shop.open()

    async def serve(client: openai.AsyncOpenAI, item: str) -> None:
        messages = ask(f"How much is the {item}?")
        reply = await client.chat.completions.create(model="clerk", messages=messages, tools=[CHAT_TOOL])
        [call] = reply.choices[0].message.tool_calls or []
        assert call.type == "function"
        messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id}]
        messages[-1]["content"] = [{"type": "text", "text": price_of(call.function.arguments)}]
        reply = await client.chat.completions.create(model="clerk", messages=messages, tools=[CHAT_TOOL])
        assert PRICES[item] in (reply.choices[0].message.content or "")

    async with openai.AsyncOpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        await asyncio.gather(*(serve(client, item) for item in PRICES))
    rows = await asyncio.to_thread(shop.finish, session)
    assert len(rows) == len(PRICES)
    for row in rows:
        [item] = [item for item in PRICES if f"the {item}?" in shop.shown(row)]
        shop.check_tool_use(row, item)


def test_openai_streams_text_and_tool_calls_of_one_conversation(shop: Shop) -> None:
    session = shop.open()
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, *ask("Hello!")]
    with openai.OpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        stream = client.chat.completions.create(
            model="clerk",
            messages=messages,
            tools=[CHAT_TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert chunks[-1].usage is not None
        messages += [{"role": "assistant", "content": "".join(pieces)}, *ask("How much is the sofa?")]
        for _ in range(2):
            with client.chat.completions.stream(model="clerk", messages=messages, tools=[CHAT_TOOL]) as live:
                reply = live.get_final_completion().choices[0].message
            messages.append(reply)
            for call in reply.tool_calls or []:
                content = price_of(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    [row] = shop.finish(session)
    assert shop.shown(row).startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    greeting, called, answered = shop.said(row)
    assert greeting == "".join(pieces) + "<|im_end|>"
    assert '"sofa"' in called
    assert answered == f"{reply.content}<|im_end|>"
    assert PRICES["sofa"] in answered


def test_without_tools_text_is_streamed_as_it_is_sampled(shop: Shop) -> None:
    session = shop.open()
    with openai.OpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        stream = client.chat.completions.create(
            model="clerk", messages=ask("Hello!"), stream=True, temperature=1.0
        )
        deltas = [choice.delta.content for chunk in stream for choice in chunk.choices]
    pieces = [piece for piece in deltas if piece]
    [row] = shop.finish(session)
    assert len(pieces) > 5
    assert shop.said(row) == ["".join(pieces) + "<|im_end|>"]
    # Words were drawn, so that equal logprobs say something.
    assert row.behavior_logprobs.min() < -0.1


# ------------------------------------------------------------------ OpenAI: Responses


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_call_tools_and_answer(shop: Shop, stream: bool) -> None:
    session = shop.open()
    items: list[Any] = ask("How much are the rug and the sofa?")
    asked: dict[str, Any] = {"model": "clerk", "instructions": "Be brief.", "tools": [RESPONSES_TOOL]}
    with openai.OpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        for _ in range(2):
            if stream:
                with client.responses.stream(input=items, **asked) as live:
                    reply: Any = live.get_final_response()
            else:
                reply = client.responses.create(input=items, store=False, **asked)
            items += reply.output
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": price_of(item.arguments)}
                for item in reply.output
                if item.type == "function_call"
            ]
    assert reply.output_text
    [row] = shop.finish(session)
    shop.check_tool_use(row, "rug", "sofa")
    assert shop.said(row)[1] == f"{reply.output_text}<|im_end|>"


# ------------------------------------------------------------------ Anthropic


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_calls_tools_and_answers(shop: Shop, stream: bool) -> None:
    session = shop.open()
    messages = ask("How much are the lamp and the rug?")
    asked: dict[str, Any] = {"model": "clerk", "max_tokens": 128, "system": "Be brief."}
    asked["tools"] = [ANTHROPIC_TOOL]
    url = f"{session.base_url}/agents/clerk"
    with anthropic.Anthropic(base_url=url, api_key=session.api_key) as client:
        counted = client.messages.count_tokens(
            model="clerk", messages=messages, system="Be brief.", tools=[ANTHROPIC_TOOL]
        )
        for _ in range(2):
            if stream:
                with client.messages.stream(messages=messages, **asked) as live:
                    reply: Any = live.get_final_message()
            else:
                reply = client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": PRICES[block.input["item"]]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    assert reply.stop_reason == "end_turn"
    [row] = shop.finish(session)
    shop.check_tool_use(row, "lamp", "rug")
    assert counted.input_tokens == len(row.prompt_ids)


async def test_anthropic_s_own_tool_runner_needs_nothing_else(shop: Shop) -> None:
    @anthropic.beta_async_tool
    async def price(item: str) -> str:
        """What an item costs."""
        return PRICES[item]

    session = shop.open()
    url = f"{session.base_url}/agents/clerk"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as client:
        messages = ask("What does the desk cost?")
        runner = client.beta.messages.tool_runner(
            model="clerk", max_tokens=128, tools=[price], messages=messages
        )
        last = await runner.until_done()
    assert last.stop_reason == "end_turn"
    [row] = await asyncio.to_thread(shop.finish, session)
    shop.check_tool_use(row, "desk")


# ------------------------------------------------------------------ clients that lose patience


def num_given_up(harness: GatewayHarness) -> float:
    """Calls whose client hung up."""
    lines = harness.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "requests_total{" in line and '"499"' in line)


def ask_impatiently(sdk: str, session: LiveSession) -> str:
    """What the SDK returns in the end. It waits for three seconds at most, up to nine times."""
    settings: Any = {"api_key": session.api_key, "timeout": 3.0, "max_retries": 8}
    if sdk == "anthropic":
        url = f"{session.base_url}/agents/clerk"
        with anthropic.Anthropic(base_url=url, **settings) as client:
            message = client.messages.create(model="clerk", max_tokens=64, messages=ask("Hello!"))
            return "".join(block.text for block in message.content if block.type == "text")
    with openai.OpenAI(base_url=openai_url(session), **settings) as other:
        if sdk == "responses":
            return other.responses.create(model="clerk", input="Hello!").output_text
        reply = other.chat.completions.create(model="clerk", messages=ask("Hello!"))
        return reply.choices[0].message.content or ""


@pytest.mark.parametrize("sdk", ["openai", "responses", "anthropic"])
def test_a_call_that_an_sdk_gave_up_and_sent_again_is_one_turn(shop: Shop, sdk: str) -> None:
    harness, before = shop.harness, num_given_up(shop.harness)
    session = shop.open()
    harness.renew("shop", status="starting")
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask_impatiently, sdk, session)
            deadline = time.monotonic() + 30
            while num_given_up(harness) == before:
                assert time.monotonic() < deadline, "the client never gave up"
                time.sleep(0.05)
            harness.renew("shop")
            text = asked.result(60)
    finally:
        harness.renew("shop")
    [row] = shop.finish(session)
    assert shop.said(row) == [f"{text}<|im_end|>"]


def num_running(shop: Shop) -> float:
    """Generations on the server."""
    [replica] = shop.harness.defaults["shop"]["replicas"]
    lines = shop.harness.http.get(f"{replica['url']}/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{"))


# Two calls are fifty tokens: whoever waits for less than 30 ms gives up while the server samples.
HASTY_S = 0.03
TWO_CALLS: Any = {
    "model": "clerk",
    "messages": ask("How much are the lamp and the desk?"),
    "tools": [CHAT_TOOL],
}


def test_an_sdk_whose_patience_is_shorter_than_the_answer_gets_it_when_it_comes_back(shop: Shop) -> None:
    session, before = shop.open(), num_given_up(shop.harness)
    settings: Any = {"api_key": session.api_key, "timeout": HASTY_S, "max_retries": 8}
    with openai.OpenAI(base_url=openai_url(session), **settings) as client:
        reply = client.chat.completions.create(**TWO_CALLS)
    assert num_given_up(shop.harness) > before
    [row] = shop.finish(session)
    assert len(row.turns) == 1
    assert reply.usage is not None
    assert row.response_mask.sum() == reply.usage.completion_tokens


def test_a_generation_that_nobody_comes_back_for_is_stopped_and_leaves_nothing(shop: Shop) -> None:
    session = shop.open()
    url, key = openai_url(session), {"Authorization": f"Bearer {session.api_key}"}
    with httpx.Client(timeout=HASTY_S) as client, pytest.raises(httpx.TimeoutException):
        client.post(f"{url}/chat/completions", json=TWO_CALLS, headers=key)
    deadline = time.monotonic() + 10
    while num_running(shop):
        assert time.monotonic() < deadline, "a generation goes on for nobody"
        time.sleep(0.05)
    with openai.OpenAI(base_url=url, api_key=session.api_key) as patient:
        reply = patient.chat.completions.create(**TWO_CALLS)
    [row] = shop.finish(session)
    assert len(row.turns) == 1
    assert reply.usage is not None
    assert row.response_mask.sum() == reply.usage.completion_tokens


async def test_one_call_sent_twice_at_once_is_one_generation(shop: Shop) -> None:
    session = shop.open()
    async with openai.AsyncOpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        first, second = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="clerk", messages=ask("Hello!"), extra_headers={"Idempotency-Key": "hello-1"}
                )
                for _ in range(2)
            )
        )
    assert first.id == second.id
    [row] = await asyncio.to_thread(shop.finish, session)
    assert shop.said(row) == [f"{first.choices[0].message.content}<|im_end|>"]
