"""Who leads a run, what it wants, and what may change between two lives of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from model_runtime.config import RunConfig
from model_runtime.coordinator import (
    CheckpointCoordinator,
    begin_run,
    claim_epoch,
    latest_epoch,
    read_desired,
    read_run,
    require_leading,
    update_run,
    write_desired,
)
from model_runtime.documents import SnapshotDocument
from model_runtime.errors import ConfigError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from tests.memory_store import MemoryStore
from tests.training_log import save_manifest

LAYOUT = RunLayout("run-1")


def config(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "multi_model": {
            "models": [{"model_id": "a", "model_path": "/a"}, {"model_id": "b", "model_path": "/b"}]
        },
        "agent_model_mapping": {"x": "a", "y": "b"},
    }
    return RunConfig.model_validate(raw | changes)


def model(**changes: Any) -> dict[str, Any]:
    others = {"model_id": "b", "model_path": "/b"}
    return {"multi_model": {"models": [{"model_id": "a", "model_path": "/a"} | changes, others]}}


def test_epochs_count_up_and_the_newest_leads(local_store: Store) -> None:
    assert latest_epoch(local_store, LAYOUT) is None
    assert [claim_epoch(local_store, LAYOUT).epoch for _ in range(3)] == [1, 2, 3]
    require_leading(local_store, LAYOUT, 3)
    with pytest.raises(SupersededError, match="epoch 3 leads"):
        require_leading(local_store, LAYOUT, 2)


def test_parents_that_claim_at_once_get_epochs_of_their_own(local_store: Store) -> None:
    claimed: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: claimed.append(claim_epoch(local_store, LAYOUT, host=str(id(claimed))).epoch)
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [1, 2, 3, 4, 5, 6]


def test_the_last_desired_state_counts_and_stop_is_sticky_within_an_epoch(local_store: Store) -> None:
    assert read_desired(local_store, LAYOUT) is None
    write_desired(local_store, LAYOUT, epoch=1, state="run")
    write_desired(local_store, LAYOUT, epoch=1, state="drain", reason="done")
    write_desired(local_store, LAYOUT, epoch=1, state="stop")
    assert write_desired(local_store, LAYOUT, epoch=1, state="run").state == "stop"
    last = read_desired(local_store, LAYOUT)
    assert last is not None
    assert (last.seq, last.state) == (3, "stop")
    assert write_desired(local_store, LAYOUT, epoch=2, state="run").seq == 4


def test_an_older_epoch_can_want_nothing_any_more(local_store: Store) -> None:
    write_desired(local_store, LAYOUT, epoch=2, state="run")
    with pytest.raises(SupersededError, match="epoch 2 leads, not 1"):
        write_desired(local_store, LAYOUT, epoch=1, state="stop")


def test_saying_the_same_again_writes_nothing(local_store: Store) -> None:
    first = write_desired(local_store, LAYOUT, epoch=1, state="drain")
    assert write_desired(local_store, LAYOUT, epoch=1, state="drain") == first


def test_run_json_keeps_its_birthday_and_snapshot_over_lives(local_store: Store) -> None:
    first = begin_run(local_store, LAYOUT, config(), epoch=1)
    update_run(local_store, LAYOUT, epoch=1, gateway_url="http://g", latest_snapshot=4)
    second = begin_run(local_store, LAYOUT, config(seed=5), epoch=2)
    assert (second.created_at, second.latest_snapshot) == (first.created_at, 4)
    assert (second.epoch, second.gateway_url) == (2, None)
    with pytest.raises(SupersededError):
        update_run(local_store, LAYOUT, epoch=1, state="failed")
    assert (read_run(local_store, LAYOUT) or second).state == "running"


class Interrupted(MemoryStore):
    """Calls `meanwhile` once, after `before` operations; never where there are fewer."""

    def __init__(self, objects: dict[str, bytes], *, before: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.objects, self._left, self._meanwhile = objects, before, meanwhile

    @property
    def was_interrupted(self) -> bool:
        return self._left < 0

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._meanwhile()

    def put(self, key: str, data: bytes) -> None:
        self._count()
        super().put(key, data)

    def _create(self, key: str, data: bytes) -> bool:
        self._count()
        return super()._create(key, data)

    def get(self, key: str) -> bytes:
        self._count()
        return super().get(key)

    def children(self, prefix: str) -> list[str]:
        self._count()
        return super().children(prefix)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)


def at_every_point(
    before: MemoryStore, act: Callable[[Store], object], meanwhile: Callable[[Store], None]
) -> Iterator[tuple[MemoryStore, SupersededError | None]]:
    """The store after `act`, once for each of its operations that `meanwhile` may come before, and the
    SupersededError that `act` raised."""
    for number in itertools.count():
        other = MemoryStore()
        other.objects.update(before.objects)
        store = Interrupted(other.objects, before=number, meanwhile=lambda other=other: meanwhile(other))
        error = None
        try:
            act(store)
        except SupersededError as raised:
            error = raised
        if not store.was_interrupted:
            return
        yield other, error


def begun(epoch: int = 1) -> MemoryStore:
    store = MemoryStore()
    for number in range(1, epoch + 1):
        begin_run(store, LAYOUT, config(), epoch=number)
        update_run(store, LAYOUT, epoch=number, gateway_url=f"http://{number}")
    return store


@pytest.mark.parametrize("num_later", [0, 1, 5])
@pytest.mark.parametrize(
    "act",
    [
        lambda store: update_run(store, LAYOUT, epoch=1, latest_snapshot=7),
        lambda store: update_run(store, LAYOUT, epoch=1, state="cancelled", gateway_url=None),
        lambda store: begin_run(store, LAYOUT, config(), epoch=1),
    ],
    ids=["snapshot", "end", "begin"],
)
def test_an_older_parent_undoes_nothing_of_a_newer_one_whenever_it_writes(
    act: Callable[[Store], object], num_later: int
) -> None:
    def newer(store: Store) -> None:
        begin_run(store, LAYOUT, config(seed=2), epoch=2)
        update_run(store, LAYOUT, epoch=2, gateway_url="http://2")
        for number in range(num_later):
            update_run(store, LAYOUT, epoch=2, latest_snapshot=10 + number)

    num_points = 0
    for store, _ in at_every_point(begun(), act, newer):
        num_points += 1
        run = read_run(store, LAYOUT)
        assert run is not None
        assert (run.epoch, run.gateway_url, run.state) == (2, "http://2", "running")
        assert run.config["seed"] == 2
        if num_later:
            assert run.latest_snapshot == 9 + num_later
        assert store.get(LAYOUT.run()) == run.to_bytes(), "the file for others says the same"
        with pytest.raises(SupersededError, match="epoch 2 leads"):
            update_run(store, LAYOUT, epoch=1, state="failed")
    assert num_points > 4


def test_an_older_parent_is_told_of_a_newer_one_that_wrote_before_its_own_change_counted() -> None:
    def newer(store: Store) -> None:
        begin_run(store, LAYOUT, config(), epoch=2)

    def act(store: Store) -> None:
        update_run(store, LAYOUT, epoch=1, state="failed")

    told = [error is not None for _, error in at_every_point(begun(), act, newer)]
    assert told == sorted(told, reverse=True), "in the end its change is one the newer parent has seen"
    assert all(told[:4])


def test_what_one_thread_of_a_parent_says_of_the_run_is_not_undone_by_another() -> None:
    def end(store: Store) -> None:
        update_run(store, LAYOUT, epoch=1, state="completed", gateway_url=None)

    def act(store: Store) -> None:
        update_run(store, LAYOUT, epoch=1, latest_snapshot=7)

    for store, error in at_every_point(begun(), act, end):
        run = read_run(store, LAYOUT)
        assert run is not None
        assert error is None
        assert (run.state, run.gateway_url, run.latest_snapshot) == ("completed", None, 7)


def test_run_json_alone_is_enough_to_go_on_from(local_store: Store) -> None:
    document = begin_run(local_store, LAYOUT, config(), epoch=1)
    for key in local_store.list(LAYOUT.epochs()):
        local_store.delete(key)
    assert read_run(local_store, LAYOUT) == document
    assert update_run(local_store, LAYOUT, epoch=1, latest_snapshot=3).latest_snapshot == 3
    assert local_store.get(LAYOUT.run()) == (read_run(local_store, LAYOUT) or document).to_bytes()


def test_of_run_json_two_revisions_are_kept(local_store: Store) -> None:
    begin_run(local_store, LAYOUT, config(), epoch=1)
    for number in range(5):
        update_run(local_store, LAYOUT, epoch=1, latest_snapshot=number)
    assert local_store.children(LAYOUT.epochs()) == ["run-5.json", "run-6.json"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (model(model_path="/other"), "multi_model.models.a.model_path: was '/a'"),
        (model(lora={"rank": 8}), "multi_model.models.a.lora"),
        (model(kind="frozen"), "multi_model.models.a.kind: was 'trainable'"),
        ({"agent_model_mapping": {"x": "b", "y": "a"}}, "agent_model_mapping.x: was 'a'"),
        ({"agent_model_mapping": {"x": "a", "y": "b", "z": "b"}}, "agent_model_mapping.z: was None"),
        ({"workflow": {"group_size": 4}}, "workflow.group_size: was 8"),
    ],
)
def test_a_run_does_not_go_on_under_a_config_its_data_contradicts(
    local_store: Store, changes: dict[str, Any], named: str
) -> None:
    begin_run(local_store, LAYOUT, config(), epoch=1)
    with pytest.raises(ConfigError, match=named) as error:
        begin_run(local_store, LAYOUT, config(**changes), epoch=2)
    assert "start a new run" in str(error.value)


def test_a_run_does_not_go_on_with_other_models(local_store: Store) -> None:
    begin_run(local_store, LAYOUT, config(), epoch=1)
    fewer = config(
        multi_model={"models": [{"model_id": "a", "model_path": "/a"}]}, agent_model_mapping={"x": "a"}
    )
    with pytest.raises(ConfigError, match=r"multi_model.models: run 'run-1' has \['a', 'b'\]"):
        begin_run(local_store, LAYOUT, fewer, epoch=2)


def test_what_no_data_depends_on_may_change(local_store: Store) -> None:
    begin_run(local_store, LAYOUT, config(), epoch=1)
    changed = config(**model(trainer={"learning_rate": 1e-3}, save_every=2), max_duration_s=60)
    assert begin_run(local_store, LAYOUT, changed, epoch=2).config["max_duration_s"] == 60


@pytest.fixture
def coordinator(local_store: Store) -> CheckpointCoordinator:
    begin_run(local_store, LAYOUT, config(), epoch=1)
    return CheckpointCoordinator(local_store, LAYOUT, ("a", "b"), epoch=1)


def test_a_snapshot_waits_until_every_model_has_a_newer_checkpoint(
    local_store: Store, coordinator: CheckpointCoordinator
) -> None:
    save_manifest(local_store, LAYOUT.model("a"), 5, version=4)
    assert coordinator.snapshot() is None
    save_manifest(local_store, LAYOUT.model("b"), 3, version=3)
    first = coordinator.snapshot()
    assert first is not None
    assert (first.number, first.checkpoints, first.versions) == (1, {"a": 5, "b": 3}, {"a": 4, "b": 3})
    save_manifest(local_store, LAYOUT.model("a"), 10, version=9)
    assert coordinator.snapshot() is None
    save_manifest(local_store, LAYOUT.model("b"), 6, version=6)
    second = coordinator.snapshot()
    assert second is not None
    assert second.checkpoints == {"a": 10, "b": 6}
    run = read_run(local_store, LAYOUT)
    assert run is not None
    assert run.latest_snapshot == 2


def test_the_last_snapshot_takes_what_is_there(
    local_store: Store, coordinator: CheckpointCoordinator
) -> None:
    save_manifest(local_store, LAYOUT.model("a"), 5, version=4)
    last = coordinator.snapshot(final=True)
    assert last is not None
    assert last.checkpoints == {"a": 5}
    assert coordinator.snapshot(final=True) is None


def test_a_snapshot_whose_number_an_older_parent_took_meanwhile_takes_the_next() -> None:
    def older(store: Store) -> None:
        theirs = CheckpointCoordinator(store, LAYOUT, ("a",), epoch=1)
        with pytest.raises(SupersededError):
            theirs.snapshot()

    def act(store: Store) -> None:
        assert CheckpointCoordinator(store, LAYOUT, ("a",), epoch=2).snapshot() is not None

    before = begun(epoch=2)
    save_manifest(before, LAYOUT.model("a"), 5, version=4)
    for store, error in at_every_point(before, act, older):
        assert error is None
        run = read_run(store, LAYOUT)
        assert run is not None
        assert run.latest_snapshot is not None
        newest = SnapshotDocument.parse(store.get(LAYOUT.snapshot(run.latest_snapshot)), source="here")
        assert newest.epoch == 2
        assert len(store.children(LAYOUT.snapshots())) == 2


def test_a_checkpoint_without_its_manifest_is_not_named(
    local_store: Store, coordinator: CheckpointCoordinator
) -> None:
    for model_id in ("a", "b"):
        save_manifest(local_store, LAYOUT.model(model_id), 5, version=4)
        local_store.put(f"{LAYOUT.model(model_id).checkpoint(10)}/adapter.safetensors", b"half")
    snapshot = coordinator.snapshot()
    assert snapshot is not None
    assert snapshot.checkpoints == {"a": 5, "b": 5}


def test_a_snapshot_names_the_checkpoint_before_a_damaged_one(
    local_store: Store, coordinator: CheckpointCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the one a trainer would go on from."""
    a, b = LAYOUT.model("a"), LAYOUT.model("b")
    for step in (5, 10):
        save_manifest(local_store, a, step, version=step)
    save_manifest(local_store, b, 7, version=7)
    local_store.put(a.checkpoint_marker(10), b"{")
    snapshot = coordinator.snapshot()
    assert snapshot is not None
    assert snapshot.checkpoints == {"a": 5, "b": 7}
    assert coordinator.snapshot() is None
    assert caplog.text.count(local_store.uri(a.checkpoint_marker(10))) == 1, "said once, not at each look"
    save_manifest(local_store, a, 15, version=15)
    save_manifest(local_store, b, 14, version=14)
    snapshot = coordinator.snapshot()
    assert snapshot is not None
    assert snapshot.checkpoints == {"a": 15, "b": 14}


def test_a_model_whose_only_checkpoint_is_damaged_is_waited_for(
    local_store: Store, coordinator: CheckpointCoordinator
) -> None:
    for model_id in ("a", "b"):
        save_manifest(local_store, LAYOUT.model(model_id), 5, version=5)
    local_store.put(LAYOUT.model("a").checkpoint_marker(5), b"{")
    assert coordinator.snapshot() is None
