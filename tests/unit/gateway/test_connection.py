"""Clients that hang up are heard of, whatever they had sent."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway_harness import GatewayHarness
from tests.unit.gateway.test_failover import until
from tests.unit.gateway.test_rollback import user


@pytest.mark.parametrize("num_bytes", [10, 300_000], ids=["small", "large"])
def test_a_call_ends_with_its_connection(harness: GatewayHarness, num_bytes: int) -> None:
    group = f"left-{num_bytes}"
    harness.open_group(group)
    session = harness.open_session(0, group)
    live = harness.gateway.sessions._sessions[session.session_id]
    harness.server.delay_s = 30.0
    body = {"messages": [user("hello")], "model": "m", "metadata": {"note": "x" * num_bytes}}
    url = f"{session.base_url}/agents/planner/v1/chat/completions"
    with (
        httpx.Client(headers=session.headers, timeout=httpx.Timeout(30, read=1)) as http,
        pytest.raises(httpx.ReadTimeout),
    ):
        http.post(url, json=body)
    until(lambda: harness.server.requests, "the server was not asked")
    until(lambda: not live.calls.num_running, "the call goes on")
    harness.server.delay_s = 0.0
    assert session.chat([user("hello")]).status_code == 200
