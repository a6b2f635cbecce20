"""How long a run stands still after a process was killed.

    python benchmarks/recovery.py [--roles trainer gateway …] [--repeats 1] [--json]

The quickstart in small steps; each role is killed in turn with SIGKILL and the run is watched until it has
been going on again for a while. Told is the longest time since the kill in which some model answered with no
token, and in which it began no training step: what was under way when the process died, or waited in a
queue, may still come at once. A role whose death ends the launch (parent, serve) is resumed at once by
`repertory up --resume`, as a person would. Times of a shared machine say little by themselves: the row
`nothing` is the same without a kill, the cadence of an undisturbed run. Exits with 1 when a role was not back
within LIMIT_S.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deployments.home import admin_key
from model_runtime.coordinator import read_run
from model_runtime.layout import number_in
from tests.chaos.driver import LAYOUT, MODELS, ChaosRun
from tests.chaos.store_faults import BreakableStore
from tests.chaos.victims import ROLES, Fault

NOTHING = "nothing"
USUAL = ("trainer", "vllm-engine", "gateway", "runtime")
"""Killed without being asked; all of ROLES take a quarter of an hour."""
LIMIT_S = 420.0
CALM_S = 10.0
"""Between a recovery and the next kill."""
LEAST_S, GOING_S = 30.0, 5.0
"""A run is watched for so long at least, and until each model went on within the last seconds."""
MANY_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Recovery:
    """Longest times without, of any model; None: not back within LIMIT_S."""

    role: str
    without_token_s: float | None
    without_step_s: float | None


class Silence:
    """The longest time in which one of the models' counters stood still."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = dict(counters)
        self._changed_at: dict[str, float] = dict.fromkeys(MODELS, 0.0)
        self.longest_s = 0.0

    def note(self, counters: Mapping[str, int], at_s: float) -> None:
        """A counter that began anew goes on too, once it counts something."""
        for model, count in counters.items():
            if count not in (0, self._counters.get(model)):
                self.longest_s = max(self.longest_s, at_s - self._changed_at[model])
                self._counters[model], self._changed_at[model] = count, at_s

    def is_over(self, at_s: float) -> bool:
        return all(at_s - changed_at <= GOING_S for changed_at in self._changed_at.values())


class Rehearsal(ChaosRun):
    """One run, killed again and again."""

    def recover(self, role: str) -> Recovery:
        tokens, steps, began = Silence(self._tokens()), Silence(self._steps()), time.monotonic()
        if role != NOTHING:
            self.strike(Fault(role, "SIGKILL", 0.0))
        at_s = 0.0
        while at_s < LIMIT_S:
            self.tick()
            at_s = time.monotonic() - began
            tokens.note(self._tokens(), at_s)
            steps.note(self._steps(), at_s)
            if at_s >= LEAST_S and tokens.is_over(at_s) and steps.is_over(at_s):
                return Recovery(role, tokens.longest_s, steps.longest_s)
        return Recovery(
            role,
            tokens.longest_s if tokens.is_over(at_s) else None,
            steps.longest_s if steps.is_over(at_s) else None,
        )

    def _tokens(self) -> dict[str, int]:
        """Tokens sampled of each model, as the gateway of this moment counts; empty while there is none."""
        run = read_run(self.store, LAYOUT)
        if run is None or run.gateway_url is None:
            return {}
        try:
            headers = {"Authorization": f"Bearer {admin_key()}"}
            answer = httpx.get(
                f"{run.gateway_url}/admin/status", headers=headers, timeout=2.0, trust_env=False
            )
            models = answer.raise_for_status().json()["models"]
        except (httpx.HTTPError, ValueError):
            return {}
        return {m: models[m]["sampled_tokens"] for m in MODELS}

    def _steps(self) -> dict[str, int]:
        """The newest step that each model has begun."""
        listed = {m: self.store.children(LAYOUT.model(m).batches()) for m in MODELS}
        return {m: max((number_in(name) for name in names), default=0) for m, names in listed.items()}


def rehearse(folder: Path, roles: list[str], repeats: int) -> list[Recovery]:
    os.environ["REPERTORY_HOME"] = str(folder / "home")
    run = Rehearsal(
        folder, 0, max_steps=MANY_STEPS, limit_s=float("inf"), breakable=BreakableStore(str(folder / "runs"))
    )
    found = []
    try:
        run.launch()
        run.until_trained()
        for _ in range(repeats):
            for role in [NOTHING, *roles]:
                run.wait(CALM_S)
                found.append(run.recover(role))
                print(json.dumps(asdict(found[-1])), file=sys.stderr, flush=True)
    finally:
        run.clean_up()
    return found


def shown(values: list[float | None]) -> str:
    if any(value is None for value in values):
        return f"not within {LIMIT_S:.0f} s"
    known = [value for value in values if value is not None]
    spread = f" ({min(known):.0f}-{max(known):.0f})" if len(known) > 1 else ""
    return f"{statistics.median(known):.1f} s{spread}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roles", nargs="+", default=list(USUAL), choices=ROLES)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        found = rehearse(Path(folder), args.roles, args.repeats)
    if args.json:
        sys.stdout.write(json.dumps([asdict(r) for r in found], indent=1) + "\n")
    else:
        table = Table("killed", "longest without a token of a model", "without a step")
        for role in [NOTHING, *args.roles]:
            of_role = [r for r in found if r.role == role]
            tokens, steps = [r.without_token_s for r in of_role], [r.without_step_s for r in of_role]
            table.add_row(role, shown(tokens), shown(steps))
        Console().print(table)
    return 1 if any(r.without_token_s is None or r.without_step_s is None for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
