"""What a store knows of its runs and models: `repertory runs`, `history` and `status --store`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.live_view import live_table
from deployments.summary_view import disk_use, print_summary
from model_runtime.adapters import latest_version
from model_runtime.coordinator import read_run
from model_runtime.documents import RunDocument
from model_runtime.errors import ConfigError
from model_runtime.evaluation import EvaluationDocument, read_evaluations
from model_runtime.layout import CHECKPOINT_MARKER, EVALUATION_INFIX, RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.protocol import GatewayStatus
from model_runtime.store import Store
from model_runtime.summary import mean_reward, read_summary, removed_log_bytes, usage
from tasks.gateway_admin import GatewayAdmin

SHARE_OF_STEPS = 0.1
"""What counts as a run's start and end: a tenth of its steps each, one at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run of a store."""

    run_id: str
    name: str  # of its config
    state: str
    epoch: int
    models: list[str]
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """One model in one run."""

    run_id: str
    state: str
    newest_version: int | None
    num_steps: int
    num_checkpoints: int
    first_reward: float | None  # means over the first and the last tenth of the steps
    last_reward: float | None
    evaluations: list[dict[str, Any]]  # {version, reward, low, high, created_at}, oldest first
    adapter_uri: str | None
    updated_at: float


def stored_runs(store: Store) -> list[StoredRun]:
    """The runs of a store, the one that was touched last at the end."""
    found = [
        StoredRun(
            run_id=document.run_id,
            name=document.config.get("name", "default"),
            state=document.state,
            epoch=document.epoch,
            models=[model["model_id"] for model in document.config["multi_model"]["models"]],
            created_at=document.created_at,
            updated_at=document.updated_at,
        )
        for document in _documents(store)
    ]
    return sorted(found, key=lambda run: run.updated_at)


def model_history(store: Store, model_id: str, *, run_id: str | None = None) -> list[ModelRun]:
    """A model through the runs of a store, or in one of them; the newest at the end. Raises ConfigError
    naming the models there are."""
    runs = [run for run in stored_runs(store) if run_id in (None, run.run_id)]
    if not runs:
        raise ConfigError(f"no run{f' {run_id!r}' if run_id else ''} in {store.url}")
    with_it = [run for run in runs if model_id in run.models]
    if not with_it:
        known = sorted({model for run in runs for model in run.models})
        raise ConfigError(f"no model {model_id!r} in the runs of {store.url}; models there are {known}")
    return [_model_run(store, run, model_id) for run in with_it]


def _documents(store: Store) -> Iterator[RunDocument]:
    for run_id in store.children(""):
        if EVALUATION_INFIX not in run_id:
            document = read_run(store, RunLayout(run_id))
            if document is not None:
                yield document


def _model_run(store: Store, run: StoredRun, model_id: str) -> ModelRun:
    layout = RunLayout(run.run_id)
    ours = layout.model(model_id)
    newest, steps = latest_version(store, ours), read_metrics(store, ours, "steps")
    rewards = [reward for row in steps if (reward := mean_reward(row)) is not None]
    window = max(1, int(len(rewards) * SHARE_OF_STEPS))
    marked = [key for key in store.list(ours.checkpoints()) if key.endswith(CHECKPOINT_MARKER)]
    return ModelRun(
        run_id=run.run_id,
        state=run.state,
        newest_version=newest,
        num_steps=len(steps),
        num_checkpoints=len(marked),
        first_reward=sum(rewards[:window]) / window if rewards else None,
        last_reward=sum(rewards[-window:]) / window if rewards else None,
        evaluations=[_evaluation(d, model_id) for d in read_evaluations(store, layout)],
        adapter_uri=None if newest is None else store.uri(ours.version(newest)),
        updated_at=run.updated_at,
    )


def _evaluation(document: EvaluationDocument, model_id: str) -> dict[str, Any]:
    version, reward = document.plan.versions.get(model_id), document.reward
    return {
        "version": "base" if version is None else version,
        "reward": reward and reward.mean,
        "low": reward and reward.low,
        "high": reward and reward.high,
        "created_at": document.created_at,
    }


# ------------------------------------------------------------------ shown


def show_runs(store: Store, console: Console, *, sizes: bool, as_json: bool) -> None:
    """`repertory runs`; with `sizes`, for which every object of the runs is looked at, what they take."""
    runs = stored_runs(store)
    used = {run.run_id: _size(store, run.run_id) for run in runs} if sizes else {}
    if as_json:
        _write([asdict(run) | used.get(run.run_id, {}) for run in runs])
        return
    if not runs:
        console.print(f"no run in {store.url}", highlight=False, soft_wrap=True)
        return
    columns = ("run", "state", "epoch", "models", "created", "last sign")
    rows = [
        (r.run_id, r.state, str(r.epoch), ", ".join(r.models), _when(r.created_at), _when(r.updated_at))
        for r in runs
    ]
    if sizes:
        columns = (*columns, "in the store", "logs removed")
        rows = [(*row, *(f"{n / 1e6:.1f} MB" for n in used[row[0]].values())) for row in rows]
    _print(console, columns, rows)


def _size(store: Store, run_id: str) -> dict[str, int]:
    layout = RunLayout(run_id)
    return {
        "store_bytes": sum(usage(store, layout).values()),
        "removed_log_bytes": removed_log_bytes(store, layout),
    }


def show_history(store: Store, model_id: str, console: Console, *, run_id: str | None, as_json: bool) -> None:
    """`repertory history MODEL`."""
    runs = model_history(store, model_id, run_id=run_id)
    if as_json:
        _write([asdict(run) for run in runs])
        return
    rows = [
        (
            r.run_id,
            r.state,
            "–" if r.newest_version is None else f"v0→v{r.newest_version}",
            str(r.num_steps),
            str(r.num_checkpoints),
            "–" if r.first_reward is None else f"{r.first_reward:.2f}→{r.last_reward:.2f}",
            _newest_evaluation(r),
        )
        for r in runs
    ]
    _print(console, ("run", "state", "versions", "steps", "checkpoints", "reward", "evaluated"), rows)
    newest = runs[-1]
    if newest.adapter_uri is not None:
        console.print(f"newest adapter: {newest.adapter_uri}", highlight=False, soft_wrap=True)


def show_stored_run(store: Store, run_id: str, console: Console, *, as_json: bool, key: str | None) -> None:
    """`repertory status RUN_ID --store URL`: live where its gateway can be reached with `key`, else as it was
    left. Raises ConfigError for a run that is not there."""
    document = read_run(store, RunLayout(run_id))
    if document is None:
        raise ConfigError(f"no run {run_id!r} in {store.url}; runs there: `repertory runs --store`")
    live = asyncio.run(_live(document.gateway_url, run_id, key)) if document.gateway_url and key else None
    summary = read_summary(store, RunLayout(run_id))
    state = document.state
    if state == "running" and live is None:
        state = "running, as far as the store knows"
    if as_json:
        _write(
            {
                "run_id": run_id,
                "state": document.state,
                "live": live.model_dump(mode="json") if live else None,
                "summary": summary.model_dump(mode="json") if summary else None,
            }
        )
    elif live is not None:
        url = document.gateway_url or ""
        console.print(live_table(live, run_id=run_id, started_at=document.created_at, ui_url=url))
        removed = removed_log_bytes(store, RunLayout(run_id))
        used = disk_use(usage(store, RunLayout(run_id)), removed_log_bytes=removed)
        console.print(used, highlight=False, soft_wrap=True)
    else:
        console.print(f"{run_id}: {state}, last sign {_when(document.updated_at)}", highlight=False)
        if summary is not None:
            print_summary(console, summary)


async def _live(url: str, run_id: str, key: str) -> GatewayStatus | None:
    gateway = GatewayAdmin(url, key=key, run_id=run_id)
    try:
        return await gateway.status()
    finally:
        await gateway.close()


def _newest_evaluation(run: ModelRun) -> str:
    rated = [e for e in run.evaluations if e["reward"] is not None]
    if not rated:
        return "–"
    newest = rated[-1]
    name = newest["version"] if newest["version"] == "base" else f"v{newest['version']}"
    return f"{name}: {newest['reward']:.2f} ({newest['low']:.2f} to {newest['high']:.2f})"


def _print(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for head in heads:  # ids are copied: never cut or broken
        table.add_column(head, no_wrap=head == "run", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _write(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
