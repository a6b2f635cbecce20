"""What went wrong with an S3 request, as the store's errors.

The HTTP status decides: error codes, bodies and the exceptions s3fs makes of them differ from server to
server (a failed condition is FileExistsError, OSError(EINVAL) or a bare 412, depending on who answers).
"""

from __future__ import annotations

import re
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ResponseStreamingError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from model_runtime.errors import (
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from model_runtime.store import SINGLE_WRITER_HINT

_CREDENTIALS_HINT = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
_NO_ANSWER = (
    OSError,
    BotoConnectionError,
    HTTPClientError,
    ResponseParserError,
    ResponseStreamingError,
    aiohttp.ClientError,
)
# Refusals of credentials that come as 400.
_ACCESS_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}


class ConditionFailedError(StoreUnavailableError):
    """409 or 412: an object is there, or another writer is at work on it."""


def s3_error(operation: str, uri: str, error: Exception) -> Exception:
    """The error to raise for `error`; one that is no failure of the store comes back as it is."""
    what = f"{operation} {uri}"
    if isinstance(error, StoreError):
        return error
    answer = _http_answer(error)
    if answer is not None:
        return _from_answer(what, uri, answer)
    if isinstance(error, _NO_CREDENTIALS):
        return StoreAccessError(f"{what}: no usable credentials ({_reason(error)}); {_CREDENTIALS_HINT}")
    if isinstance(error, _NO_ANSWER):
        return StoreUnavailableError(f"{what}: no answer ({_reason(error)})")
    if isinstance(error, BotoCoreError):
        return StoreError(f"{what}: {_reason(error)}")
    return error


def _http_answer(error: BaseException) -> dict[str, Any] | None:
    """The parsed answer botocore keeps on the error, or on the one s3fs translated it from."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and "HTTPStatusCode" in response.get("ResponseMetadata", {}):
            return response
    return None


def _from_answer(what: str, uri: str, answer: dict[str, Any]) -> StoreError:
    status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
    details = answer.get("Error", {})
    code, message = details.get("Code") or "", details.get("Message") or ""
    shown = f"HTTP {status} {code} {message}".rstrip()
    if code == "NoSuchBucket":
        bucket = uri.removeprefix("s3://").split("/", 1)[0]
        return StoreError(
            f"{what}: there is no bucket {bucket!r}; create it first, Repertory never does ({shown})"
        )
    if status in (401, 403) or code in _ACCESS_CODES:
        return StoreAccessError(f"{what}: refused ({shown}); {_CREDENTIALS_HINT}")
    if status == 404:
        return ObjectNotFoundError(f"{what}: no such object")
    if status in (301, 307, 308):
        return StoreError(f"{what}: the bucket is elsewhere ({shown}); set AWS_DEFAULT_REGION to its region")
    if status == 501 and what.startswith("create "):
        return StoreUnsafeError(
            f"{what}: the store has no conditional writes ({shown}). {SINGLE_WRITER_HINT}"
        )
    if status in (409, 412):
        return ConditionFailedError(f"{what}: {shown}")
    # An endpoint that is not S3 answers pages that can't be parsed; botocore shows those as 200 or 400.
    if status in (408, 429) or (status >= 500 and status != 501) or code in ("RequestTimeout", "SlowDown"):
        return StoreUnavailableError(f"{what}: the store is in trouble ({shown})")
    return StoreError(f"{what}: {shown}")


def _reason(error: BaseException) -> str:
    text = re.sub(r"://[^/@\s\"]*@", "://", str(error))  # an endpoint may carry user:password@
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
