"""What does a run of many versions leave in Prefect, and are its pages still quick?

A model's flow, with all its tasks, artifacts and events, on a Prefect server of its own (SQLite). Its
runtime is played: versions, steps, syncs and checkpoints come as fast as those of a tiny model, without
servers or weights.

    python -m benchmarks.many_versions [--versions 500] [--pace-s 0.4] [--folder FOLDER] [--json]

Prints how much the database grows per version, in fifths of the run, the task runs and artifact rows there
are, how long the server takes for what the run's pages ask, and how long the pages themselves take in
headless Chromium until what they are opened for is visible (where Chromium and playwright are installed).
Fails when the database grows by more than MAX_KIB a version over the run, or a page (in the median of its
openings) or its data takes longer than MAX_PAGE_S.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.rig.pages import Page, missing, time_pages
from benchmarks.rig.prefect_server import PrefectServer, prefect_server
from model_runtime.config import RunConfig
from model_runtime.documents import CheckpointDocument
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.protocol import TrainerStatus
from model_runtime.store import open_store

MAX_KIB, MAX_PAGE_S = 50.0, 3.0
NUM_PARTS = 5
CHECKPOINT_EVERY = 10
SETTLE_S = 5.0  # events and task runs reach the database in batches
NUM_OPENINGS = 5  # of each page
POOL = "machines"


def run_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "many",
            "multi_model": {"models": [{"model_id": "tiny", "model_path": "/m"}]},
            "agent_model_mapping": {"x": "tiny"},
            "store": {"url": str(folder / "store")},
        }
    )


class PlayedRuntime:
    """A model's runtime whose versions come at a pace."""

    model_id, run_id, incarnation = "tiny", "run-1", 1
    stop_reason: str | None = None

    def __init__(self, folder: Path, *, num_versions: int, pace_s: float, settle_s: float = SETTLE_S) -> None:
        self.published_version: int | None = None
        self.checkpoint_step: int | None = None
        self.trainer_status: TrainerStatus | None = None
        self.sizes_bytes: list[int] = []
        self._folder, self._num_versions = folder, num_versions
        self._pace_s, self._settle_s = pace_s, settle_s
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

    async def until_servable(self) -> None:
        """Its servers are always there."""

    async def publish(self, version: int, **columns: object) -> None:
        row = {"version": version, "total_s": 0.1, "at": time.time(), **columns}
        await asyncio.to_thread(self._syncs.append, row)
        self.published_version = version
        if version % (self._num_versions // NUM_PARTS) == 0:
            await asyncio.sleep(self._settle_s)
            self.sizes_bytes.append(await asyncio.to_thread(database_bytes, self._folder))

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


def database_bytes(folder: Path) -> int:
    """Bytes in use; what SQLite keeps for later does not count."""
    with sqlite3.connect(f"file:{folder / 'prefect.db'}?mode=ro", uri=True, timeout=30) as database:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


def play(folder: Path, num_versions: int, pace_s: float, settle_s: float) -> None:
    """A run of the model's deployment, in a process that talks to the server as a worker's would."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow_async

    from flows.model_runtime import live

    runtime = PlayedRuntime(folder, num_versions=num_versions, pace_s=pace_s, settle_s=settle_s)
    found: dict[str, Any] = {}

    @flow(name="model-runtime", persist_result=False)
    async def played() -> None:
        began = time.monotonic()
        await live(cast(Any, runtime), runtime.config)
        found["seconds"] = time.monotonic() - began

    async def run() -> None:
        config = runtime.config.model_dump(mode="json", exclude_defaults=True)
        given = {
            "run_id": runtime.run_id,
            "model_id": "tiny",
            "epoch": 1,
            "gateway_url": "",
            "config": config,
        }
        async with get_client() as client:
            deployment = await client.read_deployment_by_name("model-runtime/tiny")
            flow_run = await client.create_flow_run_from_deployment(deployment.id, parameters=given)
        found.update(deployment_id=str(deployment.id), flow_run_id=str(flow_run.id))
        await run_flow_async(cast(Any, played), flow_run=flow_run, parameters={})

    asyncio.run(run())
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
        graph = http.get(f"/flow_runs/{flow_run_id}/graph-v2")
        if graph.status_code != httpx.codes.BAD_REQUEST:  # it has more nodes than the server hands out
            graph.raise_for_status()
        seconds["graph"] = time.monotonic() - began
        name = http.get(f"/flow_runs/{flow_run_id}").raise_for_status().json()["name"]
    last = next(run for run in answers["task runs"] if run["name"].startswith("train"))
    return {
        "page_s": seconds,
        "run_name": name,
        "last_train": f"{last['name']}: {last['state_name']}",
        "num_task_runs": answers["number of task runs"],
        "num_artifacts": dict(Counter(artifact["key"] for artifact in answers["artifacts"])),
        "newest_artifacts": {found["key"]: found["latest_id"] for found in answers["newest artifacts"]},
    }


def pages_of(found: Mapping[str, Any], num_versions: int) -> list[Page]:
    """What a person opens who looks for this run."""
    run, deployment = f"/v2/runs/flow-run/{found['flow_run_id']}", found["deployment_id"]
    name, last = found["run_name"], f"publish v{num_versions}"
    syncs = found["newest_artifacts"]["tiny-syncs"]
    return [
        Page("the model's deployment", f"/v2/deployments/deployment/{deployment}?tab=Runs", (name,)),
        Page("all runs", "/v2/runs", (name,)),
        Page("the run and its tasks", f"{run}?tab=TaskRuns", (name, last)),
        Page("the run's artifacts", f"{run}?tab=Artifacts", (name, "tiny-curve", "tiny-syncs")),
        Page("all artifacts", "/v2/artifacts", ("tiny-curve", "tiny-syncs")),
        Page("the tables of syncs", "/v2/artifacts/key/tiny-syncs", ("The last syncs", name)),
        Page("the newest of them", f"/v2/artifacts/artifact/{syncs}", ("The last syncs", "total_s")),
    ]


def measure(
    folder: Path, *, num_versions: int, pace_s: float, pictures: Path | None = None
) -> dict[str, Any]:
    with prefect_server(folder) as server:
        if not (folder / "found.json").exists():
            _deploy(folder, server)
            arguments = ["--play", str(folder), "--versions", str(num_versions), "--pace-s", str(pace_s)]
            _run("benchmarks.many_versions", *arguments, server=server, log=folder / "flow.log")
        time.sleep(SETTLE_S)
        found = json.loads((folder / "found.json").read_text())
        found |= look(server.env["PREFECT_API_URL"], found["flow_run_id"])
        found["opened_s"] = {}
        if missing() is None:
            pages = pages_of(found, num_versions)
            found["opened_s"] = time_pages(server.url, pages, repeats=NUM_OPENINGS, pictures=pictures)
        return found


def _deploy(folder: Path, server: PrefectServer) -> None:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(run_config(folder).model_dump(mode="json", exclude_defaults=True)))
    log = folder / "deploy.log"
    _run("prefect", "work-pool", "create", POOL, "--type", "process", server=server, log=log)
    _run("deployments.cli", "deploy", str(config), "--pool", POOL, server=server, log=log)


def _run(module: str, *arguments: str, server: PrefectServer, log: Path) -> None:
    with log.open("ab") as file:
        command = [sys.executable, "-m", module, *arguments]
        ended = subprocess.run(command, env=server.env, stdout=file, stderr=file)
    if ended.returncode:
        raise SystemExit(f"{module} failed:\n" + log.read_text()[-3000:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=500)
    parser.add_argument("--pace-s", type=float, default=0.4)
    parser.add_argument("--folder", type=Path, help="keeps the run; one that is there is only looked at")
    parser.add_argument("--pictures", type=Path, help="folder for what the pages looked like")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play is not None:
        play(arguments.play, arguments.versions, arguments.pace_s, arguments.settle_s)
        return 0
    with tempfile.TemporaryDirectory(prefix="many-versions-") as folder:
        if arguments.folder is not None:
            arguments.folder.mkdir(parents=True, exist_ok=True)
        found = measure(
            arguments.folder or Path(folder),
            num_versions=arguments.versions,
            pace_s=arguments.pace_s,
            pictures=arguments.pictures,
        )
    sizes, part = found["sizes_bytes"], arguments.versions // NUM_PARTS
    found["kib_of_parts"] = [(after - before) / part / 1024 for before, after in itertools.pairwise(sizes)]
    found["kib_per_version"] = statistics.fmean(found["kib_of_parts"])
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    problems = list(_problems(found))
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    grown = found["kib_per_version"]
    if grown > MAX_KIB:
        yield f"{grown:.1f} KiB a version, more than {MAX_KIB:g}"
    opened = {f"opening {name}": statistics.median(s) for name, s in found["opened_s"].items()}
    for name, seconds in (found["page_s"] | opened).items():
        if seconds > MAX_PAGE_S:
            yield f"{name} took {seconds:.1f} s, more than {MAX_PAGE_S:g}"


def _show(found: Mapping[str, Any]) -> None:
    parts = ", ".join(f"{kib:.1f}" for kib in found["kib_of_parts"])
    table = Table(title=found["run_name"], title_justify="left", show_header=False)
    rows = [
        ("KiB a version", f"{found['kib_per_version']:.1f}; by part {parts}"),
        ("task runs", str(found["num_task_runs"])),
        ("the last", found["last_train"]),
        ("artifact rows", ", ".join(f"{key} {count}" for key, count in found["num_artifacts"].items())),
        *((f"data of {name}, s", f"{seconds:.2f}") for name, seconds in found["page_s"].items()),
        *((f"page of {name}, s", _spread(seconds)) for name, seconds in found["opened_s"].items()),
    ]
    if not found["opened_s"]:
        rows.append(("pages", f"not opened: {missing()}"))
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _spread(seconds: list[float]) -> str:
    return (
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}, first {seconds[0]:.2f})"
    )


if __name__ == "__main__":
    sys.exit(main())
