from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError
from s3fs.errors import translate_boto_error

from model_runtime.errors import (
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from model_runtime.s3_errors import ConditionFailedError, s3_error


def answered(status: int, code: str = "", message: str | None = "said the server") -> ClientError:
    error = {"Code": code or str(status), "Message": message}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize("translated_by_s3fs", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (404, "NoSuchKey", ObjectNotFoundError, "no such object"),
        (404, "", ObjectNotFoundError, "no such object"),
        (404, "NoSuchBucket", StoreError, "there is no bucket 'b'; create it first"),
        (401, "", StoreAccessError, "AWS_SECRET_ACCESS_KEY"),
        (403, "InvalidAccessKeyId", StoreAccessError, "InvalidAccessKeyId"),
        (400, "ExpiredToken", StoreAccessError, "ExpiredToken"),
        (301, "PermanentRedirect", StoreError, "AWS_DEFAULT_REGION"),
        (409, "OperationAborted", ConditionFailedError, "HTTP 409"),
        (412, "PreconditionFailed", ConditionFailedError, "HTTP 412"),
        (501, "NotImplemented", StoreUnsafeError, "single_writer"),
        (400, "RequestTimeout", StoreUnavailableError, "RequestTimeout"),
        (429, "", StoreUnavailableError, "HTTP 429"),
        (503, "SlowDown", StoreUnavailableError, "SlowDown"),
        (400, "KeyTooLongError", StoreError, "HTTP 400 KeyTooLongError said the server"),
    ],
)
def test_the_http_status_decides(
    status: int, code: str, kind: type[StoreError], said: str, translated_by_s3fs: bool
) -> None:
    error: Exception = answered(status, code)
    if translated_by_s3fs:
        error = translate_boto_error(error)
    found = s3_error("create", "s3://b/k", error)
    assert type(found) is kind
    assert said in str(found)
    assert str(found).startswith("create s3://b/k: ")


def test_an_answer_without_a_message_is_no_trouble() -> None:
    """Ceph sends none."""
    found = s3_error("get", "s3://b/k", answered(403, "InvalidAccessKeyId", None))
    assert isinstance(found, StoreAccessError)
    assert "None" not in str(found)


def test_only_a_conditional_write_makes_a_store_unsafe() -> None:
    assert type(s3_error("get", "s3://b/k", answered(501))) is StoreError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCredentialsError(), StoreAccessError),
        (ReadTimeoutError(endpoint_url="http://user:secret@host"), StoreUnavailableError),
        (ConnectionResetError(104, "Connection reset by peer"), StoreUnavailableError),
        (TimeoutError(), StoreUnavailableError),
    ],
)
def test_without_an_answer_the_cause_decides(error: Exception, kind: type[StoreError]) -> None:
    found = s3_error("get", "s3://b/k", error)
    assert type(found) is kind
    assert "secret" not in str(found)


def test_what_is_no_failure_of_the_store_stays_what_it_is() -> None:
    for error in (TypeError("a bug"), StoreError("put s3://b/k: known")):
        assert s3_error("get", "s3://b/k", error) is error
