"""The end of a run: its summary in the store and on the run's page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from model_runtime import summary as core
from model_runtime.config import RunConfig, artifact_slug
from model_runtime.layout import RunLayout
from model_runtime.protocol import TrainerState
from model_runtime.store import Store
from model_runtime.summary import Reward, RunSummary
from tasks.reporting import tell


@task(name="summary", task_run_name="summary", cache_policy=NO_CACHE, persist_result=False)
async def write_summary(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    *,
    started_at: float,
    failures: Mapping[str, str],
    endings: Mapping[str, TrainerState],
) -> RunSummary:
    """Read the run's logs and books, write summary.json, show it as an artifact."""

    def make() -> RunSummary:
        made = core.summarize(
            store, layout, config, started_at=started_at, failures=failures, endings=endings
        )
        core.write_summary(store, layout, made)
        return made

    summary = await asyncio.to_thread(make)
    page = acreate_markdown_artifact(
        markdown(summary), key=f"{artifact_slug(config.name)}-summary", description=summary.headline
    )
    await tell("the summary", page)
    return summary


def markdown(summary: RunSummary) -> str:
    """The summary as a page of the UI."""
    lines = [
        f"# {summary.run_id}: {summary.state}",
        "",
        f"Workflow reward {change(summary.workflow_reward)} over "
        f"{summary.num_executions} executions in {summary.duration_s:.0f} s.",
        *(f"**{role}**: {reason}" for role, reason in summary.failures.items()),
        "",
        "| agent | model | reward, start → end | success of its own part |",
        "|---|---|---|---|",
        *(
            f"| {a.agent_id} | {a.model_id} | {change(a.reward)} | {change(a.success)} |"
            for a in summary.agents
        ),
        "",
        "| model | steps | versions | finalized | trained | dropped | in log |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {m.model_id} | {m.steps} | {m.versions_published} | {m.finalized} | {m.trained} | "
            f"{dropped(m.dropped)} | {m.in_log} |"
            for m in summary.models
        ),
        "",
        *(f"- `{m.model_id}`: {m.adapter_uri or 'the base model'}" for m in summary.models),
        "",
        f"Summary: {summary.summary_uri}",
    ]
    if summary.held_out is not None:
        held_out = summary.held_out
        lines.insert(3, f"Held-out, {held_out.sampled}: {shown(held_out.reward)}.")
    return "\n".join(lines)


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def change(reward: Reward) -> str:
    return f"{shown(reward.start)} → {shown(reward.end)}"


def dropped(reasons: Mapping[str, int]) -> str:
    """`12 zero_variance, 1 expired`, or 0."""
    return ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()) if n) or "0"
