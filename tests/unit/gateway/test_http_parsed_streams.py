"""Streams of answers that the server's parsers have to read: real deltas of reasoning and text up to where a
tool call begins, in every API, and the same record as without streaming."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from model_runtime.config import StoreConfig
from model_runtime.store import open_store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway
from tests.tool_gateway import SAMPLED_CALL, num_breaks, prepare, tool_config
from tests.tool_use import SEARCH, result, user

THOUGHT = "let me think about the menu"
TEXT = "There is green tea, and naïve 🙂 coffee"
SAMPLED = f"<think>{THOUGHT}</think>{TEXT}{SAMPLED_CALL}"
HELLO: Any = [user("x")]
TOOLS: Any = [SEARCH]
RESPONSES_TOOL: Any = {"type": "function", **SEARCH["function"]}
MESSAGES_TOOL: Any = {"name": "search", "input_schema": SEARCH["function"]["parameters"]}


@pytest.fixture(scope="module")
def thinking_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("thinking"))))
    with live_gateway(store, config=tool_config(reasoning_parser="qwen3")) as harness:
        yield harness


@pytest.fixture
def thinking(thinking_gateway: GatewayHarness) -> GatewayHarness:
    harness = prepare(thinking_gateway)
    harness.server.answers = [SAMPLED, f"<think>so</think>{TEXT}"]
    harness.server.token_delay_s = 0.004
    return harness


def client_of(session: LiveSession) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [event["choices"][0] for event in events if event.get("choices")]


def test_reasoning_and_text_come_while_the_answer_is_sampled(thinking: GatewayHarness) -> None:
    session = thinking.open_session()
    came: list[tuple[str, float]] = []
    reasoning, text, calls = "", "", []
    with client_of(session) as client:
        for chunk in client.chat.completions.create(
            model="m",
            messages=HELLO,
            tools=TOOLS,
            stream=True,
        ):
            for choice in chunk.choices:
                thought = getattr(choice.delta, "reasoning_content", None) or ""
                content = choice.delta.content or ""
                assert "<tool_call>" not in content
                assert not (thought and text), "a thought after the text began"
                reasoning, text = reasoning + thought, text + content
                calls += choice.delta.tool_calls or []
                came += [(kind, time.monotonic()) for kind in ("r" * bool(thought) + "t" * bool(content))]
    assert (reasoning, text) == (THOUGHT, TEXT)
    assert json.loads(calls[0].function.arguments) == {"query": "tea"}
    assert [kind for kind, _ in came].count("r") > 2
    assert [kind for kind, _ in came].count("t") > 2
    # Text was there before the call, which takes the longest to sample, was.
    num_call_tokens = len(thinking.server.answer_ids(SAMPLED_CALL))
    texts = [when for kind, when in came if kind == "t"]
    assert time.monotonic() - texts[0] > num_call_tokens * thinking.server.token_delay_s / 2


def test_the_parser_is_asked_about_growing_pieces_of_all_tokens(thinking: GatewayHarness) -> None:
    thinking.server.answers = ["word " * 40]
    session = thinking.open_session()
    session.chat([user("x")], tools=[SEARCH], stream=True, max_tokens=256)
    lengths = [len(p["generate_chunk"]["choices"][0]["token_ids"]) for p in thinking.server.pieces]
    before = [len((p["stream_state"] or {}).get("output_token_ids", ())) for p in thinking.server.pieces]
    assert all(8 * new >= seen for new, seen in zip(lengths, before, strict=True))
    assert before == [sum(lengths[:i]) for i in range(len(lengths))]
    assert len(lengths) < len(thinking.server.answer_ids("word " * 40)) / 2


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_every_api_streams_reasoning_apart_and_what_was_heard_goes_on(
    thinking: GatewayHarness, api: str
) -> None:
    session = thinking.open_session()
    ask = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}[api]
    kinds, history = ask(session, [user("x")])
    assert kinds == ["reasoning", "text", "call"]
    ask(session, history)
    before = num_breaks(thinking)
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    assert num_breaks(thinking) == before
    [row] = thinking.rows("plan")
    mask = row.response_mask.astype(bool)
    own = [i for text in thinking.server.answers for i in thinking.server.answer_ids(text)]
    assert row.response_ids[mask].tolist() == own


def ask_chat(session: LiveSession, messages: list[Any]) -> tuple[list[str], list[Any]]:
    text = session.chat(messages, tools=[SEARCH], stream=True).text
    kinds: list[str] = []
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for choice in chunks_of(text):
        delta = choice["delta"]
        for key, kind in (("reasoning_content", "reasoning"), ("content", "text"), ("tool_calls", "call")):
            if delta.get(key):
                message[key] += delta[key]
                kinds += [kind] if kinds[-1:] != [kind] else []
    calls = message["tool_calls"]
    return kinds, [*messages, message, *(result("tea", call["id"]) for call in calls)]


def ask_responses(session: LiveSession, items: list[Any]) -> tuple[list[str], list[Any]]:
    names = {"response.reasoning_text.delta": "reasoning", "response.output_text.delta": "text"}
    names["response.function_call_arguments.delta"] = "call"
    kinds: list[str] = []
    with client_of(session) as client:
        stream = client.responses.create(model="m", input=items, tools=[RESPONSES_TOOL], stream=True)
        events = list(stream)
    for event in events:
        kind = names.get(event.type)
        if kind and kinds[-1:] != [kind]:
            kinds.append(kind)
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.response.output]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    output = [item.model_dump(exclude_none=True) for item in last.response.output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "tea"}
        for item in output
        if item["type"] == "function_call"
    ]
    return kinds, [*items, *output, *results]


def ask_messages(session: LiveSession, messages: list[Any]) -> tuple[list[str], list[Any]]:
    url = f"{session.base_url}/agents/planner"
    names = {"thinking": "reasoning", "text": "text", "tool_use": "call"}
    with (
        anthropic.Anthropic(base_url=url, api_key=session.api_key) as client,
        client.messages.stream(model="m", max_tokens=256, messages=messages, tools=[MESSAGES_TOOL]) as stream,
    ):
        events = list(stream)
        message = stream.get_final_message()
    kinds = [names[e.content_block.type] for e in events if e.type == "content_block_start"]
    assert sum(e.type == "content_block_delta" for e in events) > 6
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "tea"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    turns = [{"role": "user", "content": results}] if results else []
    return kinds, [*messages, {"role": "assistant", "content": blocks}, *turns]


def test_a_call_that_turns_out_to_be_none_is_text_after_what_was_heard(thinking: GatewayHarness) -> None:
    broken = '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>'
    thinking.server.answers = [f"<think>why</think>Look: {broken}", "ok"]
    session = thinking.open_session()
    _, history = ask_chat(session, [user("x")])
    message = history[-1]
    assert (message["reasoning_content"], message["content"]) == ("why", f"Look: {broken}")
    assert not message["tool_calls"]
    plain = session.chat([user("y")], tools=[SEARCH]).json()["choices"][0]["message"]
    assert plain["content"] == "ok"
    assert session.finalize()["num_rows"] == {"plan": 2}


def test_a_plain_call_keeps_reasoning_apart_of_a_call_that_is_none(thinking: GatewayHarness) -> None:
    broken = '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>'
    thinking.server.answers = [f"<think>why</think>Look: {broken}"]
    session = thinking.open_session()
    message = session.chat([user("x")], tools=[SEARCH]).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", f"Look: {broken}")


def test_logprobs_of_every_token_come_with_the_deltas(thinking: GatewayHarness) -> None:
    session = thinking.open_session()
    choices = chunks_of(session.chat([user("x")], tools=[SEARCH], stream=True, logprobs=True).text)
    found = [entry["logprob"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert found == thinking.server.logprobs(len(thinking.server.answer_ids(SAMPLED)))
    assert sum(c["logprobs"] is not None for c in choices) > 3


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_server_that_can_not_parse_pieces_delays_the_answer_and_spoils_nothing(
    thinking: GatewayHarness, status: int
) -> None:
    thinking.server.fail_pieces = status
    session = thinking.open_session()
    kinds, history = ask_chat(session, [user("x")])
    assert kinds == ["reasoning", "text", "call"]
    assert history[1]["content"] == TEXT
    assert len(thinking.server.pieces) == 1
    assert session.finalize(1.0)["status"] == "finalized"


def test_a_parsed_stream_that_breaks_before_anything_was_heard_is_repeated_unseen(
    thinking: GatewayHarness,
) -> None:
    thinking.server.answers = [f"{SAMPLED_CALL}"]
    thinking.server.fail_next = ["drop"]
    session = thinking.open_session()
    kinds, _ = ask_chat(session, [user("x")])
    assert kinds == ["call"]
    assert session.finalize(1.0)["status"] == "finalized"


def test_a_parsed_stream_that_breaks_after_something_was_heard_goes_on(thinking: GatewayHarness) -> None:
    server = thinking.server
    whole = server.answer_ids(SAMPLED)
    server.answer_of = lambda body: whole[len(body["token_ids"]) - len(server.requests[0]["token_ids"]) :]
    server.break_after = len(server.answer_ids(f"<think>{THOUGHT}</think>There is"))
    session = thinking.open_session()
    kinds, history = ask_chat(session, [user("x")])
    assert kinds == ["reasoning", "text", "call"]
    assert history[1]["content"] == TEXT
    assert len(server.requests) == 2
    assert session.finalize(1.0)["status"] == "finalized"
    [row] = thinking.rows("plan")
    assert row.response_ids.tolist() == whole
