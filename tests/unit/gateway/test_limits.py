"""What one client may ask of the gateway at most, over HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
import uvicorn

from gateway.connection import bounded_protocol
from model_runtime.store import Store
from tests.gateway_harness import GatewayHarness, live_gateway, make_config

BOUNDS = {
    "max_request_bytes": 20_000,
    "max_header_bytes": 4_000,
    "max_sessions": 3,
    "max_chains_per_session": 3,
    "max_concurrent_requests": 3,
    "max_concurrent_requests_per_session": 2,
}


@pytest.fixture
def harness(local_store: Store) -> Iterator[GatewayHarness]:
    with live_gateway(local_store, config=make_config(**BOUNDS)) as harness:
        harness.make_ready()
        harness.open_group(size=4)
        yield harness


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return error["message"]


def refusals(harness: GatewayHarness) -> dict[str, float]:
    lines = [
        line for line in harness.http.get("/metrics").text.splitlines() if "refused_requests_total{" in line
    ]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def open_session(harness: GatewayHarness, member: int = 0) -> Any:
    return harness.open_session(member, group_size=4)


def test_a_body_that_is_announced_too_long_is_refused_unread(harness: GatewayHarness) -> None:
    session = open_session(harness)
    message = refused(session.chat("x" * 30_000), 413, "request_too_large")
    assert "gateway.max_request_bytes is 20000" in message
    assert session.chat("x" * 10).status_code == 200
    assert refusals(harness) == {"request_too_large": 1}


@pytest.mark.parametrize("path", ["agents/planner/v1/chat/completions", "reward"])
def test_a_body_of_unknown_length_is_cut_off_where_it_grows_too_long(
    harness: GatewayHarness, path: str
) -> None:
    session = open_session(harness)

    def body() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    url = f"/sessions/{session.session_id}/{path}"
    headers = session.headers | {"Content-Type": "application/json"}
    refused(harness.http.post(url, content=body(), headers=headers), 413, "request_too_large")


def test_anthropics_client_hears_of_a_body_too_long_in_its_own_shape(harness: GatewayHarness) -> None:
    session = open_session(harness)
    with (
        anthropic.Anthropic(
            base_url=f"{session.base_url}/agents/planner", api_key=session.api_key, max_retries=0
        ) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        client.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "x" * 30_000}])
    assert caught.value.status_code == 413
    assert caught.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


def test_headers_too_long_are_refused(harness: GatewayHarness) -> None:
    answer = harness.http.get("/health", headers={"X-Padding": "x" * 5_000})
    assert "gateway.max_header_bytes is 4000" in refused(answer, 431, "headers_too_large")
    answer = harness.http.get("/health?" + "x" * 5_000)
    refused(answer, 431, "headers_too_large")


def test_opening_more_sessions_than_may_be_open_is_to_be_asked_again(harness: GatewayHarness) -> None:
    sessions = [open_session(harness, member) for member in range(3)]
    answer = harness.ask_for_session(3, group_size=4)
    assert "gateway.max_sessions is 3" in refused(answer, 429, "too_many_requests")
    assert float(answer.headers["Retry-After"]) > 0
    assert "x-should-retry" not in answer.headers
    sessions[0].finalize(1.0)
    assert harness.ask_for_session(3, group_size=4).status_code == 200


def test_conversations_of_a_session_are_bounded_and_waiting_would_not_help(harness: GatewayHarness) -> None:
    session = open_session(harness)
    first = session.chat("one").json()["choices"][0]["message"]["content"]
    assert session.chat("two").status_code == 200
    assert session.chat("three", agent="searcher").status_code == 200
    answer = session.chat("four")
    assert "gateway.max_chains_per_session is 3" in refused(answer, 429, "limit_exceeded")
    assert "Retry-After" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    going_on = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    assert session.chat([*going_on, {"role": "user", "content": "more"}]).status_code == 200


def hold_calls(harness: GatewayHarness, sessions: list[Any], pool: ThreadPoolExecutor) -> list[Any]:
    """Model calls that stay under way until the server is let go."""
    calls = [pool.submit(session.chat, f"hold {i}") for i, session in enumerate(sessions)]
    deadline = time.monotonic() + 10
    while sum(binding.running for binding in harness.gateway.bindings) < len(sessions):
        assert time.monotonic() < deadline, "the calls did not begin"
        time.sleep(0.01)
    return calls


def test_a_sessions_calls_at_once_are_bounded_and_its_rewards_are_not(harness: GatewayHarness) -> None:
    session, other = open_session(harness), open_session(harness, 1)
    harness.server.delay_s = 1.0
    with ThreadPoolExecutor(4) as pool:
        calls = hold_calls(harness, [session, session], pool)
        answer = session.chat("one more")
        message = refused(answer, 429, "too_many_requests")
        assert "gateway.max_concurrent_requests_per_session is 2" in message
        assert answer.headers["Retry-After"] == "1"
        assert session.post("reward", {"reward": 1.0}).status_code == 200
        assert other.chat("from elsewhere").status_code == 200
        assert [call.result().status_code for call in calls] == [200, 200]
    harness.server.delay_s = 0.0
    assert session.chat("hold 0", headers={"X-Stainless-Retry-Count": "1"}).status_code == 200


def test_all_calls_at_once_are_bounded_and_control_calls_are_not(harness: GatewayHarness) -> None:
    sessions = [open_session(harness, member) for member in range(3)]
    harness.server.delay_s = 1.0
    with ThreadPoolExecutor(4) as pool:
        calls = hold_calls(harness, sessions, pool)
        message = refused(sessions[0].chat("one more"), 429, "too_many_requests")
        assert "gateway.max_concurrent_requests is 3" in message
        assert harness.http.get("/admin/status", headers=harness.admin).status_code == 200
        assert sessions[0].post("reward", {"reward": 1.0}).status_code == 200
        assert [call.result().status_code for call in calls] == [200, 200, 200]


def test_openais_client_comes_back_by_itself_when_the_gateway_was_full(harness: GatewayHarness) -> None:
    session = open_session(harness)
    harness.server.delay_s = 0.5
    with ThreadPoolExecutor(4) as pool:
        calls = hold_calls(harness, [session, session], pool)
        base_url = f"{session.base_url}/agents/searcher/v1"
        with openai.OpenAI(base_url=base_url, api_key=session.api_key, max_retries=3) as client:
            reply = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "me too"}]
            )
        assert reply.choices[0].message.content
        assert [call.result().status_code for call in calls] == [200, 200]
    assert refusals(harness)["too_many_requests"] >= 1


# ------------------------------------------------------------------ on the line


@pytest.fixture
def bounded_address() -> Iterator[tuple[str, int]]:
    """A listener whose heads may have 2,000 bytes, before an application that is content with anything."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        application, http=bounded_protocol(2_000), lifespan="off", port=0, log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the listener did not start"
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join(10)


def test_headers_that_never_end_are_refused_while_they_come(bounded_address: tuple[str, int]) -> None:
    with socket.create_connection(bounded_address, timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Padding: ")
        answer = b""
        client.settimeout(0.05)
        for _ in range(200):
            try:
                client.sendall(b"x" * 500)
                answer += client.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"headers_too_large" in answer


def test_headers_that_come_in_pieces_are_taken(bounded_address: tuple[str, int]) -> None:
    with socket.create_connection(bounded_address, timeout=10) as client:
        for _ in range(3):  # on one connection
            for piece in (b"GET / HT", b"TP/1.1\r\nHos", b"t: x\r\nX-Padding: " + b"x" * 1500, b"\r\n\r\n"):
                client.sendall(piece)
                time.sleep(0.01)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_headers_that_come_too_slowly_end_the_connection(
    bounded_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.connection.HEAD_TIMEOUT_S", 0.2)
    with socket.create_connection(bounded_address, timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(4096) == b""


def test_a_body_that_does_not_come_ends_the_call(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.connection.BODY_TIMEOUT_S", 0.2)
    session, (host, port) = open_session(harness), harness.url.removeprefix("http://").split(":")
    head = (
        f"POST /sessions/{session.session_id}/agents/planner/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {session.api_key}\r\nContent-Length: 1000\r\n\r\n"
    )
    for _ in range(BOUNDS["max_concurrent_requests"] + 1):  # none of them keeps its place
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head.encode() + b'{"messages": ')
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(4096) == b""
    assert session.chat("hello").status_code == 200


def test_a_body_that_comes_in_pieces_is_taken(harness: GatewayHarness) -> None:
    session = open_session(harness)
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    head = (
        f"POST /sessions/{session.session_id}/agents/planner/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {session.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = harness.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        for start in range(0, len(head) + len(body), 40):
            client.sendall((head.encode() + body)[start : start + 40])
            time.sleep(0.005)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_connection_on_which_nothing_comes_is_closed(
    bounded_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.connection.HEAD_TIMEOUT_S", 0.2)
    with (
        socket.create_connection(bounded_address, timeout=10) as client,
        contextlib.suppress(ConnectionResetError),
    ):
        assert client.recv(4096) == b""


def test_a_client_that_reads_nothing_of_its_answer_is_let_go(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.connection.READ_TIMEOUT_S", 0.2)
    session, (host, port) = open_session(harness), harness.url.removeprefix("http://").split(":")
    note = "x" * 15_000  # comes back with every answer
    body = f'{{"input": "hello", "stream": true, "instructions": "{note}"}}'.encode()
    head = (
        f"POST /sessions/{session.session_id}/agents/planner/v1/responses HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {session.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect((host, int(port)))
        with contextlib.suppress(OSError):  # it is let go of on the way
            for _ in range(1000):
                client.sendall(head.encode() + body)
                time.sleep(0.002)
            pytest.fail("it was answered without end")
