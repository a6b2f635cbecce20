"""The S3 store against a server that misbehaves. Against real ones: tests/integration/test_store_s3.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from time import monotonic
from typing import Literal

import pytest

from model_runtime.config import StoreConfig
from model_runtime.errors import (
    ConfigError,
    ObjectExistsError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from model_runtime.store import Store, open_store
from tests import fakes


@pytest.fixture
def fake_s3() -> Iterator[fakes.FakeS3]:
    server = fakes.FakeS3()
    with fakes.serve(server):
        yield server


@pytest.fixture
def s3_store(fake_s3: fakes.FakeS3, monkeypatch: pytest.MonkeyPatch) -> Store:
    fakes.use_s3(monkeypatch, fake_s3.url)
    return open_store(StoreConfig(url="s3://bucket/runs", max_attempts=3, read_timeout_s=5))


@pytest.mark.parametrize("conditions", ["ignored", "unknown"])
def test_a_store_without_conditional_writes_is_refused_by_the_probe(
    s3_store: Store, fake_s3: fakes.FakeS3, conditions: Literal["ignored", "unknown"]
) -> None:
    fake_s3.conditions = conditions
    with pytest.raises(StoreUnsafeError, match=r"conditional writes.*store\.single_writer: true"):
        s3_store.check()
    assert fake_s3.objects == {}


@pytest.mark.parametrize("conditions", ["ignored", "unknown"])
def test_a_single_writer_may_use_a_store_without_conditional_writes(
    s3_store: Store, fake_s3: fakes.FakeS3, conditions: Literal["ignored", "unknown"]
) -> None:
    fake_s3.conditions = conditions
    store = open_store(StoreConfig(url=s3_store.url, single_writer=True))
    store.check()
    assert store.put_if_absent("k", b"1") is True
    assert store.put_if_absent("k", b"1") is False
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("k", b"2")
    assert store.get("k") == b"1"


def test_a_store_that_changes_bytes_is_found_by_the_probe(s3_store: Store, fake_s3: fakes.FakeS3) -> None:
    class Trailing(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, value + b"\r\nx-amz-checksum-crc32:AAAAAA==")

    fake_s3.objects = Trailing()
    with pytest.raises(StoreError, match="other bytes"):
        s3_store.check()


def test_a_create_whose_answer_was_lost_is_no_conflict(s3_store: Store, fake_s3: fakes.FakeS3) -> None:
    s3_store.put("warm", b"")
    fake_s3.lose_next_answers = 1
    assert s3_store.put_if_absent("k", b"mine") is False  # the retry finds its own bytes
    assert s3_store.get("k") == b"mine"
    assert fake_s3.requests.count("PUT /bucket/runs/k") == 2


def test_a_conflict_with_a_writer_that_then_failed_is_tried_again(
    s3_store: Store, fake_s3: fakes.FakeS3
) -> None:
    fake_s3.refuse_next = [409]
    assert s3_store.put_if_absent("k", b"mine") is True
    assert s3_store.get("k") == b"mine"


def test_retries_leave_pythons_random_numbers_alone(s3_store: Store, fake_s3: fakes.FakeS3) -> None:
    """A checkpoint holds them: a store that failed now and then must not change its bytes."""
    s3_store.put("warm", b"")
    before = random.getstate()
    fake_s3.refuse_next = [503, 503]
    s3_store.put("k", b"1")
    assert fake_s3.requests.count("PUT /bucket/runs/k") == 3
    assert random.getstate() == before


@pytest.mark.parametrize("status", [429, 503])
def test_trouble_is_retried_within_the_attempts(s3_store: Store, fake_s3: fakes.FakeS3, status: int) -> None:
    fake_s3.refuse_next = [status, status]
    s3_store.put("k", b"1")
    fake_s3.refuse_next = [status] * 3
    with pytest.raises(StoreUnavailableError, match=f"put s3://bucket/runs/k: .*HTTP {status}"):
        s3_store.put("k", b"2")
    assert fake_s3.requests.count("PUT /bucket/runs/k") == 6
    assert s3_store.get("k") == b"1"


def test_a_body_that_breaks_off_is_read_again_and_never_returned_short(
    s3_store: Store, fake_s3: fakes.FakeS3
) -> None:
    s3_store.put("k", b"x" * 100_000)
    fake_s3.cut_next_bodies = 1
    assert s3_store.get("k") == b"x" * 100_000
    fake_s3.cut_next_bodies = 3
    with pytest.raises(StoreUnavailableError, match="get s3://bucket/runs/k"):
        s3_store.get("k")


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_an_access_error_and_not_retried(
    s3_store: Store, fake_s3: fakes.FakeS3, status: int
) -> None:
    fake_s3.refuse_next = [status]
    with pytest.raises(StoreAccessError, match="AWS_ACCESS_KEY_ID") as caught:
        s3_store.put("k", b"1")
    assert len(fake_s3.requests) == 1
    assert "test-secret" not in str(caught.value)
    assert "test-key" not in str(caught.value)


def test_a_silent_endpoint_costs_no_more_than_the_attempts(fake_s3: fakes.FakeS3, s3_store: Store) -> None:
    fake_s3.hang_s = 30
    store = open_store(StoreConfig(url=s3_store.url, read_timeout_s=0.3, max_attempts=2))
    with pytest.raises(StoreUnavailableError, match=r"get s3://bucket/runs/k: no answer .*ReadTimeout"):
        store.get("k")
    assert fake_s3.requests == ["GET /bucket/runs/k"] * 2


def test_a_silent_endpoint_costs_no_more_than_the_operation_limit(
    fake_s3: fakes.FakeS3, s3_store: Store
) -> None:
    fake_s3.hang_s = 30
    store = open_store(StoreConfig(url=s3_store.url, read_timeout_s=20, operation_timeout_s=0.5))
    started = monotonic()
    with pytest.raises(StoreUnavailableError, match=r"get s3://bucket/runs/k: not done within 0\.5 s"):
        store.get("k")
    assert monotonic() - started < 15


def test_an_endpoint_nobody_listens_on_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.use_s3(monkeypatch, "http://user:topsecret@127.0.0.1:9")
    store = open_store(StoreConfig(url="s3://bucket/runs", max_attempts=2, operation_timeout_s=10))
    with pytest.raises(StoreUnavailableError, match="list s3://bucket/runs") as caught:
        store.check()
    assert "topsecret" not in str(caught.value)


def test_missing_credentials_are_an_access_error(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreAccessError, match="no usable credentials"):
        open_store(StoreConfig(url=s3_store.url)).check()


def test_credentials_in_the_url_are_refused_without_repeating_them() -> None:
    with pytest.raises(ConfigError, match="environment") as caught:
        open_store(StoreConfig(url="s3://key:topsecret@bucket/runs"))
    assert "topsecret" not in str(caught.value)


def test_no_bucket_is_ever_created(s3_store: Store, fake_s3: fakes.FakeS3) -> None:
    s3_store.check()
    s3_store.put("deep/er/key", b"1")
    assert "PUT /bucket" not in fake_s3.requests
    assert all(request.startswith("GET") or "/bucket/runs/" in request for request in fake_s3.requests)
