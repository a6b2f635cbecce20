"""What the runs of `benchmarks/learning.py` have to show, and whether they do."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.rig.learning_runs import Outcome

ALGORITHMS = ("grpo", "rloo", "cispo", "gspo")
MIN_SEEDS = 3
MAX_LOSS_BY_LAG = 0.05
MIN_LAG = 4
MIN_MEAN_LAG = 2.0
"""Of each model's batches over the whole run: one old batch is no lag."""
MIN_LEAD = 0.1
MAX_TOKEN_SPREAD = 0.05
"""Between the variants of one seed, so that their sampled tokens count as equal."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim. `holds` None: not all its runs are there."""

    claim: str
    holds: bool | None
    why: str


def judge(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """All claims, in the order of the tables."""
    return [*judge_algorithms(outcomes), judge_staleness(outcomes), *judge_together(outcomes)]


def judge_algorithms(outcomes: Iterable[Outcome]) -> list[Verdict]:
    """Each algorithm on its own; a run with a second seed that misses the bar is not passed over."""
    verdicts = []
    for name in ALGORITHMS:
        found = [o for o in outcomes if o.experiment == "algorithms" and o.variant == name]
        missing = [f"seed {o.seed}: {reason}" for o in found for reason in o.below_bar]
        why = "; ".join(missing) or (f"{len(found)} of {len(found)} runs" if found else "no run yet")
        verdicts.append(Verdict(f"{name} reaches the quickstart's bar", not missing if found else None, why))
    return verdicts


def judge_staleness(outcomes: Iterable[Outcome]) -> Verdict:
    """Held-out reward with lag against without, mean over the seeds both were run with."""
    claim = f"with lag {MIN_LAG}, corrected, the final reward is within {MAX_LOSS_BY_LAG} of on-policy"
    pairs = _by_seed(outcomes, "staleness", ("on-policy", "lag-4"))
    if len(pairs) < MIN_SEEDS:
        return Verdict(claim, None, f"{len(pairs)} of {MIN_SEEDS} seeds")
    differences = [_held_out(lagged) - _held_out(fresh) for fresh, lagged in pairs.values()]
    mean = statistics.fmean(differences)
    short = [seed for seed, (_, lagged) in pairs.items() if not _really_lagged(lagged)]
    why = f"{mean:+.3f} ({', '.join(f'{d:+.3f}' for d in differences)})"
    if short:
        wanted = f"a mean lag of {MIN_MEAN_LAG:g} and a worst of {MIN_LAG}"
        return Verdict(claim, False, f"{why}; seed {short} did not have {wanted}, so nothing is shown")
    return Verdict(claim, mean >= -MAX_LOSS_BY_LAG, why)


def _really_lagged(outcome: Outcome) -> bool:
    worst, means = outcome.lag_max.values(), outcome.lag_mean.values()
    return max(worst, default=0) >= MIN_LAG and min(means, default=0.0) >= MIN_MEAN_LAG


def judge_together(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """At equal tokens both models trained against the better of one, for every seed; and the control."""
    better = f"both trained beat the better of one trained by {MIN_LEAD}, at equal sampled tokens, every seed"
    control = f"both trained lose at least {MIN_LEAD} when their adapters are exchanged, every seed"
    runs = _by_seed(outcomes, "together", ("both", "planner-only", "solver-only"))
    swaps = _by_seed(outcomes, "together", ("both", "exchanged"))
    return [
        _every_seed(better, {seed: _lead(*three) for seed, three in runs.items()}),
        _every_seed(control, {seed: (_held_out(a) - _held_out(b), "") for seed, (a, b) in swaps.items()}),
    ]


def _lead(both: Outcome, *alone: Outcome) -> tuple[float, str]:
    """How far `both` is ahead, and what makes the comparison unfair."""
    tokens = [o.sampled_tokens for o in (both, *alone)]
    spread = (max(tokens) - min(tokens)) / max(tokens)
    unfair = f"sampled tokens differ by {spread:.0%}" if spread > MAX_TOKEN_SPREAD else ""
    return _held_out(both) - max(_held_out(o) for o in alone), unfair


def _every_seed(claim: str, leads: dict[int, tuple[float, str]]) -> Verdict:
    if len(leads) < MIN_SEEDS:
        return Verdict(claim, None, f"{len(leads)} of {MIN_SEEDS} seeds")
    why = ", ".join(f"{lead:+.3f}{f' ({unfair})' if unfair else ''}" for lead, unfair in leads.values())
    return Verdict(claim, all(lead >= MIN_LEAD and not unfair for lead, unfair in leads.values()), why)


def _by_seed(
    outcomes: Iterable[Outcome], experiment: str, variants: Sequence[str]
) -> dict[int, tuple[Outcome, ...]]:
    """Seed → its outcomes in the order of `variants`; seeds that lack one are left out."""
    found = {(o.variant, o.seed): o for o in outcomes if o.experiment == experiment}
    seeds = sorted({seed for _, seed in found})
    return {
        seed: tuple(found[name, seed] for name in variants)
        for seed in seeds
        if all((name, seed) in found for name in variants)
    }


def _held_out(outcome: Outcome) -> float:
    """Nobody answered a held-out task: nothing was learned."""
    return outcome.held_out if outcome.held_out is not None else 0.0
