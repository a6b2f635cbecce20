"""Real trainers on one and on several processes: the same training (its gradients, over random batches:
test_ways_of_a_step.py); a rank that dies takes the step down and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from model_runtime.adapters import check_adapter, fetch_version
from model_runtime.metrics import read_metrics
from tests.training_log import TrainingFolder, make_groups, outcome

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
STEPS = 4
# Everything that is exchanged: logprobs beforehand, gradients, figures.
OBJECTIVE = {
    "old_logprobs": "proximal", "kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "session-balanced",
    "rejection": [{"statistic": "token_k1", "high": 50.0}],
}  # fmt: skip


def make_folder(root: Path, base: Path, processes: int, **model: Any) -> TrainingFolder:
    root.mkdir()
    trainer = {"n_processes": processes, "micro_batch_tokens": 64, "learning_rate": 1e-3}
    folder = TrainingFolder(root, base, model={"trainer": trainer} | model)
    folder.write_groups(make_groups(2 * STEPS))
    folder.tell(desired="drain", published_version=1000)
    return folder


def start(folder: TrainingFolder) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "model_runtime.trainer", str(folder.write_spec())]
    with log_of(folder).open("ab") as log:
        return subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def log_of(folder: TrainingFolder) -> Path:
    return folder.root / "trainer.log"


def run_to_the_end(folder: TrainingFolder) -> None:
    process = start(folder)
    try:
        assert process.wait(timeout=200) == 0, log_of(folder).read_text()
    finally:
        process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children()
        if "model_runtime.trainer_rank" in " ".join(child.cmdline())
    ]


def until_step(folder: TrainingFolder, process: subprocess.Popen[bytes], step: int) -> None:
    deadline = time.monotonic() + 120
    while (status := folder.status()) is None or status.pid != process.pid or status.step < step:
        assert process.poll() is None, log_of(folder).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_processes_train_as_one(tmp_path: Path, tiny_base: Path) -> None:
    folders = [make_folder(tmp_path / str(n), tiny_base, n, objective=OBJECTIVE, max_steps=2) for n in (1, 2)]
    for folder in folders:
        run_to_the_end(folder)
    assert "rank 1" not in log_of(folders[1]).read_text()
    one, two = (check_adapter(fetch_version(f.store, f.layout, 1)[1], source="v1") for f in folders)
    start_of, _ = (check_adapter(fetch_version(f.store, f.layout, 0)[1], source="v0") for f in folders)
    moved = np.sqrt(sum(float(np.square(one[n] - start_of[n]).sum()) for n in one))
    apart = np.sqrt(sum(float(np.square(one[n] - two[n]).sum()) for n in one))
    rows = [read_metrics(f.store, f.layout, "steps") for f in folders]
    assert len(rows[0]) == len(rows[1]) == 2
    first, other = rows[0][0], rows[1][0]
    compared = [
        name for name in first if name.startswith(("actor/", "rollout_corr/", "training/", "critic/"))
    ]
    assert {"actor/grad_norm", "actor/kl_loss", "actor/entropy", "rollout_corr/kl"} <= set(compared)
    for name in compared:
        np.testing.assert_allclose(other[name], first[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert moved > 1e-3
    assert apart < 1e-2 * moved  # AdamW's first steps have the gradient's sign: noise around 0 is amplified
    assert [b["rows"] for b in folders[0].batches()] == [b["rows"] for b in folders[1].batches()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 1", "rank 0"])
def test_a_killed_rank_takes_all_down_and_a_restart_goes_on(
    tmp_path: Path, tiny_base: Path, victim: str
) -> None:
    folder = make_folder(tmp_path / "run", tiny_base, 2, save_every=1)
    process = start(folder)
    try:
        until_step(folder, process, 1)
        (worker,) = ranks_of(process)
        os.kill(process.pid if victim == "rank 0" else worker.pid, signal.SIGKILL)
        code = process.wait(timeout=60)
        assert code == (-signal.SIGKILL if victim == "rank 0" else 1)
        worker.wait(timeout=30)
        if victim == "rank 1":
            status = folder.status()
            assert status is not None
            assert status.state == "failed"
            assert "rank 1" in status.reason or "data-parallel training" in status.reason
    finally:
        process.kill()
        process.wait()
    folder.epoch += 1
    run_to_the_end(folder)
    status = folder.status()
    assert status is not None
    assert (status.state, status.step) == ("drained", STEPS)
    trained = [row["trajectory_id"] for batch in folder.batches() for row in batch["rows"]]
    assert len(trained) == len(set(trained)) == 8 * STEPS


@pytest.mark.slow
def test_a_stop_ends_every_rank(tmp_path: Path, tiny_base: Path) -> None:
    folder = make_folder(tmp_path / "run", tiny_base, 2)
    folder.tell(published_version=1000)
    process = start(folder)
    try:
        until_step(folder, process, STEPS)
        (worker,) = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        worker.wait(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert outcome(folder)["checkpoint"]["step"] == STEPS


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_train_as_one(tmp_path: Path, tiny_base: Path) -> None:
    folders = []
    for n in (1, 2):
        trainer = {"n_gpus": n, "gpu_ids": list(range(n)), "n_processes": 1}
        folder = make_folder(tmp_path / str(n), tiny_base, 1, objective=OBJECTIVE, max_steps=1)
        folder.model["trainer"] |= trainer
        folder.gpu_ids = list(range(n))
        folders.append(folder)
        run_to_the_end(folder)
    one, two = (read_metrics(f.store, f.layout, "steps")[0] for f in folders)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)
