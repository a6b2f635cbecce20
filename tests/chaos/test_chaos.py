"""Seeded faults on the quickstart with real processes; and that the driver which looks for what they broke
can see it.

`make chaos` is the long form.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from model_runtime.books import ModelBooks
from tests.chaos import matrix
from tests.chaos.driver import ChaosRun, Outcome, missing_from, wrong_in
from tests.chaos.store_faults import BreakableStore, Daemons, store_of
from tests.chaos.victims import ENDS_THE_LAUNCH, ROLES, Fault, schedule

SIGNALS = ["SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"]


def local_run(folder: Path, seed: int, *, max_steps: int, limit_s: float) -> ChaosRun:
    store = BreakableStore(str(folder / "runs"))
    return ChaosRun(folder, seed, max_steps=max_steps, limit_s=limit_s, breakable=store)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_under_a_seeded_schedule_of_faults_completes_and_its_books_balance(
    tmp_path: Path, seed: int
) -> None:
    faults = schedule(seed, 5, roles=ROLES, hows=SIGNALS, stop_s=20.0)
    run = ChaosRun(
        tmp_path, seed, max_steps=12, limit_s=1500.0, breakable=BreakableStore(str(tmp_path / "runs"))
    )
    outcome = run.run(faults)
    assert outcome.wrong == []
    assert outcome.witnessed > 0
    assert outcome.faults


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_waits_for_neither_a_locked_database_of_prefects_nor_a_server_that_stands_still(
    tmp_path: Path,
) -> None:
    faults = [
        Fault("prefect-database", "locked", 1.0, 45.0),
        Fault("prefect-server", "SIGSTOP", 50.0, 60.0),
    ]
    run = ChaosRun(
        tmp_path, 1, max_steps=40, limit_s=1500.0, breakable=BreakableStore(str(tmp_path / "runs"))
    )
    outcome = run.run(faults)
    assert outcome.wrong == []
    assert outcome.faults == faults
    assert outcome.launches == 1


@pytest.mark.integration
@pytest.mark.real_s3
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_through_an_outage_a_tenth_of_refusals_and_a_slow_line_of_its_store(
    tmp_path: Path, real_s3_env_file: Path
) -> None:
    """None of its processes is restarted for it, each fault has its whole time, and training goes on."""
    faults = [
        Fault("store", "down", 1.0, 30.0),
        Fault("store", "refuse", 45.0, 60.0),
        Fault("store", "slow", 75.0, 60.0),
    ]
    with store_of(tmp_path, real_s3_env_file, seed=1) as store:
        run = ChaosRun(tmp_path, 1, max_steps=80, limit_s=1500.0, breakable=store)
        outcome = run.run(faults)
    print(json.dumps(asdict(outcome)))
    assert outcome.wrong == []
    assert outcome.faults == faults
    assert outcome.launches == 1
    children = [path.name for path in (tmp_path / "home" / "work" / "run-1" / "logs").iterdir()]
    assert len(children) == len({name.rpartition("-")[0] for name in children}), "a process was started again"


def test_a_database_is_locked_until_the_driver_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "home" / "prefect" / "prefect.db"
    path.parent.mkdir(parents=True)
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE t (n)")
    writer.close()
    run = local_run(tmp_path, 1, max_steps=1, limit_s=60.0)
    run.lock_database(Fault("prefect-database", "locked", 0.0, 60.0))
    other = sqlite3.connect(path, timeout=0.05)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("INSERT INTO t VALUES (1)")
    run.unlock_database()
    other.execute("INSERT INTO t VALUES (1)")
    other.close()


def test_a_daemon_of_the_store_is_killed_and_brought_back_when_its_time_is_over(tmp_path: Path) -> None:
    name = f"stored-{os.getpid()}"
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    process = subprocess.Popen([program, "600"])
    back = tmp_path / "back"
    daemons = Daemons([name], [sys.executable, "-c", f"open({str(back)!r}, 'w')"])
    store = BreakableStore("unused", daemons=daemons)
    store.break_it(Fault("store-daemon", "killed", 0.0, 0.0))
    assert process.wait(10) == -signal.SIGKILL
    assert not back.exists()
    store.tick()
    store.mend()
    assert back.exists()
    with pytest.raises(AssertionError, match=f"no process is named any of {name}"):
        store.break_it(Fault("store-daemon", "killed", 0.0, 0.0))


def test_a_seed_names_one_schedule() -> None:
    first, again, other = (schedule(seed, 20, roles=ROLES, hows=SIGNALS, stop_s=20.0) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.role for fault in first} | {fault.role for fault in other} > {"parent", "gateway"}
    assert all((fault.stop_s > 0) == (fault.how == "SIGSTOP") for fault in first)


@pytest.mark.parametrize(
    "books",
    [
        ModelBooks(finalized=3, trained=2),
        ModelBooks(finalized=3, trained=3, num_trained_twice=1),
        ModelBooks(finalized=3, trained=3, num_missing=1),
        ModelBooks(finalized=3, trained=3, num_damaged_shards=1),
    ],
)
def test_books_that_do_not_add_up_are_seen(books: ModelBooks) -> None:
    assert wrong_in(books)
    assert not wrong_in(ModelBooks(finalized=3, trained=2, in_log=1))


def test_a_session_that_was_answered_and_is_not_in_the_log_is_seen() -> None:
    answered = {"s1": {"a": 2, "b": 1}, "s2": {"a": 1}}
    assert missing_from({"s1": 2, "s2": 1}, answered, "a") == {}
    assert missing_from({"s1": 1, "s2": 1}, answered, "a") == {"s1": 2}
    assert missing_from({}, answered, "b") == {"s1": 1}


# ------------------------------------------------------------------ the kill matrix


def test_the_matrix_is_dealt_out_whole_over_few_runs_and_no_run_gets_too_much_of_one_role() -> None:
    outcomes: list[Outcome] = []
    while left := matrix.missing(outcomes):
        seed = len(outcomes) + 1
        dealt = matrix.deal(left, seed, 12)
        assert dealt == matrix.deal(left, seed, 12)
        assert max(Counter(f.role for f in dealt).values()) <= matrix.MAX_OF_A_ROLE
        relaunches = [f for f in dealt if f.role in ENDS_THE_LAUNCH and f.how != "SIGSTOP"]
        assert len(relaunches) <= matrix.MAX_RELAUNCHES
        assert all((f.stop_s > 0) == (f.how == "SIGSTOP") for f in dealt)
        outcomes.append(Outcome(seed, faults=dealt))
    assert len(outcomes) <= 16
    assert matrix.struck(outcomes) == {(r, how): n for r in ROLES for how, n in matrix.WANTED.items()}


def test_a_run_that_came_out_wrong_counts_for_nothing_and_its_books_are_shown(tmp_path: Path) -> None:
    fault = Fault("trainer", "SIGKILL", 5.0)
    right = Outcome(1, faults=[fault], below_bar=[])
    wrong = Outcome(2, faults=[fault, fault], lost=3, wrong=["planner_model: lost"])
    for outcome in (right, wrong):
        (tmp_path / f"run-{outcome.seed}.json").write_text(json.dumps(asdict(outcome)))
    outcomes = matrix.read_outcomes(tmp_path)
    assert outcomes == [right, wrong]
    assert matrix.missing(outcomes)["trainer", "SIGKILL"] == matrix.WANTED["SIGKILL"] - 1
    row = next(r for r in matrix.rows(outcomes) if r[0] == "trainer")
    assert row[1:] == ["1 of 10", "0 of 3", "0 of 3", "2", "3", "0", "0", "0"]
    assert matrix.main(["--out", str(tmp_path)]) == 1
    (tmp_path / "run-2.json").unlink()
    assert matrix.main(["--out", str(tmp_path)]) == 0


def test_a_series_whose_runs_keep_coming_out_wrong_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def __init__(self, folder: Path, seed: int, **_: object) -> None:
            self.seed = seed

        def run(self, faults: list[Fault]) -> Outcome:
            return Outcome(self.seed, faults=faults, wrong=["lost"])

    monkeypatch.setattr(matrix, "ChaosRun", Wrong)
    matrix.run_missing(tmp_path, runs=None, faults=12, steps=1, limit_s=1.0, lock=None)
    assert [o.seed for o in matrix.read_outcomes(tmp_path)] == list(range(1, matrix.MAX_WRONG_RUNS + 1))
