"""What one client may ask of the gateway at most: bytes of a request, and model calls at once.

Bounds on sessions and chains stand where those are made (`sessions.py`, `router.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.responses import error_response
from gateway.routes import anthropic
from model_runtime.errors import (
    GatewayError,
    HeadersTooLargeError,
    RequestTooLargeError,
    TooManyRequestsError,
)
from model_runtime.gateway_config import GatewayConfig

OnRefusal = Callable[[GatewayError], None]


class BoundedRequests:
    """ASGI middleware that refuses what is too large or too much, in the caller's own error shape."""

    def __init__(self, app: ASGIApp, *, config: GatewayConfig, on_refusal: OnRefusal) -> None:
        self._app = app
        self._config = config
        self._on_refusal = on_refusal
        self._num_running = 0
        self._by_session: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = _content_length(scope)
        session_id = _session_of_model_call(scope)
        refusal = self._refusal(scope, length, session_id)
        if refusal is not None:
            self._on_refusal(refusal)
            return await self._refuse(refusal, scope, receive, send)
        if length is None:
            receive = self._counted(receive)
        if session_id is None:
            return await self._app(scope, receive, send)
        self._num_running += 1
        self._by_session[session_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
            self._by_session[session_id] -= 1
            if not self._by_session[session_id]:
                del self._by_session[session_id]

    def _refusal(self, scope: Scope, length: int | None, session_id: str | None) -> GatewayError | None:
        config = self._config
        if (num_bytes := _head_bytes(scope)) > config.max_header_bytes:
            return HeadersTooLargeError(
                f"the request line and headers are {num_bytes} bytes; "
                f"gateway.max_header_bytes is {config.max_header_bytes}"
            )
        if length is not None and length > config.max_request_bytes:
            return self._too_large(length)
        if session_id is None:
            return None
        if self._num_running >= config.max_concurrent_requests:
            return TooManyRequestsError(
                f"{self._num_running} model calls are under way; gateway.max_concurrent_requests is "
                f"{config.max_concurrent_requests}"
            )
        if self._by_session[session_id] >= config.max_concurrent_requests_per_session:
            return TooManyRequestsError(
                f"{self._by_session[session_id]} model calls of this session are under way; "
                "gateway.max_concurrent_requests_per_session is "
                f"{config.max_concurrent_requests_per_session}"
            )
        return None

    def _too_large(self, num_bytes: int) -> RequestTooLargeError:
        limit = self._config.max_request_bytes
        return RequestTooLargeError(
            f"the body has {num_bytes} bytes or more; gateway.max_request_bytes is {limit}"
        )

    def _counted(self, receive: Receive) -> Receive:
        """For a body whose length is not announced."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._config.max_request_bytes:
                error = self._too_large(num_bytes)
                self._on_refusal(error)
                # FastAPI lets no other exception through from here.
                raise HTTPException(error.status_code, str(error))
            return message

        return counted

    async def _refuse(self, error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
        response = anthropic.refusal(error) if "/v1/messages" in scope["path"] else error_response(error)
        response.headers["Connection"] = "close"  # or the rest of the body would be read
        await response(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    head = len(scope["raw_path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:
        head += len(name) + len(value)
    return head


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return None


def _session_of_model_call(scope: Scope) -> str | None:
    """`/sessions/<id>/…/v1/…` names the session; control calls are not counted."""
    parts = scope["path"].split("/", 3)
    if scope["method"] != "POST" or len(parts) < 4 or parts[1] != "sessions":
        return None
    return parts[2] if "v1/" in parts[3] else None
