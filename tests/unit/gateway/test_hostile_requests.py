"""What no well-meaning client sends: it costs its sender an answer, and nobody else anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import session as sessions
from gateway.routes.serving import MAX_COMMAS
from gateway.sampling import MAX_STOP_CHARS, MAX_STOPS
from tests.gateway_harness import GatewayHarness, LiveSession
from tests.unit.gateway.test_rollback import user

HUGE = "1" + "0" * 400  # no float is so large
ENDLESS = "1" * 5_000  # nor does Python write so many digits
HALF_A_PAIR = "\ud800"
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
ASKED = {
    CHAT: '"messages": [{"role": "user", "content": "x"}]',
    RESPONSES: '"input": "x"',
    MESSAGES: '"messages": [{"role": "user", "content": "x"}]',
}


def ask(session: LiveSession, path: str, more: str) -> Any:
    """A model call with something more in its body, written by hand."""
    url = f"/sessions/{session.session_id}/agents/planner/v1/{path}"
    return session.harness.http.post(url, content=f"{{{ASKED[path]}, {more}}}", headers=session.headers)


def control(harness: GatewayHarness, method: str, path: str, body: str) -> Any:
    headers = harness.admin | {"Content-Type": "application/json"}
    return harness.http.request(method, path, content=body, headers=headers)


@pytest.mark.parametrize("number", [HUGE, f"-{HUGE}", ENDLESS], ids=["huge", "very negative", "endless"])
def test_a_number_of_any_size_is_refused_and_not_held_against_the_execution(
    harness: GatewayHarness, number: str
) -> None:
    session = harness.open_session()
    for path, field, param in [
        (CHAT, "seed", "seed"),
        (CHAT, "top_k", "top_k"),
        (CHAT, "max_tokens", "max_tokens"),
        (CHAT, "n", "n"),
        (RESPONSES, "max_output_tokens", "max_tokens"),
        (MESSAGES, "top_k", "top_k"),
        (MESSAGES, "max_tokens", "max_tokens"),
    ]:
        answer = ask(session, path, f'"{field}": {number}')
        assert answer.status_code == 400, answer.text
        if number != ENDLESS:  # which the JSON parser refuses itself
            assert param in answer.json()["error"]["message"]
        assert len(answer.text) < 1_000
    assert session.finalize(1.0)["status"] == "finalized"


@pytest.mark.parametrize("name", ["seed", "temperature"])
def test_a_sessions_own_settings_may_be_no_such_number_either(harness: GatewayHarness, name: str) -> None:
    body = f'{{"mode": "eval", "group_id": "e", "sampling": {{"{name}": {HUGE}}}}}'
    assert control(harness, "POST", "/sessions", body).status_code == 400


def test_a_field_nested_to_any_depth_is_the_callers_fault(harness: GatewayHarness) -> None:
    session = harness.open_session()
    for depth in range(940, 1_000, 3):  # somewhere here Python's stack ends
        nested = '{"a": ' * depth + "1" + "}" * depth
        for path, field in [(CHAT, "logit_bias"), (CHAT, "tool_choice"), (MESSAGES, "thinking")]:
            assert ask(session, path, f'"{field}": {nested}').status_code == 400
        assert ask(session, RESPONSES, f'"metadata": {nested}').status_code < 500
    assert session.finalize(1.0)["status"] == "finalized"


def test_what_a_message_quotes_of_a_body_is_short(harness: GatewayHarness) -> None:
    session = harness.open_session()
    for path, more in [
        (CHAT, '"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "%s"'),
        (CHAT, '"response_format": "%s"'),
        (RESPONSES, '"include": ["%s"]'),
        (RESPONSES, '"reasoning": {"summary": "auto"}, "tools": [{"type": "%s"}]'),
        (MESSAGES, '"tools": [{"type": "%s", "name": "f"}]'),
    ]:
        answer = ask(session, path, more % ("x" * 100_000))
        assert answer.status_code == 400
        assert len(answer.text) < 1_000


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("user", "name"),
        ("tool", "tool_call_id"),
        ("assistant", "reasoning_content"),
        ("assistant", "reasoning"),
    ],
)
def test_what_should_be_a_text_and_is_none_is_refused_and_not_left_out(
    harness: GatewayHarness, role: str, field: str
) -> None:
    session = harness.open_session()
    for value in (5, ["x"], {"a": "x"}, True):
        answer = session.chat([user("x"), {"role": role, "content": "y", field: value}])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[1].{field}"


def test_a_body_of_a_million_values_is_refused_unread(harness: GatewayHarness) -> None:
    session = harness.open_session()
    values = "[" + "[]," * MAX_COMMAS + "[]]"
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = ask(session, path, f'"metadata": {{"a": {values}}}')
        assert answer.status_code == 413
        assert "values" in answer.json()["error"]["message"]
    long = session.chat([user("a, b " * (MAX_COMMAS // 2))])  # a text of half as many is none of the kind
    assert long.status_code == 200


@pytest.mark.parametrize(
    "stop", [["x"] * (MAX_STOPS + 1), ["x" * (MAX_STOP_CHARS + 1)]], ids=["many", "long"]
)
def test_stop_strings_are_bounded(harness: GatewayHarness, stop: list[str]) -> None:
    session = harness.open_session()
    answer = session.chat("hello", stop=stop)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"
    as_many = [f"{'x' * (MAX_STOP_CHARS - 3)}{i:03}" for i in range(MAX_STOPS)]
    assert session.chat("hello", stop=as_many, stream=True).status_code == 200


def test_the_rewards_of_a_session_are_bounded_and_it_can_still_end(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_REWARDS_GIVEN", 3)
    session = harness.open_session()
    given = [session.post("reward", {"reward": i, "component": "same"}) for i in range(4)]
    assert [answer.status_code for answer in given] == [200, 200, 200, 429]
    assert given[-1].json()["error"]["code"] == "limit_exceeded"
    assert session.finalize(1.0)["status"] == "finalized"


# ------------------------------------------------------------------ with the admin key


@pytest.mark.parametrize("field", ["reason", "totals", "last_metrics", "queue", "replicas"])
def test_a_renewal_with_half_a_character_is_refused_and_changes_nothing(
    harness: GatewayHarness, field: str
) -> None:
    replica = {"url": "http://127.0.0.1:1", "api_key": "k"}
    values: dict[str, Any] = {
        "reason": HALF_A_PAIR,
        "totals": {HALF_A_PAIR: 1},
        "last_metrics": {HALF_A_PAIR: 1.0},
        "queue": {"read_positions": {HALF_A_PAIR: 1}},
        "replicas": [replica | {"replica_id": HALF_A_PAIR}],
    }
    body = harness.renewal("plan", **{"status": "failed", field: values[field]})
    answer = control(harness, "PUT", "/admin/models/plan", json.dumps(body))
    assert answer.status_code == 422
    assert "surrogate" in answer.json()["error"]["message"]
    status = harness.http.get("/admin/status", headers=harness.admin)
    assert status.json()["models"]["plan"]["ready"] is True
    assert harness.open_session().chat("hello").status_code == 200


@pytest.mark.parametrize(
    "replica",
    [
        {"url": "http://127.0.0.1:99999"},
        {"url": "http://127.0.0.1:0"},
        {"api_key": "key\r\nX-Smuggled: yes"},
        {"api_key": "schlüssel"},
    ],
)
def test_a_replica_that_can_not_be_asked_is_refused_and_the_ones_there_are_stay(
    harness: GatewayHarness, replica: dict[str, str]
) -> None:
    whole = {"replica_id": "r1", "url": "http://127.0.0.1:1", "api_key": "k"} | replica
    body = harness.renewal("plan", replicas=[whole])
    answer = harness.http.put("/admin/models/plan", json=body, headers=harness.admin)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith("replicas.0.")
    assert harness.open_session().chat("hello").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/sessions", '{"mode": "eval", "group_id": "e", "timeout_s": Infinity}'),
        ("POST", "/groups", '{"group_id": "for-ever", "group_size": 1, "deadline_s": Infinity}'),
        ("PUT", "/admin/desired", '{"state": "run", "reason": "\\ud800"}'),
        ("PUT", "/admin/evaluations/e", '{"versions": {"\\ud800": 1}}'),
    ],
)
def test_times_without_end_and_texts_that_are_none_are_refused(
    harness: GatewayHarness, method: str, path: str, body: str
) -> None:
    assert control(harness, method, path, body).status_code == 422


# ------------------------------------------------------------------ answers


@pytest.mark.parametrize("streamed", [False, True])
def test_the_bytes_of_a_calls_logprobs_are_those_of_its_text(harness: GatewayHarness, streamed: bool) -> None:
    harness.server.answers = [text := "naïve 🙂 日本"]
    answer = harness.open_session().chat("hello", logprobs=True, top_logprobs=1, stream=streamed)
    events = (
        [line.removeprefix("data: ") for line in answer.text.split("\n\n")] if streamed else [answer.text]
    )
    choices = [c for event in events if event[:1] == "{" for c in json.loads(event)["choices"]]
    tokens = [t for choice in choices for t in (choice["logprobs"] or {"content": []})["content"]]
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == text + "<|im_end|>"
    assert any(token["token"] == "�" for token in tokens), "no token was a part of a character"


def test_tokens_that_can_not_be_counted_are_an_error_in_the_log(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> int:
        raise RuntimeError("a detail for the log alone")

    session = harness.open_session()
    monkeypatch.setattr(harness.gateway.router, "count_tokens", broken)
    answer = session.post("agents/planner/v1/messages/count_tokens", {"messages": [user("x")]})
    assert answer.status_code == 500
    assert "detail" not in answer.text
    assert "a detail for the log alone" in caplog.text
