"""Tools: offered through the template, calls read by the server's parser, conversations kept exact."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.codec import ChatCodec, TextMark
from gateway.conversation import ConversationKey
from gateway.routes.openai_messages import normal_message, offered_tools
from model_runtime.config import StoreConfig
from model_runtime.store import open_store
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import GatewayHarness, live_gateway
from tests.tool_gateway import COMPACT_CALL, SAMPLED_CALL, num_breaks, prepare, tool_config
from tests.tool_use import CLOCK, CONVERSATIONS, SEARCH, TOOL_TEMPLATE, call, calling, result, user

# ------------------------------------------------------------------ through OpenAI's SDK


@pytest.mark.parametrize("sampled", [SAMPLED_CALL, COMPACT_CALL, f"Let me look.\n{SAMPLED_CALL}"])
def test_a_tool_conversation_is_one_chain_of_the_models_own_tokens(
    tools: GatewayHarness, sampled: str
) -> None:
    tools.server.answers = [sampled, "There is tea."]
    before = num_breaks(tools)
    session = tools.open_session()
    url = f"{session.base_url}/agents/planner/v1"
    with openai.OpenAI(base_url=url, api_key=session.api_key) as client:
        messages: list[Any] = [user("what is there?")]
        first = client.chat.completions.create(model="m", messages=messages, tools=[SEARCH])  # type: ignore[list-item]
        [choice] = first.choices
        assert choice.finish_reason == "tool_calls"
        [made] = choice.message.tool_calls or []
        assert made.type == "function"
        assert (made.function.name, json.loads(made.function.arguments)) == ("search", {"query": "tea"})
        messages += [choice.message, result("tea", made.id)]
        second = client.chat.completions.create(model="m", messages=messages, tools=[SEARCH])  # type: ignore[list-item]
        assert second.choices[0].message.content == "There is tea."
        assert not second.choices[0].message.tool_calls
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    assert num_breaks(tools) == before
    [row] = tools.rows("plan")
    mask = row.response_mask.astype(bool)
    own = [*tools.server.answer_ids(sampled), *tools.server.answer_ids("There is tea.")]
    assert row.response_ids[mask].tolist() == own
    given = tools.server.requests[1]["token_ids"]
    assert [*row.prompt_ids.tolist(), *row.response_ids.tolist()][: len(given)] == given
    context = row.response_ids[~mask].tolist()
    text = tools.server.tokenizer.decode(context, skip_special_tokens=False)
    assert text == (
        "\n<|im_start|>user\n<tool_response>\ntea\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    shown = tools.server.tokenizer.decode(row.prompt_ids.tolist(), skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "search", "description": "Search the café' in shown


def test_a_streamed_tool_call_comes_as_the_sdk_expects_it(tools: GatewayHarness) -> None:
    tools.server.answers = [f"Let me look.{SAMPLED_CALL}"]
    session = tools.open_session()
    url = f"{session.base_url}/agents/planner/v1"
    with (
        openai.OpenAI(base_url=url, api_key=session.api_key) as client,
        client.chat.completions.stream(model="m", messages=[user("x")], tools=[SEARCH]) as stream,  # type: ignore[list-item]
    ):
        whole = stream.get_final_completion()
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [made] = choice.message.tool_calls or []
    assert (made.function.name, json.loads(made.function.arguments)) == ("search", {"query": "tea"})


def test_new_ids_and_other_json_of_the_same_call_continue_the_chain(tools: GatewayHarness) -> None:
    tools.server.answers = [SAMPLED_CALL, "There is tea."]
    session = tools.open_session()
    session.chat([user("x")], tools=[SEARCH])
    echoed = calling(call("search", '{ "query":\n"tea" }', "made-up"))
    session.chat([user("x"), echoed, result("tea", "made-up")], tools=[SEARCH])
    assert session.finalize()["num_rows"] == {"plan": 1}


@pytest.mark.parametrize(
    ("echoed", "offered"),
    [
        (calling(call("search", '{"query": "coffee"}')), [SEARCH]),
        (calling(call("search", '{"query": "tea"}'), call("clock", "{}")), [SEARCH]),
        (calling(call("search", '{"query": "tea"}')), [SEARCH, CLOCK]),
        (calling(call("search", '{"query": "tea"}')), []),
        (calling(call("search", '{"query": "tea"')), [SEARCH]),
    ],
)
def test_another_call_or_other_tools_are_another_chain(
    tools: GatewayHarness, echoed: dict[str, Any], offered: list[Any]
) -> None:
    tools.server.answers = [SAMPLED_CALL, "There is tea."]
    session = tools.open_session()
    session.chat([user("x")], tools=[SEARCH])
    assert session.chat([user("x"), echoed, result("tea")], tools=offered).status_code == 200
    assert session.finalize()["num_rows"] == {"plan": 2}


@pytest.mark.parametrize(
    "sampled",
    [
        '<tool_call>\n{"name": "search", "arguments": {"query": \n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>',
        "no call at all",
    ],
)
def test_what_is_no_call_is_handed_over_as_text(tools: GatewayHarness, sampled: str) -> None:
    tools.server.answers = [sampled, "ok"]
    session = tools.open_session()
    choice = session.chat([user("x")], tools=[SEARCH]).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": sampled, "refusal": None}
    assert choice["finish_reason"] == "stop"
    session.chat([user("x"), {"role": "assistant", "content": sampled}, user("y")], tools=[SEARCH])
    assert session.finalize()["num_rows"] == {"plan": 1}


def test_an_answer_the_server_refuses_to_parse_is_text_and_a_server_without_parser_is_a_failure(
    tools: GatewayHarness,
) -> None:
    session = tools.open_session()
    tools.server.fail_derender = 400
    assert session.chat([user("x")], tools=[SEARCH]).json()["choices"][0]["message"]["content"] == "hello"
    tools.server.fail_derender = 404
    assert session.chat([user("y")], tools=[SEARCH]).status_code == 503
    assert session.finalize()["status"] == "infra"


def test_tool_choice_none_shows_no_tools_and_asks_no_parser(tools: GatewayHarness) -> None:
    tools.server.answers = [SAMPLED_CALL]
    session = tools.open_session()
    choice = session.chat([user("x")], tools=[SEARCH], tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == SAMPLED_CALL
    assert tools.server.derendered == []
    assert "<tools>" not in tools.server.tokenizer.decode(tools.server.requests[0]["token_ids"])


def test_a_plain_call_asks_no_parser(tools: GatewayHarness) -> None:
    tools.open_session().chat([user("x")])
    assert tools.server.derendered == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_can_not_be_honoured_is_refused(
    tools: GatewayHarness, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [user("x")], "tools": [SEARCH]} | fields
    answer = tools.open_session().post("agents/planner/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_a_parser_takes_no_tools(tools: GatewayHarness) -> None:
    answer = tools.open_session().chat([user("x")], agent="searcher", tools=[SEARCH])
    assert answer.status_code == 400
    assert "rollout.tool_call_parser" in answer.json()["error"]["message"]


def test_reasoning_is_kept_apart_and_goes_on_where_the_template_keeps_it(tmp_path: Any) -> None:
    sampled = f"<think>\nwhy\n</think>\n\n{SAMPLED_CALL}"
    store = open_store(StoreConfig(url=str(tmp_path)))
    with live_gateway(store, config=tool_config(reasoning_parser="qwen3")) as harness:
        prepare(harness)
        harness.server.answers = [sampled, "<think>\nso\n</think>\n\nThere is tea.", "ok"]
        session = harness.open_session()
        messages = [user("x")]
        message = session.chat(messages, tools=[SEARCH]).json()["choices"][0]["message"]
        assert message["reasoning_content"].strip() == "why"
        messages += [message, result("tea")]
        message = session.chat(messages, tools=[SEARCH]).json()["choices"][0]["message"]
        assert message["content"].strip() == "There is tea."
        # The template drops earlier thoughts once the user speaks again: counted, and a chain of its own.
        before = num_breaks(harness)
        session.chat([*messages, message, user("more")], tools=[SEARCH])
        assert num_breaks(harness) == before + 1
        assert session.finalize()["num_rows"] == {"plan": 2}
        assert sorted(len(row.turns) for row in harness.rows("plan")) == [1, 2]


# ------------------------------------------------------------------ keys and continuations


def key_of(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> bytes:
    normal = [normal_message(message, i) for i, message in enumerate(messages)]
    return ConversationKey(normal, offered_tools(tools, None)).digest(len(normal) - 1)


def test_ids_do_not_count_and_json_is_compared_by_value() -> None:
    one = [user("x"), calling(call("f", '{"a": 1, "b": [2]}', "i")), result("t", "i")]
    other = [user("x"), calling(call("f", '{"b":[2],"a":1}', "j")), result("t", "j")]
    assert key_of(one) == key_of(other)
    assert key_of([calling(call("f", "{}"))]) == key_of([calling(call("f", ""))])
    assert key_of([calling(call("f", "raw one"))]) != key_of([calling(call("f", "raw two"))])
    assert key_of(one) != key_of([user("x"), calling(call("g", '{"a": 1, "b": [2]}')), result("t")])
    assert key_of(one, [SEARCH]) != key_of(one)
    assert key_of(one, [SEARCH]) != key_of(one, [SEARCH, CLOCK])
    original = calling(call("f", '{"a": 1}'))
    before = json.dumps(original)
    normal_message(original, 0)
    assert json.dumps(original) == before


def test_a_call_is_not_spliced_when_the_template_writes_another_text() -> None:
    codec = ChatCodec(make_tokenizer_document(chat_template=TOOL_TEMPLATE))
    tools = offered_tools([SEARCH], None)
    opening = [user("x")]
    so_far = [
        normal_message(m, i) for i, m in enumerate([*opening, calling(call("search", '{"query":"tea"}'))])
    ]
    mark = codec.render_prompt(opening, tools).mark

    def splice(sampled: str, before: TextMark = mark) -> Any:
        ids = codec.encode(sampled + "<|im_end|>").tolist()
        new = [normal_message(result("tea"), 0)]
        return codec.render_continuation(
            so_far, new, last_id=ids[-1], before=before, tools=tools, sampled_ids=ids
        )

    assert splice(SAMPLED_CALL) is not None
    assert splice(COMPACT_CALL) is not None
    assert splice(f"a dropped thought {SAMPLED_CALL}") is None
    assert splice(SAMPLED_CALL, TextMark.of("another opening")) is None


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_tool_prompts_equal_transformers_apply_chat_template(messages: list[dict[str, Any]]) -> None:
    from transformers import PreTrainedTokenizerFast

    from tests.fakes import make_tokenizer

    reference = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    codec = ChatCodec(make_tokenizer_document(chat_template=TOOL_TEMPLATE))
    normal = [normal_message(message, i) for i, message in enumerate(messages)]
    if any(not isinstance(c["function"]["arguments"], dict) for m in normal for c in m.get("tool_calls", ())):
        pytest.skip("transformers shows templates such arguments as they are; vLLM does not")
    tools = list(offered_tools([SEARCH, CLOCK], None))
    expected: Any = reference.apply_chat_template(
        normal, tools=tools, chat_template=TOOL_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    assert codec.render_prompt(normal, tools).ids.tolist() == expected
