"""What does a run of many versions leave in Prefect, and are its pages still quick?

A model's flow, with all its tasks, artifacts and events, on a Prefect server of its own (SQLite). Its
runtime is played: versions, steps, syncs and checkpoints come as fast as those of a tiny model, without
servers or weights.

    python -m benchmarks.many_versions [--versions 500] [--pace-s 0.4] [--json]

Prints how much the database grows per version, in fifths of the run, the task runs and artifact rows there
are, and how long the server takes for what the run's pages ask. Fails when it grows by more than
MAX_KIB a version over the run, or a page's data takes longer than MAX_PAGE_S.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
from rich.console import Console
from rich.table import Table

from model_runtime.config import RunConfig
from model_runtime.documents import CheckpointDocument
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.processes import free_port
from model_runtime.protocol import TrainerStatus
from model_runtime.store import open_store

MAX_KIB, MAX_PAGE_S = 50.0, 3.0
NUM_PARTS = 5
CHECKPOINT_EVERY = 10
SERVER_LIMIT_S = 180.0
SETTLE_S = 5.0  # events and task runs reach the database in batches


def run_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "multi_model": {"models": [{"model_id": "tiny", "model_path": "/m"}]},
            "agent_model_mapping": {"x": "tiny"},
            "store": {"url": str(folder / "store")},
        }
    )


class PlayedRuntime:
    """A model's runtime whose versions come at a pace."""

    model_id, run_id, incarnation = "tiny", "run-1", 1
    stop_reason: str | None = None

    def __init__(self, folder: Path, *, num_versions: int, pace_s: float) -> None:
        self.published_version: int | None = None
        self.checkpoint_step: int | None = None
        self.trainer_status: TrainerStatus | None = None
        self.sizes_bytes: list[int] = []
        self._folder, self._num_versions, self._pace_s = folder, num_versions, pace_s
        self.config = run_config(folder)
        self._store = open_store(self.config.store)
        self._layout = RunLayout(self.run_id).model(self.model_id)
        self._steps, self._syncs = (
            MetricsWriter(self._store, self._layout, stream, epoch=1, incarnation=1)
            for stream in ("steps", "syncs")
        )

    async def start_rollout_servers(self) -> None:
        return None

    async def start_trainer(self) -> None:
        return None

    async def next_version(self) -> int | None:
        coming = 0 if self.published_version is None else self.published_version + 1
        if coming > self._num_versions:
            return None
        await asyncio.sleep(self._pace_s)
        await asyncio.to_thread(self._step, coming)
        return coming

    def _step(self, step: int) -> None:
        row = {"step": step, "agent/x/reward/mean": step / self._num_versions, "actor/pg_loss": 0.1}
        self._steps.append(row)
        self.trainer_status = TrainerStatus(
            pid=1, state="running", heartbeat_at=0.0, step=step, steps_left=self._num_versions - step
        )
        if step and step % CHECKPOINT_EVERY == 0:
            self._store.put(self._layout.checkpoint_marker(step), _manifest(step).to_bytes())
            self.checkpoint_step = step

    async def publish(self, version: int, **columns: object) -> None:
        row = {"version": version, "total_s": 0.1, "at": time.time(), **columns}
        await asyncio.to_thread(self._syncs.append, row)
        self.published_version = version
        if version % (self._num_versions // NUM_PARTS) == 0:
            await asyncio.sleep(SETTLE_S)
            self.sizes_bytes.append(await asyncio.to_thread(_database_bytes, self._folder))

    async def serve_until_stopped(self) -> str:
        return "the run is over"

    async def close(self) -> None:
        return None


def _manifest(step: int) -> CheckpointDocument:
    return CheckpointDocument(
        step=step,
        epoch=1,
        version=step,
        files={},
        low_water={},
        consumed=[],
        closed_groups=[],
        totals={},
        seed=0,
        created_at=time.time(),
    )


def _database_bytes(folder: Path) -> int:
    """Bytes in use; what SQLite keeps for later does not count."""
    with sqlite3.connect(f"file:{folder / 'prefect.db'}?mode=ro", uri=True, timeout=30) as database:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


def play(folder: Path, num_versions: int, pace_s: float) -> None:
    """The flow, in a process that talks to the server."""
    from prefect import flow
    from prefect.runtime import flow_run as this_run

    from flows.model_runtime import live

    runtime = PlayedRuntime(folder, num_versions=num_versions, pace_s=pace_s)
    found: dict[str, Any] = {}

    @flow(name="model-runtime", persist_result=False)
    async def played() -> None:
        found["flow_run_id"] = this_run.id
        began = time.monotonic()
        await live(cast(Any, runtime), runtime.config)
        found["seconds"] = time.monotonic() - began

    asyncio.run(cast(Any, played()))
    found["sizes_bytes"] = runtime.sizes_bytes
    (folder / "found.json").write_text(json.dumps(found))


def look(api_url: str, flow_run_id: str) -> dict[str, Any]:
    """What the run's pages ask, and how long the server takes for it."""
    mine = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    asked: dict[str, tuple[str, Mapping[str, Any]]] = {
        "task runs": ("/task_runs/filter", mine | {"limit": 200, "sort": "EXPECTED_START_TIME_DESC"}),
        "number of task runs": ("/task_runs/count", mine),
        "artifacts": ("/artifacts/filter", mine | {"limit": 200}),
        "newest artifacts": ("/artifacts/latest/filter", {"limit": 200}),
        "events": ("/events/filter", {"limit": 50}),
        "logs": ("/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200}),
    }
    seconds, answers = {}, {}
    with httpx.Client(base_url=api_url, timeout=60, trust_env=False) as http:
        for name, (path, body) in asked.items():
            began = time.monotonic()
            answers[name] = http.post(path, json=body).raise_for_status().json()
            seconds[name] = time.monotonic() - began
        began = time.monotonic()
        answers["graph"] = http.get(f"/flow_runs/{flow_run_id}/graph-v2").raise_for_status().json()
        seconds["graph"] = time.monotonic() - began
        name = http.get(f"/flow_runs/{flow_run_id}").raise_for_status().json()["name"]
    last = next(run for run in answers["task runs"] if run["name"].startswith("train"))
    return {
        "page_s": seconds,
        "run_name": name,
        "last_train": f"{last['name']}: {last['state_name']}",
        "num_task_runs": answers["number of task runs"],
        "num_artifacts": dict(Counter(artifact["key"] for artifact in answers["artifacts"])),
    }


def measure(folder: Path, *, num_versions: int, pace_s: float) -> dict[str, Any]:
    port = free_port()
    api_url = f"http://127.0.0.1:{port}/api"
    env = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(f"{api_url}/health", server)
        arguments = ["--play", str(folder), "--versions", str(num_versions), "--pace-s", str(pace_s)]
        with (folder / "flow.log").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.many_versions", *arguments]
            flow = subprocess.run(command, env=env, stdout=log, stderr=log)
        if flow.returncode:
            raise SystemExit("the flow failed:\n" + (folder / "flow.log").read_text()[-3000:])
        time.sleep(SETTLE_S)
        found = json.loads((folder / "found.json").read_text())
        return found | look(api_url, found["flow_run_id"])
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SERVER_LIMIT_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise SystemExit(f"the Prefect server did not answer at {url}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--pace-s", type=float, default=0.4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play is not None:
        play(arguments.play, arguments.versions, arguments.pace_s)
        return 0
    with tempfile.TemporaryDirectory(prefix="many-versions-") as folder:
        found = measure(Path(folder), num_versions=arguments.versions, pace_s=arguments.pace_s)
    sizes, part = found["sizes_bytes"], arguments.versions // NUM_PARTS
    found["kib_of_parts"] = [(after - before) / part / 1024 for before, after in itertools.pairwise(sizes)]
    found["kib_per_version"] = grown = statistics.fmean(found["kib_of_parts"])
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    slowest = max(found["page_s"].values())
    for problem, bad in (
        (f"{grown:.1f} KiB a version, more than {MAX_KIB:g}", grown > MAX_KIB),
        (f"a page's data took {slowest:.1f} s, more than {MAX_PAGE_S:g}", slowest > MAX_PAGE_S),
    ):
        if bad:
            print(problem, file=sys.stderr)
    return int(grown > MAX_KIB or slowest > MAX_PAGE_S)


def _show(found: Mapping[str, Any]) -> None:
    parts = ", ".join(f"{kib:.1f}" for kib in found["kib_of_parts"])
    table = Table(title=found["run_name"], title_justify="left", show_header=False)
    rows = [
        ("KiB a version", f"{found['kib_per_version']:.1f}; by part {parts}"),
        ("task runs", str(found["num_task_runs"])),
        ("the last", found["last_train"]),
        ("artifact rows", ", ".join(f"{key} {count}" for key, count in found["num_artifacts"].items())),
        *((f"{name}, s", f"{seconds:.2f}") for name, seconds in found["page_s"].items()),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
