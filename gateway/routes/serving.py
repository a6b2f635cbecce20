"""What every API's model calls have in common: the key, the ledger, the end of the connection, the counters.

An API brings an `Exchange` for each request: how it was parsed, and how answers look.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import logs
from gateway.calls import CallIdentity
from gateway.connection import LOST
from gateway.conversation import ChatCall, ChatReply, ReplyDelta
from gateway.responses import encodable, status_of
from gateway.routes.access import gateway_of, header, session_key
from gateway.session import Session
from model_runtime.errors import InvalidRequestError, RequestTooLargeError, UnknownAgentError

if TYPE_CHECKING:
    from gateway.app import Gateway

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Body = TypeVar("Body")

CLIENT_CLOSED_REQUEST = 499  # never seen by the client; for the counters

_ID_PREFIXES = ("chatcmpl-", "msg_", "resp_")
# A body of many small values takes a hundred times as long to read as one of long texts, and everybody waits.
# Commas are what is cheap to count; texts of a million tokens have fewer.
MAX_COMMAS = 200_000


class EventWriter(Protocol):
    """Writes one answer as server-sent events."""

    def delta(self, delta: ReplyDelta) -> bytes: ...

    def end(self, reply: ChatReply) -> bytes:
        """All that has not been written yet."""
        ...

    def error(self, error: Exception) -> bytes: ...


class Exchange(Protocol):
    """One parsed request of an API."""

    @property
    def call(self) -> ChatCall: ...

    @property
    def streams(self) -> bool: ...

    @property
    def with_token_bytes(self) -> bool: ...

    def answer(self, reply: ChatReply) -> Response: ...

    def writer(self) -> EventWriter: ...


def decode_body(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Raises InvalidRequestError naming the field that is wrong or unknown, RequestTooLargeError."""
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise RequestTooLargeError(f"the body holds more than {MAX_COMMAS} values")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), param=_field_named_in(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_why(body, error)}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _why(body: bytes, error: Exception) -> str:
    """msgspec takes half of a surrogate pair for the end of the text."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return str(error)
    return "a text holds half of a surrogate pair"


def _field_named_in(message: str) -> str | None:
    found = re.search(r"at `\$\.(\w+)|unknown field `(\w+)`|required field `(\w+)`", message)
    return next((name for name in found.groups() if name), None) if found else None


Parse = Callable[[Request, bytes], Exchange]
Refuse = Callable[[Exception], Response]


async def serve(request: Request, parse: Parse, refuse: Refuse) -> Response:
    """Answer one model call. Errors before the first byte have their status, later ones are an event."""
    gateway = gateway_of(request)
    agent_id, session, call = request.path_params.get("agent_id", ""), None, _AskedCall()
    try:
        session = gateway.sessions.find(request.path_params["session_id"], session_key(request))
        logs.session_id.set(session.session_id)
        body = await body_of(request)
        exchange = parse(request, body)
        agent_id = exchange.call.agent_id
        gateway.router.check(session, exchange.call)
        identity, wait_s = _identity(request, agent_id, body), _preferred_wait_s(request)
        call = _AskedCall(identity.key, is_repeated=session.has_failed(identity.key))
        if exchange.streams:
            response = await _stream(request, session, exchange, identity, wait_s, call)
            if isinstance(response, EventStream):
                return response  # counted when it ends
        else:
            reply = await until_disconnect(
                request,
                session.calls.run(
                    identity,
                    lambda claimed: gateway.router.chat_completion(
                        session,
                        exchange.call,
                        identity=identity,
                        claimed=claimed,
                        with_token_bytes=exchange.with_token_bytes,
                        wait_s=wait_s,
                    ),
                ),
            )
            response = exchange.answer(reply)
        await call.succeeded(session)
    except ClientDisconnected:
        response = Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:  # the edge: every error has an answer in one table
        response = refuse(error)
        await call.failed(session, agent_id, error, response.status_code)
    _count(gateway, agent_id, response.status_code)
    return response


async def body_of(request: Request) -> bytes:
    """What `request.body()` is, without an asynchronous generator for the one piece it mostly is."""
    message = await request.receive()
    pieces = [message.get("body", b"")]
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await request.receive()
        pieces.append(message.get("body", b""))
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def named_agent(request: Request, *names: Any) -> str:
    """The agent of the base URL; at the session's own, the one the X-Agent-ID header or the body names."""
    agent_id = request.path_params.get("agent_id")
    if agent_id:
        return agent_id
    named = header(request, b"x-agent-id") or next((name for name in names if name), None)
    if not isinstance(named, str):
        raise UnknownAgentError(
            "no agent is named: use the base URL …/agents/<agent_id>, the X-Agent-ID header, "
            "metadata.agent_id, or model = an agent's id; agents are "
            f"{sorted(gateway_of(request).routes.agents)}"
        )
    return named


def _identity(request: Request, agent_id: str, body: bytes) -> CallIdentity:
    digest = hashlib.sha256(body).digest()[:16]  # bodies are long, and processors have instructions for it
    key = header(request, b"idempotency-key")
    if key:
        return CallIdentity(f"key {agent_id} {key}", digest, repeats=True)
    # The SDKs say which attempt this is: a first one is a call of its own, whatever its body.
    attempt = header(request, b"x-stainless-retry-count")
    name = f"body {agent_id} {digest.hex()}"
    return CallIdentity(name, digest, fresh=attempt == "0", repeats=bool(attempt))


def _preferred_wait_s(request: Request) -> float | None:
    """`Prefer: wait=<seconds>` (RFC 7240): how long the call may wait for its model and for room on it before
    it begins. None: as long as a call may take."""
    preferred = header(request, b"prefer")
    found = preferred and re.search(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\b", preferred)
    return float(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class _AskedCall:
    """A call as its session will remember it. `is_repeated`: it was answered with a 5xx before, and is asked
    again; an agent that is answered at last met no failure."""

    key: str = ""
    is_repeated: bool = False

    async def succeeded(self, session: Session) -> None:
        if self.is_repeated:
            session.lift_infra(self.key)
            await session.journal.durable()

    async def failed(
        self, session: Session | None, agent_id: str, error: Exception, status_code: int
    ) -> None:
        if status_code == 500:
            logger.error("a model call failed unexpectedly", exc_info=error)
        if session is not None and status_code >= 500 and not self.is_repeated:
            reason = f"agent {agent_id!r} was answered {status_code}: {encodable(error)}"
            session.mark_infra(reason, self.key)
            await session.journal.durable()


def _count(gateway: Gateway, agent_id: str, status_code: int) -> None:
    known_agent = agent_id if agent_id in gateway.routes else "unknown"
    gateway.metrics.count_request(known_agent, status_code)


def bare_request_id(answer_id: str) -> str:
    """The call that an answer's own `id` names: each API puts its prefix before it."""
    prefix = next((p for p in _ID_PREFIXES if answer_id.startswith(p)), "")
    return answer_id.removeprefix(prefix)


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancelled as soon as the client hangs up."""
    caller, is_waiting = asyncio.current_task(), True
    assert caller is not None, "a coroutine runs in a task"

    def stop(_: asyncio.Future[None]) -> None:
        if is_waiting:
            caller.cancel()

    lost: asyncio.Future[None] = request.scope["extensions"][LOST]
    lost.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if lost.done() and not caller.uncancel():
            raise ClientDisconnected from None
        raise
    finally:
        is_waiting = False
        lost.remove_done_callback(stop)


# ------------------------------------------------------------------ streams


class _LiveReply:
    """An answer while it is sampled: its deltas in order, then the reply.

    A request that joined another's generation hears no deltas and gets all of it with the reply."""

    def __init__(self) -> None:
        self._pending: asyncio.Queue[ReplyDelta | None] = asyncio.Queue()
        self._task: asyncio.Task[ChatReply]

    def put(self, delta: ReplyDelta) -> None:
        self._pending.put_nowait(delta)

    def follow(self, work: Coroutine[Any, Any, ChatReply]) -> None:
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self._pending.put_nowait(None))

    async def next(self) -> ReplyDelta | ChatReply:
        """Raises what the call raised."""
        delta = await self._pending.get()
        return self._task.result() if delta is None else delta

    async def abandon(self) -> None:
        if not self._task.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _stream(
    request: Request,
    session: Session,
    exchange: Exchange,
    identity: CallIdentity,
    wait_s: float | None,
    call: _AskedCall,
) -> EventStream:
    """The response, once its first piece is there. Raises what a call that never began raised."""
    router, live = gateway_of(request).router, _LiveReply()
    live.follow(
        session.calls.run(
            replace(identity, repeats=False),  # half of a stream is not asked for again
            lambda claimed: router.chat_completion(
                session,
                exchange.call,
                identity=identity,
                claimed=claimed,
                with_token_bytes=exchange.with_token_bytes,
                on_delta=live.put,
                wait_s=wait_s,
            ),
        )
    )
    try:
        first = await until_disconnect(request, live.next())
    except BaseException:
        await live.abandon()
        raise
    return EventStream(request, session, exchange, live, first, call)


class EventStream(Response):
    """Server-sent events of one answer. Ends the call when its client hangs up."""

    def __init__(
        self,
        request: Request,
        session: Session,
        exchange: Exchange,
        live: _LiveReply,
        first: ReplyDelta | ChatReply,
        call: _AskedCall,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Request-ID": first.request_id}
        super().__init__(None, 200, headers, media_type="text/event-stream")
        # A stream has no length; Starlette announced that of an empty body.
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        self._request, self._session, self._call = request, session, call
        self._exchange, self._live, self._first = exchange, live, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.ensure_future(self._pump(send))
        hang_up = asyncio.ensure_future(receive())
        status = CLIENT_CLOSED_REQUEST
        try:
            await asyncio.wait({pump, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                status = pump.result()
        finally:
            hang_up.cancel()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            await self._live.abandon()
            _count(gateway_of(self._request), self._exchange.call.agent_id, status)

    async def _pump(self, send: Send) -> int:
        writer, status = self._exchange.writer(), 200
        try:
            item = self._first
            while isinstance(item, ReplyDelta):
                data = writer.delta(item)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                item = await self._live.next()
            await self._call.succeeded(self._session)
            last = writer.end(item)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the edge, after the first byte
            status = status_of(error)
            await self._call.failed(self._session, self._exchange.call.agent_id, error, status)
            last = writer.error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        return status
