"""The one table from exceptions to what callers are told, and OpenAI's shape of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from model_runtime.errors import GatewayError, RequestTooLargeError, StoreError, SupersededError
from model_runtime.protocol import STORE_UNAVAILABLE

STORE_RETRY_AFTER_S = 2.0

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "run_ended_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def json_response(body: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status_code, headers, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a caller is told of an error, in whatever shape its API has."""

    status_code: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = f"{self.retry_after_s:g}"
        if self.status_code < 500 and self.retry_after_s is None:
            headers["x-should-retry"] = "false"  # the SDKs would repeat a 409
        return headers


def failure_of(error: Exception) -> Failure:
    """What is not listed is a 500 without details."""
    match error:
        case GatewayError():
            param = getattr(error, "param", None)
            param = None if param is None else encodable(param)
            return Failure(error.status_code, error.code, encodable(error), param, error.retry_after_s)
        case StoreError():
            message = f"the store failed: {encodable(error)}"
            return Failure(503, STORE_UNAVAILABLE, message, retry_after_s=STORE_RETRY_AFTER_S)
        case SupersededError():
            return Failure(503, "superseded", str(error))
        case RequestValidationError():
            return _invalid(error)
        case RecursionError():  # nothing here recurses but over what a caller sent
            return Failure(400, "invalid_request", "the request is nested too deeply")
        case HTTPException():
            code = RequestTooLargeError.code if error.status_code == 413 else "http_error"
            return Failure(error.status_code, code, encodable(error.detail))
        case _:
            return Failure(500, "internal_error", "the gateway failed; its log says how")


def _invalid(error: RequestValidationError) -> Failure:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return Failure(422, "invalid_request", f"the body is not valid JSON: {encodable(reason)}")
    path = encodable(".".join(str(part) for part in first["loc"][1:]))
    return Failure(422, "invalid_request", f"{path or 'body'}: {encodable(first['msg'])}", path or None)


def encodable(message: object) -> str:
    """What a caller sent may hold half of a surrogate pair, which no answer can."""
    return str(message).encode(errors="replace").decode()


def status_of(error: Exception) -> int:
    return failure_of(error).status_code


def error_response(error: Exception) -> Response:
    """The answer to a request that ended with `error`, in OpenAI's shape."""
    failure = failure_of(error)
    return json_response(openai_error(failure), failure.status_code, failure.headers)


def openai_error(failure: Failure) -> dict[str, Any]:
    status = failure.status_code
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": failure.message,
            "type": kind,
            "code": failure.code,
            "param": failure.param,
        }
    }
