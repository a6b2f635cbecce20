"""Models take turns in publishing, by a limit of a real Prefect server; each model is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import RunConfig
from model_runtime.processes import free_port
from tests.integration.test_deploy import Process, until_healthy

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # starts a server and a dozen processes

MODELS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("prefect")
    port = free_port()
    env = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Process(command, env, folder / "server.log"):
        until_healthy(f"http://127.0.0.1:{port}/api/health")
        yield env


def config(name: str, **sync: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": name,
            "multi_model": {"models": [{"model_id": m, "model_path": "/m"} for m in MODELS]},
            "agent_model_mapping": {f"{m}_agent": m for m in MODELS},
            "sync": sync,
        }
    )


def publish_all(
    folder: Path, env: dict[str, str], run: RunConfig, *, num_versions: int, load_s: float
) -> dict[str, dict[str, Any]]:
    """Every model publishes its versions in a process of its own; rows and spans by model."""
    arguments = [str(num_versions), str(load_s), run.model_dump_json()]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.turn_taker", str(folder), model_id, *arguments],
            env=env,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for model_id in MODELS
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output.decode()
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    return {m: json.loads((folder / f"{m}.json").read_text()) for m in MODELS}


def most_at_once(spans: list[tuple[float, float]]) -> int:
    edges = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def test_at_most_so_many_models_publish_at_once(tmp_path: Path, environment: dict[str, str]) -> None:
    run = config("two-at-once", max_concurrent=2)
    found = publish_all(tmp_path, environment, run, num_versions=3, load_s=0.7)
    rows = [row for model in found.values() for row in model["rows"]]
    assert len(rows) == 12
    assert {row["turn"] for row in rows} == {"taken"}
    assert most_at_once([tuple(span) for model in found.values() for span in model["spans"]]) <= 2
    assert max(row["turn_wait_s"] for row in rows) > 0.5, "somebody had to wait"


def test_who_waited_long_enough_goes_on_and_is_counted(tmp_path: Path, environment: dict[str, str]) -> None:
    run = config("patience-ends", max_concurrent=1, max_wait_s=1.0)
    found = publish_all(tmp_path, environment, run, num_versions=1, load_s=8.0)
    rows = [row for model in found.values() for row in model["rows"]]
    turns = sorted(row["turn"] for row in rows)
    assert turns.count("passed") == 3
    assert turns.count("taken") == 1
    assert all(row["turn_wait_s"] < 1.0 + 6 for row in rows)


def test_without_prefect_nobody_waits_for_a_turn(tmp_path: Path, environment: dict[str, str]) -> None:
    away = environment | {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"}
    run = config("alone", max_concurrent=1, max_wait_s=1.0)
    found = publish_all(tmp_path, away, run, num_versions=1, load_s=0.1)
    rows = [row for model in found.values() for row in model["rows"]]
    assert len(rows) == 4
    assert {row["turn"] for row in rows} <= {"away", "passed"}
    assert all(row["turn_wait_s"] < 1.0 + 6 for row in rows)
