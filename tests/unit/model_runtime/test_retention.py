"""What a run removes from its store, and what it never does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model_runtime.adapters import latest_version, next_free_version, write_version
from model_runtime.checkpoints import TrainingState, checkpoint_steps, load_latest_checkpoint, save_checkpoint
from model_runtime.config import RunConfig
from model_runtime.coordinator import CheckpointCoordinator, begin_run, claim_epoch
from model_runtime.evaluation import Estimate, EvaluationDocument, EvaluationPlan, write_evaluation
from model_runtime.layout import ModelLayout, RunLayout, number_in
from model_runtime.metrics import MetricsWriter
from model_runtime.retention import sweep
from model_runtime.store import Store
from model_runtime.summary import usage
from model_runtime.training_queue import QueueProgress
from tests.fake_servers import make_adapter_files

LAYOUT = RunLayout("run")
MODEL = LAYOUT.model("a")
LONG_AGO = 10_000_000_000.0  # `now`, long after everything that is written here
NOTHING_READ = QueueProgress(low_water={}, consumed=[], closed_groups=[], totals={}, replay=[])


def config(*, model_ids: str = "a", every_checkpoints: int | None = None, **retention: Any) -> RunConfig:
    models = [{"model_id": m, "model_path": f"/{m}", "rollout": {"max_live_versions": 2}} for m in model_ids]
    run = RunConfig.model_validate(
        {
            "multi_model": {"models": models},
            "agent_model_mapping": {f"agent_of_{m}": m for m in model_ids},
            "retention": retention,
        }
    )
    evaluation = run.evaluation.model_copy(update={"every_checkpoints": every_checkpoints})
    return run.model_copy(update={"evaluation": evaluation})


def version(store: Store, number: int, place: ModelLayout = MODEL) -> None:
    write_version(store, place, make_adapter_files(number), version=number, step=number, epoch=1)


def checkpoint(store: Store, step: int, version: int, place: ModelLayout = MODEL) -> None:
    weights = {"w": np.full(100, step, np.float32)}
    state = TrainingState(adapter=weights, optimizer=weights, generators={}, values={})
    save_checkpoint(store, place, state, step=step, epoch=1, version=version, seed=0, progress=NOTHING_READ)


def evaluation(version: int, reward: float) -> EvaluationDocument:
    plan = EvaluationPlan(
        run_id="run",
        versions={"a": version},
        function="m:f",
        tasks_sha256="0" * 64,
        samples_per_task=1,
        temperature=0.0,
        seed=0,
    )
    estimate = Estimate(mean=reward, low=reward, high=reward, num_tasks=9)
    return EvaluationDocument(plan=plan, executions={}, reward=estimate, created_at=1.0, duration_s=1.0)


def versions(store: Store, place: ModelLayout = MODEL) -> list[int]:
    return sorted(number_in(name) for name in store.children(place.versions()))


@pytest.fixture
def store(local_store: Store) -> Store:
    """Twelve versions, a checkpoint after each but the last."""
    fill(local_store, MODEL)
    return local_store


def fill(store: Store, place: ModelLayout) -> None:
    for number in range(12):
        version(store, number, place)
        if number < 11:
            checkpoint(store, number, number, place)


def test_by_default_everything_stays(store: Store) -> None:
    assert sweep(store, LAYOUT, config(), epoch=1, now=LONG_AGO) == []
    assert len(versions(store)) == 12


def test_the_newest_stay_and_a_run_can_be_resumed_from_them(store: Store) -> None:
    (removed,) = sweep(store, LAYOUT, config(keep_last=3), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == [10, 9, 8]
    assert removed.checkpoints == tuple(range(7, -1, -1))
    assert versions(store) == [8, 9, 10, 11]
    loaded = load_latest_checkpoint(store, MODEL)
    assert loaded is not None
    assert loaded.document.step == 10
    assert latest_version(store, MODEL) == 11
    assert next_free_version(store, MODEL) == 12, "a number that was given is never given again"


def test_multiples_stay_beside_the_newest(store: Store) -> None:
    sweep(store, LAYOUT, config(keep_last=2, keep_every=5), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == [10, 9, 5, 0]
    assert versions(store) == [0, 5, 9, 10, 11]


def test_versions_that_a_server_may_load_again_stay(store: Store) -> None:
    """max_live_versions of them, and the next."""
    checkpoint(store, 12, 11)
    checkpoint(store, 13, 11)
    sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert versions(store) == [9, 10, 11]


def test_whatever_a_replay_from_a_kept_checkpoint_would_commit_stays(store: Store) -> None:
    """Else a machine that doesn't repeat itself would give a number to another adapter."""
    for step in (1, 2, 3):
        store.delete(MODEL.checkpoint_marker(step))
    for step in range(6, 11):
        store.delete(MODEL.checkpoint_marker(step))
    sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == [5, 4]
    assert versions(store) == list(range(4, 12))


def test_what_a_snapshot_names_stays(store: Store) -> None:
    claim_epoch(store, LAYOUT)
    begin_run(store, LAYOUT, config(), epoch=1)
    assert CheckpointCoordinator(store, LAYOUT, ("a",), 1).snapshot() is not None  # step 10, v10
    for number in range(12, 20):
        version(store, number)
        checkpoint(store, number, number)
    sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == [19, 18, 10]
    assert versions(store) == [10, 17, 18, 19]


def test_a_damaged_snapshot_keeps_everything_and_ends_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    claim_epoch(store, LAYOUT)
    begin_run(store, LAYOUT, config(), epoch=1)
    for number in range(12, 20):
        version(store, number)
        checkpoint(store, number, number)
    store.put(LAYOUT.snapshot(1), b"{")
    assert sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO) == []
    assert versions(store) == list(range(20))
    assert store.uri(LAYOUT.snapshot(1)) in caplog.text


DAMAGED = {
    "one to resume from": (MODEL.checkpoint_marker(9), {}),
    "one kept for its number": (MODEL.checkpoint_marker(5), {"keep_every": 5}),
    "one to be evaluated": (MODEL.checkpoint_marker(10), {"every_checkpoints": 1}),
    "the rewards": (MODEL.metrics_file("steps", 1, 1), {"keep_best": 1}),
}


@pytest.mark.parametrize("data", [b"{", b"1"])
@pytest.mark.parametrize("damaged", DAMAGED)
def test_what_cannot_be_judged_for_damage_is_kept_and_other_models_are_swept_all_the_same(
    store: Store, caplog: pytest.LogCaptureFixture, damaged: str, data: bytes
) -> None:
    other = LAYOUT.model("b")
    fill(store, other)
    key, kept = DAMAGED[damaged]
    store.put(key, data)
    (removed,) = sweep(store, LAYOUT, config(model_ids="ab", keep_last=2, **kept), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == list(range(10, -1, -1))
    assert versions(store) == list(range(12))
    assert removed.model_id == "b"
    assert 8 not in versions(store, other)
    assert store.uri(key) in caplog.text


def test_a_checkpoint_that_is_saved_again_meanwhile_keeps_all_until_the_next_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is gone while its files are replaced."""
    marker, exists = MODEL.checkpoint_marker(9), store.exists
    manifest = store.get(marker)

    def then_gone(key: str) -> bool:
        found = exists(key)
        if key == marker:
            store.delete(marker)
        return found

    monkeypatch.setattr(store, "exists", then_gone)
    assert sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO) == []
    assert versions(store) == list(range(12))
    monkeypatch.undo()
    store.put(marker, manifest)
    sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert checkpoint_steps(store, MODEL) == [10, 9]


@pytest.mark.parametrize(("evaluated", "best"), [({}, 3), ({4: 0.2, 6: 0.9}, 6)])
def test_the_best_stay_by_evaluations_or_else_by_the_rewards_of_training(
    store: Store, evaluated: dict[int, float], best: int
) -> None:
    metrics = MetricsWriter(store, MODEL, "steps", epoch=1, incarnation=1)
    for number in range(12):
        reward = 1.0 if number == 3 else 0.1
        metrics.append({"step": number, "version": number, "agent/x/reward/mean": reward})
    for number, reward in evaluated.items():
        write_evaluation(store, LAYOUT, evaluation(number, reward))
    sweep(store, LAYOUT, config(keep_last=2, keep_best=1), epoch=1, now=LONG_AGO)
    assert versions(store) == [best, 9, 10, 11]


def test_a_young_version_stays(store: Store) -> None:
    sweep(store, LAYOUT, config(keep_last=2), epoch=1)
    assert len(versions(store)) == 12
    assert checkpoint_steps(store, MODEL) == [10, 9]


def test_half_a_removal_counts_as_removed_and_is_harmless(store: Store) -> None:
    store.delete(MODEL.version_marker(2))  # died right after the marker
    (removed,) = sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert 2 not in removed.versions
    assert latest_version(store, MODEL) == 11


def test_the_log_stays_unless_it_is_bounded_and_the_documents_of_the_steps_always_do(store: Store) -> None:
    always = [MODEL.batch(1), MODEL.metrics_file("steps", 1, 1)]
    for key in (*always, MODEL.log_shard("e00001-00001", 0)):
        store.put(key, b"1")
    sweep(store, LAYOUT, config(keep_last=2), epoch=1, now=LONG_AGO)
    assert store.exists(MODEL.log_shard("e00001-00001", 0))
    sweep(store, LAYOUT, config(keep_last=2, max_log_bytes=0), epoch=1, now=LONG_AGO)
    assert all(store.exists(key) for key in always)


def test_a_long_run_takes_a_bounded_part_of_the_store(local_store: Store) -> None:
    used = []
    for number in range(60):
        version(local_store, number)
        checkpoint(local_store, number, number)
        sweep(local_store, LAYOUT, config(keep_last=3), epoch=1, now=LONG_AGO)
        used.append(sum(usage(local_store, LAYOUT).values()))
    assert used[-1] < 1.01 * used[10]  # numbers get longer
    assert set(usage(local_store, LAYOUT)) == {"checkpoints", "versions"}


@pytest.mark.parametrize("unbounded", [{"keep_every": 5}, {"keep_best": 1}])
def test_keeping_more_of_everything_is_refused(unbounded: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="set keep_last too"):
        config(**unbounded)


def test_a_checkpoint_that_is_to_be_evaluated_stays_until_it_was(store: Store) -> None:
    run = config(keep_last=2, every_checkpoints=2)
    begin_run(store, LAYOUT, run, epoch=1)
    for step in (10, 20, 30, 50, 60):
        version(store, step)
        checkpoint(store, step, version=step)
    sweep(store, LAYOUT, run, epoch=1, now=LONG_AGO)
    assert sorted(checkpoint_steps(store, MODEL)) == [20, 50, 60]
    assert store.exists(MODEL.version_marker(20))
    write_evaluation(store, LAYOUT, evaluation(20, 0.5))
    sweep(store, LAYOUT, run, epoch=1, now=LONG_AGO)
    assert sorted(checkpoint_steps(store, MODEL)) == [50, 60]
