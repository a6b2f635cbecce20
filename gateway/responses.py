"""The one table from exceptions to HTTP answers, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from model_runtime.errors import GatewayError, StoreError, SupersededError

STORE_RETRY_AFTER_S = 2.0

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "run_ended_error",
    429: "rate_limit_error",
}


def json_response(body: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status_code, headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The answer to a request that ended with `error`. What is not listed is a 500 without details."""
    match error:
        case GatewayError():
            param = getattr(error, "param", None)
            return _error(error.status_code, error.code, str(error), param, error.retry_after_s)
        case StoreError():
            return _error(503, "store_unavailable", f"the store failed: {error}", None, STORE_RETRY_AFTER_S)
        case SupersededError():
            return _error(503, "superseded", str(error), None, None)
        case RequestValidationError():
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"][1:])
            return _error(422, "invalid_request", f"{path or 'body'}: {first['msg']}", path or None, None)
        case HTTPException():
            return _error(error.status_code, "http_error", str(error.detail), None, None)
        case _:
            return _error(500, "internal_error", "the gateway failed; its log says how", None, None)


def _error(status: int, code: str, message: str, param: str | None, retry_after_s: float | None) -> Response:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    headers = {}
    if retry_after_s is not None:
        headers["Retry-After"] = f"{retry_after_s:g}"
    if status < 500:
        headers["x-should-retry"] = "false"  # the SDKs would repeat a 409
    body = {"error": {"message": message, "type": kind, "code": code, "param": param}}
    return json_response(body, status, headers)
