"""A proxy on loopback before a real S3 endpoint that breaks what passes, when told to.

Requests are passed on as they came, the Host header too, so that their signatures stay valid.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from yarl import URL

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_CHUNK_BYTES = 16 * 2**10
_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"}


class FaultyProxy:
    """Use as a context manager. Its faults are plain attributes that any thread may set at any time."""

    def __init__(self, endpoint: str, *, seed: int = 0) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.refuse_share = 0.0  # of requests that are answered 503 SlowDown instead of being passed on
        self.cut_share = 0.0  # of answers that break off half-way
        self.lose_share = 0.0  # of requests that are done and whose answer never comes
        self.bytes_per_s: float | None = None  # of each body, either way
        self.silent = False  # takes requests and answers nothing
        self.num_requests = 0
        self.num_broken = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._http: aiohttp.ClientSession | None = None
        self._open: set[asyncio.BaseTransport] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """Break nothing from now on."""
        self.refuse_share = self.cut_share = self.lose_share = 0.0
        self.bytes_per_s, self.silent = None, False

    def down(self) -> None:
        """Nobody listens, and every open connection ends."""
        self._do(self._stop_listening())

    def up(self) -> None:
        self._do(self._listen())

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=600),
            connector=aiohttp.TCPConnector(limit=0),
        )
        application = web.Application(client_max_size=2**32)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._listen()

    async def _listen(self) -> None:
        assert self._runner is not None
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop_listening(self) -> None:
        assert self._site is not None
        await self._site.stop()
        for transport in list(self._open):
            transport.close()

    async def _close(self) -> None:
        assert self._runner is not None
        assert self._http is not None
        self.silent = False
        for transport in list(self._open):
            transport.close()
        await self._http.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.num_requests += 1
        transport = request.transport
        self._open = {t for t in self._open if not t.is_closing()} | {transport}
        try:
            return await self._pass_on(request, transport)
        except (
            ConnectionResetError,
            aiohttp.ClientError,
        ):  # broken on purpose, given up, or no server behind
            transport.close()
            return web.Response(status=499)  # nobody reads it

    async def _pass_on(self, request: web.Request, transport: asyncio.Transport) -> web.StreamResponse:
        body = await request.read()
        while self.silent and not transport.is_closing():  # noqa: ASYNC110 - any thread sets it
            await asyncio.sleep(0.05)
        if self._happens(self.refuse_share):
            return web.Response(status=503, body=_SLOW_DOWN, content_type="application/xml")
        await self._take_time(len(body))
        assert self._http is not None
        headers = {n: v for n, v in request.headers.items() if n.lower() not in _HOP_HEADERS}
        target = f"{self.endpoint}{request.raw_path}"
        async with self._http.request(
            request.method, URL(target, encoded=True), headers=headers, data=body, allow_redirects=False
        ) as answer:
            data = await answer.read()
            if self._happens(self.lose_share):
                transport.close()
            return await self._answer(request, transport, answer, data)

    async def _answer(
        self, request: web.Request, transport: asyncio.Transport, answer: aiohttp.ClientResponse, data: bytes
    ) -> web.StreamResponse:
        reply = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP_HEADERS | {"content-length"}:
                reply.headers.add(name, value)
        length = answer.headers.get("Content-Length")
        reply.content_length = int(length) if request.method == "HEAD" and length else len(data)
        await reply.prepare(request)
        if request.method == "HEAD":
            return reply
        cut = len(data) > 1 and self._happens(self.cut_share)
        for start in range(0, len(data), _CHUNK_BYTES):
            if cut and start + _CHUNK_BYTES >= len(data) / 2:
                await reply.write(data[start : max(start, len(data) // 2)])
                transport.close()
                return reply
            chunk = data[start : start + _CHUNK_BYTES]
            await self._take_time(len(chunk))
            await reply.write(chunk)
        return reply

    def _happens(self, share: float) -> bool:
        hit = share > 0 and self._random.random() < share
        self.num_broken += hit
        return hit

    async def _take_time(self, num_bytes: int) -> None:
        if self.bytes_per_s is not None:
            await asyncio.sleep(num_bytes / self.bytes_per_s)
