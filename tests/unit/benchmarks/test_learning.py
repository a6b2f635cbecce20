"""What the learning benchmark runs, counts and claims."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.rig import learning_runs
from benchmarks.rig.learning_claims import judge, judge_algorithms, judge_staleness, judge_together
from benchmarks.rig.learning_runs import Outcome, Variant, all_variants, outcome_path, write_run_config
from benchmarks.rig.token_counts import BUDGET_ENV, COUNTS_ENV, REWARD_DELAY_ENV, TokenCounts, read_counts
from model_runtime.config_file import load_config
from model_runtime.workflow import ChatReply

SEEDS = (0, 1, 2)


def outcome(experiment: str, variant: str, seed: int = 0, **different: Any) -> Outcome:
    known: dict[str, Any] = {
        "experiment": experiment,
        "variant": variant,
        "seed": seed,
        "held_out": 0.9,
        "held_out_agents": {"planner_agent": 0.9},
        "reward_start": 0.1,
        "reward_end": 0.9,
        "below_bar": [],
        "steps": {"planner_model": 22},
        "lag_mean": {"planner_model": 2.0},
        "lag_max": {"planner_model": 4},
        "sampled_tokens": 1000,
        "num_executions": 100,
        "duration_s": 10.0,
        "adapters": {},
    }
    return Outcome(**known | different)


def together(
    *, both: float, alone: float, exchanged: float = 0.0, seeds: tuple[int, ...] = SEEDS
) -> list[Outcome]:
    rewards = {"both": both, "planner-only": alone, "solver-only": alone / 2, "exchanged": exchanged}
    return [
        outcome("together", name, seed, held_out=reward) for seed in seeds for name, reward in rewards.items()
    ]


def staleness(*losses: float, lag: int = 4, mean_lag: float = 2.5) -> list[Outcome]:
    return [
        outcome(
            "staleness",
            name,
            seed,
            held_out=reward,
            lag_max={"planner_model": lag},
            lag_mean={"planner_model": mean_lag},
        )
        for seed, loss in enumerate(losses)
        for name, reward in (("on-policy", 0.9), ("lag-4", 0.9 - loss))
    ]


# ---------------------------------------------------------------- claims


def test_nothing_is_claimed_of_runs_that_are_not_there() -> None:
    assert [verdict.holds for verdict in judge([])] == [None] * 7


def test_an_algorithm_s_run_below_the_bar_is_named_with_its_reason() -> None:
    runs = [outcome("algorithms", "grpo"), outcome("algorithms", "rloo", below_bar=["held-out 0.5"])]
    grpo, rloo, cispo, _ = judge_algorithms(runs)
    assert (grpo.holds, rloo.holds, cispo.holds) == (True, False, None)
    assert "held-out 0.5" in rloo.why


@pytest.mark.parametrize(
    ("losses", "holds"),
    [((0.0, 0.02, 0.12), True), ((0.0, 0.05, 0.12), False), ((-0.3, -0.3, -0.3), True), ((0.0, 0.0), None)],
)
def test_staleness_is_judged_by_the_mean_loss_over_three_seeds(
    losses: tuple[float, ...], holds: bool | None
) -> None:
    assert judge_staleness(staleness(*losses)).holds is holds


@pytest.mark.parametrize("lag", [{"lag": 1}, {"mean_lag": 1.3}], ids=["never", "once"])
def test_runs_that_hardly_lagged_prove_nothing_about_lag(lag: dict[str, Any]) -> None:
    verdict = judge_staleness(staleness(0.0, 0.0, 0.0, **lag))
    assert verdict.holds is False
    assert "seed [0, 1, 2] did not have a mean lag of 2 and a worst of 4" in verdict.why


def test_both_must_lead_by_a_tenth_with_every_seed() -> None:
    assert judge_together(together(both=0.9, alone=0.2))[0].holds is True
    assert judge_together(together(both=0.9, alone=0.85))[0].holds is False
    one_seed_short = together(both=0.9, alone=0.2, seeds=(0, 1)) + together(both=0.9, alone=0.85, seeds=(2,))
    assert judge_together(one_seed_short)[0].holds is False
    assert judge_together(together(both=0.9, alone=0.2, seeds=(0, 1)))[0].holds is None


def test_a_lead_at_unequal_tokens_does_not_count() -> None:
    runs = together(both=0.9, alone=0.2)
    runs[1] = replace(runs[1], sampled_tokens=900)
    verdict = judge_together(runs)[0]
    assert verdict.holds is False
    assert "sampled tokens differ by 10%" in verdict.why


def test_exchanged_policies_that_do_as_well_fail_the_control() -> None:
    assert judge_together(together(both=0.9, alone=0.2, exchanged=0.1))[1].holds is True
    assert judge_together(together(both=0.9, alone=0.2, exchanged=0.85))[1].holds is False


def test_a_run_without_a_held_out_reward_counts_as_nothing_learned() -> None:
    runs = [replace(o, held_out=None) if o.variant == "both" else o for o in together(both=0.9, alone=0.2)]
    assert judge_together(runs)[0].holds is False


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("variant", all_variants(), ids=lambda variant: variant.key)
def test_every_variant_is_a_valid_config_of_the_quickstart(variant: Variant, tmp_path: Path) -> None:
    adapters = {"planner_model": str(tmp_path)} if variant.exchanges else {}
    config = load_config(write_run_config(variant, tmp_path, adapters=adapters))
    assert {m.model_id for m in config.models if m.kind == "frozen"} == set(variant.frozen)
    assert config.seed == variant.seed
    assert config.model("planner_model").adapter_path == (str(tmp_path) if adapters else None)


def test_runs_have_names_of_their_own_and_exchanges_come_after_what_they_exchange() -> None:
    keys = [variant.key for variant in all_variants()]
    assert len(keys) == len(set(keys)) == 22
    for seed in SEEDS:
        assert keys.index(f"together-both-{seed}") < keys.index(f"together-exchanged-{seed}")


def test_models_get_each_other_s_adapters_when_exchanged(tmp_path: Path) -> None:
    learned = outcome("together", "both", adapters={"planner_model": "/p", "solver_model": "/s"})
    outcome_path(tmp_path, "together-both-0").write_text(json.dumps(asdict(learned)))
    variant = next(v for v in all_variants() if v.key == "together-exchanged-0")
    assert learning_runs.exchanged_adapters(variant, tmp_path) == {
        "planner_model": "/s",
        "solver_model": "/p",
    }


def test_a_run_whose_outcome_is_there_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[str] = []

    def pretend(variant: Variant, out: Path) -> Outcome:
        run.append(variant.name)
        done = outcome(variant.experiment, variant.name)
        outcome_path(out, variant.key).write_text(json.dumps(asdict(done)))
        return done

    monkeypatch.setattr(learning, "run_variant", pretend)
    arguments = ["--run", "--only", "algorithms", "--out", str(tmp_path), "--json"]
    assert learning.main([*arguments, "--variants", "rloo"]) == 0
    assert learning.main([*arguments, "--lock", str(tmp_path / "lock")]) == 0
    assert run == ["rloo", "grpo", "cispo", "gspo"]
    capsys.readouterr()
    assert learning.main(["--out", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [v["holds"] for v in shown["verdicts"]] == [True] * 4 + [None] * 3


def test_a_claim_that_fails_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missed = outcome("algorithms", "gspo", below_bar=["too little"])
    outcome_path(tmp_path, "algorithms-gspo-0").write_text(json.dumps(asdict(missed)))
    assert learning.main(["--out", str(tmp_path)]) == 1
    assert "FAILS  gspo reaches the quickstart's bar: seed 0: too little" in capsys.readouterr().out
    assert learning.main(["--out", str(tmp_path), "--markdown"]) == 1
    page = capsys.readouterr().out
    assert "| gspo | 0 | 0.900 | 0.900 | – | – | 0.900 | 22 | 2.0 ≤ 4 | 1,000 | 10 |" in page.splitlines()
    assert "- FAILS: gspo reaches" in page


# ---------------------------------------------------------------- counting


def test_counts_go_on_after_a_restart_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    TokenCounts(path, 10).add("planner_agent", 4)
    again = TokenCounts(path, 10)
    again.add("search_agent", 5)
    assert not again.is_spent
    again.add("search_agent", 1)
    assert again.is_spent
    with path.open("a") as file:
        file.write("answer_agent 3")
    assert read_counts(path) == {"planner_agent": 4, "search_agent": 6}


async def test_nobody_is_asked_once_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(learning_runs.QUICKSTART))
    monkeypatch.delitem(sys.modules, "workflow", raising=False)
    monkeypatch.setenv(COUNTS_ENV, str(tmp_path / "counts"))
    monkeypatch.setenv(BUDGET_ENV, "5")
    from benchmarks.rig import counted_shop

    asked: list[str] = []

    async def chat(agent_id: str, messages: list[dict], **sampling: Any) -> ChatReply:
        asked.append(agent_id)
        return ChatReply(
            content="price, sofa", finish_reason="stop", request_id="r", policy_version=0, num_tokens=3
        )

    async def reward(value: float, **whose: Any) -> None: ...

    session: Any = SimpleNamespace(mode="train", chat=chat, reward=reward)
    task = {"question": "how much is the sofa?", "table": "price", "name": "sofa"}
    assert await counted_shop.run(task, session) == 0.0
    assert asked == ["planner_agent", "search_agent"]
    assert await counted_shop.run(task, session) is None
    assert len(asked) == 2
    session.mode = "eval"
    assert await counted_shop.run(task, session) == 0.0
    assert read_counts(tmp_path / "counts").total() == 6


async def test_a_reward_is_held_back_as_long_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(learning_runs.QUICKSTART))
    from benchmarks.rig import counted_shop

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def work(task: dict, session: Any) -> float:
        return 1.0

    monkeypatch.setattr(counted_shop.asyncio, "sleep", sleep)
    monkeypatch.setattr(counted_shop.quickstart, "run", work)
    monkeypatch.setenv(COUNTS_ENV, str(tmp_path / "late"))
    monkeypatch.setenv(REWARD_DELAY_ENV, "16")
    session: Any = SimpleNamespace(mode="train")
    assert await counted_shop.run({}, session) == 1.0
    session.mode = "eval"
    assert await counted_shop.run({}, session) == 1.0
    assert slept == [16.0]
