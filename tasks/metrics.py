"""What a model's run page shows: progress, the last steps, the last syncs, and a learning curve.

Written beside the training, never in its way: reading and drawing happen in a thread, every call to Prefect
has a limit, and a failed one is tried again with the next round.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

from prefect.artifacts import (
    acreate_image_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.runtime import flow_run as this_run

from model_runtime.config import ModelConfig, artifact_slug
from model_runtime.errors import RepertoryError
from model_runtime.evaluation import EvaluationDocument
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.protocol import TrainerStatus
from model_runtime.store import Store
from model_runtime.summary import mean_reward
from tasks.alerts import TrainingWatch
from tasks.reporting import tell
from tasks.story import evaluation_title, note_evaluation, rename_run, run_title

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0
TABLES_EVERY_S = 30.0
CURVE_EVERY_S = 60.0
NUM_TABLE_ROWS = 30
NUM_CURVE_POINTS = 500

REWARD = "mean reward"
STEP_COLUMNS = {
    "step": "step",
    "reward": REWARD,
    "groups": "batch/num_groups",
    "tokens": "batch/num_trained_tokens",
    "loss": "actor/pg_loss",
    "grad norm": "actor/grad_norm",
    "learning rate": "actor/lr",
    "clipped": "actor/pg_clipfrac",
    "lag": "training/off_policy/trajectory_staleness_worst/mean",
    "seconds": "timing_s/step",
}
"""Heading → name in the metrics rows."""

Row = Mapping[str, Any]


class Reported(Protocol):
    """What the reporter looks at in a model runtime."""

    @property
    def trainer_status(self) -> TrainerStatus | None: ...
    @property
    def published_version(self) -> int | None: ...
    @property
    def incarnation(self) -> int: ...


class ModelReporter:
    """Keeps one model's artifacts fresh, under keys that stay the same from run to run."""

    def __init__(
        self, runtime: Reported, store: Store, layout: RunLayout, model: ModelConfig, watch: TrainingWatch
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._layout = layout.model(model.model_id)
        self._model = model
        self._watch = watch
        self._slug = artifact_slug(model.model_id)
        self._progress_id: UUID | None = None
        self._run = layout
        self._incarnation = runtime.incarnation
        self._title = ""
        self._began_at = time.time()
        self._evaluations: set[str] | None = None

    async def run(self) -> None:
        """Report until cancelled."""
        tables_at = curve_at = time.monotonic()
        while True:
            await self.progress()
            now = time.monotonic()
            if now >= tables_at:
                tables_at = now + TABLES_EVERY_S
                await self.tables()
                await self.evaluations()
            if now >= curve_at:
                curve_at = now + CURVE_EVERY_S
                await self.curve()
                await self.name()
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def finish(self) -> None:
        """The last word of a model that ended as it should: everything once more, and full progress."""
        await self.progress(done=True)
        await self.tables()
        await self.evaluations()
        await self.curve()
        await self.name()

    async def progress(self, *, done: bool = False) -> None:
        status, version = self._runtime.trainer_status, self._runtime.published_version
        self._watch.see(status)
        percent = 100.0 if done else progress_percent(status)
        text = describe_progress(self._model.model_id, status, version)
        if self._progress_id is None:
            create = acreate_progress_artifact(percent, key=f"{self._slug}-progress", description=text)
            self._progress_id = await tell("the progress artifact", create)
        else:
            await tell(
                "the progress", aupdate_progress_artifact(self._progress_id, percent, description=text)
            )

    async def tables(self) -> None:
        for stream, key, pick in (("steps", "metrics", step_table), ("syncs", "syncs", sync_table)):
            rows = await self._rows(stream)
            if stream == "steps":
                self._watch.see_steps(rows)
            if rows:
                table = acreate_table_artifact(
                    pick(rows[-NUM_TABLE_ROWS:]),
                    key=f"{self._slug}-{key}",
                    description=f"The last {stream} of {self._model.model_id}, newest first",
                )
                await tell(f"the table of {stream}", table)

    async def curve(self) -> None:
        rows = await self._rows("steps")
        if len(rows) < 2:
            return
        picture = await asyncio.to_thread(learning_curve, rows, title=self._model.model_id)
        image = acreate_image_artifact(
            "data:image/png;base64," + base64.b64encode(picture).decode(),
            key=f"{self._slug}-curve",
            description=f"Mean reward per training step of {self._model.model_id}",
        )
        await tell("the learning curve", image)

    async def name(self) -> None:
        """Call the flow run by what is known of it by now."""
        flow_run_id = this_run.id
        if flow_run_id is None:
            return
        of_this_life = [row for row in await self._rows("syncs") if row.get("at", 0.0) >= self._began_at]
        synced = [row["version"] for row in of_this_life if "error" not in row]
        title = run_title(
            run_id=self._run.run_id,
            model_id=self._model.model_id,
            versions=(min(synced), max(synced)) if synced else None,
            rows=await self._rows("steps") if self._model.kind == "trainable" else [],
            incarnation=self._incarnation,
        )
        if title != self._title:
            self._title = title
            await rename_run(UUID(str(flow_run_id)), title)

    async def evaluations(self) -> None:
        """Each evaluation of this model that has come since the last look becomes a task of its story."""
        try:
            found = await asyncio.to_thread(self._new_evaluations)
        except RepertoryError as error:  # reading again comes with the next round
            log.warning("evaluations of %s could not be read: %s", self._model.model_id, error)
            return
        for document in found:
            title = evaluation_title(document, self._model.model_id)
            await tell("an evaluation", note_evaluation(title, document.plan.evaluation_id))

    def _new_evaluations(self) -> list[EvaluationDocument]:
        keys = {k for k in self._store.list(self._run.evaluations()) if self._run.is_evaluation_of_plan(k)}
        if self._evaluations is None:  # those of an earlier life are in its story
            self._evaluations = keys
            return []
        new, self._evaluations = keys - self._evaluations, keys
        documents = [EvaluationDocument.parse(self._store.get(k), source=self._store.uri(k)) for k in new]
        ours = [d for d in documents if self._model.model_id in d.plan.versions]
        return sorted(ours, key=lambda document: document.created_at)

    async def _rows(self, stream: str) -> list[dict[str, Any]]:
        try:
            return await asyncio.to_thread(read_metrics, self._store, self._layout, stream)
        except RepertoryError as error:  # the trainer writes them; reading again comes with the next round
            log.warning("metrics of %s could not be read: %s", self._model.model_id, error)
            return []


def progress_percent(status: TrainerStatus | None) -> float:
    """Share of the steps done, when there is a bound on them; 0 when there is none or nothing began."""
    if status is None or status.steps_left is None or status.step + status.steps_left == 0:
        return 0.0
    return round(100.0 * status.step / (status.step + status.steps_left), 1)


def describe_progress(model_id: str, status: TrainerStatus | None, version: int | None) -> str:
    """One line: `planner_model: step 12, serving v11, running; 5 groups wait`."""
    serving = "serving nothing yet" if version is None else f"serving v{version}"
    if status is None:
        return f"{model_id}: {serving}"
    reason = f" ({status.reason})" if status.reason else ""
    return (
        f"{model_id}: step {status.step}, {serving}, trainer {status.state}{reason}; "
        f"{status.queue.untrained_groups} groups wait"
    )


def step_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Newest first, the columns of STEP_COLUMNS that any row has."""
    full = [{**row, REWARD: mean_reward(row)} for row in rows]
    present = {
        head: name for head, name in STEP_COLUMNS.items() if any(row.get(name) is not None for row in full)
    }
    return [{head: _shown(row.get(name)) for head, name in present.items()} for row in reversed(full)]


def sync_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Newest first, every column as it was written, but nested values."""
    return [
        {k: _shown(v) for k, v in row.items() if not isinstance(v, dict | list)} for row in reversed(rows)
    ]


def _shown(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def learning_curve(rows: Sequence[Row], *, title: str) -> bytes:
    """PNG of each agent's mean reward over the steps, as measured and smoothed over a tenth of the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to import; drawn once a minute
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (agent_id, points) in enumerate(sorted(reward_series(rows).items())):
        steps, rewards = zip(*points, strict=True)
        stride = max(1, len(steps) // NUM_CURVE_POINTS)
        smooth = _moving_mean(rewards, window=max(1, len(rewards) // 10))
        axes.plot(steps[::stride], rewards[::stride], color=f"C{i}", linewidth=1, alpha=0.35)
        axes.plot(steps[::stride], smooth[::stride], color=f"C{i}", linewidth=2, label=agent_id)
    axes.set(title=title, xlabel="training step", ylabel="mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="lower right", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def reward_series(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Agent → (step, mean reward) wherever a row has one."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            agent_id = name.removeprefix("agent/").removesuffix("/reward/mean")
            if name == f"agent/{agent_id}/reward/mean" and isinstance(value, int | float):
                series.setdefault(agent_id, []).append((int(row["step"]), float(value)))
    return series


def _moving_mean(values: Sequence[float], *, window: int) -> list[float]:
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means
