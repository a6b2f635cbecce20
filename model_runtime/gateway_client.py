"""The gateway as a driver of workflows sees it: typed errors, bounded retries, one connection pool.

Control calls (groups, sessions, finalize, abort) may be repeated without harm, so they are, until the
gateway has been away for `patience_s`. Model calls are repeated only when the connection broke, with the
same Idempotency-Key, so that the gateway joins the two.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from pydantic import BaseModel
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from model_runtime.errors import (
    AlreadyDoneError,
    AuthenticationError,
    BackendRejectedError,
    BackendUnavailableError,
    ConfigError,
    ConflictError,
    GatewayError,
    InvalidRequestError,
    LimitExceededError,
    ModelNotReadyError,
    RequestTooLargeError,
    RunEndedError,
    TooManyRequestsError,
    UnknownAgentError,
    UnknownModelError,
    UnknownSessionError,
)
from model_runtime.protocol import STORE_UNAVAILABLE

CONNECT_TIMEOUT_S = 5.0

Answer = TypeVar("Answer", bound=BaseModel)

_BY_CODE: dict[str, type[GatewayError]] = {
    error.code: error
    for error in (
        AlreadyDoneError,
        AuthenticationError,
        ConflictError,
        InvalidRequestError,
        LimitExceededError,
        ModelNotReadyError,
        RequestTooLargeError,
        RunEndedError,
        TooManyRequestsError,
        UnknownAgentError,
        UnknownModelError,
        UnknownSessionError,
    )
}
_WORTH_REPEATING = (BackendUnavailableError, ModelNotReadyError, TooManyRequestsError)


def open_http(*, max_connections: int, trusted_certificate: str | None = None) -> aiohttp.ClientSession:
    """A pool for one driver. Calls give their own total limits. `trusted_certificate` is a PEM file that is
    believed besides the system's. Raises ConfigError where it can't be read."""
    tls = ssl.create_default_context()
    if trusted_certificate is not None:
        try:
            tls.load_verify_locations(cafile=trusted_certificate)
        except OSError as error:
            raise ConfigError(f"gateway.tls_certificate {trusted_certificate!r}: {error}") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=30.0, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


class GatewayClient:
    """Calls on one gateway. Every failure is a GatewayError: BackendUnavailableError and
    ModelNotReadyError are the infrastructure's, the others are the caller's own and final."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        *,
        admin_key: str,
        patience_s: float,
        store_patience_s: float = 0.0,
    ) -> None:
        """`patience_s` with a gateway that is away; one that answers that its store is away gets
        `store_patience_s` more."""
        self.url = url.rstrip("/")
        self._http = http
        self._admin_headers = _headers(admin_key)
        self._patience_s = patience_s
        self._store_patience_s = store_patience_s

    async def control(
        self,
        path: str,
        body: BaseModel,
        answer: type[Answer],
        *,
        timeout_s: float,
        patience_s: float | None = None,
    ) -> Answer:
        """A control call, repeated while the gateway is away or answers 5xx."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_WORTH_REPEATING),
            stop=self._gives_up(self._patience_s) if patience_s is None else stop_after_delay(patience_s),
            wait=wait_exponential_jitter(multiplier=0.1, max=3.0, jitter=0.2),
            reraise=True,
        )
        data = body.model_dump_json().encode()
        async for attempt in retrying:
            with attempt:
                reply = await self._post(f"{self.url}{path}", data, self._admin_headers, timeout_s)
                return answer.model_validate_json(reply)
        raise AssertionError("unreachable: tenacity re-raises the last error")

    def _gives_up(self, patience_s: float) -> Callable[[RetryCallState], bool]:
        def stop(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            more_s = self._store_patience_s if isinstance(error, _StoreAway) else 0.0
            return (state.seconds_since_start or 0.0) >= patience_s + more_s

        return stop

    async def call(
        self, url: str, body: Any, *, api_key: str, timeout_s: float, idempotency_key: str | None = None
    ) -> Any:
        """A call with a session's own key; repeated for `patience_s` while the connection breaks or the
        gateway is full: a gateway that was restarted still has its sessions."""
        data = msgspec.json.encode(body)
        headers = _headers(api_key)
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        try:
            return msgspec.json.decode(await self._post(url, data, headers, timeout_s))
        except _ASK_AGAIN:
            return await self._call_again(url, data, headers, timeout_s)

    async def _call_again(self, url: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> Any:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_ASK_AGAIN),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.2),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return msgspec.json.decode(await self._post(url, data, headers, timeout_s))
        raise AssertionError("unreachable: tenacity re-raises the last error")

    async def _post(self, url: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._http.post(url, data=data, headers=headers, timeout=limit) as response:
                status, reply = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, but nothing was asked yet
            raise _ConnectionBroke(f"{url}: no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise BackendUnavailableError(f"no answer from {url} within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _ConnectionBroke(f"{url}: {type(error).__name__}: {error}") from error
        if status >= 400:
            raise error_of(status, reply)
        return reply


class _StoreAway(BackendUnavailableError):
    """The gateway is there, and waits for its store."""


class _ConnectionBroke(BackendUnavailableError):
    """The gateway could not be reached, or went away before it answered."""


_ASK_AGAIN = (_ConnectionBroke, TooManyRequestsError)


def error_of(status: int, reply: bytes) -> GatewayError:
    """The error behind an answer of 400 or above, in the gateway's (OpenAI's) error shape or any other."""
    message, code = _message_and_code(reply)
    if (known := _BY_CODE.get(code)) is not None:
        return known(message)
    if code == STORE_UNAVAILABLE:
        return _StoreAway(f"the gateway answered {status}: {message}")
    if status >= 500:
        return BackendUnavailableError(f"the gateway answered {status}: {message}")
    if status in (400, 422):
        return InvalidRequestError(message)
    return BackendRejectedError(message, status_code=status)


def _message_and_code(reply: bytes) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(reply)["error"]
        return str(error["message"]), str(error.get("code", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return reply[:200].decode(errors="replace"), ""


def is_infrastructure(error: BaseException) -> bool:
    """Is the infrastructure to blame for what a workflow raised? Then the same execution may be tried again.

    Looks through the chain of causes: frameworks wrap what their HTTP client raised.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, (*_WORTH_REPEATING, UnknownSessionError)) or _is_openai_outage(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def _is_openai_outage(error: BaseException) -> bool:
    """5xx, a full gateway or a lost connection, as the SDKs of OpenAI and Anthropic report it; neither is
    imported here."""
    if type(error).__module__.split(".")[0] not in ("openai", "anthropic"):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", 0)
    return "APIConnectionError" in names or status >= 500 or (status == 429 and _is_to_come_back(error))


def _is_to_come_back(error: BaseException) -> bool:
    return "retry-after" in getattr(getattr(error, "response", None), "headers", {})


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
