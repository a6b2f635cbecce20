"""Behaviours a gateway of this kind is expected to have, over HTTP, that no other file is about."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.router import MultiModelGatewayRouter
from model_runtime.config_file import parse_config
from model_runtime.errors import ConfigError
from model_runtime.layout import RunLayout
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import RUN_ID, GatewayHarness, make_config
from tests.tool_use import TOOL_TEMPLATE
from tests.unit.gateway.test_rollback import said, user

APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [user("hello")]}),
    "responses": ("responses", {"input": "hello"}),
    "messages": ("messages", {"messages": [user("hello")], "max_tokens": 9}),
}


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "max_response_tokens", 0),
        ("rollout", "max_model_len", 0),
        ("gateway", "roll_back_rewritten_turns", "sometimes"),
    ],
)
def test_budgets_below_one_and_switches_that_are_none_are_refused_with_the_config(
    section: str, field: str, value: Any
) -> None:
    raw = make_config().model_dump(mode="json")
    assert raw["gateway"]["roll_back_rewritten_turns"] is True
    first = raw["multi_model"]["models"][0]
    {"model": first, "rollout": first["rollout"], "gateway": raw["gateway"]}[section][field] = value
    with pytest.raises(ConfigError, match=field):
        parse_config(raw)


@pytest.mark.parametrize("value", [0, True, -3, "9", 1.5])
def test_a_session_with_no_token_to_sample_is_refused_before_any_server_is_asked(
    harness: GatewayHarness, value: Any
) -> None:
    refused = harness.ask_for_session(sampling={"max_tokens": value})
    assert refused.status_code in (400, 422)
    assert "max_tokens" in refused.text
    assert harness.server.requests == []


@pytest.mark.parametrize("api", APIS)
def test_defaults_of_a_session_are_its_own_and_a_request_overrides_them(
    harness: GatewayHarness, api: str
) -> None:
    path, body = APIS[api]
    warm = harness.open_session(sampling={"temperature": 0.25})
    cold = harness.open_session(member=1)
    for session, extra in ((warm, {}), (cold, {}), (warm, {"temperature": 0.75}), (warm, {})):
        assert session.post(f"agents/planner/v1/{path}", body | extra).status_code == 200
    given = [request["sampling_params"]["temperature"] for request in harness.server.requests]
    assert given == [0.25, 1.0, 0.75]  # the last one is the first one again


def test_nothing_but_settings_and_ids_reaches_the_server(harness: GatewayHarness) -> None:
    session = harness.open_session()
    body = {
        "messages": [user("x")],
        "user": "somebody",
        "metadata": {"secret": "s"},
        "store": True,
        "seed": 1,
    }
    assert session.post("agents/planner/v1/chat/completions", body).status_code == 200
    [request] = harness.server.requests
    assert set(request) == {"model", "token_ids", "sampling_params", "request_id"}
    known = {"temperature", "max_tokens", "seed", "stop_token_ids", "logprobs"}
    assert set(request["sampling_params"]) == known


@pytest.mark.parametrize("api", APIS)
def test_the_answers_model_is_the_requests_or_the_one_that_answered(
    harness: GatewayHarness, api: str
) -> None:
    path, body = APIS[api]
    session = harness.open_session()
    named = session.post(f"agents/planner/v1/{path}", body | {"model": "gpt-x"})
    unnamed = session.post(f"agents/planner/v1/{path}", body)
    assert (named.json()["model"], unnamed.json()["model"]) == ("gpt-x", "plan")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"", b'{"messages": 1, "input": 1}', b"\xff"])
def test_malformed_bodies_are_400_in_the_shape_of_the_api(
    harness: GatewayHarness, api: str, body: bytes
) -> None:
    session = harness.open_session()
    url = f"/sessions/{session.session_id}/agents/planner/v1/{APIS[api][0]}"
    answer = harness.http.post(url, content=body, headers=session.headers)
    assert answer.status_code == 400
    assert_shape(api, answer.json())
    assert harness.server.requests == []


@pytest.mark.parametrize("api", APIS)
def test_an_unexpected_failure_is_a_500_in_the_shape_of_the_api(
    harness: GatewayHarness, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(MultiModelGatewayRouter, "chat_completion", fail)
    path, body = APIS[api]
    answer = harness.open_session().post(f"agents/planner/v1/{path}", body)
    assert answer.status_code == 500
    assert_shape(api, answer.json())
    assert "secret" not in answer.text


@pytest.mark.parametrize("api", APIS)
def test_an_unknown_session_is_404_in_the_shape_of_the_api(harness: GatewayHarness, api: str) -> None:
    path, body = APIS[api]
    answer = harness.http.post(f"/sessions/nope/agents/planner/v1/{path}", json=body)
    assert answer.status_code == 404
    assert_shape(api, answer.json())


def assert_shape(api: str, body: dict[str, Any]) -> None:
    if api == "messages":
        assert body["type"] == "error"
        assert set(body["error"]) >= {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"]


@pytest.mark.parametrize("api", APIS)
def test_images_are_refused_by_name(harness: GatewayHarness, api: str) -> None:
    path, _ = APIS[api]
    parts: dict[str, Any] = {
        "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
        },
    }
    message = {"role": "user", "content": [parts[api]]}
    answer = harness.open_session().post(
        f"agents/planner/v1/{path}", {"input" if api == "responses" else "messages": [message]}
    )
    assert answer.status_code == 400
    assert "content" in answer.json()["error"]["message"] or "block" in answer.json()["error"]["message"]


def test_many_executions_at_once_keep_their_rows_and_rewards_apart(harness: GatewayHarness) -> None:
    harness.open_group("many", size=12)
    sessions = [harness.open_session(i, "many", group_size=12) for i in range(12)]
    harness.group_id = "many"

    def run(index: int) -> None:
        session = sessions[index]
        assert session.chat([user(f"question {index}")]).status_code == 200
        assert session.chat([user(f"question {index}"), said("hello"), user("on")]).status_code == 200
        session.finalize(float(index))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(run, range(12)))
    rows = harness.rows("plan")
    assert len(rows) == 12
    for row in rows:
        index = row.member.member_index
        assert dict(row.workflow_rewards) == {"reward": float(index)}
        assert len(row.turns) == 2
        shown = harness.server.tokenizer.decode(row.prompt_ids.tolist())
        assert f"question {index}\n" in shown


def test_a_template_that_rewrites_answers_is_named_in_status_and_metrics(harness: GatewayHarness) -> None:
    uri = RunLayout(RUN_ID).model("plan").tokenizer("rewriting")
    harness.store.put(uri, make_tokenizer_document(chat_template=TOOL_TEMPLATE).to_bytes())
    harness.renew("plan", tokenizer_uri=uri)
    harness.wait_for_tokenizer("plan", uri)
    models = harness.http.get("/admin/status", headers=harness.admin).json()["models"]
    assert "reasoning" in models["plan"]["template_problem"]
    assert models["solve"]["template_problem"] is None
    text = harness.http.get("/metrics").text
    assert 'repertory_gateway_template_rewrites{model="plan"} 1.0' in text
    assert 'repertory_gateway_template_rewrites{model="solve"} 0.0' in text


def test_anthropics_events_come_in_its_order(harness: GatewayHarness) -> None:
    harness.server.answers = ["two words"]
    session = harness.open_session()
    body = {"messages": [user("x")], "max_tokens": 64, "stream": True}
    text = session.post("agents/planner/v1/messages", body).text
    kinds = [line[len("event: ") :] for line in text.splitlines() if line.startswith("event: ")]
    squeezed = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert squeezed == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    data = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in data] == kinds
