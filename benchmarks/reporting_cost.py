"""What does a trainer lose to reporting its versions to Prefect?

A real trainer process on a log that is already there, a version after every step, faster than any model that
is of use. Its versions are published by a wait of PUBLISH_S in place of rollout servers. In every second
window that is done by the model's flow, with all its tasks, artifacts and events, on a Prefect server of its
own; in the others by a bare loop. Windows alternate within one life of the trainer: each with reporting has
one without before and after it.

    python -m benchmarks.reporting_cost [--pairs 3] [--window-s 30] [--json]

The trainer has a core to itself; the flow's process and the server have the other. Prints of each window the
trainer's steps a second, its CPU time a step, how long it stood between steps, and the CPU time that flow and
server took a version. What a step takes of its own is the CPU time and the standing: that, and not the clock,
is compared, since others on the machine slow the clock. Fails when it grows by more than MAX_LOSS in the
median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.rig.prefect_server import prefect_server
from benchmarks.rig.processes import MEASURED_CORE, Measured, use_load_core
from model_runtime.metrics import MetricsWriter, read_metrics
from model_runtime.protocol import TrainerControl, TrainerStatus
from model_runtime.runtime import trainer_environment
from model_runtime.trainer_process import TrainerProcess
from model_runtime.versions import Changed
from tests.tiny_models import make_model
from tests.training_log import MODEL_ID, TrainingFolder, make_groups

MAX_LOSS = 0.02
PUBLISH_S = 0.05
WARM_S = 6.0
BATCH_GROUPS = 16
MOST_STEPS_A_SECOND = 6.0  # of which the log has groups
GROUPS_A_SHARD = 400
MODEL = {
    "batch_size": BATCH_GROUPS,
    "save_every": 10,
    "trainer": {"micro_batch_tokens": 1024},
    "async_training": {"trigger_parameter_sync_step": 1, "max_staleness": 1_000_000},
}
BESIDE_UPDATES = ("timing_s/step", "timing_s/commit_version", "timing_s/save_checkpoint")


@dataclass(frozen=True, slots=True)
class Mark:
    """How far everybody was when a version was published."""

    version: int
    at: float
    trainer_cpu_s: float
    flow_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Window:
    reported: bool
    num_versions: int
    steps_per_s: float
    trainer_cpu_ms: float  # a step
    stood_ms: float  # of a step: neither waiting for data nor at work, so waiting for the publish, mostly
    flow_cpu_ms: float  # a version, as the next
    server_cpu_ms: float

    @property
    def own_ms(self) -> float:
        """Of a step: what whoever else keeps the machine busy does not lengthen."""
        return self.trainer_cpu_ms + self.stood_ms


class TrainedRuntime:
    """A model's runtime with a trainer process and nobody to serve. A window's end is the end for the flow,
    not for the trainer."""

    model_id, run_id, incarnation = MODEL_ID, "run", 1
    stop_reason: str | None = None

    def __init__(self, folder: TrainingFolder, server_pid: int) -> None:
        self.config = folder.config
        self.published_version: int | None = None
        self.marks: list[Mark] = []
        self._until = float("inf")
        self._changed = Changed()
        self._trainer = TrainerProcess(
            folder.spec,
            logs=folder.root,
            env=trainer_environment(os.environ, self.config.model(MODEL_ID), []),
            on_status=lambda _: self._changed.notify(),
        )
        self._syncs = MetricsWriter(folder.store, folder.layout, "syncs", epoch=1, incarnation=1)
        self._server = Measured(server_pid)

    # ------------------------------------------------------------------ what the flow asks

    @property
    def trainer_status(self) -> TrainerStatus | None:
        return self._trainer.status

    @property
    def checkpoint_step(self) -> int | None:
        return self.trainer_status.checkpoint_step if self.trainer_status is not None else None

    async def start_rollout_servers(self) -> None:
        return None

    async def start_trainer(self) -> None:
        return None

    async def next_version(self) -> int | None:
        while time.monotonic() < self._until:
            if self._supervision.done():
                raise RuntimeError(f"the trainer ended: {self.trainer_status or self._supervision}")
            committed = self.trainer_status.committed_version if self.trainer_status is not None else None
            published = -1 if self.published_version is None else self.published_version
            if committed is not None and committed > published:
                return committed
            await self._changed.wait()
        return None

    async def until_servable(self) -> None:
        """Its servers are always there."""

    async def publish(self, version: int, **columns: object) -> None:
        await asyncio.sleep(PUBLISH_S)
        row = {"version": version, "total_s": PUBLISH_S, "at": time.time(), **columns}
        await asyncio.to_thread(self._syncs.append, row)
        self.published_version = version
        self._trainer.tell(TrainerControl(published_version=version))
        self.marks.append(self._mark(version))

    async def serve_until_stopped(self) -> str:
        return "the window is over"

    async def close(self) -> None:
        return None

    # ------------------------------------------------------------------ what the benchmark asks

    async def start(self) -> None:
        self._supervision = asyncio.create_task(self._trainer.run())
        self._supervision.add_done_callback(lambda _: self._changed.notify())
        await self._trainer.wait_loaded()
        assert self._trainer.pid is not None
        self._measured = Measured(self._trainer.pid)
        for thread in psutil.Process(self._trainer.pid).threads():
            os.sched_setaffinity(thread.id, {MEASURED_CORE})

    async def stop(self) -> None:
        self._trainer.tell(TrainerControl(desired="stop", published_version=self.published_version))
        await self._supervision

    def begin_window(self, seconds: float) -> None:
        self.marks = []
        self._until = time.monotonic() + seconds

    def _mark(self, version: int) -> Mark:
        return Mark(
            version=version,
            at=time.time(),
            trainer_cpu_s=self._measured.cpu_seconds(),
            flow_cpu_s=time.process_time(),
            server_cpu_s=self._server.cpu_seconds(),
        )


# ---------------------------------------------------------------- the run


def play(root: Path, *, pairs: int, window_s: float, server_pid: int) -> list[Window]:
    """In a process that talks to the server."""
    folder = TrainingFolder(root, make_model(root / "model", hidden_size=128), model=MODEL)
    count = int(BATCH_GROUPS * MOST_STEPS_A_SECOND * (2 * WARM_S + (2 * pairs + 1) * window_s))
    for seq, first in enumerate(range(0, count, GROUPS_A_SHARD)):
        folder.write_groups(make_groups(GROUPS_A_SHARD, first=first), seq=seq)
    return asyncio.run(_play(folder, pairs=pairs, window_s=window_s, server_pid=server_pid))


async def _play(folder: TrainingFolder, *, pairs: int, window_s: float, server_pid: int) -> list[Window]:
    from prefect import flow

    from flows.model_runtime import live

    runtime = TrainedRuntime(folder, server_pid)

    @flow(name="model-runtime", persist_result=False)
    async def reported() -> None:
        await live(cast(Any, runtime), runtime.config)

    async def window(seconds: float, *, is_reported: bool) -> tuple[bool, list[Mark]]:
        runtime.begin_window(seconds)
        await (cast(Any, reported()) if is_reported else _unreported(runtime))
        return is_reported, runtime.marks

    await runtime.start()
    try:
        for is_reported in (False, True):  # imports, pictures, tables: once
            await window(WARM_S, is_reported=is_reported)
        order = [False, *[True, False] * pairs]
        seen = [await window(window_s, is_reported=is_reported) for is_reported in order]
    finally:
        await runtime.stop()
    rows = read_metrics(folder.store, folder.layout, "steps")
    return [summarized(is_reported, marks, rows) for is_reported, marks in seen]


async def _unreported(runtime: TrainedRuntime) -> None:
    while (version := await runtime.next_version()) is not None:
        await runtime.publish(version)


def summarized(reported: bool, marks: Sequence[Mark], rows: Sequence[Mapping[str, Any]]) -> Window:
    """From the first publish to the last: what a window begins and ends with is not among it."""
    first, last = marks[0], marks[-1]
    num_versions, seconds = last.version - first.version, last.at - first.at
    by_step = {row["step"]: row for row in rows}
    pairs = [(by_step[step - 1], by_step[step]) for step in range(first.version + 2, last.version + 1)]
    stood = [b["time"] - a["time"] - sum(b.get(name) or 0.0 for name in BESIDE_UPDATES) for a, b in pairs]

    def each_ms(total_s: float) -> float:
        return 1e3 * total_s / num_versions

    return Window(
        reported=reported,
        num_versions=num_versions,
        steps_per_s=num_versions / seconds,
        trainer_cpu_ms=each_ms(last.trainer_cpu_s - first.trainer_cpu_s),
        stood_ms=1e3 * statistics.fmean(stood),
        flow_cpu_ms=each_ms(last.flow_cpu_s - first.flow_cpu_s),
        server_cpu_ms=each_ms(last.server_cpu_s - first.server_cpu_s),
    )


def measure(folder: Path, *, pairs: int, window_s: float) -> dict[str, Any]:
    use_load_core()
    with prefect_server(folder) as server, (folder / "flow.log").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.reporting_cost", "--play", str(folder)]
        command += ["--pairs", str(pairs), "--window-s", str(window_s), "--server-pid", str(server.pid)]
        ended = subprocess.run(command, env=server.env, stdout=log, stderr=log)
    if ended.returncode:
        raise SystemExit("the flow failed:\n" + (folder / "flow.log").read_text()[-3000:])
    return json.loads((folder / "result.json").read_text())


# ---------------------------------------------------------------- what it comes to


def losses(windows: Sequence[Window]) -> list[float]:
    """Of each window with reporting: how much more of its own time a step takes than in those around it."""
    found = []
    for before, reported, after in zip(windows[::2], windows[1::2], windows[2::2], strict=False):
        found.append(2 * reported.own_ms / (before.own_ms + after.own_ms) - 1)
    return found


def result_of(windows: Sequence[Window]) -> dict[str, Any]:
    lost = losses(windows)
    return {
        "benchmark": "reporting_cost",
        "windows": [asdict(window) for window in windows],
        "losses": lost,
        "median_loss": statistics.median(lost),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="A trainer with and without reporting; in ms")
    heads = ("window", "versions", "steps/s", "CPU a step", "stood")
    for head in (*heads, "flow CPU a version", "server's", "loss"):
        table.add_column(head, justify="right")
    for i, window in enumerate(result["windows"]):
        table.add_row(
            "reported" if window["reported"] else "bare",
            str(window["num_versions"]),
            f"{window['steps_per_s']:.3f}",
            *(f"{window[name]:.1f}" for name in ("trainer_cpu_ms", "stood_ms", "flow_cpu_ms")),
            f"{window['server_cpu_ms']:.1f}",
            f"{100 * result['losses'][i // 2]:+.2f} %" if window["reported"] else "",
        )
    console.print(table)
    low, high = min(result["losses"]), max(result["losses"])
    console.print(
        f"a step's own time grows by: median {100 * result['median_loss']:+.2f} %, "
        f"range {100 * low:+.2f} to {100 * high:+.2f} %; at most {100 * MAX_LOSS:g} %"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=30.0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server-pid", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play is not None:
        windows = play(args.play, pairs=args.pairs, window_s=args.window_s, server_pid=args.server_pid)
        (args.play / "result.json").write_text(json.dumps(result_of(windows)))
        return 0
    use_load_core()
    with (
        tempfile.TemporaryDirectory(prefix="reporting-cost-") as folder,
        prefect_server(Path(folder)) as server,
    ):
        command = [sys.executable, "-m", "benchmarks.reporting_cost", "--play", folder]
        command += ["--pairs", str(args.pairs), "--window-s", str(args.window_s)]
        with (Path(folder) / "flow.log").open("wb") as log:
            command += ["--server-pid", str(server.pid)]
            ended = subprocess.run(command, env=server.env, stdout=log, stderr=log)
        if ended.returncode:
            raise SystemExit("the flow failed:\n" + (Path(folder) / "flow.log").read_text()[-3000:])
        result = json.loads((Path(folder) / "result.json").read_text())
    print(json.dumps(result, indent=1)) if args.json else show(result, Console())
    return int(result["median_loss"] > MAX_LOSS)


if __name__ == "__main__":
    sys.exit(main())
