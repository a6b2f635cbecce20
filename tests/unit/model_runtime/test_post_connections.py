"""Kept connections for POST, before a server that speaks bytes as a test writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from model_runtime import post_connections
from model_runtime.errors import BackendUnavailableError
from model_runtime.post_connections import PostConnections

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers request after request with the next of its pieces; None closes the connection instead."""

    def __init__(self, answers: Sequence[Sequence[bytes] | None]) -> None:
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.asked, self.closed = asyncio.Event(), asyncio.Event()
        self._answers = iter(answers)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                [length] = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
                self.requests.append(head + await reader.readexactly(int(length.split()[1])))
                self.asked.set()
                answer = next(self._answers)
                if answer is None:
                    break
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError, StopIteration):
            pass
        finally:
            self.closed.set()
            writer.close()


@asynccontextmanager
async def connections_to(server: Server) -> AsyncIterator[PostConnections]:
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connections = PostConnections(
        f"http://127.0.0.1:{port}/base", headers={"Authorization": "Bearer k"}, connect_timeout_s=5
    )
    try:
        yield connections
    finally:
        connections.close()
        listener.close()
        await asyncio.sleep(0.01)


async def test_one_connection_serves_call_after_call_and_the_server_gets_all_of_each():
    server = Server([[OK]] * 3)
    async with connections_to(server) as connections:
        for number in range(3):
            assert await connections.post("/path", b"{%d}" % number, timeout_s=5) == (200, b"ok")
    assert server.num_connections == 1
    assert server.requests[2].startswith(b"POST /base/path HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer k\r\n" in server.requests[2]
    assert server.requests[2].endswith(b"\r\n\r\n{2}")


async def test_calls_at_once_have_a_connection_each():
    server = Server([[OK]] * 4)
    async with connections_to(server) as connections:
        await asyncio.gather(*(connections.post("/", b"{}", timeout_s=5) for _ in range(4)))
    assert server.num_connections == 4


@pytest.mark.parametrize(
    "pieces",
    [
        [bytes([byte]) for byte in OK],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"],
    ],
    ids=["byte by byte", "chunked"],
)
async def test_answers_come_together_however_they_are_cut(pieces: list[bytes]):
    async with connections_to(Server([pieces])) as connections:
        assert await connections.post("/", b"{}", timeout_s=5) == (200, b"ok")


async def test_a_connection_the_server_wants_closed_is_not_used_again():
    last = b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno"
    server = Server([[last], [OK]])
    async with connections_to(server) as connections:
        assert await connections.post("/", b"{}", timeout_s=5) == (503, b"no")
        assert await connections.post("/", b"{}", timeout_s=5) == (200, b"ok")
    assert server.num_connections == 2


async def test_an_idle_connection_is_not_used_once_the_server_may_close_it(monkeypatch):
    monkeypatch.setattr(post_connections, "MAX_IDLE_S", 0.0)
    server = Server([[OK], [OK]])
    async with connections_to(server) as connections:
        await connections.post("/", b"{}", timeout_s=5)
        await connections.post("/", b"{}", timeout_s=5)
    assert server.num_connections == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "closed the connection"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"], "no answer within"),
        ([b"no http\r\n\r\n"], "HttpParser"),
    ],
    ids=["closed", "half", "nonsense"],
)
async def test_what_is_no_whole_answer_is_unavailable_and_its_connection_is_closed(answer, message):
    server = Server([answer])
    async with connections_to(server) as connections:
        with pytest.raises(BackendUnavailableError, match=message):
            await connections.post("/", b"{}", timeout_s=0.2)
        await asyncio.wait_for(server.closed.wait(), 5)


async def test_cancelling_a_call_closes_its_connection():
    server = Server([[b"HTTP/1.1 200 OK\r\n"]])
    async with connections_to(server) as connections:
        call = asyncio.create_task(connections.post("/", b"{}", timeout_s=5))
        await asyncio.wait_for(server.asked.wait(), 5)
        call.cancel()
        await asyncio.wait_for(server.closed.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_once_closed_no_connection_is_kept():
    server = Server([[OK]])
    async with connections_to(server) as connections:
        connections.close()
        assert await connections.post("/", b"{}", timeout_s=5) == (200, b"ok")
        await asyncio.wait_for(server.closed.wait(), 5)
