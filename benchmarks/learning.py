"""Do the policies learn, and is training them together worth it?

Runs the quickstart (`repertory up`, real vLLM, its own tiny models) in variants and holds the results against
three claims:

  algorithms  GRPO, RLOO, CISPO and GSPO each reach the quickstart's bar: every agent right in ≥ 0.75 of
              the last quarter of executions, 0.25 more than at the start, ≥ 0.9 of the held-out tasks
              solved greedily (tests/e2e/quickstart.py). One seed.
  staleness   With tokens up to 4 versions old and off-policy correction on, the held-out reward stays within
              0.05 of strict on-policy training. Three seeds.
  together    At equal sampled tokens, both models trained beat the better of {only the planner, only the
              solver} by ≥ 0.1 on held-out tasks; exchanging the two adapters loses that again. Three seeds.

Without --run nothing is started: the tables of what is in the output folder are printed.

    python -m benchmarks.learning --run                            # all 22 runs: an hour on two quiet cores
    python -m benchmarks.learning --run --only together --seeds 0  # four of them
    python -m benchmarks.learning --json                           # the outcomes and verdicts so far

A run takes two to four minutes. One that is in the output folder is not run again, so an interrupted series
goes on where it stopped; delete <folder>/<run>.json to repeat one. Runs follow one another: two at once would
slow each other and lag differently. On a shared machine, --lock FILE holds that file's lock during each run.

Exits with 1 when a claim doesn't hold, 0 when all do or runs are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # also as a script
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.rig.file_lock import holding  # noqa: E402
from benchmarks.rig.learning_claims import Verdict, judge  # noqa: E402
from benchmarks.rig.learning_runs import (  # noqa: E402
    Outcome,
    Variant,
    all_variants,
    outcome_path,
    read_outcomes,
    run_variant,
)

EXPERIMENTS = ("algorithms", "staleness", "together")
COLUMNS = (
    "variant",
    "seed",
    "held out",
    "planner",
    "search",
    "answer",
    "last quarter",
    "steps",
    "lag",
    "sampled tokens",
    "seconds",
)
"""Held-out reward and each agent's held-out success; the reward of the last quarter of training executions;
of planner and solver the steps, and the lag in versions (mean ≤ worst)."""
MARKS = {True: "holds", False: "FAILS", None: "open"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    variants = [v for v in all_variants() if _is_wanted(v, options)]
    failed = _run(variants, options.out, options.lock) if options.run else []
    outcomes = read_outcomes(options.out)
    verdicts = judge(outcomes)
    if options.json:
        result = {"outcomes": [asdict(o) for o in outcomes], "verdicts": [asdict(v) for v in verdicts]}
        print(json.dumps(result, indent=1))
    elif options.markdown:
        print(_markdown(outcomes, verdicts))
    else:
        _show(Console(width=130), outcomes, verdicts)
    return 1 if failed or any(v.holds is False for v in verdicts) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", action="store_true", help="run what is missing; else only show")
    parser.add_argument(
        "--only",
        action="append",
        choices=EXPERIMENTS,
        help="run this experiment; may be repeated (default: all)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="run these seeds (default: each one's own)")
    parser.add_argument("--variants", nargs="+", help="run these variants, as the tables name them")
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "runs" / "learning",
        help="folder of outcomes and stores (default: runs/learning)",
    )
    parser.add_argument("--lock", type=Path, help="hold this file's lock during each run")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print outcomes and verdicts as JSON")
    shown.add_argument("--markdown", action="store_true", help="print them as docs/learning.md has them")
    return parser


def _is_wanted(variant: Variant, options: argparse.Namespace) -> bool:
    return (
        (not options.only or variant.experiment in options.only)
        and (options.seeds is None or variant.seed in options.seeds)
        and (options.variants is None or variant.name in options.variants)
    )


def _run(variants: Sequence[Variant], out: Path, lock: Path | None) -> list[str]:
    """Run what has no outcome yet. Keys of the runs that failed: the others go on."""
    failed = []
    for number, variant in enumerate(variants, 1):
        if outcome_path(out, variant.key).exists():
            continue
        _say(f"{number}/{len(variants)} {variant.key} …")
        try:
            with holding(lock):
                outcome = run_variant(variant, out)
        except Exception as error:
            _say(f"{variant.key} failed: {error}")
            failed.append(variant.key)
        else:
            _say(f"{variant.key}: held out {_number(outcome.held_out)} in {outcome.duration_s:.0f} s")
    return failed


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- tables


def _show(console: Console, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> None:
    for experiment in EXPERIMENTS:
        found = [o for o in outcomes if o.experiment == experiment]
        if found:
            table = Table(*COLUMNS, title=experiment)
            for cells in _rows(found):
                table.add_row(*cells)
            console.print(table)
    for verdict in verdicts:
        console.print(
            f"{MARKS[verdict.holds]:5}  {verdict.claim}: {verdict.why}", highlight=False, markup=False
        )


def _markdown(outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> str:
    """The tables and verdicts as docs/learning.md shows them."""
    lines = []
    for experiment in EXPERIMENTS:
        rows = _rows([o for o in outcomes if o.experiment == experiment])
        if not rows:
            continue
        separator = ["---"] * len(COLUMNS)
        lines += [f"{experiment}:", "", *(f"| {' | '.join(r)} |" for r in (COLUMNS, separator, *rows)), ""]
    lines += [f"- {MARKS[v.holds]}: {v.claim}: {v.why}" for v in verdicts]
    return "\n".join(lines)


def _rows(outcomes: Sequence[Outcome]) -> list[Sequence[str]]:
    rows = []
    for o in sorted(outcomes, key=lambda o: (o.variant, o.seed)):
        agents = [o.held_out_agents.get(f"{name}_agent") for name in ("planner", "search", "answer")]
        lags = [f"{o.lag_mean[m]:.1f} ≤ {o.lag_max[m]}" for m in o.lag_mean]
        figures = [o.held_out, *agents, o.reward_end]
        steps = [str(steps) for steps in o.steps.values() if steps]
        tokens = f"{o.sampled_tokens:,}"
        rows.append(
            (
                o.variant,
                str(o.seed),
                *map(_number, figures),
                _both(steps),
                _both(lags),
                tokens,
                f"{o.duration_s:.0f}",
            )
        )
    return rows


def _both(values: Sequence[str]) -> str:
    """Of planner and solver; of the one that was trained; – of none."""
    return " · ".join(values) or "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
