from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from model_runtime import gateway_client
from model_runtime.errors import (
    AlreadyDoneError,
    BackendRejectedError,
    BackendUnavailableError,
    ConflictError,
    InvalidRequestError,
    ModelNotReadyError,
    RunEndedError,
    UnknownAgentError,
    UnknownSessionError,
)
from model_runtime.gateway_client import GatewayClient, error_of, is_infrastructure, open_http
from model_runtime.protocol import GroupAnswer, GroupRequest

GROUP = GroupRequest(group_id="g", group_size=2)
OPEN = {"group_id": "g", "status": "open"}


@asynccontextmanager
async def client_of(
    handler: Callable[[web.Request], Any], *, patience_s: float = 5.0, store_patience_s: float = 0.0
) -> AsyncIterator[GatewayClient]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    server = TestServer(app)
    await server.start_server()
    try:
        async with open_http(max_connections=4) as http:
            url = str(server.make_url("")).rstrip("/")
            yield GatewayClient(
                url, http, admin_key="k" * 16, patience_s=patience_s, store_patience_s=store_patience_s
            )
    finally:
        await server.close()


def shape(code: str, message: str = "said") -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "reply", "kind"),
    [
        (404, shape("unknown_agent"), UnknownAgentError),
        (404, shape("unknown_session"), UnknownSessionError),
        (409, shape("conflict"), ConflictError),
        (409, shape("already_done"), AlreadyDoneError),
        (410, shape("run_ended"), RunEndedError),
        (503, shape("model_not_ready"), ModelNotReadyError),
        (502, shape("backend_unavailable"), BackendUnavailableError),
        (500, shape("internal_error"), BackendUnavailableError),
        (502, b"<html>bad gateway", BackendUnavailableError),
        (422, shape("other"), InvalidRequestError),
        (413, b"[]", BackendRejectedError),
    ],
)
def test_answers_become_the_errors_the_gateway_raised(status: int, reply: bytes, kind: type) -> None:
    assert type(error_of(status, reply)) is kind


def test_only_the_infrastructure_s_failures_are_worth_another_attempt() -> None:
    outages = [BackendUnavailableError("x"), ModelNotReadyError("x"), UnknownSessionError("x")]
    own = [
        ValueError("x"),
        UnknownAgentError("x"),
        ConflictError("x"),
        BackendRejectedError("x", status_code=400),
    ]
    assert all(is_infrastructure(e) for e in outages)
    assert not any(is_infrastructure(e) for e in own)

    wrapped = RuntimeError("framework")
    wrapped.__cause__ = outages[0]
    assert is_infrastructure(wrapped)


async def test_control_calls_are_repeated_until_the_gateway_is_back() -> None:
    answers = [web.Response(status=502), web.json_response({}, status=503)]

    async def handler(request: web.Request) -> web.Response:
        return answers.pop(0) if answers else web.json_response(OPEN)

    async with client_of(handler) as client:
        assert (await client.control("/groups", GROUP, GroupAnswer, timeout_s=5)).status == "open"


async def test_control_calls_give_up_after_their_patience() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=502)

    async with client_of(handler, patience_s=0.3) as client:
        with pytest.raises(BackendUnavailableError, match="502"):
            await client.control("/groups", GROUP, GroupAnswer, timeout_s=5)


async def test_a_refusal_is_final() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=409, body=shape("conflict", "group 'g' is over"))

    async with client_of(handler) as client:
        with pytest.raises(ConflictError, match="group 'g' is over"):
            await client.control("/groups", GROUP, GroupAnswer, timeout_s=5)
    assert asked == ["/groups"]


async def test_a_model_call_whose_connection_broke_is_repeated_under_the_same_key() -> None:
    keys = []

    async def handler(request: web.Request) -> web.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"ok": True})

    async with client_of(handler) as client:
        reply = await client.call(f"{client.url}/chat", {}, api_key="s", timeout_s=5, idempotency_key="one")
    assert reply == {"ok": True}
    assert keys == ["one"] * 3


async def test_a_call_that_found_no_connection_in_time_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts, and the line of those who wait to be accepted is full: as while a gateway restarts."""
    monkeypatch.setattr(gateway_client, "CONNECT_TIMEOUT_S", 0.1)
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"ok":true}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(EOFError, ConnectionError):  # of those who only waited
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as line:
        for _ in range(4):
            waiting = line.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        async with open_http(max_connections=4) as http:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = GatewayClient(url, http, admin_key="k" * 16, patience_s=20.0)
            call = asyncio.create_task(client.call(f"{url}/reward", {}, api_key="k", timeout_s=10))
            await asyncio.sleep(0.5)
            assert not call.done()
            listener.setblocking(False)
            async with await asyncio.start_server(answer, sock=listener):
                assert await call == {"ok": True}
                line.close()  # those who wait hang up
                await asyncio.sleep(0.1)


async def test_a_model_call_that_was_answered_5xx_is_not_repeated() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(1)
        return web.Response(status=503, body=shape("model_not_ready"))

    async with client_of(handler) as client:
        with pytest.raises(ModelNotReadyError):
            await client.call(f"{client.url}/chat", {}, api_key="s", timeout_s=5)
    assert len(asked) == 1


async def test_an_answer_that_does_not_come_names_the_limit() -> None:
    async def handler(request: web.Request) -> web.Response:
        await request.content.read()
        await asyncio.sleep(1)
        return web.json_response({})

    async with client_of(handler) as client:
        with pytest.raises(BackendUnavailableError, match=r"no answer from .*/chat within 0\.1 s"):
            await client.call(f"{client.url}/chat", {}, api_key="s", timeout_s=0.1)


async def test_a_gateway_whose_store_is_away_is_waited_for_longer_than_one_that_is_away_itself() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls <= 4:
            return web.Response(status=503, body=shape("store_unavailable"))
        return web.json_response(OPEN)

    async with client_of(handler, patience_s=0.0, store_patience_s=60.0) as gateway:
        answer = await gateway.control("/groups", GROUP, GroupAnswer, timeout_s=5)
    assert answer.status == "open"

    async def never(request: web.Request) -> web.Response:
        return web.Response(status=503, body=shape("internal_error"))

    async with client_of(never, patience_s=0.0, store_patience_s=60.0) as gateway:
        with pytest.raises(BackendUnavailableError):
            await gateway.control("/groups", GROUP, GroupAnswer, timeout_s=5)
