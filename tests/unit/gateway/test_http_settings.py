"""What a call may ask for beside its messages: several choices, stop strings, likeliest tokens, template
arguments, forced tool calls, settings off the policy. Honoured or refused, never ignored."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import RUN_ID, GatewayHarness, LiveSession, live_gateway
from tests.tool_gateway import SAMPLED_CALL, num_breaks, prepare, tool_config
from tests.tool_use import CLOCK, SEARCH, result, user
from tests.unit.gateway.test_http_parsed_streams import chunks_of

HELLO: Any = [user("x")]
RESPONSES_TOOL: Any = {"type": "function", **SEARCH["function"]}
NAMED: Any = {"type": "function", "function": {"name": "search"}}
# As Qwen3's: an argument of the request decides what the prompt says.
SWITCHED = (
    "{{ 'think\n' if enable_thinking is not defined or enable_thinking else 'answer\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def client_of(session: LiveSession) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key)


# ------------------------------------------------------------------ several choices


def test_each_of_n_choices_is_a_generation_and_a_chain_of_its_own(tools: GatewayHarness) -> None:
    tools.server.answers = ["one", "two", "three", "and so on"]
    session = tools.open_session()
    with client_of(session) as client:
        whole = client.chat.completions.create(model="m", messages=HELLO, n=3, seed=5)
        texts = [choice.message.content or "" for choice in whole.choices]
        assert sorted(texts) == ["one", "three", "two"]
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        given = tools.server.requests
        assert sorted(r["sampling_params"]["seed"] for r in given) == [5, 6, 7]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(given[0]["token_ids"])
        sampled = [len(tools.server.answer_ids(text)) for text in texts]
        assert whole.usage.completion_tokens == sum(sampled)
        # The best is taken up: its chain goes on, the others stay as they are.
        best: Any = [user("x"), {"role": "assistant", "content": "two"}, user("go on")]
        client.chat.completions.create(model="m", messages=best)
    for index, choice in enumerate(whole.choices):
        reward = {"reward": float(index), "request_id": (choice.model_extra or {})["request_id"]}
        assert session.post("reward", reward).status_code == 200
    assert session.finalize(1.0)["num_rows"] == {"plan": 3}
    rows = {
        tools.server.tokenizer.decode(r.response_ids[: r.turns[0].end].tolist()): r for r in rows_of(tools)
    }
    assert {text: len(row.turns) for text, row in rows.items()} == {"one": 1, "two": 2, "three": 1}
    for index, text in enumerate(texts):
        assert rows[text].turns[0].rewards == {"reward": float(index)}


def rows_of(harness: GatewayHarness) -> list[Any]:
    return harness.rows("plan")


def test_one_of_n_choices_goes_on_with_the_chain_and_the_others_repeat_its_prompt(
    tools: GatewayHarness,
) -> None:
    tools.server.answers = ["first", "a", "b"]
    session = tools.open_session()
    session.chat([user("x")])
    follow = [user("x"), {"role": "assistant", "content": "first"}, user("y")]
    assert session.chat(follow, n=2).status_code == 200
    assert session.finalize()["num_rows"] == {"plan": 2}
    assert sorted(len(row.turns) for row in rows_of(tools)) == [1, 2]
    one, other = (request["token_ids"] for request in tools.server.requests[1:])
    assert one == other


def test_choices_are_streamed_side_by_side(tools: GatewayHarness) -> None:
    tools.server.answers = ["the first answer", "the second one"]
    tools.server.token_delay_s = 0.005
    session = tools.open_session()
    answer = session.chat([user("x")], n=2, stream=True, stream_options={"include_usage": True})
    choices = chunks_of(answer.text)
    texts = ["", ""]
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert sorted(texts) == ["the first answer", "the second one"]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order), "the choices came one after the other"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len({event["id"] for event in events}) == 1
    sampled = sum(len(tools.server.answer_ids(text)) for text in texts)
    assert events[-1]["usage"]["completion_tokens"] == sampled
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_n_choices_is_recorded_whole_or_not_at_all(tools: GatewayHarness, stream: bool) -> None:
    session = tools.open_session()
    tools.server.fail_next = [400]
    answer = session.chat([user("x")], n=3, stream=stream)
    if answer.status_code == 200:  # another choice was heard of before
        assert stream
        assert '"code":"backend_rejected"' in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 400
    assert session.finalize()["num_rows"] == {}
    assert rows_of(tools) == []


def test_a_prompt_without_room_gives_n_empty_choices(tools: GatewayHarness) -> None:
    session = tools.open_session()
    answer = session.chat([user("word " * 3000)], n=2).json()
    assert [c["finish_reason"] for c in answer["choices"]] == ["length", "length"]
    assert tools.server.requests == []


# ------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_stays_in_the_record(
    tools: GatewayHarness, stream: bool
) -> None:
    tools.server.answers = ["Action: search\nObservation: made up", "ok"]
    session = tools.open_session()
    answer = session.chat([user("x")], stop=["Observation:", "zzz"], stream=stream)
    if stream:
        choices = chunks_of(answer.text)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        finish = choices[-1]["finish_reason"]
    else:
        [choice] = answer.json()["choices"]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("Action: search\n", "stop")
    # What was sampled is not what the agent sends back: the template can't prove it, so a chain of its own.
    before = num_breaks(tools)
    session.chat([user("x"), {"role": "assistant", "content": text}, user("Observation: tea")])
    assert num_breaks(tools) == before + 1
    assert session.finalize(1.0)["num_rows"] == {"plan": 2}
    first, _ = rows_of(tools)
    assert tools.server.tokenizer.decode(first.response_ids.tolist()) == "Action: search\nObservation:"


def test_anthropic_is_told_which_sequence_stopped_the_answer(tools: GatewayHarness) -> None:
    tools.server.answers = ["one STOP two"]
    session = tools.open_session()
    url = f"{session.base_url}/agents/planner"
    with anthropic.Anthropic(base_url=url, api_key=session.api_key) as client:
        message = client.messages.create(
            model="m", max_tokens=64, messages=[{"role": "user", "content": "x"}], stop_sequences=["STOP"]
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one "  # type: ignore[union-attr]


def test_a_stop_string_inside_a_parsed_answer_is_left_out_too(tools: GatewayHarness) -> None:
    tools.server.answers = ["Let me look. END of it"]
    for stream in (False, True):
        session = tools.open_session(member=int(stream))
        answer = session.chat([user("x")], tools=[SEARCH], stop="END", stream=stream)
        if stream:
            text = "".join(c["delta"].get("content") or "" for c in chunks_of(answer.text))
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        assert text == "Let me look. "


# ------------------------------------------------------------------ likeliest tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_come_beside_each_sampled_one(tools: GatewayHarness, stream: bool) -> None:
    session = tools.open_session()
    answer = session.chat([user("x")], logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        entries = [e for c in chunks_of(answer.text) if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        entries = answer.json()["choices"][0]["logprobs"]["content"]
    count = len(tools.server.answer_ids("hello"))
    assert [entry["logprob"] for entry in entries] == tools.server.logprobs(count)
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) >= 3
        assert values == sorted(values, reverse=True)
        assert all(
            bytes(top["bytes"]).decode(errors="replace") == top["token"] for top in entry["top_logprobs"]
        )
    assert tools.server.requests[0]["sampling_params"]["logprobs"] == 3
    session.finalize(1.0)
    [row] = rows_of(tools)
    assert row.behavior_logprobs.tolist() == tools.server.logprobs(count)


# ------------------------------------------------------------------ template arguments


def test_template_arguments_reach_the_template_and_tell_chains_apart(tools: GatewayHarness) -> None:
    uri = RunLayout(RUN_ID).model("plan").tokenizer("switched")
    tools.store.put(uri, make_tokenizer_document(chat_template=SWITCHED).to_bytes())
    tools.renew("plan", tokenizer_uri=uri)
    tools.wait_for_tokenizer("plan", uri)
    tools.server.answers = ["one", "two", "three"]
    session = tools.open_session()
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    session.chat([user("x")], **off)
    follow = [user("x"), {"role": "assistant", "content": "one"}, user("y")]
    session.chat(follow, **off)
    session.chat(follow)
    shown = [tools.server.tokenizer.decode(r["token_ids"]) for r in tools.server.requests]
    assert [text.split("\n")[0] for text in shown] == ["answer", "answer", "think"]
    assert session.finalize()["num_rows"] == {"plan": 2}


def test_parsers_are_told_of_template_arguments(tools: GatewayHarness) -> None:
    session = tools.open_session()
    session.chat([user("x")], tools=[SEARCH], chat_template_kwargs={"enable_thinking": False})
    assert tools.server.derendered[0]["chat_request"]["chat_template_kwargs"] == {"enable_thinking": False}


# ------------------------------------------------------------------ off the policy


def allowing_config() -> Any:
    raw = tool_config().model_dump(mode="json")
    raw["gateway"]["allow_off_policy_sampling"] = True
    return parse_config(raw)


def test_settings_off_the_policy_pass_where_the_config_allows_them_and_are_recorded(
    local_store: Store,
) -> None:
    with live_gateway(local_store, config=allowing_config()) as harness:
        prepare(harness)
        harness.server.answers = [SAMPLED_CALL, "There is tea."]
        session = harness.open_session()
        first = session.chat(
            [user("x")], tools=[SEARCH], tool_choice="required", top_p=0.9, presence_penalty=0.5
        )
        message = first.json()["choices"][0]["message"]
        session.chat([user("x"), message, result("tea")], tools=[SEARCH])
        assert session.chat([user("z")], temperature=0).status_code == 400
        session.finalize(1.0)
        [row] = harness.rows("plan")
        recorded = {"top_p": "0.9", "presence_penalty": "0.5", "tool_choice": '"required"'}
        assert [dict(turn.off_policy) for turn in row.turns] == [recorded, {}]
        asked, free = (request["sampling_params"] for request in harness.server.requests)
        assert (asked["top_p"], asked["presence_penalty"]) == (0.9, 0.5)
        assert asked["structured_outputs"] == {"structural_tag": "a grammar"}
        assert "structured_outputs" not in free


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_the_servers_own_grammar_in_evaluation_and_refused_in_training(
    tools: GatewayHarness, choice: Any
) -> None:
    tools.server.answers = [SAMPLED_CALL]
    training = tools.open_session()
    refused = training.chat([user("x")], tools=[SEARCH], tool_choice=choice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    session = tools.open_session(mode="eval", group_id="forced")
    answer = session.chat([user("x")], tools=[SEARCH], tool_choice=choice, temperature=0)
    [made] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "search"
    [rendered] = tools.server.rendered
    assert rendered["tool_choice"] == choice
    assert rendered["tools"][0]["function"]["strict"] is True
    assert tools.server.derendered[0]["chat_request"]["tool_choice"] == choice


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "made_up"}}, "tools": [SEARCH, CLOCK]},
        {"tool_choice": {"type": "allowed_tools"}, "tools": [SEARCH]},
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
    ],
)
def test_a_forced_call_of_nothing_that_is_offered_is_refused(
    tools: GatewayHarness, fields: dict[str, Any]
) -> None:
    session = tools.open_session(mode="eval", group_id="forced")
    refused = session.chat([user("x")], **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_responses_and_messages_force_calls_in_their_own_words(tools: GatewayHarness) -> None:
    tools.server.answers = [SAMPLED_CALL]
    session = tools.open_session(mode="eval", group_id="forced")
    base = f"{session.base_url}/agents/planner"
    schema = SEARCH["function"]["parameters"]
    with client_of(session) as client:
        client.responses.create(
            model="m",
            input="x",
            tools=[RESPONSES_TOOL],
            tool_choice={"type": "function", "name": "search"},
        )
    with anthropic.Anthropic(base_url=base, api_key=session.api_key) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "search"}):
            message = client.messages.create(
                model="m",
                max_tokens=200,
                messages=[{"role": "user", "content": "x"}],
                tools=[{"name": "search", "input_schema": schema}],
                tool_choice=choice,  # type: ignore[arg-type]
            )
            assert message.stop_reason == "tool_use"
    assert [r["tool_choice"] for r in tools.server.rendered] == [NAMED, "required", NAMED]


# ------------------------------------------------------------------ reasoning that agents leave out


def test_an_agent_that_leaves_reasoning_out_goes_on_with_it(local_store: Store) -> None:
    """Most frameworks drop it; whether the prompt has it is the template's to say."""
    with live_gateway(local_store, config=tool_config(reasoning_parser="qwen3")) as harness:
        prepare(harness)
        harness.server.answers = [
            f"<think>\nwhy\n</think>\n\n{SAMPLED_CALL}",
            "<think>\nso\n</think>\n\nTea.",
        ]
        session = harness.open_session()
        first = session.chat([user("x")], tools=[SEARCH]).json()["choices"][0]["message"]
        assert first.pop("reasoning_content").strip() == "why"
        before = num_breaks(harness)
        history = [user("x"), first, result("tea")]
        second = session.chat(history, tools=[SEARCH]).json()["choices"][0]["message"]
        assert num_breaks(harness) == before
        given = harness.server.requests[1]["token_ids"]
        assert "why" in harness.server.tokenizer.decode(given)
        # The user speaks again: this template drops earlier thoughts, whoever left them out.
        second.pop("reasoning_content")
        session.chat([*history, second, user("more")], tools=[SEARCH])
        assert num_breaks(harness) == before + 1
        assert session.finalize()["num_rows"] == {"plan": 2}
