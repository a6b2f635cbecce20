"""The short way of model calls leads where the application's own routes lead."""

from __future__ import annotations

import pytest

from tests.gateway_harness import GatewayHarness


def test_a_model_call_is_answered_at_the_session_and_at_its_agents(harness: GatewayHarness) -> None:
    session = harness.open_session()
    body = {"model": "planner", "messages": [{"role": "user", "content": "hi"}]}
    for path in ("v1/chat/completions", "agents/planner/v1/chat/completions"):
        assert session.post(path, body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "sessions/{id}/v1/chat/completions", 405),
        ("POST", "sessions/{id}/v1/models", 405),
        ("POST", "sessions/{id}/v1/nothing", 404),
        ("POST", "sessions/{id}/agents/v1/chat/completions", 404),
        ("POST", "sessions/{id}/agents/a/b/v1/chat/completions", 404),
        ("POST", "sessions//v1/chat/completions", 404),
        ("POST", "other/{id}/v1/chat/completions", 404),
        ("GET", "sessions/{id}/v1/models", 200),
    ],
)
def test_what_is_no_model_call_is_left_to_the_application(
    harness: GatewayHarness, method: str, path: str, status: int
) -> None:
    session = harness.open_session()
    answer = harness.http.request(
        method, "/" + path.format(id=session.session_id), headers=session.headers, json={}
    )
    assert answer.status_code == status


def test_an_unknown_session_is_refused_in_the_caller_s_shape(harness: GatewayHarness) -> None:
    answer = harness.http.post("/sessions/none/v1/messages", json={}, headers={"x-api-key": "k"})
    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
