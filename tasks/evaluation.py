"""What an evaluation came to, on its page and under each model's artifacts."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from model_runtime.config import artifact_slug
from model_runtime.evaluation import Estimate, EvaluationDocument, comparable, difference
from tasks.reporting import announce, tell


@task(name="show evaluation", task_run_name="evaluate {title}", cache_policy=NO_CACHE, persist_result=False)
async def show_evaluation(
    document: EvaluationDocument, before: Sequence[EvaluationDocument], title: str
) -> None:
    """One page under a key of each model (`<model>-evaluation`), so that its history is the model's."""
    for model_id, version in document.plan.versions.items():
        page = acreate_markdown_artifact(
            markdown(document, before),
            key=f"{artifact_slug(model_id)}-evaluation",
            description=title,
        )
        await tell("the evaluation", page)
        announce(
            "evaluation.completed",
            model_id=model_id,
            run_id=document.plan.run_id,
            version="base" if version is None else version,
            evaluation_id=document.plan.evaluation_id,
            reward=None if document.reward is None else document.reward.mean,
        )


def headline(document: EvaluationDocument) -> str:
    """`planner_model v12, solver_model v12: 0.81 (0.74 to 0.88)`."""
    return f"{document.plan.named_versions()}: {shown(document.reward)}"


def markdown(document: EvaluationDocument, before: Sequence[EvaluationDocument]) -> str:
    """The figures, beside those of the base models and of the evaluation before."""
    base, last = comparable(before, document.plan)
    columns = [("now", document)]
    columns += [("before", last)] if last else []
    columns += [("base", base)] if base else []
    agents = sorted({agent for _, d in columns for agent in d.agent_success})
    passes = sorted({k for _, d in columns for k in d.pass_at})
    rows = [
        ("versions", [d.plan.named_versions() for _, d in columns]),
        ("workflow reward", [shown(d.reward) for _, d in columns]),
        ("tasks with a reward", [_tasks(d) for _, d in columns]),
        ("now better by", ["–", *(_gain(document, d) for _, d in columns[1:])]),
        *((f"pass@{k}", [_number(d.pass_at.get(k)) for _, d in columns]) for k in passes),
        *((f"success of {a}", [_number(d.agent_success.get(a)) for _, d in columns]) for a in agents),
        ("executions", [_executions(d) for _, d in columns]),
    ]
    plan = document.plan
    lines = [
        f"# {headline(document)}",
        "",
        f"Run {plan.run_id}; {plan.samples_per_task} executions a task at temperature {plan.temperature:g}. "
        "Rewards with their 95 % confidence interval over the tasks; gains over the tasks both have.",
        "",
        "| | " + " | ".join(name for name, _ in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
        *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows),
    ]
    return "\n".join(lines)


def shown(reward: Estimate | None) -> str:
    return "no reward" if reward is None else f"{reward.mean:.2f} ({reward.low:.2f} to {reward.high:.2f})"


def _gain(now: EvaluationDocument, before: EvaluationDocument) -> str:
    gain = difference(now.task_rewards, before.task_rewards)
    return "–" if gain is None else f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _tasks(document: EvaluationDocument) -> str:
    rewarded = 0 if document.reward is None else document.reward.num_tasks
    return f"{rewarded} of {max(rewarded, len(document.task_rewards))}"


def _executions(document: EvaluationDocument) -> str:
    return ", ".join(f"{n} {status}" for status, n in sorted(document.executions.items()))
