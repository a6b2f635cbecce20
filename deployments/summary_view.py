"""A run's summary on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from model_runtime.summary import ModelSummary, Reward, RunSummary


def summary_view(summary: RunSummary) -> RenderableType:
    """Rewards and books."""
    parts: list[RenderableType] = [Text(headline(summary), style="bold"), rewards_table(summary)]
    if summary.held_out is not None:
        held_out = summary.held_out
        parts.append(
            Text(f"held-out tasks, greedy, {held_out.num_executions} executions: {shown(held_out.reward)}")
        )
    parts.append(books_table(summary))
    parts.extend(Text(f"{role}: {reason}", style="red") for role, reason in summary.failures.items())
    return Group(*parts)


def where_it_lies(summary: RunSummary) -> list[str]:
    """Lines to copy from: the adapters, and the command that serves one of them."""
    lines = [f"{m.model_id} adapter: {m.adapter_uri}" for m in summary.models if m.adapter_uri]
    if summary.models:
        lines.append(f"serve one: {summary.models[-1].serve_command}")
    return lines


def headline(summary: RunSummary) -> str:
    minutes, seconds = divmod(int(summary.duration_s), 60)
    return f"run {summary.run_id}: {summary.state} after {minutes} min {seconds} s"


def rewards_table(summary: RunSummary) -> Table:
    """Means over the first tenth and the last quarter of the executions."""
    table = Table(title="first tenth → last quarter of the executions", title_justify="left")
    for column in ("of", "model", "reward", "success of its own part"):
        table.add_column(column, justify="left" if column in ("of", "model") else "right")
    table.add_row("workflow", "", change(summary.workflow_reward), "")
    for model in summary.models:
        table.add_row(f"model {model.model_id}", "", change(model.reward), change(model.success))
    for agent in summary.agents:
        table.add_row(f"agent {agent.agent_id}", agent.model_id, change(agent.reward), change(agent.success))
    return table


def change(reward: Reward) -> str:
    return f"{shown(reward.start)} → {shown(reward.end)}" if reward.num_values else "–"


def books_table(summary: RunSummary) -> Table:
    """finalized = trained + dropped + in the log, per model."""
    balance = "ok" if all(model.balanced for model in summary.models) else "BROKEN"
    title = f"trajectories (finalized = trained + dropped + in log: {balance})"
    table = Table(title=title, title_justify="left", padding=(0, 1), collapse_padding=True, pad_edge=False)
    for column in ("model", "steps", "versions", "finalized", "trained", "dropped", "in log"):
        table.add_column(column, justify="left" if column in ("model", "dropped") else "right")
    for model in summary.models:
        table.add_row(*_books_row(model))
    return table


def _books_row(model: ModelSummary) -> list[str]:
    counts = (model.steps, model.versions_published, model.finalized, model.trained)
    return [model.model_id, *map(str, counts), reasons(model.dropped), str(model.in_log)]


def reasons(dropped: Mapping[str, int]) -> str:
    """`13: 12 zero_variance, 1 expired`, or 0."""
    given = {reason: n for reason, n in sorted(dropped.items()) if n}
    parts = ", ".join(f"{n} {reason}" for reason, n in given.items())
    return f"{sum(given.values())}: {parts}" if given else "0"


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def print_summary(console: Console, summary: RunSummary) -> None:
    console.print(summary_view(summary))
    for line in where_it_lies(summary):  # never wrapped: a wrapped path or command can't be pasted
        console.print(line, soft_wrap=True, highlight=False, markup=False)
