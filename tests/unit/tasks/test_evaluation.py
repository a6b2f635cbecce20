"""How an evaluation reads on its page."""

from __future__ import annotations

from typing import Any

from model_runtime.evaluation import Estimate, EvaluationDocument, EvaluationPlan
from tasks.evaluation import headline, markdown


def evaluated(version: int | None, mean: float | None, **changes: Any) -> EvaluationDocument:
    plan = EvaluationPlan(
        run_id="run-1",
        versions={"planner": version},
        function="m:f",
        tasks_sha256="0" * 64,
        samples_per_task=4,
        temperature=0.7,
        seed=0,
    )
    reward = None if mean is None else Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1, num_tasks=9)
    given = {"plan": plan, "executions": {"finalized": 36, "aborted": 1}, "reward": reward}
    return EvaluationDocument.model_validate(given | {"created_at": 1.0, "duration_s": 2.0} | changes)


def test_the_headline_has_the_versions_and_the_interval() -> None:
    assert headline(evaluated(12, 0.81)) == "planner v12: 0.81 (0.71 to 0.91)"
    assert headline(evaluated(None, None)) == "planner base: no reward"


def test_the_page_compares_with_the_evaluation_before_and_with_base() -> None:
    now = evaluated(12, 0.81, pass_at={1: 0.8, 4: 0.95}, agent_success={"x": 0.9})
    before = [evaluated(None, 0.2, pass_at={1: 0.1, 4: 0.3}), evaluated(7, 0.5), now]
    page = markdown(now, before)
    assert "| | now | before | base |" in page
    assert "| versions | planner v12 | planner v7 | planner base |" in page
    assert "| workflow reward | 0.81 (0.71 to 0.91) | 0.50 (0.40 to 0.60) | 0.20 (0.10 to 0.30) |" in page
    assert "| pass@4 | 0.95 | – | 0.30 |" in page
    assert "| success of x | 0.90 | – | – |" in page
    assert "| executions | 1 aborted, 36 finalized |" in page


def test_the_page_says_of_how_many_tasks_there_is_a_reward() -> None:
    some = evaluated(12, 0.81, task_rewards={f"t{n}": [] if n > 8 else [0.81] for n in range(12)})
    none = evaluated(7, None, task_rewards={"t0": [], "t1": []})
    assert "| tasks with a reward | 9 of 12 | 0 of 2 |" in markdown(some, [none, some])


def test_the_first_evaluation_stands_alone() -> None:
    assert "| | now |\n|---|---|" in markdown(evaluated(0, 0.4), [])
