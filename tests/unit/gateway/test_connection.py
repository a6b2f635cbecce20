"""Clients that hang up are heard of, whatever they had sent; answers leave in one piece."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.connection import bounded_protocol
from tests.gateway_harness import GatewayHarness
from tests.unit.gateway.test_rollback import user
from tests.waiting import until


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


class Wire(asyncio.Transport):
    """What is written to a client, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        return

    def resume_reading(self) -> None:
        return


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body, 200 if body else 204)(scope, receive, send)


@pytest.mark.parametrize(
    ("request_", "writes"),
    [
        (b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi", [b"200 OK", b"hi"]),
        (b"GET / HTTP/1.1\r\n\r\n", [b"204 No Content", b""]),
        (b"HEAD / HTTP/1.1\r\n\r\n", [b"204 No Content", b""]),
    ],
)
async def test_an_answers_head_and_body_are_one_write(request_: bytes, writes: list[bytes]) -> None:
    wire = await answered(request_)
    [whole] = wire.writes
    head, _, body = whole.partition(b"\r\n\r\n")
    assert [head.split(b"\r\n")[0], body] == [b"HTTP/1.1 " + writes[0], writes[1]]


async def test_who_waits_for_100_continue_has_it_before_the_answer() -> None:
    wire = await answered(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n", b"hi")
    assert wire.writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert wire.writes[1].endswith(b"\r\n\r\nhi")
    assert len(wire.writes) == 2


async def answered(*pieces: bytes) -> Wire:
    """The wire after an exchange in which the client sends a piece, and the next a moment later."""
    make: Any = bounded_protocol(10_000)
    config = uvicorn.Config(echo, http=make, ws="none", lifespan="off", log_config=None)
    config.load()
    wire, protocol = Wire(), make(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(wire)
    for piece in pieces:
        protocol.data_received(piece)
        await asyncio.sleep(0.01)
    protocol.connection_lost(None)
    return wire
