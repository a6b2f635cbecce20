from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from model_runtime.config import StoreConfig
from model_runtime.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnsafeError,
)
from model_runtime.local_store import LEFT_AFTER_S
from model_runtime.store import Store, open_store
from tests import fakes


def test_what_is_put_is_got_listed_and_deleted(local_store: Store) -> None:
    local_store.put("run/models/a/x.json", b"1")
    local_store.put("run/models/b", b"22")
    local_store.put("run/models/b", b"333")

    assert local_store.get("run/models/b") == b"333"
    assert local_store.list("run") == ["run/models/a/x.json", "run/models/b"]
    assert local_store.list("run/models/") == local_store.list("run")
    assert local_store.children("run/models") == ["a", "b"]
    assert local_store.exists("run/models/b")
    assert not local_store.exists("run/models")

    local_store.delete("run/models/b")
    local_store.delete("run/models/b")
    local_store.delete("run/never/there")
    assert local_store.list("") == ["run/models/a/x.json"]


def test_a_missing_object_is_named_and_a_missing_folder_is_empty(local_store: Store) -> None:
    local_store.put("run/b", b"1")
    for key in ("run/nothing", "run", "run/b/below-an-object"):
        with pytest.raises(ObjectNotFoundError, match=f"get file:///.*/{key}: no such object"):
            local_store.get(key)
    assert local_store.list("nowhere") == []
    assert local_store.children("nowhere") == []
    assert local_store.children("run/b") == []


def test_a_folder_whose_objects_are_gone_is_no_child(local_store: Store) -> None:
    local_store.put("journal/w1/0.bin", b"1")
    local_store.put("journal/w2/0.bin", b"1")
    local_store.delete("journal/w1/0.bin")
    assert local_store.children("journal") == ["w2"]


def test_creating_twice_is_true_then_false_then_refused(local_store: Store) -> None:
    assert local_store.put_if_absent("k", b"same") is True
    assert local_store.put_if_absent("k", b"same") is False
    with pytest.raises(ObjectExistsError, match=r"create file:///.*/k: .*other bytes"):
        local_store.put_if_absent("k", b"other")
    assert local_store.get("k") == b"same"


def test_a_race_has_exactly_one_winner_and_its_bytes_stay(local_store: Store) -> None:
    for round_number in range(20):
        won = fakes.race_to_create(local_store, f"race/{round_number}")
        assert len(won) == 1
        assert local_store.get(f"race/{round_number}") == b"%d" % won[0] * 1000


def test_readers_never_see_half_an_object(local_store: Store) -> None:
    versions = [bytes([i]) * 200_000 for i in range(4)]
    local_store.put("pointer", versions[0])
    done = threading.Event()

    def read() -> int:
        seen = 0
        while not done.is_set():
            assert local_store.get("pointer") in versions
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for i in range(60):
            local_store.put("pointer", versions[i % 4])
        done.set()
        assert all(reader.result() > 0 for reader in readers)


@pytest.mark.parametrize(
    ("write", "step"),
    [("put", "fsync"), ("put", "replace"), ("put_if_absent", "fsync"), ("put_if_absent", "link")],
)
def test_a_crash_before_the_name_is_given_leaves_nothing_visible(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, write: str, step: str
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    local_store.put("run/before", b"1")
    with monkeypatch.context() as patch:
        # Clean-up doesn't run either when a process is killed.
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(os, step, crash)
        with pytest.raises(KeyboardInterrupt):
            getattr(local_store, write)("run/x", b"2")
    assert len(_files(local_store)) == 2
    assert local_store.list("run") == ["run/before"]
    assert local_store.children("run") == ["before"]
    assert local_store.put_if_absent("run/x", b"3") is True


def _files(store: Store) -> list[Path]:
    return [p for p in Path(store.url.removeprefix("file://")).rglob("*") if p.is_file()]


WRITER = """
import os, signal, stat, sys
from model_runtime.config import StoreConfig
from model_runtime.store import open_store

store, sync = open_store(StoreConfig(url=sys.argv[1])), os.fsync

def stop(descriptor):
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        print("is writing", flush=True)
        sys.stdin.readline()
    sync(descriptor)

os.fsync = stop
getattr(store, sys.argv[2])("run/models/a/x.json", bytes(1000))
"""


@contextmanager
def writing(store: Store, write: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of this write, until it reads a line."""
    command = [sys.executable, "-c", WRITER, store.url, write]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "is writing\n"
            yield process
        finally:
            process.kill()


def grown_old(store: Store, *, by_s: float) -> None:
    for path in _files(store):
        written_at = path.stat().st_mtime - by_s
        os.utime(path, (written_at, written_at))


@pytest.mark.parametrize("write", ["put", "put_if_absent"])
def test_what_a_killed_writer_left_is_removed_once_it_is_old(local_store: Store, write: str) -> None:
    local_store.put("run/models/a/old.json", b"1")
    with writing(local_store, write):
        pass
    with writing(local_store, write):
        pass
    assert len(_files(local_store)) == 3
    assert local_store.remove_leftovers("run") == 0, "too young to be sure about"
    grown_old(local_store, by_s=2 * LEFT_AFTER_S)
    assert local_store.remove_leftovers("another") == 0
    assert local_store.remove_leftovers("run") == 2000
    assert [p.name for p in _files(local_store)] == ["old.json"]


@pytest.mark.parametrize("write", ["put", "put_if_absent"])
def test_what_another_process_is_writing_stays_however_old_it_is(local_store: Store, write: str) -> None:
    with writing(local_store, write) as process:
        grown_old(local_store, by_s=2 * LEFT_AFTER_S)
        assert local_store.remove_leftovers("run") == 0
        process.communicate("go on\n")
    assert process.returncode == 0
    assert local_store.get("run/models/a/x.json") == bytes(1000)
    assert len(_files(local_store)) == 1


def test_where_files_can_not_be_locked_unfinished_ones_stay(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with writing(local_store, "put"):
        pass
    grown_old(local_store, by_s=2 * LEFT_AFTER_S)
    assert local_store.remove_leftovers("run") == 0
    assert len(_files(local_store)) == 1
    local_store.put("run/models/a/x.json", b"1")
    assert local_store.get("run/models/a/x.json") == b"1"


def test_a_failed_write_leaves_no_file_behind(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    local_store.put("run/x", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for write in (local_store.put, local_store.put_if_absent):
            with pytest.raises(StoreError, match=r"run/y: No space left on device"):
                write("run/y", b"new")
    assert [p.name for p in _files(local_store)] == ["x"]


def test_a_file_system_without_hard_links_is_refused_unless_there_is_a_single_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnsafeError, match=r"no hard links.*store\.single_writer: true"):
        open_store(StoreConfig(url=str(tmp_path))).check()

    store = open_store(StoreConfig(url=str(tmp_path), single_writer=True))
    store.check()
    assert store.put_if_absent("k", b"1") is True
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("k", b"2")


def test_a_permission_error_becomes_an_access_error(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(StoreAccessError, match=r"get file:///.*/k: Permission denied"):
        local_store.get("k")


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "../x", "a/../b", "."])
def test_keys_that_leave_the_store_or_are_ambiguous_are_refused(local_store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="not a store key"):
        local_store.put(key, b"")


def test_file_urls_and_plain_paths_are_the_same_store(tmp_path: Path) -> None:
    plain = open_store(StoreConfig(url=str(tmp_path / "a b")))
    plain.put("k", b"1")
    assert open_store(StoreConfig(url=(tmp_path / "a b").as_uri())).get("k") == b"1"
    assert plain.uri("k") == f"{(tmp_path / 'a b').as_uri()}/k"
    with pytest.raises(ConfigError, match="names a host"):
        open_store(StoreConfig(url="file://relative/path"))


def test_the_start_up_probe_passes_and_leaves_nothing(local_store: Store) -> None:
    local_store.check()
    assert _files(local_store) == []


# ------------------------------------------------------------------ any sequence of operations

names = st.sampled_from(["a", "b", "ab", "x.json"])
keys = st.lists(names, min_size=1, max_size=3).map("/".join)
contents = st.sampled_from([b"", b"1", b"22"])


class StoreAgainstADict(RuleBasedStateMachine):
    """Whatever is done in whatever order, the store holds what a dict would."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(StoreConfig(url=self.folder.name))
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    def clashes(self, key: str) -> bool:
        """A folder of this machine can't be an object too, as it may on S3; the layout never asks for it."""
        return any(k.startswith(f"{key}/") or key.startswith(f"{k}/") for k in self.model) or (
            Path(self.folder.name, key).is_dir()
        )

    @rule(key=keys, data=contents)
    def put(self, key: str, data: bytes) -> None:
        if self.clashes(key):
            return
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=keys, data=contents)
    def create(self, key: str, data: bytes) -> None:
        if self.clashes(key):
            return
        before = key in self.model
        there = self.model.setdefault(key, data)
        try:
            created = self.store.put_if_absent(key, data)
        except ObjectExistsError:
            assert there != data
        else:
            assert there == data
            assert created is not before

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if self.clashes(key):
            return
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=keys)
    def get(self, key: str) -> None:
        if key in self.model:
            assert self.store.get(key) == self.model[key]
        else:
            with pytest.raises(ObjectNotFoundError):
                self.store.get(key)
        assert self.store.exists(key) == (key in self.model)

    @rule(prefix=st.just("") | keys)
    def look(self, prefix: str) -> None:
        inside = f"{prefix}/" if prefix else ""
        below = sorted(k for k in self.model if k.startswith(inside))
        assert self.store.list(prefix) == below
        assert self.store.children(prefix) == sorted({k.removeprefix(inside).split("/")[0] for k in below})


StoreAgainstADict.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
test_any_sequence_of_operations_leaves_what_a_dict_would_hold = StoreAgainstADict.TestCase
