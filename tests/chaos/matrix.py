"""The kill matrix: every process of a run hit with every signal, so many times, several a run, and the books.

    python -m tests.chaos.matrix --run               # what is missing: nine runs, an hour
    python -m tests.chaos.matrix --run --runs 2      # two runs of it
    python -m tests.chaos.matrix                     # the table of what is in the output folder
    python -m tests.chaos.matrix --markdown          # as docs/guarantees.md has it

Each run is the quickstart at its own settings, with more steps, and is held against its learning bar. What
struck in a run counts once the run came out right; a run that did not is shown, and its folder stays. Run n
has the seed n, and deals its faults from those still missing, so a series that was interrupted goes on where
it stopped. On a shared machine, --lock FILE holds that file's lock during each run.

Exits with 1 when a run came out wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rig.file_lock import holding
from tests.chaos.driver import ChaosRun, Outcome
from tests.chaos.store_faults import BreakableStore
from tests.chaos.victims import ENDS_THE_LAUNCH, ROLES, Fault

WANTED = {"SIGKILL": 10, "SIGTERM": 3, "SIGSTOP": 3}
"""Times each role is hit with each signal."""
STOP_S = 60.0
LEARNING_RUNS = 5
"""Runs that must reach the quickstart's bar."""
MAX_WRONG_RUNS = 3
"""A series stops there: what came out wrong so often does so again."""
MAX_OF_A_ROLE, MAX_RELAUNCHES, MAX_STOPS = 2, 3, 4
"""In one run: a role's restarts are bounded, and each relaunch costs half a minute."""
GAP_S = (3.0, 10.0)
COLUMNS = (
    "process",
    *WANTED,
    "runs",
    "lost",
    "trained twice",
    "versions reused",
    "orphans",
)

Cell = tuple[str, str]  # role, signal


def struck(outcomes: Sequence[Outcome]) -> Counter[Cell]:
    """How often each role was hit with each signal, in runs that came out right."""
    return Counter((f.role, f.how) for o in outcomes if not o.wrong for f in o.faults)


def missing(outcomes: Sequence[Outcome]) -> Counter[Cell]:
    wanted = Counter({(role, how): times for role in ROLES for how, times in WANTED.items()})
    return wanted - struck(outcomes)


def deal(left: Counter[Cell], seed: int, count: int) -> list[Fault]:
    """The faults of one run, out of those that are left."""
    draw = random.Random(seed)
    cells = sorted(left.elements())
    draw.shuffle(cells)
    dealt: list[Fault] = []
    for role, how in cells:
        relaunches = sum(f.role in ENDS_THE_LAUNCH and f.how != "SIGSTOP" for f in dealt)
        if (
            len(dealt) == count
            or sum(f.role == role for f in dealt) == MAX_OF_A_ROLE
            or (role in ENDS_THE_LAUNCH and how != "SIGSTOP" and relaunches == MAX_RELAUNCHES)
            or (how == "SIGSTOP" and sum(f.how == "SIGSTOP" for f in dealt) == MAX_STOPS)
        ):
            continue
        lasts = STOP_S if how == "SIGSTOP" else 0.0
        dealt.append(Fault(role, how, round(draw.uniform(*GAP_S), 1), lasts))
    # What ends a launch waits until nobody is stopped, so it comes first, or last, once.
    early = bool(seed % 2)
    return sorted(dealt, key=lambda f: (f.role in ENDS_THE_LAUNCH and f.how != "SIGSTOP") != early)


def read_outcomes(out: Path) -> list[Outcome]:
    found = []
    for path in sorted(out.glob("run-*.json"), key=_number):
        given = json.loads(path.read_text())
        found.append(Outcome(**given | {"faults": [Fault(**fault) for fault in given["faults"]]}))
    return found


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def run_missing(
    out: Path, *, runs: int | None, faults: int, steps: int, limit_s: float, lock: Path | None
) -> None:
    """Run until nothing is missing, as often as asked, or until too many came out wrong."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes, done, wrong = read_outcomes(out), 0, 0
    while (runs is None or done < runs) and wrong < MAX_WRONG_RUNS:
        seed = len(outcomes) + 1
        if not (dealt := deal(missing(outcomes), seed, faults)):
            break
        folder = out / f"run-{seed}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
        folder.mkdir()
        with holding(lock):
            print(f"run {seed}: {', '.join(map(str, dealt))}", file=sys.stderr, flush=True)
            run = ChaosRun(
                folder,
                seed,
                max_steps=steps,
                limit_s=limit_s,
                breakable=BreakableStore(str(folder / "runs")),
                learns=True,
            )
            outcome = run.run(dealt)
        (out / f"run-{seed}.json").write_text(json.dumps(asdict(outcome), indent=1))
        if not outcome.wrong:
            shutil.rmtree(folder)
        outcomes.append(outcome)
        done, wrong = done + 1, wrong + bool(outcome.wrong)
        print(_line(outcome), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- tables


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row a role: hits of those wanted, in runs that came out right; the books of all runs that hit it."""
    hits, table = struck(outcomes), []
    for role in ROLES:
        counts = [f"{hits[role, how]} of {wanted}" for how, wanted in WANTED.items()]
        of_role = [o for o in outcomes if any(f.role == role for f in o.faults)]
        table.append([role, *counts, *_books(of_role)])
    totals = [f"{sum(hits[r, how] for r in ROLES)} of {n * len(ROLES)}" for how, n in WANTED.items()]
    return [*table, ["all", *totals, *_books(outcomes)]]


def _books(outcomes: Sequence[Outcome]) -> list[str]:
    fields = ("lost", "trained_twice", "versions_reused", "orphans")
    return [str(len(outcomes)), *(str(sum(getattr(o, f) for o in outcomes)) for f in fields)]


def _line(o: Outcome) -> str:
    verdict = "; ".join(o.wrong)[:500] if o.wrong else "right"
    learned = "" if o.below_bar is None else f"; bar: {'; '.join(o.below_bar) or 'reached'}"
    return (
        f"run {o.seed}: {len(o.faults)} faults, {o.launches} launches, {o.duration_s:.0f} s, "
        f"{o.finalized} finalized, {o.trained} trained, {o.versions} versions: {verdict}{learned}"
    )


def summary_lines(outcomes: Sequence[Outcome]) -> list[str]:
    right = [o for o in outcomes if not o.wrong]
    reached = sum(o.below_bar == [] for o in right)
    faults, launches = sum(len(o.faults) for o in right), sum(o.launches for o in right)
    finalized, trained = sum(o.finalized for o in right), sum(o.trained for o in right)
    return [
        f"{len(right)} runs of {len(outcomes)} came out right, with {faults} faults and {launches} launches: "
        f"{finalized:,} trajectories finalized, {trained:,} trained, "
        f"{sum(o.versions for o in right)} versions.",
        f"The quickstart's learning bar was reached by {reached} of them (wanted: {LEARNING_RUNS}).",
    ]


def _markdown(outcomes: Sequence[Outcome]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows(outcomes)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *summary_lines(outcomes)])


def _show(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table(*COLUMNS)
    for cells in rows(outcomes):
        table.add_row(*cells)
    console.print(table)
    for line in [*summary_lines(outcomes), *(_line(o) for o in outcomes)]:
        console.print(line, highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", action="store_true", help="run what is missing; else only show")
    parser.add_argument("--runs", type=int, help="at most so many runs now")
    parser.add_argument("--faults", type=int, default=18, help="of each run")
    parser.add_argument("--steps", type=int, default=30, help="of each model")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of outcomes")
    parser.add_argument("--lock", type=Path, help="hold this file's lock during each run")
    parser.add_argument("--markdown", action="store_true", help="as docs/guarantees.md has it")
    options = parser.parse_args(arguments)
    if options.run:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started is ended
        run_missing(
            options.out.resolve(),
            runs=options.runs,
            faults=options.faults,
            steps=options.steps,
            limit_s=options.limit_s,
            lock=options.lock,
        )
    outcomes = read_outcomes(options.out)
    if options.markdown:
        print(_markdown(outcomes))
    else:
        _show(Console(width=130), outcomes)
    return 1 if any(o.wrong for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
