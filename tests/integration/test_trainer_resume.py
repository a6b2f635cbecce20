"""A real trainer process, killed with SIGKILL at random moments, ends with the bytes of one that nobody
touched: adapters, optimizer, random generators, journal and metrics."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.dying_trainer import KINDS, SIGKILLED, Moment, run_trainer_process
from tests.training_log import GROUP_SIZE, TrainingFolder, make_groups, outcome

NUM_GROUPS = 16  # in 4 shards; 8 steps, 5 versions, 3 checkpoints
NUM_TRIALS = 25
# How often each kind happens in a life that nobody ends; a resumed life may end before its moment comes.
OPERATIONS = {"update": 16, "export": 15, "checkpoint": 15, "queue read": 5, "journal": 8}
MODEL = {"trainer": {"micro_batch_tokens": 128, "learning_rate_schedule": "linear"}, "max_steps": 8}


def make_folder(root: Path, base: Path) -> TrainingFolder:
    root.mkdir()
    folder = TrainingFolder(root, base, model=MODEL)
    for seq in range(4):
        folder.write_groups(make_groups(NUM_GROUPS // 4, first=seq * NUM_GROUPS // 4), seq=seq)
    folder.tell(desired="drain", published_version=1000)
    return folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> dict[str, Any]:
    folder = make_folder(tmp_path_factory.mktemp("calm") / "run", tiny_base)
    assert run_trainer_process(folder.write_spec(), None) == 0
    status = folder.status()
    assert status is not None
    assert (status.step, status.totals["trained"]) == (8, GROUP_SIZE * NUM_GROUPS)
    return outcome(folder)


def moments_of(trial: int) -> list[Moment]:
    """One to three deaths; over five trials every kind comes first once."""
    draw = random.Random(trial)
    kinds = [KINDS[trial % len(KINDS)], *draw.choices(KINDS, k=draw.randint(0, 2))]
    return [Moment(kind, draw.randint(1, OPERATIONS[kind]), draw.random() < 0.5) for kind in kinds]


@pytest.mark.integration
@pytest.mark.parametrize(
    "trial", [pytest.param(t, marks=[pytest.mark.slow] if t >= 3 else []) for t in range(NUM_TRIALS)]
)
def test_a_trainer_killed_at_random_moments_ends_with_the_same_bytes(
    tmp_path: Path, tiny_base: Path, calm: dict[str, Any], trial: int
) -> None:
    stormy = make_folder(tmp_path / "run", tiny_base)
    deaths = 0
    for moment in moments_of(trial):
        code = run_trainer_process(stormy.write_spec(), moment)
        assert code in (0, SIGKILLED)
        deaths += code == SIGKILLED
        stormy.epoch += 1
    assert deaths, "the first moment always comes"
    assert run_trainer_process(stormy.write_spec(), None) == 0
    assert outcome(stormy) == calm
