"""OpenAI's Responses API through its own SDK: stateless, with function tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.routes.openai_items import parse_responses_request, to_call
from tests.gateway_harness import GatewayHarness, LiveSession
from tests.tool_gateway import SAMPLED_CALL
from tests.tool_use import SEARCH, calling, result, user
from tests.tool_use import call as chat_call

TOOL: Any = {"type": "function", **SEARCH["function"]}


def client_of(session: LiveSession) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)


def test_the_sdk_works_unchanged_and_its_output_echoed_continues_the_chain(tools: GatewayHarness) -> None:
    session = tools.open_session()
    with client_of(session) as client:
        first = client.responses.create(
            model="m", instructions="be brief", input="hello", max_output_tokens=9
        )
        assert (first.output_text, first.status, first.model) == ("hello", "completed", "m")
        assert first.usage is not None
        assert first.usage.input_tokens == len(tools.server.requests[0]["token_ids"])
        assert first.usage.output_tokens == len(tools.server.answer_ids("hello"))
        assert (first.model_extra or {})["policy_version"] == 0
        follow: Any = [{"role": "user", "content": "hello"}, *first.output, {"role": "user", "content": "on"}]
        client.responses.create(model="m", instructions="be brief", input=follow, store=False)
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}


async def test_the_async_sdk_streams_real_deltas(tools: GatewayHarness) -> None:
    tools.server.answers = ["naïve 🙂 indeed"]
    session = tools.open_session()
    url = f"{session.base_url}/agents/planner/v1"
    async with (
        openai.AsyncOpenAI(base_url=url, api_key=session.api_key) as client,
        client.responses.stream(model="m", input="hello") as stream,
    ):
        events = [event async for event in stream]
        whole = await stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text == "naïve 🙂 indeed"
    assert len(pieces) > 2
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    session.finalize(1.0)
    [row] = tools.rows("plan")
    assert row.response_ids.tolist() == tools.server.answer_ids("naïve 🙂 indeed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_is_one_chain(tools: GatewayHarness, stream: bool) -> None:
    tools.server.answers = [f"Let me look.\n{SAMPLED_CALL}", "There is tea."]
    session = tools.open_session()
    items: list[Any] = [user("what is there?")]
    with client_of(session) as client:
        if stream:
            with client.responses.stream(model="m", input=items, tools=[TOOL]) as live:
                first: Any = live.get_final_response()
        else:
            first = client.responses.create(model="m", input=items, tools=[TOOL])
        text, made = first.output
        assert text.type == "message"
        assert (made.type, made.name, json.loads(made.arguments)) == (
            "function_call",
            "search",
            {"query": "tea"},
        )
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        items += [{"type": "function_call_output", "call_id": made.call_id, "output": "tea"}]
        for item in items:
            for part in item.get("content", ()) if isinstance(item.get("content"), list) else ():
                part.pop("parsed", None)
        second = client.responses.create(model="m", input=items, tools=[TOOL])
        assert second.output_text == "There is tea."
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = tools.rows("plan")
    assert len(row.turns) == 2


def test_an_answer_cut_by_length_is_incomplete(tools: GatewayHarness) -> None:
    tools.server.answers = ["a long answer"]
    session = tools.open_session()
    with client_of(session) as client:
        whole = client.responses.create(model="m", input="hello", max_output_tokens=2)
        assert whole.incomplete_details is not None
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_that_can_not_go_on_is_an_error_of_the_sdk(tools: GatewayHarness) -> None:
    tools.server.answers = ["a long answer"]
    tools.server.break_after, tools.server.fail_after_break = 3, [422]
    session = tools.open_session()
    with client_of(session) as client, pytest.raises(openai.APIError, match="refused with 422"):
        for _ in client.responses.create(model="m", input="hello", stream=True):
            pass
    assert session.finalize()["status"] == "finalized"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": "json"}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"top_p": 0.5}, "top_p"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ],
)
def test_what_can_not_be_honoured_is_refused(
    tools: GatewayHarness, fields: dict[str, Any], param: str
) -> None:
    answer = tools.open_session().post("agents/planner/v1/responses", {"input": "hello"} | fields)
    assert answer.status_code == 400
    assert param in (answer.json()["error"]["param"], answer.json()["error"]["message"].split()[0])


def test_what_asks_for_nothing_is_taken(tools: GatewayHarness) -> None:
    neutral = {
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "store": True,
        "metadata": {"trace": "1"},
        "max_tool_calls": None,
    }
    answer = tools.open_session().post("agents/planner/v1/responses", {"input": "hello"} | neutral)
    assert answer.status_code == 200


def test_items_of_one_answer_are_one_message() -> None:
    import msgspec

    items = [
        {"type": "message", "role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "why"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look."}],
        },
        {"type": "function_call", "call_id": "a", "name": "search", "arguments": '{"query": "tea"}'},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "tea"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    body = msgspec.json.encode({"input": items, "instructions": "do"})
    messages = to_call("a", parse_responses_request(body)).messages
    assert [m["role"] for m in messages] == ["system", "developer", "user", "assistant", "tool", "tool"]
    assert messages[3]["content"] == "Let me look."
    assert messages[3]["reasoning_content"] == "why"
    assert [c["function"] for c in messages[3]["tool_calls"]] == [
        {"name": "search", "arguments": {"query": "tea"}},
        {"name": "clock", "arguments": {}},
    ]


def test_chat_completions_and_responses_go_on_from_each_other(tools: GatewayHarness) -> None:
    tools.server.answers = [SAMPLED_CALL, "There is tea."]
    session = tools.open_session()
    with client_of(session) as client:
        client.responses.create(model="m", input="x", tools=[TOOL])
    session.chat([user("x"), calling(chat_call("search", '{"query":"tea"}')), result("tea")], tools=[SEARCH])
    assert session.finalize()["num_rows"] == {"plan": 1}
