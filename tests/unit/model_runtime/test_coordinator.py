"""Who leads a run, what it wants, and what may change between two lives of it."""

from __future__ import annotations

import threading
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
from model_runtime.errors import ConfigError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.store import Store
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
