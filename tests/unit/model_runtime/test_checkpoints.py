"""Checkpoints are whole or not there, and a damaged one is never loaded."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from model_runtime.checkpoints import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    TrainingState,
    checkpoint_steps,
    load_latest_checkpoint,
    save_checkpoint,
)
from model_runtime.errors import CorruptObjectError
from model_runtime.layout import RunLayout

LAYOUT = RunLayout("run").model("planner")
PROGRESS = SimpleNamespace(
    low_water={"e00001-00001": 3},
    consumed=["b", "a"],
    closed_groups=["g1"],
    totals={"trained": 12},
    replay=[],
)


def state(value=0.5):
    return TrainingState(
        adapter={"w.lora_A.weight": np.full((2, 3), value, np.float32)},
        optimizer={"w.lora_A.weight.step": np.asarray(4.0, np.float32)},
        generators={"torch": np.arange(5, dtype=np.uint8)},
        values={"version_step": 2, "trained_prompt": [1, 2]},
    )


def save(store, step, *, value=0.5):
    return save_checkpoint(
        store, LAYOUT, state(value), step=step, epoch=1, version=step // 2, seed=7, progress=PROGRESS
    )


def test_what_was_saved_is_loaded(local_store):
    saved = save(local_store, 4)
    loaded = load_latest_checkpoint(local_store, LAYOUT)
    assert loaded is not None
    assert loaded.document == saved
    assert (saved.low_water, saved.consumed, saved.closed_groups) == ({"e00001-00001": 3}, ["a", "b"], ["g1"])
    assert (saved.version, saved.seed, saved.totals) == (2, 7, {"trained": 12})
    for kind in ("adapter", "optimizer", "generators"):
        want, got = getattr(state(), kind), getattr(loaded.state, kind)
        assert want.keys() == got.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
            assert got[name].dtype == want[name].dtype
    assert loaded.state.values == state().values


def test_a_new_run_has_none(local_store):
    assert load_latest_checkpoint(local_store, LAYOUT) is None


def test_the_newest_complete_one_counts(local_store):
    save(local_store, 9)
    save(local_store, 10)
    local_store.put(f"{LAYOUT.checkpoint(11)}/{ADAPTER_FILE}", b"cut off before its manifest")
    assert checkpoint_steps(local_store, LAYOUT) == [10, 9]
    loaded = load_latest_checkpoint(local_store, LAYOUT)
    assert loaded is not None
    assert loaded.document.step == 10


@pytest.mark.parametrize("name", [ADAPTER_FILE, OPTIMIZER_FILE, STATE_FILE])
def test_a_damaged_one_is_named_and_the_one_before_taken(local_store, caplog, name):
    save(local_store, 9, value=0.25)
    save(local_store, 10)
    key = f"{LAYOUT.checkpoint(10)}/{name}"
    data = bytearray(local_store.get(key))
    data[-1] ^= 1
    local_store.put(key, bytes(data))
    with caplog.at_level(logging.ERROR):
        loaded = load_latest_checkpoint(local_store, LAYOUT)
    assert loaded is not None
    assert loaded.document.step == 9
    assert f"step-10/{name}" in caplog.text


def test_a_file_the_manifest_names_and_nobody_has_is_damage(local_store):
    save(local_store, 10)
    local_store.delete(f"{LAYOUT.checkpoint(10)}/{OPTIMIZER_FILE}")
    with pytest.raises(CorruptObjectError, match=r"no checkpoint is whole.*optimizer\.safetensors"):
        load_latest_checkpoint(local_store, LAYOUT)


def test_training_never_begins_anew_over_damaged_checkpoints(local_store):
    save(local_store, 10)
    local_store.put(LAYOUT.checkpoint_marker(10), b"{}")
    with pytest.raises(CorruptObjectError, match="no checkpoint is whole"):
        load_latest_checkpoint(local_store, LAYOUT)


def test_a_step_saved_again_is_replaced_without_ever_lying(local_store):
    save(local_store, 10, value=0.25)
    save(local_store, 10, value=0.75)
    loaded = load_latest_checkpoint(local_store, LAYOUT)
    assert loaded is not None
    assert loaded.state.adapter["w.lora_A.weight"][0, 0] == 0.75
