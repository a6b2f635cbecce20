"""A run's summary on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from model_runtime.summary import Reward, RunSummary

DROP_REASONS = {
    "aborted": "the workflow raised, or gave a reward that is no number",
    "aged_out": "sampled by a version older than max_staleness allows",
    "cancelled": "the group was given up before all its executions ended",
    "duplicate": "a copy of a row that is in the log already",
    "duplicate_attempt": "another attempt at the same execution counted",
    "expired": "the execution was not finalized in time",
    "infra": "a server failed under the execution; it was tried again",
    "invalid": "refused when it was recorded; the gateway's log says why",
    "missing_reward": "the workflow gave no reward",
    "not_for_training": "work of a group that feeds another model, while this one had enough",
    "retried": "an attempt that was given up for another one",
    "too_few_values": "fewer than two rewards in the group: nothing to compare with",
    "unfinished": "the execution did not finish",
    "zero_variance": "all rewards of the group were equal: nothing to learn from",
}
ENDINGS = {
    "drained": "there was no more data",
    "no_signal": "too many groups in a row had equal rewards; look at the rewards, or take larger groups",
}


def print_summary(console: Console, summary: RunSummary) -> None:
    """Rewards, books, adapters, and the command that serves one of them. Paths and commands are never
    broken over lines, so that they can be copied."""

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True, highlight=False)

    line(headline(summary), "bold")
    console.print(rewards_table(summary))
    if summary.held_out is not None:
        held_out = summary.held_out
        num, reward = held_out.num_executions, shown(held_out.reward)
        line(f"held-out tasks, {held_out.sampled}, {num} executions: {reward}")
    console.print(books_table(summary))
    for model in summary.models:
        if any(model.dropped.values()):
            line(f"{model.model_id} dropped {reasons(model.dropped)}")
    for reason in sorted({r for model in summary.models for r, n in model.dropped.items() if n}):
        if reason in DROP_REASONS:
            line(f"  {reason}: {DROP_REASONS[reason]}", "dim")
    for model in summary.models:
        if model.ended in ENDINGS:
            line(f"{model.model_id} stopped after step {model.steps}: {ENDINGS[model.ended]}", "yellow")
    for role, reason in summary.failures.items():
        line(f"{role}: {reason}", "red")
    for model in summary.models:
        if model.adapter_uri:
            line(f"{model.model_id} adapter: {model.adapter_uri}")
    if summary.store_bytes:
        line(disk_use(summary.store_bytes, removed_log_bytes=summary.removed_log_bytes))
    line(f"serve one: {summary.models[-1].serve_command}")


def disk_use(store_bytes: Mapping[str, int], *, removed_log_bytes: int = 0) -> str:
    """`in the store: 12.3 MB (checkpoints 8.1, log 4.0, other 0.2)`, the largest first, and what retention
    has removed."""
    largest_first = sorted(store_bytes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{part} {num_bytes / 1e6:.1f}" for part, num_bytes in largest_first)
    removed = f"; {removed_log_bytes / 1e6:.1f} MB of logs removed" if removed_log_bytes else ""
    return f"in the store: {sum(store_bytes.values()) / 1e6:.1f} MB ({parts}){removed}"


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
    # No borders between columns: every heading is whole on 80 columns.
    table = Table(
        title="trajectories", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in ("model", "steps", "versions", "finalized", "trained", "dropped", "in log", "balance"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=column == "model")
    for model in summary.models:
        counts = (model.steps, model.versions_published, model.finalized, model.trained)
        dropped = sum(model.dropped.values())
        balance = "ok" if model.balanced else "BROKEN"
        table.add_row(model.model_id, *map(str, (*counts, dropped, model.in_log)), balance)
    return table


def reasons(dropped: Mapping[str, int]) -> str:
    """`13: 12 zero_variance, 1 expired`, or 0."""
    given = {reason: n for reason, n in sorted(dropped.items()) if n}
    parts = ", ".join(f"{n} {reason}" for reason, n in given.items())
    return f"{sum(given.values())}: {parts}" if given else "0"


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
