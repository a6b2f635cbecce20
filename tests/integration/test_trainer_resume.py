"""A real trainer process, killed at random moments, ends with the bytes of one that nobody touched."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model_runtime.adapters import version_document
from model_runtime.checkpoints import load_latest_checkpoint
from tests.training_log import TrainingFolder, make_groups

ROOT = Path(__file__).parents[2]
NUM_GROUPS = 60  # 30 steps, 15 versions, 10 checkpoints


def start(folder: TrainingFolder) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "model_runtime.trainer", str(folder.write_spec())]
    with (folder.root / f"trainer-{folder.epoch}.log").open("wb") as log:
        return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def make_folder(root: Path, base: Path) -> TrainingFolder:
    root.mkdir()
    folder = TrainingFolder(root, base)
    folder.write_groups(make_groups(NUM_GROUPS))
    folder.tell(desired="drain", published_version=1000)
    return folder


def run_to_the_end(folder: TrainingFolder) -> None:
    process = start(folder)
    try:
        assert process.wait(timeout=200) == 0, (folder.root / f"trainer-{folder.epoch}.log").read_text()
    finally:
        process.kill()
        process.wait()


def kill_after_step(folder: TrainingFolder, step: int, *, delay_s: float) -> None:
    """Start the trainer and kill -9 it somewhere after it has finished this step."""
    process = start(folder)
    try:
        deadline = time.monotonic() + 200
        while (status := folder.status()) is None or status.pid != process.pid or status.step < step:
            assert process.poll() is None, (folder.root / f"trainer-{folder.epoch}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(delay_s)
    finally:
        process.kill()
        assert process.wait() == -9


@pytest.mark.integration
def test_a_trainer_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, tiny_base: Path) -> None:
    calm, stormy = make_folder(tmp_path / "calm", tiny_base), make_folder(tmp_path / "stormy", tiny_base)
    run_to_the_end(calm)
    moments = random.Random(0)
    for step in (3, 10, 18):
        kill_after_step(stormy, step, delay_s=moments.uniform(0, 0.15))
        stormy.epoch += 1
    run_to_the_end(stormy)

    status = stormy.status()
    assert status is not None
    assert (status.state, status.step, status.totals["trained"]) == ("drained", 30, 4 * NUM_GROUPS)
    for version in range(16):
        want = version_document(calm.store, calm.layout, version)
        got = version_document(stormy.store, stormy.layout, version)
        assert (got.sha256, got.config_sha256) == (want.sha256, want.config_sha256)
    final = [load_latest_checkpoint(folder.store, folder.layout) for folder in (calm, stormy)]
    assert final[0] is not None
    assert final[1] is not None
    assert final[0].document.files == final[1].document.files
    assert final[0].document.consumed == final[1].document.consumed
    assert final[0].document.totals == final[1].document.totals
    rows = [[batch["rows"] for batch in folder.batches()] for folder in (calm, stormy)]
    assert rows[0] == rows[1]
