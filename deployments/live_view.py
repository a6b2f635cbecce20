"""A run as it goes: one row per model, from the gateway's status."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from model_runtime.protocol import GatewayStatus, ModelRenewal, ModelStatus
from model_runtime.summary import mean_reward

STALENESS = "training/off_policy/trajectory_staleness_worst/mean"
COLUMNS = ("model", "state", "step", "mean reward", "version", "queue", "staleness", "tokens/s")


def live_table(status: GatewayStatus, *, run_id: str, started_at: float, ui_url: str) -> Group:
    """The table of one moment, between a line of what runs and one of its executions."""
    # Without borders every column is whole on 80 columns; a narrower window breaks lines and cuts nothing.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in COLUMNS:
        left = column in ("model", "state")
        justify = "left" if left else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "model")
    for model_id in sorted(status.models):
        table.add_row(*cells(status.models[model_id]))
    title = f"{run_id} · {clock(time.time() - started_at)} · {ui_url}"
    return Group(Text(title, style="bold"), table, Text(executions_line(status), style="dim"))


def cells(model: ModelStatus) -> list[str | Text]:
    """One model's row, in the order of COLUMNS."""
    renewal = model.renewal
    if renewal is None:
        return [model.model_id, "starting", *("–" for _ in COLUMNS[2:])]
    version = renewal.published_version
    return [
        model.model_id,
        state_of(model, renewal),
        _step(renewal),
        _number(mean_reward(renewal.last_metrics), "{:.2f}"),
        "–" if version is None else f"v{version}",
        "–" if renewal.kind == "frozen" else f"{renewal.queue.untrained_groups}/{renewal.limit}",
        _number(renewal.last_metrics.get(STALENESS), "{:.1f}"),
        f"{model.tokens_per_s:.0f}",
    ]


def state_of(model: ModelStatus, renewal: ModelRenewal) -> str:
    """What the model does now, in a word or two."""
    if renewal.status in ("failed", "stopped", "starting"):
        return renewal.status
    if not model.ready:
        return "not ready"
    if renewal.status == "syncing":
        return "syncing"
    if renewal.kind == "frozen":
        return "serving"
    if renewal.trainer_state == "waiting" and 0 < renewal.limit <= renewal.queue.untrained_groups:
        return "waits for agents"  # of older versions than it may go on without
    return {"running": "training", "waiting": "waiting for work"}.get(renewal.trainer_state or "", "") or (
        renewal.trainer_state or "serving"
    ).replace("_", " ")


def executions_line(status: GatewayStatus) -> str:
    """`412 finalized, 3 expired · 64 running in 8 groups · running`."""
    settled = (
        ", ".join(f"{n} {name}" for name, n in sorted(status.settlements.items()) if n) or "none settled"
    )
    waiting = f", {status.waiting_groups} more wait to open" if status.waiting_groups else ""
    rewards = agent_rewards_line(status.agent_rewards)
    line = f"executions: {settled} · {status.open_sessions} running in {status.open_groups} groups{waiting}"
    return f"{line} · {status.desired}" + (f"\nreward: {rewards}" if rewards else "")


def agent_rewards_line(rewards: Mapping[str, Mapping[str, float]]) -> str:
    """`planner_agent 0.31, search_agent 0.44`, of agents that have any."""
    shown = [f"{agent} {of['mean']:.2f}" for agent, of in sorted(rewards.items()) if "mean" in of]
    return ", ".join(shown)


def plain_line(status: GatewayStatus, *, started_at: float) -> str:
    """The same moment in one line, where there is no terminal to redraw."""
    parts = []
    for model_id in sorted(status.models):
        _, state, step, reward, version, queue, staleness, speed = cells(status.models[model_id])
        parts.append(
            f"{model_id}: {state}, step {step}, reward {reward}, {version}, queue {queue}, "
            f"staleness {staleness}, {speed} tok/s"
        )
    return f"[{clock(time.time() - started_at)}] " + " | ".join(parts)


def clock(seconds: float) -> str:
    """`3:07`, `1:02:45`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _step(renewal: ModelRenewal) -> str:
    if renewal.kind == "frozen":
        return "–"
    if renewal.steps_left is None:
        return str(renewal.step)
    return f"{renewal.step}/{renewal.step + renewal.steps_left}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
