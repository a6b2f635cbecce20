"""What a run came to: rewards at its start and end, versions, books, and where the adapters lie.

Everything is read from the store, so a summary can be made of any run at any time, by anybody.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from model_runtime.books import ModelBooks, read_books
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.coordinator import read_run
from model_runtime.errors import ObjectNotFoundError, ProcessError
from model_runtime.layout import ModelLayout, RunLayout, number_in
from model_runtime.metrics import read_metrics
from model_runtime.protocol import TrainerState
from model_runtime.removed_log import RemovedShard, RemovedTrajectory, last_removal
from model_runtime.store import Store
from model_runtime.types import DEFAULT_COMPONENT, FINAL_STATUSES, Shard, Trajectory
from model_runtime.vllm_environment import find_vllm

SUCCESS_COMPONENT = "success"
START_SHARE = 0.1
"""The start of a run: its first tenth of executions."""
END_SHARE = 0.25
"""The end of a run: its last quarter of executions."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Reward(_Part):
    """Mean reward at the start and at the end. None: nobody gave one."""

    start: float | None
    end: float | None
    num_values: int


class AgentSummary(_Part):
    """`reward` is the agent's own where it was given one, else the workflow's; `success` is its reward
    component of that name, by which a workflow tells an agent's own part from the others'."""

    agent_id: str
    model_id: str
    reward: Reward
    success: Reward


class ModelSummary(_Part):
    model_id: str
    kind: str
    reward: Reward
    success: Reward
    steps: int
    versions_published: int
    latest_version: int | None
    finalized: int
    trained: int
    dropped: dict[str, int]
    in_log: int
    balanced: bool
    adapter_uri: str | None
    serve_command: str
    ended: TrainerState | None = None
    """Why training ended: `finished` took every step, `drained` had no more data, `no_signal` saw too many
    groups in a row that teach nothing. None: it did not say."""
    failure: str | None = None


class HeldOut(_Part):
    """Executions of tasks never trained on, with the last versions."""

    temperature: float = 0.0
    num_executions: int
    reward: float | None
    agent_success: dict[str, float] = Field(default_factory=dict)

    @property
    def sampled(self) -> str:
        return f"at temperature {self.temperature:g}" if self.temperature else "greedy"


class RunSummary(_Part):
    """`summary.json`."""

    run_id: str
    state: str
    failures: dict[str, str] = Field(default_factory=dict)
    epoch: int
    duration_s: float
    workflow_reward: Reward
    num_executions: int
    agents: list[AgentSummary]
    models: list[ModelSummary]
    held_out: HeldOut | None
    store_bytes: dict[str, int] = Field(default_factory=dict)  # part of the run → bytes in the store
    removed_log_bytes: int = 0  # by retention, in all lives of the run
    run_uri: str
    summary_uri: str
    created_at: float

    @property
    def headline(self) -> str:
        """One line for a list of runs."""
        reward = f"workflow reward {_shown(self.workflow_reward.start)} → {_shown(self.workflow_reward.end)}"
        versions = ", ".join(f"{m.model_id} v{m.latest_version}" for m in self.models)
        return f"{self.run_id} {self.state}: {reward}; {versions}"


def mean_reward(metrics: Mapping[str, Any]) -> float | None:
    """A model's mean reward in one step's metrics: the mean over its agents, every settled group counted."""
    of_agents = [
        value
        for name, value in metrics.items()
        if name.startswith("agent/") and name.endswith("/reward/mean") and isinstance(value, int | float)
    ]
    if of_agents:
        return statistics.fmean(of_agents)
    value = metrics.get("critic/score/mean")
    return float(value) if isinstance(value, int | float) else None


def summarize(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    *,
    started_at: float,
    failures: Mapping[str, str],
    endings: Mapping[str, TrainerState] | None = None,
) -> RunSummary:
    """Read the whole run. The duration is that of this life of the parent. `endings` says of each trained
    model how its training ended."""
    logs = {m.model_id: _read_log(store, layout.model(m.model_id), m) for m in config.models}
    everything = [row for rows, _ in logs.values() for row in rows]
    executions = _executions(everything)
    run = read_run(store, layout)
    epoch = run.epoch if run else 0
    return RunSummary(
        run_id=layout.run_id,
        state="failed" if failures else "completed",
        failures=dict(failures),
        epoch=epoch,
        duration_s=round(time.time() - started_at, 1),
        workflow_reward=_reward([row.workflow_reward for row in executions]),
        num_executions=len(executions),
        agents=[
            AgentSummary(
                agent_id=agent_id,
                model_id=model_id,
                reward=_by_execution([row for row in everything if row.agent_id == agent_id], "reward"),
                success=_by_execution([row for row in everything if row.agent_id == agent_id], "success"),
            )
            for agent_id, model_id in config.agent_to_model.items()
        ],
        models=[
            _model(
                store,
                layout,
                model,
                *logs[model.model_id],
                failure=failures.get(model.model_id),
                ended=(endings or {}).get(model.model_id),
            )
            for model in config.models
        ],
        held_out=read_held_out(store, layout, epoch),
        store_bytes=usage(store, layout),
        removed_log_bytes=removed_log_bytes(store, layout),
        run_uri=store.uri(layout.run_id),
        summary_uri=store.uri(layout.summary()),
        created_at=time.time(),
    )


def usage(store: Store, layout: RunLayout) -> dict[str, int]:
    """Bytes in the store by part of the run: `checkpoints`, `versions`, `log` …, and `other`."""
    total: dict[str, int] = defaultdict(int)
    models = f"{layout.models()}/"
    for key, num_bytes in store.sizes(layout.run_id).items():
        part = key.removeprefix(models).split("/")[1] if key.startswith(models) else "other"
        total[part] += num_bytes
    return dict(total)


def removed_log_bytes(store: Store, layout: RunLayout) -> int:
    """Bytes of the models' logs that retention has removed."""
    models = store.children(layout.models())
    return sum(last_removal(store, layout.model(model_id)).num_bytes for model_id in models)


def write_held_out(store: Store, layout: RunLayout, epoch: int, held_out: HeldOut) -> None:
    """Keep what the held-out tasks came to in this epoch."""
    store.put(layout.evaluation(epoch), held_out.model_dump_json(indent=1).encode())


def read_held_out(store: Store, layout: RunLayout, epoch: int) -> HeldOut | None:
    """None when they were not run in this epoch."""
    try:
        return HeldOut.model_validate_json(store.get(layout.evaluation(epoch)))
    except ObjectNotFoundError:
        return None


def write_summary(store: Store, layout: RunLayout, summary: RunSummary) -> None:
    store.put(layout.summary(), summary.model_dump_json(indent=1).encode())


def read_summary(store: Store, layout: RunLayout) -> RunSummary | None:
    """The run's summary; None when it has not ended yet."""
    try:
        return RunSummary.model_validate_json(store.get(layout.summary()))
    except ObjectNotFoundError:
        return None


# --------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True, slots=True)
class _Row:
    """What a summary needs of one trajectory."""

    agent_id: str
    execution: tuple[str, int]  # group, member
    created_at: float
    workflow_reward: float | None
    reward: float | None
    success: float | None

    @classmethod
    def of(cls, t: Trajectory | RemovedTrajectory) -> _Row:
        workflow = t.workflow_rewards.get(DEFAULT_COMPONENT)
        own = t.agent_rewards.get(DEFAULT_COMPONENT)
        return cls(
            agent_id=t.agent_id,
            execution=(t.member.group_id, t.member.member_index),
            created_at=t.created_at,
            workflow_reward=workflow,
            reward=workflow if own is None else own,
            success=t.agent_rewards.get(SUCCESS_COMPONENT),
        )


class _Rows:
    """Collects the rows of executions that count: of each member the first attempt that settled for good."""

    def __init__(self) -> None:
        self._winners: dict[tuple[str, int], int] = {}
        self._found: dict[str, tuple[int, _Row]] = {}

    def visit(self, shard: Shard | RemovedShard) -> None:
        """One shard; they come in log order."""
        for settlement in shard.settlements:
            if settlement.status in FINAL_STATUSES:
                member = settlement.member
                self._winners.setdefault((member.group_id, member.member_index), member.attempt)
        for t in shard.trajectories:
            self._found.setdefault(t.trajectory_id, (t.member.attempt, _Row.of(t)))

    def counted(self) -> list[_Row]:
        return [row for attempt, row in self._found.values() if self._winners.get(row.execution) == attempt]


def _read_log(store: Store, layout: ModelLayout, model: ModelConfig) -> tuple[list[_Row], ModelBooks]:
    """Rows and books in one pass; nothing for a frozen model, which has no log."""
    if model.kind == "frozen":
        return [], ModelBooks()
    rows = _Rows()
    books = read_books(store, layout, objective=model.objective, visit=rows.visit)
    return rows.counted(), books


def _executions(rows: Iterable[_Row]) -> list[_Row]:
    """One row per execution, in the order they ended."""
    first: dict[tuple[str, int], _Row] = {}
    for row in rows:
        first.setdefault(row.execution, row)
    return sorted(first.values(), key=lambda row: row.created_at)


def _by_execution(rows: Iterable[_Row], name: Literal["reward", "success"]) -> Reward:
    """Per agent and execution one value: an agent that was called several times counts once."""
    values: dict[tuple[str, tuple[str, int]], list[_Row]] = defaultdict(list)
    for row in rows:
        values[row.agent_id, row.execution].append(row)
    in_order = sorted(values.values(), key=lambda group: group[0].created_at)
    return _reward([_mean(getattr(row, name) for row in group) for group in in_order])


def _reward(values: Sequence[float | None]) -> Reward:
    given = [value for value in values if value is not None]
    head, tail = max(1, round(len(given) * START_SHARE)), max(1, round(len(given) * END_SHARE))
    return Reward(start=_mean(given[:head]), end=_mean(given[-tail:]), num_values=len(given))


def _mean(values: Iterable[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return statistics.fmean(given) if given else None


# ---------------------------------------------------------------------------------------------- models


def _model(
    store: Store,
    layout: RunLayout,
    model: ModelConfig,
    rows: Sequence[_Row],
    books: ModelBooks,
    *,
    failure: str | None,
    ended: TrainerState | None,
) -> ModelSummary:
    own = layout.model(model.model_id)
    versions = [
        number_in(name)
        for name in store.children(own.versions())
        if store.exists(own.version_marker(number_in(name)))
    ]
    latest = max(versions, default=None)
    published = {row["version"] for row in read_metrics(store, own, "syncs") if _succeeded(row)}
    steps = read_metrics(store, own, "steps")
    adapter_uri = None if latest is None else store.uri(own.version(latest))
    return ModelSummary(
        model_id=model.model_id,
        kind=model.kind,
        reward=_by_execution(rows, "reward"),
        success=_by_execution(rows, "success"),
        steps=int(steps[-1]["step"]) if steps else 0,
        versions_published=len(published),
        latest_version=latest,
        finalized=books.finalized,
        trained=books.trained,
        dropped=books.dropped,
        in_log=books.in_log,
        balanced=books.balanced,
        adapter_uri=adapter_uri,
        serve_command=serve_command(model, layout.run_id, adapter_uri, serve=vllm_serve(model)),
        ended=ended,
        failure=failure,
    )


def _succeeded(row: Mapping[str, Any]) -> bool:
    return "version" in row and not row.get("error")


def vllm_serve(model: ModelConfig) -> str:
    """What `vllm serve` is called on this machine; its plain name where vLLM is not installed."""
    try:
        vllm = find_vllm()
    except ProcessError:
        return "vllm serve"
    if vllm.build == "cpu":  # no `vllm` command, no compiler needed, and not nine tenths of the memory
        return (
            f"TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1 {shlex.quote(str(vllm.python))} "
            "-m vllm.entrypoints.launchers.api_server.entry --enforce-eager "
            f"--kv-cache-memory-bytes {model.rollout.kv_cache_bytes} --model"
        )
    return f"{shlex.quote(str(vllm.python.parent / 'vllm'))} serve"


def serve_command(model: ModelConfig, run_id: str, adapter_uri: str | None, *, serve: str) -> str:
    """One command that serves this model's last adapter with vLLM, under the model's id. `serve` is what
    the model's path follows (`vllm_serve`)."""
    base = f"{serve} {shlex.quote(model.model_path)}"
    if adapter_uri is None:
        return f"{base} --served-model-name {model.model_id}"
    folder, fetch = adapter_uri.removeprefix("file://"), ""
    if "://" in folder:
        folder = f"./{model.model_id}-adapter"
        fetch = f"repertory export {run_id} {model.model_id} --to {folder} && "
    return (
        f"{fetch}{base} --enable-lora --max-lora-rank {max(8, model.lora.rank)} "
        f"--lora-modules {model.model_id}={shlex.quote(folder)}"
    )


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
