"""A trainer whose store goes away, with a tiny real model: it trains from what it has read, and what it wrote
in the end is what an undisturbed one writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model_runtime import trainer as module
from model_runtime.errors import StoreUnavailableError
from model_runtime.protocol import STORE_OUTAGE_EXIT_CODE, TrainerStatus
from model_runtime.store import open_store
from model_runtime.trainer import run_trainer
from tests.tiny_models import make_model
from tests.training_log import TrainingFolder, make_groups, outcome

UNBOUNDED = 1000
NUM_STEPS = 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Any:
    folder = prepared(TrainingFolder(tmp_path_factory.mktemp("undisturbed"), base))
    assert run_trainer(folder.spec, stop=threading.Event()) == 0
    return outcome(folder)


def prepared(folder: TrainingFolder) -> TrainingFolder:
    folder.write_groups(make_groups(2 * NUM_STEPS))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    return folder


class Outage:
    """The trainer's store is away from the moment it writes `at` until `back` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: Callable[[str], bool]) -> None:
        self.back = threading.Event()
        self.began = threading.Event()
        self._at = at
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(module, "open_store", self._open)

    def _open(self, config: Any) -> Any:
        store = open_store(config)
        for name in ("put", "put_if_absent", "get", "list", "children", "exists", "delete"):
            self._monkeypatch.setattr(store, name, self._failing(name, getattr(store, name)))
        return store

    def _failing(self, name: str, call: Any) -> Any:
        def operation(key: str, *args: Any) -> Any:
            if name.startswith("put") and self._at(key):
                self.began.set()
            if self.began.is_set() and not self.back.is_set():
                raise StoreUnavailableError(f"{name} {key}: no answer")
            return call(key, *args)

        return operation


def running(folder: TrainingFolder) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(run_trainer(folder.spec, stop=threading.Event())), daemon=True
    )
    thread.start()
    return thread, codes


def until(folder: TrainingFolder, reached: Callable[[TrainerStatus], bool]) -> None:
    deadline = time.monotonic() + 60
    while (status := folder.status()) is None or not reached(status):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)


def test_training_goes_on_from_what_was_read_and_ends_as_if_nothing_had_been(
    tmp_path: Path, base: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(TrainingFolder(tmp_path, base))
    outage = Outage(monkeypatch, at=lambda key: key == folder.layout.batch(2))
    thread, codes = running(folder)
    assert outage.began.wait(60)
    until(folder, lambda status: status.step >= 5)
    assert [batch["step"] for batch in folder.batches()] == [1]
    outage.back.set()
    thread.join(60)
    assert codes == [0]
    assert outcome(folder) == undisturbed


def test_a_trainer_that_dies_during_the_outage_leaves_nothing_that_a_later_one_would_contradict(
    tmp_path: Path, base: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(TrainingFolder(tmp_path, base, run={"store": short_of_patience(tmp_path)}))
    with monkeypatch.context() as patch:
        outage = Outage(patch, at=lambda key: key == folder.layout.batch(4))
        thread, codes = running(folder)
        thread.join(60)
        assert outage.began.is_set()
    assert codes == [STORE_OUTAGE_EXIT_CODE]
    assert [batch["step"] for batch in folder.batches()] == [1, 2, 3]
    folder.epoch = 2
    assert run_trainer(folder.spec, stop=threading.Event()) == 0
    assert outcome(folder) == undisturbed


def test_beyond_the_limit_it_says_which_store_and_what_to_do(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(TrainingFolder(tmp_path, base, run={"store": short_of_patience(tmp_path)}))
    Outage(monkeypatch, at=lambda key: key == folder.layout.batch(1))
    thread, codes = running(folder)
    thread.join(60)
    assert codes == [STORE_OUTAGE_EXIT_CODE]
    status = folder.status()
    assert status is not None
    assert status.state == "failed"
    assert str(tmp_path / "store") in status.reason
    assert "store.max_outage_s (1)" in status.reason
    assert "resume the run" in status.reason


def test_a_log_that_cannot_be_read_is_not_taken_for_one_that_has_ended(
    tmp_path: Path, base: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to drain, a trainer takes what it reads for all there is."""
    folder = prepared(TrainingFolder(tmp_path, base))
    outage = Outage(monkeypatch, at=lambda key: key == folder.layout.version_marker(0))
    thread, codes = running(folder)
    assert outage.began.wait(60)
    time.sleep(0.5)
    assert codes == []
    outage.back.set()
    thread.join(60)
    assert codes == [0]
    assert outcome(folder) == undisturbed


def short_of_patience(folder: Path) -> dict[str, Any]:
    return {"url": str(folder / "store"), "max_outage_s": 1}
