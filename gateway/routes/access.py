"""Who may call what: session keys open their session, the admin key the control API."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.requests import Request

from model_runtime.errors import AuthenticationError
from model_runtime.protocol import ADMIN_KEY_ENV

if TYPE_CHECKING:
    from gateway.app import Gateway


def gateway_of(request: Request) -> Gateway:
    return request.app.state.gateway


def header(request: Request, name: bytes) -> str:
    """The first of that name, in lower case as the scope has it; empty without one. Of `request.headers` a
    header costs several times as much, most of all one that isn't there."""
    for key, value in request.scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


def bearer_key(request: Request) -> str:
    """The key of `Authorization: Bearer …`; empty without one."""
    scheme, _, key = header(request, b"authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def session_key(request: Request) -> str:
    """The key an agent's SDK sends: OpenAI's as a bearer, Anthropic's as `x-api-key`."""
    return bearer_key(request) or header(request, b"x-api-key").strip()


def is_admin(request: Request) -> bool:
    """Has the caller shown the admin key, where it is taken? The agents' listener does not take it."""
    if not request.app.state.takes_admin_key:
        return False
    return hmac.compare_digest(bearer_key(request).encode(), gateway_of(request).admin_key.encode())


async def require_admin(request: Request) -> None:
    """A dependency of every control route; a coroutine, so that no thread has to be free for it. Raises
    AuthenticationError."""
    if not is_admin(request):
        raise AuthenticationError(f"this route asks for `Authorization: Bearer ${ADMIN_KEY_ENV}`")
