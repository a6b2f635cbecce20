"""Anthropic's Messages API through its own SDK: the record is that of the same call by OpenAI's."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from gateway.routes.anthropic_messages import parse_messages_request, to_call
from model_runtime.errors import InvalidRequestError
from tests.gateway_harness import GatewayHarness, LiveSession
from tests.tool_gateway import SAMPLED_CALL, prepare
from tests.tool_use import SEARCH, calling, result, user
from tests.tool_use import call as openai_call

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "name": "search",
    "description": SEARCH["function"]["description"],
    "input_schema": SEARCH["function"]["parameters"],
}


def client_of(session: LiveSession, agent: str = "planner") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{session.base_url}/agents/{agent}", api_key=session.api_key)


# ------------------------------------------------------------------ Anthropic's SDK, unchanged


def test_the_sdk_works_unchanged(tools: GatewayHarness) -> None:
    session = tools.open_session()
    with client_of(session) as client:
        message = client.messages.create(model="m", max_tokens=9, system="be brief", messages=HELLO)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == "hello"  # type: ignore[union-attr]
        assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "m")
        assert message.usage.input_tokens == len(tools.server.requests[0]["token_ids"])
        assert message.usage.output_tokens == len(tools.server.answer_ids("hello"))
        assert (message.model_extra or {})["policy_version"] == 0
        # The SDK's own content, echoed back, continues the chain.
        follow: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
        client.messages.create(model="m", max_tokens=9, system="be brief", messages=follow)
    shown = tools.server.tokenizer.decode(tools.server.requests[0]["token_ids"], skip_special_tokens=False)
    assert shown.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>")
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}


async def test_the_async_sdk_streams(tools: GatewayHarness) -> None:
    tools.server.answers = ["naïve 🙂 indeed"]
    session = tools.open_session()
    url = f"{session.base_url}/agents/planner"
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as client,
        client.messages.stream(model="m", max_tokens=64, messages=HELLO) as stream,
    ):
        pieces = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(pieces) == "naïve 🙂 indeed"
    assert len(pieces) > 2
    assert message.content[0].text == "naïve 🙂 indeed"  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(tools.server.answer_ids("naïve 🙂 indeed"))
    session.finalize(1.0)
    [row] = tools.rows("plan")
    assert row.response_ids.tolist() == tools.server.answer_ids("naïve 🙂 indeed")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_is_one_chain(tools: GatewayHarness, stream: bool) -> None:
    tools.server.answers = [f"Let me look.\n{SAMPLED_CALL}", "There is tea."]
    session = tools.open_session()
    messages: list[Any] = [user("what is there?")]
    with client_of(session) as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": [TOOL]}
        if stream:
            with client.messages.stream(messages=messages, **asked) as live:
                first = live.get_final_message()
        else:
            first = client.messages.create(messages=messages, **asked)
        assert first.stop_reason == "tool_use"
        text, made = first.content
        assert text.type == "text"
        assert made.type == "tool_use"
        assert (made.name, made.input) == ("search", {"query": "tea"})
        found = {"type": "tool_result", "tool_use_id": made.id, "content": [{"type": "text", "text": "tea"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [found]}]
        second = client.messages.create(messages=messages, **asked)
        assert second.stop_reason == "end_turn"
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = tools.rows("plan")
    assert len(row.turns) == 2


async def test_the_sdks_own_tool_runner_leaves_one_chain(tools: GatewayHarness) -> None:
    """It would rather have the server keep the conversation, and is told that this one does not."""
    tools.server.answers = [SAMPLED_CALL, "There is tea."]
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def search(query: str) -> str:
        """Search the menu."""
        asked.append(query)
        return "tea"

    session = tools.open_session()
    url = f"{session.base_url}/agents/planner"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key) as client:
        runner = client.beta.messages.tool_runner(model="m", max_tokens=200, tools=[search], messages=HELLO)
        last = await runner.until_done()
    assert asked == ["tea"]
    assert last.content[0].text == "There is tea."  # type: ignore[union-attr]
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = tools.rows("plan")
    assert len(row.turns) == 2


def test_both_apis_leave_the_same_record(tools: GatewayHarness) -> None:
    rows = []
    for api in ("openai", "anthropic"):
        prepare(tools)
        tools.server.answers = [SAMPLED_CALL, "There is tea."]
        session = tools.open_session()
        if api == "openai":
            echoed = calling(openai_call("search", '{"query": "tea"}'))
            for messages in ([user("x")], [user("x"), echoed, result("tea")]):
                session.chat(messages, tools=[SEARCH])
        else:
            use = {"type": "tool_use", "id": "i", "name": "search", "input": {"query": "tea"}}
            found = {"type": "tool_result", "tool_use_id": "i", "content": "tea"}
            longer = [
                user("x"),
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [found]},
            ]
            for messages in ([user("x")], longer):
                body = {"messages": messages, "tools": [TOOL], "max_tokens": 200}
                assert session.post("agents/planner/v1/messages", body).status_code == 200
        session.finalize(1.0)
        [row] = tools.rows("plan")
        rows.append(row)
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist()
    assert rows[0].response_ids.tolist() == rows[1].response_ids.tolist()
    assert rows[0].response_mask.tolist() == rows[1].response_mask.tolist()


def test_tokens_are_counted_as_the_call_would_have_them(tools: GatewayHarness) -> None:
    session = tools.open_session()
    with client_of(session) as client:
        counted = client.messages.count_tokens(model="m", system="be brief", messages=HELLO, tools=[TOOL])
        assert tools.server.requests == []
        client.messages.create(model="m", max_tokens=9, system="be brief", messages=HELLO, tools=[TOOL])
    assert counted.input_tokens == len(tools.server.requests[0]["token_ids"])


# ------------------------------------------------------------------ errors


def test_errors_have_anthropics_shape(tools: GatewayHarness) -> None:
    session = tools.open_session()
    with client_of(session) as client, pytest.raises(anthropic.BadRequestError, match="top_p") as refused:
        client.messages.create(model="m", max_tokens=9, messages=HELLO, extra_body={"top_p": 0.5})
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with client_of(session, agent="nobody") as client, pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="m", max_tokens=9, messages=HELLO)
    url = f"{session.base_url}/agents/planner"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.count_tokens(model="m", messages=HELLO)


def test_a_stream_that_can_not_go_on_is_an_error_of_the_sdk(tools: GatewayHarness) -> None:
    tools.server.answers = ["a long answer"]
    tools.server.break_after, tools.server.fail_after_break = 3, [422]
    session = tools.open_session()
    with (
        client_of(session) as client,
        client.messages.stream(model="m", max_tokens=64, messages=HELLO) as stream,
        pytest.raises(anthropic.APIStatusError, match="refused with 422"),
    ):
        stream.get_final_message()
    assert session.finalize()["status"] == "finalized"


BLOCK = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": HELLO, "made_up": 1},
        {"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "any"}},
        {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "search"}},
        {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": HELLO, "max_tokens": 0},
        {"messages": HELLO, "stop_sequences": [""]},
    ],
)
def test_what_can_not_be_honoured_is_a_400(tools: GatewayHarness, body: Any) -> None:
    session = tools.open_session()
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    path = f"/sessions/{session.session_id}/agents/planner/v1/messages"
    answer = tools.http.post(path, headers={"x-api-key": session.api_key}, **content)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"


# ------------------------------------------------------------------ how messages are read


def read(**fields: Any) -> Any:
    import msgspec

    return to_call("a", parse_messages_request(msgspec.json.encode({"messages": HELLO} | fields)))


def test_blocks_keep_their_order_and_results_are_messages_of_their_own() -> None:
    blocks = [
        BLOCK,
        {"type": "tool_result", "tool_use_id": "i", "content": [BLOCK, BLOCK]},
        {"type": "tool_result", "tool_use_id": "j", "is_error": True},
        {"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "z"},
    ]
    assert read(messages=[{"role": "user", "content": blocks}]).messages == [
        {"role": "user", "content": "x"},
        {"role": "tool", "content": "x\nx", "tool_call_id": "i"},
        {"role": "tool", "content": "", "tool_call_id": "j"},
        {"role": "user", "content": "y\nz"},
    ]


def test_thoughts_and_calls_of_the_assistant_are_read() -> None:
    content = [
        {"type": "thinking", "thinking": "why", "signature": ""},
        BLOCK,
        {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
    ]
    [message] = read(messages=[{"role": "assistant", "content": content}]).messages
    assert (message["content"], message["reasoning_content"]) == ("x", "why")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_the_billing_header_is_no_part_of_the_system_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"}
    assert read(system=[header, BLOCK]).messages[0] == {"role": "system", "content": "x"}
    assert read(system=[header]).messages == HELLO


def test_a_schema_is_passed_on_as_it_is() -> None:
    [tool] = read(tools=[TOOL]).tools
    assert tool == SEARCH
    assert read(tools=[TOOL], tool_choice={"type": "none"}).tools == ()
    with pytest.raises(InvalidRequestError):
        read(tools=[{"name": ""}])
