"""A gateway without models: the control API and chat completions, in memory, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from model_runtime.errors import (
    AlreadyDoneError,
    AuthenticationError,
    ConflictError,
    GatewayError,
    InvalidRequestError,
    RunEndedError,
    UnknownSessionError,
)

Speak = Callable[[str, list[dict[str, Any]]], str]


@dataclass
class FakeSession:
    session_id: str
    request: dict[str, Any]
    rewards: dict[tuple[str | None, str], float | None] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # Idempotency-Key of every call
    answer: dict[str, Any] | None = None
    reason: str = ""

    @property
    def member(self) -> tuple[str, int, int]:
        r = self.request
        return (r["group_id"], r["member_index"], r["attempt"])


class FakeGateway:
    """Answers like the gateway and remembers everything. Attributes may be changed while it runs."""

    def __init__(self, speak: Speak = lambda agent_id, messages: f"{agent_id} heard you") -> None:
        self.speak = speak
        self.url = ""
        self.admin_key = ""
        self.ends_after_groups: int | None = None
        self.waits_first = 0  # POST /groups that answer `waiting` before one opens
        self.refuse_all = 0  # requests that are answered 502, whatever they ask
        self.chat_errors: list[GatewayError] = []  # raised by the next chat calls
        self.chat_delay_s = 0.0
        self.stopped = False
        self.settled_groups: set[str] = set()  # parts of group ids that are over
        self.refused_members: set[int] = set()
        self.done_members: set[int] = set()
        self.groups: dict[str, dict[str, Any]] = {}
        self.open_groups: set[str] = set()
        self.sessions: dict[str, FakeSession] = {}
        self.history: list[FakeSession] = []
        self.requests: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0

    def forget(self) -> None:
        """What a restart of the gateway loses."""
        self.sessions.clear()
        self.open_groups.clear()

    @property
    def statuses(self) -> Counter[str]:
        return Counter(s.answer["status"] for s in self.history if s.answer is not None)

    def settled(self, status: str) -> list[FakeSession]:
        return [s for s in self.history if s.answer is not None and s.answer["status"] == status]

    # -------------------------------------------------------------- routes

    async def open_group(self, request: web.Request) -> web.Response:
        body = await self._admin_body(request)
        group_id = body["group_id"]
        if self.stopped or (
            self.ends_after_groups is not None
            and group_id not in self.groups
            and len(self.groups) >= self.ends_after_groups
        ):
            return web.json_response({"group_id": group_id, "status": "ended"})
        if any(part in group_id for part in self.settled_groups):
            raise AlreadyDoneError(f"group {group_id!r} is settled")
        if self.waits_first > 0:
            self.waits_first -= 1
            return web.json_response({"group_id": group_id, "status": "waiting"})
        self.groups[group_id] = body
        self.open_groups.add(group_id)
        return web.json_response({"group_id": group_id, "status": "open", "train": {}})

    async def open_session(self, request: web.Request) -> web.Response:
        body = {"mode": "train", "member_index": 0, "attempt": 0} | await self._admin_body(request)
        if self.stopped:
            raise RunEndedError("the run is stopping")
        if body["mode"] == "train" and body["group_id"] not in self.open_groups:
            raise ConflictError(f"group {body['group_id']!r} is not open")
        if body["member_index"] in self.done_members:
            raise AlreadyDoneError(f"member {body['member_index']} is settled")
        if body["member_index"] in self.refused_members:
            raise ConflictError(f"member {body['member_index']} has an open session")
        session = FakeSession(f"s-{len(self.history)}", body)
        self.sessions[session.session_id] = session
        self.history.append(session)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return web.json_response(
            {
                "session_id": session.session_id,
                "base_url": f"{self.url}/sessions/{session.session_id}",
                "api_key": f"key-{session.session_id}",
                "workflow_id": "/".join(map(str, session.member)),
            }
        )

    async def chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await request.json()
        if self.chat_delay_s:
            await asyncio.sleep(self.chat_delay_s)
        session.keys.append(request.headers.get("Idempotency-Key", ""))
        if self.chat_errors:
            raise self.chat_errors.pop(0)
        session.calls.append(body)
        agent_id = request.match_info["agent_id"]
        message = {"role": "assistant", "content": self.speak(agent_id, body["messages"])}
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": agent_id,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "request_id": f"{session.session_id}-r{len(session.calls)}",
                "policy_version": 3,
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
            }
        )

    async def reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await request.json()
        session.rewards[body["agent_id"], body["component"]] = body["reward"]
        return web.json_response({"ok": True})

    async def settle(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await self._admin_body(request, or_key=f"key-{session.session_id}")
        if session.answer is None:
            self.running -= 1
            status = body.get("status", "finalized")
            session.reason = body.get("reason", "")
            if body.get("reward") is not None:
                session.rewards[None, "reward"] = body["reward"]
            session.answer = {"session_id": session.session_id, "status": status, "num_rows": {}}
        return web.json_response(session.answer)

    # -------------------------------------------------------------- inside

    def _session(self, request: web.Request) -> FakeSession:
        session = self.sessions.get(request.match_info["session_id"])
        if session is None:
            raise UnknownSessionError("no open session of this id")
        return session

    async def _admin_body(self, request: web.Request, *, or_key: str | None = None) -> dict[str, Any]:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given not in (self.admin_key, or_key):
            raise AuthenticationError("the API key is missing or wrong")
        body = await request.json()
        if not isinstance(body, dict):
            raise InvalidRequestError("the body must be an object")
        return body

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests[request.path] += 1
        if self.refuse_all > 0:
            self.refuse_all -= 1
            return web.Response(status=502, text="bad gateway")
        try:
            return await handler(request)
        except GatewayError as error:
            body = {"error": {"message": str(error), "type": "error", "code": error.code, "param": None}}
            return web.json_response(body, status=error.status_code)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware])
        app.router.add_post("/groups", self.open_group)
        app.router.add_post("/sessions", self.open_session)
        app.router.add_post("/sessions/{session_id}/agents/{agent_id}/v1/chat/completions", self.chat)
        app.router.add_post("/sessions/{session_id}/reward", self.reward)
        app.router.add_post("/sessions/{session_id}/{how:finalize|abort}", self.settle)
        return app


@asynccontextmanager
async def serving(gateway: FakeGateway, *, admin_key: str) -> AsyncIterator[FakeGateway]:
    """The gateway on a port of its own until the block ends."""
    gateway.admin_key = admin_key
    server = TestServer(gateway.app())
    await server.start_server()
    gateway.url = str(server.make_url("")).rstrip("/")
    try:
        yield gateway
    finally:
        await server.close()
