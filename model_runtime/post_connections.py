"""POST over HTTP/1.1 on kept connections to one server: the call that every turn of every agent makes.

A general client spends three times as much CPU on such a call as everything around it; here is no more than
this call needs: plain TCP, a body of known length, the answer at once.
"""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

import httptools

from model_runtime.errors import BackendUnavailableError

# vLLM closes connections after five idle seconds; one that may just be closing is not used again.
MAX_IDLE_S = 4.0


class PostConnections:
    """Connections to one `http://` server. As many as there are calls at once; all on one event loop.

    Whatever goes wrong on the line is BackendUnavailableError. Cancelling a call closes its connection."""

    def __init__(self, url: str, *, headers: dict[str, str], connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "http", "TLS is for a general client"
        self._url = url
        self._host, self._port, self._base = parts.hostname or "", parts.port or 80, parts.path
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines)
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def post(self, path: str, payload: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer, within `timeout_s` from here."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            connection = self._pop_idle(loop.time()) or await self._connect(timeout_s)
            head = (
                f"POST {self._base}{path} HTTP/1.1\r\n{self._head}\r\nContent-Length: {len(payload)}\r\n\r\n"
            )
            try:
                answer = await connection.exchange(head.encode("latin-1"), payload, deadline)
            except BaseException:
                connection.close()
                raise
        except TimeoutError as error:
            raise BackendUnavailableError(
                f"POST {self._url}{path}: no answer within {timeout_s:g} s"
            ) from error
        except (OSError, httptools.HttpParserError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BackendUnavailableError(f"POST {self._url}{path}: {what}") from error
        if self._is_closed or not connection.is_open:
            connection.close()
        else:
            connection.idle_since = loop.time()
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close what is idle; calls under way go on, and close theirs."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _pop_idle(self, now: float) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(min(timeout_s, self._connect_timeout_s)):
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One exchange at a time. httptools calls the `on_…` methods while it reads an answer."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.is_open = False
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: httptools.HttpResponseParser
        self._body: list[bytes] = []

    async def exchange(self, head: bytes, payload: bytes, deadline: float) -> tuple[int, bytes]:
        """Raises TimeoutError, ConnectionError, HttpParserError; the connection is of no use then."""
        loop = asyncio.get_running_loop()
        self._answer = answer = loop.create_future()
        self._parser, self._body = httptools.HttpResponseParser(self), []
        self._transport.write(head + payload)
        limit = loop.call_at(deadline, self._fail, TimeoutError())
        try:
            return await answer
        finally:
            limit.cancel()
            self._answer = None

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()  # at once: the server is to notice that nobody waits

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # -------------------------------------------------------------- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(
            exc or ConnectionResetError("the server closed the connection before its answer was whole")
        )

    # -------------------------------------------------------------- the parser's calls

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))
