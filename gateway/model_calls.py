"""The short way of model calls: past the control routes' machinery, straight to their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.openapi import BASES

Handler = Callable[[Request], Awaitable[Response]]

_SESSION_BASE, _AGENT_BASE = BASES


class ModelCallRoutes:
    """Around an application, answers POSTs to its routes below a session's or an agent's base URL.

    Everything else, and what is wrong in path or method, is left to the application. An error that a handler
    raises is answered with `on_error`."""

    def __init__(self, app: Starlette, *, on_error: Callable[[Exception], Response]) -> None:
        self._app = app
        self._on_error = on_error
        self._handlers: dict[str, Handler] = {
            route.path.removeprefix(_SESSION_BASE): route.endpoint
            for route in app.routes
            if isinstance(route, Route) and "POST" in (route.methods or ())
            if route.path.startswith(f"{_SESSION_BASE}/v1/")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            return await self._app(scope, receive, send)
        handler, scope["path_params"] = found
        scope["app"] = self._app
        try:
            response = await handler(Request(scope, receive, send))
        except Exception as error:  # the edge: every error has an answer
            response = self._on_error(error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[Handler, dict[str, str]] | None:
        path: str = scope["path"]
        start, _, operation = path.partition("/v1/")
        handler = self._handlers.get(f"/v1/{operation}")
        parts = start.split("/")
        if handler is None or parts[:2] != ["", "sessions"] or not all(parts[2:]):
            return None
        match parts[2:]:
            case [session_id]:
                return handler, {"session_id": session_id}
            case [session_id, "agents", agent_id]:
                return handler, {"session_id": session_id, "agent_id": agent_id}
        return None
