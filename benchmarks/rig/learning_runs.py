"""The runs behind the tables of learning: which there are, how one is launched, and what is kept of it."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.rig.token_counts import BUDGET_ENV, COUNTS_ENV, REWARD_DELAY_ENV, read_counts
from model_runtime.config_file import load_config
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.store import Store, open_store
from model_runtime.summary import RunSummary
from tests.e2e.quickstart import QUICKSTART, below_the_bar, run_up, summary_of, write_config

Experiment = Literal["algorithms", "staleness", "together"]

REPOSITORY = Path(__file__).parents[2]
RUN_ID = "run"
RUN_LIMIT_S = 1500.0
SEEDS = (0, 1, 2)
TOKEN_BUDGET = 48_000
"""Of each run of the experiment `together`: sampled tokens, all models counted. Half of what the
quickstart takes."""
SAMPLED = {"samples_per_task": 8, "temperature": 1.0}
"""Held-out tasks as they are trained on: 320 executions. Greedy ones would flatter whoever learned all."""
PLANNER, SOLVER = "planner_model", "solver_model"
LAG_KEY = "training/off_policy/trajectory_staleness_worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run: the quickstart's config, and what is different in it."""

    experiment: Experiment
    name: str
    seed: int
    model: Mapping[str, Any] = field(default_factory=dict)  # merged into both models' sections
    sections: Mapping[str, Any] = field(default_factory=dict)  # merged into the run's
    frozen: tuple[str, ...] = ()
    token_budget: int | None = None
    reward_delay_s: float = 0.0
    exchanges: str | None = None  # variant whose two adapters are served, each by the other model

    @property
    def key(self) -> str:
        return f"{self.experiment}-{self.name}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to; a JSON file each."""

    experiment: str
    variant: str
    seed: int
    held_out: float | None
    held_out_agents: dict[str, float]
    reward_start: float | None
    reward_end: float | None
    below_bar: list[str]  # of the quickstart's own bar
    steps: dict[str, int]
    lag_mean: dict[str, float]  # versions, of the oldest token of a trajectory, over the run's batches
    lag_max: dict[str, int]
    sampled_tokens: int  # of training executions, frozen models' too
    num_executions: int
    duration_s: float
    adapters: dict[str, str]  # model → folder


# ---------------------------------------------------------------- which runs there are

# With one optimizer step a batch and recomputed old logprobs the ratio is 1, and importance weights correct
# for staleness; cispo is given the sampler's logprobs instead, and bounds that ratio itself.
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo"},
    "rloo": {"advantage": "rloo"},
    "cispo": {
        "loss": "cispo",
        "old_logprobs": "behavior",  # the ratio to the sampler, bounded by cispo itself
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 1.0,
    },
    "gspo": {
        "loss": "gspo",
        "aggregation": "seq-mean-token-mean",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "importance_weight_level": "sequence",
    },
}

_STEADY: dict[str, Any] = {"max_steps": 26, "trainer": {"learning_rate": 3e-3}}
_STALENESS: dict[str, dict[str, Any]] = {
    "on-policy": {
        "model": _STEADY
        | {"async_training": {"strict_on_policy": True, "staleness_threshold": 0.0, "max_staleness": 0}},
        "sections": {},
    },
    # Each reward comes so late, and so many executions wait for theirs, that the policy has moved on.
    "lag-4": {
        "model": _STEADY
        | {
            "async_training": {"staleness_threshold": 4.0, "max_staleness": 4},
            "rollout": {"max_live_versions": 8},
        },
        "reward_delay_s": 16.0,  # about four steps
        "sections": {
            "workflow": {
                "max_concurrent_executions": 640,
                "execution_timeout_s": 300,
                "group_timeout_s": 600,
            }
        },
    },
}

# Falls slowly: nobody is to run out of steps before the tokens are spent.
_TOGETHER: dict[str, Any] = {"max_steps": 60, "trainer": {"learning_rate": 4e-3}}


def all_variants() -> list[Variant]:
    """In the order they are worth having: one seed of everything first."""
    algorithms = [
        Variant(experiment="algorithms", name=name, seed=0, model={"objective": objective})
        for name, objective in _ALGORITHMS.items()
    ]
    first, *others = SEEDS
    return [
        *algorithms[:1],
        *_together(first),
        *algorithms[1:],
        *_staleness(first),
        *(variant for seed in others for variant in _together(seed)),
        *(variant for seed in others for variant in _staleness(seed)),
    ]


def _together(seed: int) -> list[Variant]:
    who_is_frozen = {"both": (), "planner-only": (SOLVER,), "solver-only": (PLANNER,)}
    sampled = {"evaluation": SAMPLED, "workflow": {"epochs": 2}}
    trained = [
        Variant(
            experiment="together",
            name=name,
            seed=seed,
            model=_TOGETHER,
            sections=sampled,
            frozen=frozen,
            token_budget=TOKEN_BUDGET,
        )
        for name, frozen in who_is_frozen.items()
    ]
    exchanged = Variant(
        experiment="together",
        name="exchanged",
        seed=seed,
        sections=sampled | {"workflow": {"epochs": 1, "group_size": 2}},
        frozen=(PLANNER, SOLVER),
        token_budget=0,
        exchanges="both",
    )
    return [trained[0], exchanged, *trained[1:]]


def _staleness(seed: int) -> list[Variant]:
    return [
        Variant(
            experiment="staleness",
            name=name,
            seed=seed,
            model=given["model"],
            sections={"evaluation": SAMPLED} | given["sections"],
            reward_delay_s=given.get("reward_delay_s", 0.0),
        )
        for name, given in _STALENESS.items()
    ]


# ---------------------------------------------------------------- one run


def outcome_path(out: Path, key: str) -> Path:
    return out / f"{key}.json"


def read_outcomes(out: Path) -> list[Outcome]:
    return [Outcome(**json.loads(path.read_text())) for path in sorted(out.glob("*.json"))]


def run_variant(variant: Variant, out: Path) -> Outcome:
    """Run it through `repertory up` and keep what it came to. The run's store stays in `out`/<key>."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out / variant.key
    folder.mkdir(exist_ok=True)
    counts = folder / f"tokens-{time.time():.0f}"  # a run that broke off is not counted again
    config = write_run_config(variant, folder, adapters=exchanged_adapters(variant, out))
    env = {
        COUNTS_ENV: str(counts),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
    }
    if variant.token_budget is not None:
        env[BUDGET_ENV] = str(variant.token_budget)
    if variant.reward_delay_s:
        env[REWARD_DELAY_ENV] = str(variant.reward_delay_s)
    with tempfile.TemporaryDirectory(prefix="learning-") as home:
        run_id = f"{RUN_ID}-{time.time():.0f}"
        result = run_up(Path(home), config, "--run-id", run_id, "--no-ui", limit_s=RUN_LIMIT_S, env=env)
    summary = summary_of(result)
    store = open_store(load_config(config).store)
    outcome = _outcome(variant, summary, store, sampled_tokens=sum(read_counts(counts).values()))
    outcome_path(out, variant.key).write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def write_run_config(variant: Variant, folder: Path, *, adapters: Mapping[str, str]) -> Path:
    workflow = {"function": "benchmarks.rig.counted_shop:run"} | variant.sections.get("workflow", {})
    sections = dict(variant.sections) | {"workflow": workflow, "seed": variant.seed}
    # Budgets of tokens are shorter than a warm-up is worth.
    model: dict[str, Any] = {"max_steps": 22} | dict(variant.model)
    model["trainer"] = {"warmup_steps": 0} | model.get("trainer", {})
    path = write_config(folder, model=model, **sections)
    raw = yaml.safe_load(path.read_text())
    for section in raw["multi_model"]["models"]:
        if section["model_id"] in variant.frozen:
            section["kind"] = "frozen"
        if section["model_id"] in adapters:
            section["adapter_path"] = adapters[section["model_id"]]
    path.write_text(yaml.safe_dump(raw))
    return path


def exchanged_adapters(variant: Variant, out: Path) -> dict[str, str]:
    """Each model with the adapter the other one learned."""
    if variant.exchanges is None:
        return {}
    source = outcome_path(out, f"{variant.experiment}-{variant.exchanges}-{variant.seed}")
    learned = Outcome(**json.loads(source.read_text())).adapters
    return {PLANNER: learned[SOLVER], SOLVER: learned[PLANNER]}


def _outcome(variant: Variant, summary: RunSummary, store: Store, *, sampled_tokens: int) -> Outcome:
    lags = {m.model_id: _lags(store, summary.run_id, m.model_id) for m in summary.models}
    return Outcome(
        experiment=variant.experiment,
        variant=variant.name,
        seed=variant.seed,
        held_out=summary.held_out.reward if summary.held_out else None,
        held_out_agents=dict(summary.held_out.agent_success) if summary.held_out else {},
        reward_start=summary.workflow_reward.start,
        reward_end=summary.workflow_reward.end,
        below_bar=below_the_bar(summary),
        steps={m.model_id: m.steps for m in summary.models},
        lag_mean={name: round(statistics.fmean(means), 2) for name, (means, _) in lags.items() if means},
        lag_max={name: int(max(worst)) for name, (_, worst) in lags.items() if worst},
        sampled_tokens=sampled_tokens,
        num_executions=summary.num_executions,
        duration_s=summary.duration_s,
        adapters={m.model_id: m.adapter_uri.removeprefix("file://") for m in summary.models if m.adapter_uri},
    )


def _lags(store: Store, run_id: str, model_id: str) -> tuple[Sequence[float], Sequence[float]]:
    """(mean, worst) lag of each batch."""
    rows = read_metrics(store, RunLayout(run_id).model(model_id), "steps")
    found = [row for row in rows if row.get(f"{LAG_KEY}/mean") is not None]
    return [row[f"{LAG_KEY}/mean"] for row in found], [row[f"{LAG_KEY}/max"] for row in found]


__all__ = ["QUICKSTART", "Outcome", "Variant", "all_variants", "outcome_path", "read_outcomes", "run_variant"]
