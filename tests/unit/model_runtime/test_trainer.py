"""The trainer's loop over a real log and store, with a tiny real model: what it writes and when, what it
obeys, and that a crash at any write leads to the same bytes."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from model_runtime import trainer as module
from model_runtime.adapters import fetch_version, version_document
from model_runtime.batch_source import no_signal_bound
from model_runtime.config_file import parse_config
from model_runtime.documents import EpochClaim
from model_runtime.errors import StoreError
from model_runtime.layout import RunLayout, writer_id
from model_runtime.learner import Learner
from model_runtime.metrics import read_metrics
from model_runtime.retention import sweep
from model_runtime.store import open_store
from model_runtime.trainer import run_trainer
from tests.tiny_models import make_model
from tests.training_log import TrainingFolder, make_groups, outcome

UNBOUNDED = 1000  # a published version that never holds a commit up


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def folder(tmp_path, base):
    return TrainingFolder(tmp_path, base)


def train(folder):
    return run_trainer(folder.spec, stop=threading.Event())


class Running:
    """A trainer on a thread. Leaving the block stops it."""

    def __init__(self, folder):
        self.folder = folder
        self.stop = threading.Event()
        self.exit_code = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        self.exit_code = run_trainer(self.folder.spec, stop=self.stop)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self.stop.set()
        self._thread.join(30)

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.exit_code

    def until(self, condition):
        """Wait for a status that fulfils the condition."""
        deadline = time.monotonic() + 30
        while (status := self.folder.status()) is None or not condition(status):
            assert time.monotonic() < deadline, status
            time.sleep(0.01)
        return status


def versions(folder):
    return folder.store.children(folder.layout.versions())


# ------------------------------------------------------------------ what it writes


def test_a_drained_run_trains_everything_and_leaves_nothing_unsaved(folder):
    folder.write_groups(make_groups(11))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    status = folder.status()
    assert (status.state, status.step, status.checkpoint_step, status.committed_step) == ("drained", 6, 6, 6)
    assert status.totals["trained"] == 44
    assert versions(folder) == ["v0", "v1", "v2", "v3"]
    assert [len(batch["groups"]) for batch in folder.batches()] == [2, 2, 2, 2, 2, 1]
    trained = [row["trajectory_id"] for batch in folder.batches() for row in batch["rows"]]
    assert len(trained) == len(set(trained)) == 44
    assert [row["step"] for row in read_metrics(folder.store, folder.layout, "steps")] == [1, 2, 3, 4, 5, 6]


def test_versions_carry_canaries_of_two_versions(folder):
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    train(folder)
    first, second = (version_document(folder.store, folder.layout, n) for n in (0, 1))
    assert first.canary[0].previous_logprobs is None
    assert len(second.canary) == len(first.canary) + 1
    for probe in second.canary:
        assert len(probe.token_ids) == len(probe.logprobs) == len(probe.previous_logprobs) == 16
        assert np.abs(np.subtract(probe.logprobs, probe.previous_logprobs)).max() > 0


def test_v0_is_the_adapter_that_was_given(tmp_path, base):
    from tests.tiny_models import make_adapter

    given = make_adapter(tmp_path / "given", base=base, seed=5)
    folder = TrainingFolder(tmp_path, base, model={"adapter_path": str(given)})
    folder.tell(desired="drain", published_version=UNBOUNDED)
    train(folder)
    _, files = fetch_version(folder.store, folder.layout, 0)
    from model_runtime.adapters import check_adapter, read_folder

    want = check_adapter(read_folder(given), source="given")
    got = check_adapter(files, source="v0")
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)


def test_a_learning_rate_of_0_commits_the_same_adapter_again(tmp_path, base):
    folder = TrainingFolder(tmp_path, base, model={"trainer": {"learning_rate": 0.0}})
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    train(folder)
    assert len({version_document(folder.store, folder.layout, n).sha256 for n in (0, 1)}) == 1


# ------------------------------------------------------------------ what it obeys


def test_a_model_past_its_steps_is_finished(tmp_path, base):
    folder = TrainingFolder(tmp_path, base, model={"max_steps": 3})
    folder.write_groups(make_groups(20))
    folder.tell(published_version=UNBOUNDED)
    assert train(folder) == 0
    status = folder.status()
    assert (status.state, status.step, status.steps_left) == ("finished", 3, 0)
    assert (status.committed_step, status.checkpoint_step) == (3, 3)
    assert train(folder) == 0
    assert folder.status().state == "finished"
    assert len(folder.batches()) == 3


def test_the_trainer_is_at_most_one_version_ahead(folder):
    folder.write_groups(make_groups(20))
    with Running(folder) as run:
        status = run.until(lambda s: s.state == "waiting" and s.step == 2)
        assert status.reason == "waiting for v0 to be published"
        assert versions(folder) == ["v0"]
        folder.tell(published_version=0)
        run.until(lambda s: s.step == 4 and s.state == "waiting")
        assert versions(folder) == ["v0", "v1"]
        folder.tell(published_version=1)
        run.until(lambda s: s.committed_version == 2)


def test_new_work_is_picked_up_as_it_comes(folder):
    folder.tell(published_version=UNBOUNDED)
    with Running(folder) as run:
        run.until(lambda s: s.state == "waiting" and s.step == 0)
        folder.write_groups(make_groups(1), seq=0)
        run.until(lambda s: s.queue.untrained_groups == 1)
        folder.write_groups(make_groups(1, first=1), seq=1)
        run.until(lambda s: s.step == 1)
        folder.tell(desired="drain", published_version=UNBOUNDED)
        assert run.join() == 0
    assert folder.status().state == "drained"


@pytest.mark.parametrize("how", ["order", "signal"])
def test_stop_ends_it_and_what_is_trained_is_saved(folder, how):
    folder.write_groups(make_groups(2))
    folder.tell(published_version=UNBOUNDED)
    with Running(folder) as run:
        run.until(lambda s: s.state == "waiting" and s.step == 1)
        if how == "order":
            folder.tell(desired="stop", published_version=UNBOUNDED)
        else:
            run.stop.set()
        assert run.join() == 0
    assert folder.status().reason == "stopped"
    assert folder.status().checkpoint_step == 1


def test_a_stop_while_waiting_to_commit_forgets_no_version(folder):
    folder.write_groups(make_groups(6))
    folder.tell(desired="drain")
    with Running(folder) as run:
        run.until(lambda s: s.state == "waiting" and s.step == 2)
    assert versions(folder) == ["v0"]
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    steps = [version_document(folder.store, folder.layout, n).step for n in range(3)]
    assert (steps, folder.status().step) == ([0, 2, 3], 3)


def test_groups_without_signal_end_a_model_at_last(tmp_path, base):
    folder = TrainingFolder(tmp_path, base, model={"batch_size": 1})
    folder.write_groups(make_groups(63, flat=True))
    folder.tell(published_version=UNBOUNDED)
    with Running(folder) as run:
        run.until(lambda s: s.queue.closed_groups == 63)
        folder.write_groups(make_groups(1, first=63, flat=True), seq=1)
        assert run.join() == 0
    assert folder.status().state == "no_signal"
    assert folder.status().reason == "64 groups in a row had no signal"


@pytest.mark.parametrize(("batch_size", "bound"), [(1, 64), (2, 64), (8, 80)])
def test_rare_rewards_in_small_batches_are_waited_for(tmp_path, base, batch_size, bound):
    folder = TrainingFolder(tmp_path, base, model={"batch_size": batch_size})
    assert no_signal_bound(parse_config(folder.spec.config, source="spec").models[0]) == bound


def test_a_newer_epoch_is_left_alone(folder):
    folder.write_groups(make_groups(2))
    claim = EpochClaim(epoch=2, claimed_at=0)
    folder.store.put(RunLayout("run").epoch(2), claim.to_bytes())
    assert train(folder) == 3
    assert "epoch 2 leads" in folder.status().reason
    assert versions(folder) == []
    assert folder.batches() == []


def test_another_trainers_batch_stops_this_one(folder):
    folder.tell(published_version=UNBOUNDED)
    with Running(folder) as run:
        run.until(lambda s: s.state == "waiting")
        folder.store.put(folder.layout.batch(1), b"{}")
        folder.write_groups(make_groups(2))
        assert run.join() == 1
    assert "another trainer is at work" in folder.status().reason
    assert folder.status().step == 0


def test_a_step_that_fails_is_reported_with_model_and_step(folder, monkeypatch):
    folder.write_groups(make_groups(2))
    folder.tell(published_version=UNBOUNDED)
    monkeypatch.setattr(
        "model_runtime.objective.aggregated", lambda losses_T, *_, denominator: losses_T.sum() * float("nan")
    )
    assert train(folder) == 1
    status = folder.status()
    assert (status.state, status.step) == ("failed", 0)
    assert "planner: the loss of step 1 is nan" in status.reason


def test_a_figure_that_is_not_finite_harms_neither_status_nor_rows(folder, monkeypatch):
    folder.write_groups(make_groups(2))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    monkeypatch.setattr(
        "model_runtime.objective.correction_metrics", lambda *_: {"rollout_corr/k3_kl": float("inf")}
    )
    assert train(folder) == 0
    assert "rollout_corr/k3_kl" not in folder.status().last_metrics
    (row,) = read_metrics(folder.store, folder.layout, "steps")
    assert row["rollout_corr/k3_kl"] is None


def test_a_seed_that_changed_is_refused(folder):
    folder.write_groups(make_groups(2))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    train(folder)
    folder.seed = 1
    assert train(folder) == 1
    assert "seed is 1, but this run was trained with 0" in folder.status().reason


# ------------------------------------------------------------------ writing beside the loop


def store_that(monkeypatch, hook, *, after_read=lambda key: None):
    """The trainer's store, calling `hook(key)` before each write."""

    def opened(config):
        store = open_store(config)
        read = store.get
        monkeypatch.setattr(store, "get", lambda key, **how: (read(key, **how), after_read(key))[0])
        for name in ("put", "put_if_absent"):
            write = getattr(store, name)
            monkeypatch.setattr(store, name, lambda key, data, write=write: (hook(key), write(key, data))[1])
        return store

    monkeypatch.setattr(module, "open_store", opened)


def test_training_goes_on_while_a_checkpoint_is_being_written(folder, monkeypatch):
    later_step = threading.Event()

    def hook(key):
        if key.startswith(folder.layout.checkpoint(3)):
            assert later_step.wait(30), "the loop waited for its checkpoint"
        if folder.layout.batch(5) == key:
            later_step.set()

    store_that(monkeypatch, hook)
    folder.write_groups(make_groups(14))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    assert later_step.is_set()
    assert folder.status().checkpoint_step == 7


def test_the_logs_next_shard_is_read_while_a_batch_trains(folder, monkeypatch):
    next_shard = folder.layout.log_shard(writer_id(1, 1), 1)
    was_read = threading.Event()
    update = Learner.update

    def hook(key):
        if key == folder.layout.batch(1):  # between the batch and its update
            folder.write_groups(make_groups(2, first=2), seq=1)

    def waiting(learner, rows, **settings):
        assert was_read.wait(30), "nobody reads the log meanwhile"
        return update(learner, rows, **settings)

    store_that(monkeypatch, hook, after_read=lambda key: was_read.set() if key == next_shard else None)
    monkeypatch.setattr(Learner, "update", waiting)
    folder.write_groups(make_groups(2))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    assert len(folder.batches()) == 2


def test_a_write_that_fails_beside_the_loop_ends_training_with_its_error(folder, monkeypatch):
    def hook(key):
        if key.startswith(folder.layout.checkpoint(3)):
            raise StoreError("the bucket is full")

    store_that(monkeypatch, hook)
    folder.write_groups(make_groups(14))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 1
    assert folder.status().reason == "the bucket is full"
    assert not folder.store.exists(folder.layout.checkpoint_marker(3))
    assert len(folder.batches()) < 7


def test_a_version_is_told_of_only_once_it_is_in_the_store(folder, monkeypatch):
    written = threading.Event()

    def hook(key):
        if key == folder.layout.version_marker(1):
            assert written.wait(30)

    store_that(monkeypatch, hook)
    folder.write_groups(make_groups(14))
    folder.tell(published_version=UNBOUNDED)
    with Running(folder) as running:
        status = running.until(lambda status: status.step >= 3)
        assert status.committed_version == 0
        written.set()
        status = running.until(lambda status: (status.committed_version or 0) >= 1)
        assert status.committed_step >= 2


# ------------------------------------------------------------------ crashes


class Killed(BaseException):
    """This process is gone."""


def crash_at_write(monkeypatch, number, *, after):
    """The store's write of this number never returns: it happened (`after`), or it did not. No later one,
    of any thread, happens either."""
    count, dead, one_at_a_time = 0, False, threading.Lock()

    def dying(write):
        def call(key, data):
            nonlocal count, dead
            with one_at_a_time:
                count += 1
                dead = dead or (count == number and not after)
                if dead:
                    raise Killed
                result = write(key, data)
                dead = count == number
                if dead:
                    raise Killed
                return result

        return call

    def open_dying(config):
        store = open_store(config)
        for name in ("put", "put_if_absent"):
            monkeypatch.setattr(store, name, dying(getattr(store, name)))
        return store

    monkeypatch.setattr(module, "open_store", open_dying)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, base):
    folder = TrainingFolder(tmp_path_factory.mktemp("undisturbed"), base)
    folder.write_groups(make_groups(14))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    return outcome(folder)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [4, 9, 14, 17, 19])
def test_a_crash_at_any_write_changes_nothing_in_the_end(folder, monkeypatch, undisturbed, number, after):
    folder.write_groups(make_groups(14))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    with monkeypatch.context() as patch:
        crash_at_write(patch, number, after=after)
        with pytest.raises(Killed):
            train(folder)
    folder.epoch = 2
    assert train(folder) == 0
    assert outcome(folder) == undisturbed


def test_a_crash_changes_nothing_for_an_objective_with_references_and_a_whole_batch_advantage(
    tmp_path, base, monkeypatch
):
    objective = {
        "advantage": "reinforce_plus_plus_baseline",
        "loss": "cispo",
        "aggregation": "session-balanced",
        "old_logprobs": "proximal",
        "kl_coef": 0.1,
        "rejection": [{"statistic": "token_k1", "high": 20.0}],
    }
    outcomes = []
    for name, number in (("undisturbed", None), ("crashed", 14)):
        folder = TrainingFolder(tmp_path / name, base, model={"objective": objective})
        folder.write_groups(make_groups(8))
        folder.tell(desired="drain", published_version=UNBOUNDED)
        if number is not None:
            with monkeypatch.context() as patch:
                crash_at_write(patch, number, after=True)
                with pytest.raises(Killed):
                    train(folder)
            folder.epoch = 2
        assert train(folder) == 0
        outcomes.append(outcome(folder))
    assert outcomes[0] == outcomes[1]
    assert folder.status().step == 4
    assert folder.status().last_metrics["actor/kl_loss"] > 0


def test_random_numbers_go_on_where_the_checkpoint_left_them(tmp_path, base, monkeypatch):
    """Nothing of the trainer draws any by itself; a model's code may."""
    update, drawn = Learner.update, []

    def drawing(self, *args, **options):
        drawn.append((random.random(), np.random.normal(), torch.rand(1).item()))
        return update(self, *args, **options)

    monkeypatch.setattr(Learner, "update", drawing)
    outcomes = []
    for name, lives in (("undisturbed", [8]), ("resumed", [3, 8])):
        folder = TrainingFolder(tmp_path / name, base)
        folder.write_groups(make_groups(16))
        folder.tell(desired="drain", published_version=UNBOUNDED)
        for folder.epoch, folder.model in enumerate([{"max_steps": n} for n in lives], 1):
            assert train(folder) == 0
        outcomes.append(outcome(folder)["checkpoint"]["files"])
    assert outcomes[0] == outcomes[1]
    assert drawn[:8] == drawn[8:]


def test_versions_of_a_lost_future_keep_their_numbers(folder, monkeypatch):
    """Replaying steps whose versions are committed already commits nothing anew."""
    folder.write_groups(make_groups(12))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    before = {
        name: folder.store.get(folder.layout.version_marker(int(name[1:]))) for name in versions(folder)
    }
    for name in folder.store.children(folder.layout.checkpoints()):
        folder.store.delete(f"{folder.layout.checkpoints()}/{name}/MANIFEST.json")
    assert train(folder) == 0
    after = {name: folder.store.get(folder.layout.version_marker(int(name[1:]))) for name in versions(folder)}
    assert after == before


def test_a_replay_that_differs_takes_a_number_above_all(folder):
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    for name in folder.store.children(folder.layout.checkpoints()):
        folder.store.delete(f"{folder.layout.checkpoints()}/{name}/MANIFEST.json")
    taken = version_document(folder.store, folder.layout, 1).sha256
    folder.model = {"trainer": {"learning_rate": 1e-3}}
    assert train(folder) == 0
    assert versions(folder) == ["v0", "v1", "v2"]
    assert version_document(folder.store, folder.layout, 1).sha256 == taken
    assert version_document(folder.store, folder.layout, 2).step == 2
    assert folder.status().committed_version == 2


@pytest.mark.parametrize("file", ["adapter_config.json", "VERSION.json"])
def test_what_was_begun_of_a_version_is_never_another_adapter_and_every_life_goes_on(
    folder, monkeypatch, file
):
    """Lives that are killed before this file of a version is written, and none repeats the one before."""
    folder.write_groups(make_groups(8))
    folder.tell(desired="drain", published_version=UNBOUNDED)

    def killed(key):
        if key.endswith(f"/{file}") and key != f"{folder.layout.version(0)}/{file}":
            raise Killed

    begun = []
    for learning_rate in (1e-2, 1e-3, 2e-3):
        folder.model = {"trainer": {"learning_rate": learning_rate}}
        with monkeypatch.context() as patch:
            store_that(patch, killed)
            with pytest.raises(Killed):
                train(folder)
        begun.append(kept_weights(folder))
    folder.model = {"trainer": {"learning_rate": 3e-3}}
    assert train(folder) == 0
    begun.append(kept_weights(folder))
    assert [len(weights) for weights in begun] == [2, 3, 4, 6]
    assert all(begun[-1].items() >= weights.items() for weights in begun)
    assert folder.status().committed_version == 5
    assert [version_document(folder.store, folder.layout, n).step for n in (0, 4, 5)] == [0, 2, 4]


def test_a_version_that_was_begun_keeps_its_number_when_the_same_adapter_comes_again(folder, monkeypatch):
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=UNBOUNDED)

    def killed(key):
        if key == folder.layout.version_marker(1):
            raise Killed

    with monkeypatch.context() as patch:
        store_that(patch, killed)
        with pytest.raises(Killed):
            train(folder)
    begun = kept_weights(folder)
    assert train(folder) == 0
    assert kept_weights(folder) == begun
    assert folder.status().committed_version == 1


def test_a_first_version_that_was_begun_with_another_adapter_holds_nobody_up(folder):
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    folder.store.put(f"{folder.layout.version(0)}/adapter_model.safetensors", b"another warm-up's")
    assert train(folder) == 0
    assert folder.store.get(f"{folder.layout.version(0)}/adapter_model.safetensors") == b"another warm-up's"
    assert folder.status().committed_version == 2


def kept_weights(folder):
    keys = [f"{folder.layout.version(int(name[1:]))}/adapter_model.safetensors" for name in versions(folder)]
    return {key: folder.store.get(key) for key in keys}


def test_the_number_of_a_version_that_was_removed_is_not_given_again(folder):
    folder.write_groups(make_groups(8))
    folder.tell(desired="drain", published_version=UNBOUNDED)
    assert train(folder) == 0
    assert versions(folder) == ["v0", "v1", "v2"]
    for name in folder.store.children(folder.layout.checkpoints()):
        folder.store.delete(f"{folder.layout.checkpoints()}/{name}/MANIFEST.json")
    for key in folder.store.list(folder.layout.version(1)):
        folder.store.delete(key)
    assert train(folder) == 0
    assert versions(folder) == ["v0", "v2", "v3", "v4"]


def test_a_trainer_goes_on_from_a_log_that_retention_cut_as_from_a_whole_one(tmp_path, base):
    outcomes = []
    for name, kept in (("whole", {}), ("cut", {"max_log_bytes": 0, "min_age_s": 0})):
        folder = TrainingFolder(tmp_path / name, base, run={"retention": kept})
        for seq in range(6):
            folder.write_groups(make_groups(2, first=2 * seq), seq=seq)
        folder.tell(desired="drain", published_version=UNBOUNDED)
        assert train(folder) == 0
        removed = sweep(folder.store, RunLayout("run"), folder.config, epoch=1)
        names = folder.store.children(f"{folder.layout.log_writers()}/{writer_id(1, 1)}")
        assert (bool(removed), len(names)) == ((True, 3) if kept else (False, 6))
        folder.store.put(f"{folder.layout.checkpoint(6)}/adapter.safetensors", b"damaged")  # back to step 3
        folder.epoch = 2
        folder.write_groups(make_groups(2, first=12), seq=6)
        assert train(folder) == 0
        outcomes.append(outcome(folder))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]["batches"]) == 7
