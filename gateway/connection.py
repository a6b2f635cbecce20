"""The gateway's end of a client's connection: requests that never end, clients that read no answer, and those
that hang up."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.responses import error_response
from model_runtime.errors import HeadersTooLargeError

LOST = "repertory.lost"
"""ASGI extension: a future that is done when the request's connection is lost."""

# How long a client may take over a request's headers, the first from when it connected; then over the body.
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 120.0
# How long what was sent to a client may lie there unread before the next piece.
READ_TIMEOUT_S = 60.0


def bounded_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with bounds on headers that never end, in bytes and in time, on the time bodies and
    readers take, and the extension LOST."""

    class BoundedProtocol(HttpToolsProtocol):
        _in_head = False
        _in_body = False
        _head_bytes = 0
        _timer: asyncio.TimerHandle | None = None  # of the part of a request that is coming
        _unread_timer: asyncio.TimerHandle | None = None
        _lost: asyncio.Future[None]

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._lost = self.loop.create_future()
            super().connection_made(transport)  # type: ignore[arg-type]
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()
            self.scope["extensions"] = {LOST: self._lost}  # type: ignore[typeddict-item]

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_body = False
            self._stop_timer()
            # Reading stopped for a large body; only who reads on hears of the connection's end.
            if not self.pipeline:
                self.flow.resume_reading()

        def on_headers_complete(self) -> None:
            self._in_head, self._in_body = False, True
            self._head_bytes = 0
            self._stop_timer()
            super().on_headers_complete()
            if self.scope["method"] != "HEAD":
                self.cycle.transport = _HeadWithBody(self.transport)  # type: ignore[assignment]

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # What came whole is judged by the middleware.
            if not (self._in_head or self._in_body) or self.transport.is_closing():
                return
            if self._timer is None:
                timeout_s = HEAD_TIMEOUT_S if self._in_head else BODY_TIMEOUT_S
                self._timer = self.loop.call_later(timeout_s, self.transport.abort)
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > max_header_bytes:
                    self._refuse_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_unread_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_unread_timer()
            super().connection_lost(exc)
            if not self._lost.done():
                self._lost.set_result(None)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _stop_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

        def _refuse_head(self) -> None:
            error = HeadersTooLargeError(f"the headers are longer than {max_header_bytes} bytes")
            response = error_response(error)
            response.headers["Connection"] = "close"
            lines = [f"HTTP/1.1 {error.status_code} Request Header Fields Too Large".encode()]
            lines += [name + b": " + value for name, value in response.raw_headers]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
            self.transport.close()

    return BoundedProtocol


class _HeadWithBody:
    """What one answer is written to: its head leaves with the beginning of its body, in one packet."""

    __slots__ = ("_head", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close, self.is_closing = transport.close, transport.is_closing
        self._head: bytes | None = None  # empty once it is written

    def write(self, data: bytes) -> None:
        if self._head is None and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)
