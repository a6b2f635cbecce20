"""Outages of the store are outlasted, up to a limit, and told apart from everything else."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_runtime.config import StoreConfig
from model_runtime.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreFullError,
    StoreOutageError,
    StoreUnavailableError,
)
from model_runtime.patient_store import PatientStore
from model_runtime.store import open_store
from tests.memory_store import MemoryStore


class Flaky(MemoryStore):
    """Fails as often as told, with what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[BaseException] = []

    def _maybe_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def put(self, key: str, data: bytes) -> None:
        self._maybe_fail()
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._maybe_fail()
        return super().get(key)

    def list(self, prefix: str) -> list[str]:
        self._maybe_fail()
        return super().list(prefix)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    monkeypatch.setattr("model_runtime.patient_store.FIRST_PAUSE_S", 0.001)
    return Flaky()


def away(times: int) -> list[BaseException]:
    return [StoreUnavailableError(f"put: no answer ({i})") for i in range(times)]


def test_an_operation_outlasts_an_outage_and_gives_signs_of_life(
    flaky: Flaky, caplog: pytest.LogCaptureFixture
) -> None:
    signs: list[str] = []
    store = PatientStore(flaky, max_outage_s=60, waiting=lambda error: signs.append(str(error)))
    flaky.failures = away(3)
    with caplog.at_level(logging.WARNING):
        store.put("a", b"1")
    assert flaky.objects == {"a": b"1"}
    assert len(signs) == 3
    assert "waiting for it" in caplog.text
    assert "the store is back" in caplog.text


def test_an_outage_that_lasts_too_long_ends_with_the_url_and_the_remedy(flaky: Flaky) -> None:
    now = iter(range(0, 1000, 40))
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now))
    flaky.failures = away(100)
    with pytest.raises(StoreOutageError, match=r"memory:// .* store.max_outage_s \(100\).*resume the run"):
        store.put("a", b"1")
    assert isinstance(StoreOutageError(), StoreUnavailableError)


def test_an_answer_between_two_failures_ends_the_outage(flaky: Flaky) -> None:
    now = iter(range(0, 1000, 60))
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now))
    for _ in range(3):
        flaky.failures = away(1)
        store.put("a", b"1")


def test_reads_that_succeed_do_not_hide_that_writes_fail(flaky: Flaky) -> None:
    now = iter(range(0, 1000, 40))
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now)).at_once()
    for _ in range(2):
        flaky.failures = [StoreFullError("put memory://a: No space left on device")]
        with pytest.raises(StoreUnavailableError):
            store.put("a", b"1")
        assert store.list("") == []
    flaky.failures = [StoreFullError("put memory://a: No space left on device")]
    with pytest.raises(StoreOutageError, match=r"memory://a: No space .* free some space there and resume"):
        store.put("a", b"1")


def test_writes_that_succeed_do_not_hide_that_reads_fail(flaky: Flaky) -> None:
    now = iter(range(0, 1000, 40))
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now)).at_once()
    for _ in range(2):
        flaky.failures = away(1)
        with pytest.raises(StoreUnavailableError):
            store.list("")
        store.put("a", b"1")
    flaky.failures = away(1)
    with pytest.raises(StoreOutageError, match="unavailable for reads"):
        store.list("")


def test_small_writes_that_succeed_do_not_hide_that_a_large_one_fails(flaky: Flaky) -> None:
    now = iter(range(0, 400, 20))

    def write_a_small_one(_: StoreUnavailableError) -> None:
        PatientStore.at_once(store).put("small", b"1")
        flaky.failures = away(1)

    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now), waiting=write_a_small_one)
    flaky.failures = away(1)
    with pytest.raises(StoreOutageError):
        store.put("large", b"1")


def test_an_outage_of_writes_that_nobody_waits_for_is_over_when_reads_succeed(flaky: Flaky) -> None:
    now = iter([0.0, 90.0, 200.0, 210.0])
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now)).at_once()
    for _ in range(2):
        flaky.failures = away(1)
        with pytest.raises(StoreUnavailableError) as caught:
            store.put("a", b"1")
        assert not isinstance(caught.value, StoreOutageError)
        store.list("")


@pytest.mark.parametrize("no_answer", [KeyboardInterrupt(), RuntimeError("a fault of ours")])
def test_what_is_no_answer_of_the_store_does_not_end_an_outage(
    flaky: Flaky, no_answer: BaseException
) -> None:
    now = iter([0.0, 101.0])
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now)).at_once()
    flaky.failures = [*away(1), no_answer, *away(1)]
    with pytest.raises(StoreUnavailableError):
        store.list("")
    with pytest.raises(type(no_answer)):
        store.list("")
    with pytest.raises(StoreOutageError):
        store.list("")


@pytest.mark.parametrize("error", [StoreAccessError("who are you"), ObjectNotFoundError("gone")])
def test_what_waiting_does_not_cure_is_raised_at_once(flaky: Flaky, error: Exception) -> None:
    store = PatientStore(flaky, max_outage_s=60)
    flaky.failures = [error]
    with pytest.raises(type(error)):
        store.get("a")


def test_asked_at_once_it_does_not_wait_and_still_counts_the_outage(flaky: Flaky) -> None:
    now = iter([0.0, 50.0, 101.0])
    store = PatientStore(flaky, max_outage_s=100, clock=lambda: next(now)).at_once()
    flaky.failures = away(3)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError) as caught:
            store.list("")
        assert not isinstance(caught.value, StoreOutageError)
    with pytest.raises(StoreOutageError):
        store.list("")


def test_who_gave_up_waits_no_longer(flaky: Flaky) -> None:
    store = PatientStore(flaky, max_outage_s=60, waiting=lambda error: store.give_up())
    flaky.failures = away(100)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        store.put("a", b"1")
    assert len(flaky.failures) == 98


def test_creating_an_object_outlasts_an_outage_and_has_one_winner(flaky: Flaky) -> None:
    store = PatientStore(flaky, max_outage_s=60)
    assert store.put_if_absent("a", b"1") is True
    flaky.failures = away(2)
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("a", b"2")


# ------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A file system of one megabyte at tmp_path/disk, almost full; the function makes room."""
    libc = ctypes.CDLL(None, use_errno=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    (disk / "ballast").write_bytes(bytes(1000 * 2**10))
    yield (disk / "ballast").unlink
    libc.umount2(str(disk).encode(), 2)


def test_a_full_disk_names_the_file_and_the_remedy_and_harms_no_neighbour(
    small_disk: Callable[[], None], tmp_path: Path
) -> None:
    store = open_store(StoreConfig(url=str(tmp_path / "disk" / "store")))
    store.put("small", b"1")
    with pytest.raises(StoreFullError, match=r"put file://.*/disk/store/big: No space left.*free some space"):
        store.put("big", bytes(2**19))
    with pytest.raises(StoreFullError):
        store.put_if_absent("big", bytes(2**19))
    assert store.list("") == ["small"]
    assert store.get("small") == b"1"
    assert [p.name for p in (tmp_path / "disk" / "store").iterdir()] == ["small"]


def test_a_write_goes_on_once_there_is_space(small_disk: Callable[[], None], tmp_path: Path) -> None:
    waits = threading.Event()
    store = PatientStore(
        open_store(StoreConfig(url=str(tmp_path / "disk" / "store"))),
        max_outage_s=60,
        waiting=lambda error: waits.set(),
    )
    writing = threading.Thread(target=store.put, args=("big", bytes(2**19)))
    writing.start()
    assert waits.wait(30)
    small_disk()
    writing.join(30)
    assert store.get("big") == bytes(2**19)


def test_an_exceeded_quota_counts_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_quota(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = open_store(StoreConfig(url=str(tmp_path)))
    monkeypatch.setattr(os, "fsync", no_quota)
    with pytest.raises(StoreFullError, match="quota"):
        store.put("a", b"1")
