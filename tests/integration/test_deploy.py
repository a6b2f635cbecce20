"""Deployments on a Prefect server of the user's own, run by the workers of a pool."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from benchmarks.many_versions import MAX_KIB, database_bytes, run_config
from model_runtime.config import StoreConfig
from model_runtime.evaluation import read_evaluations
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.store import open_store
from model_runtime.summary import read_summary
from tests.integration.test_prefect_lifecycle import QUICKSTART, short_config

pytestmark = pytest.mark.integration

POOL = "machines"
ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120
ADMIN_KEY = "an-admin-key-of-this-test"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Prefect server as a user has it, with one work pool; the environment of what talks to it."""
    folder = tmp_path_factory.mktemp("prefect")
    port = free_port()
    env = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "REPERTORY_HOME": str(folder / "home"),
        "REPERTORY_ADMIN_KEY": ADMIN_KEY,
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Process(command, env, folder / "server.log"):
        until_healthy(f"http://127.0.0.1:{port}/api/health")
        subprocess.run(
            [sys.executable, "-m", "prefect", "work-pool", "create", POOL, "--type", "process"],
            env=env,
            check=True,
            capture_output=True,
            timeout=60,
        )
        yield env


class Process:
    """A process in a session of its own, ended with all that it started."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._command, self._env, self._log = command, env, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as file:
            self._running = subprocess.Popen(
                self._command,
                env=self._env,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._running

    def __exit__(self, *_: object) -> None:
        self._running.terminate()
        try:
            self._running.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait(10)


def until_healthy(url: str) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"{url} did not answer within {START_LIMIT_S} s")


@pytest.fixture(scope="module")
def repertory(environment: dict[str, str]) -> Command:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deployments.cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def deployed(environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """All deployments, by the name of their function and their own."""
    answer = httpx.post(
        f"{environment['PREFECT_API_URL']}/deployments/filter", json={}, timeout=10, trust_env=False
    )
    answer.raise_for_status()
    return {f"{d['entrypoint'].split('.')[-1]}/{d['name']}": d for d in answer.json()}


def write_config(
    folder: Path,
    name: str,
    cron: str | None = None,
    alerts: dict[str, Any] | None = None,
    **models: str,
) -> str:
    raw = {
        "name": name,
        "multi_model": {"models": [{"model_id": m, "model_path": path} for m, path in models.items()]},
        "agent_model_mapping": {f"{m}_agent": m for m in models},
        "evaluation": {"cron": cron},
        "alerts": alerts or {},
        "store": {"url": str(folder / "runs")},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def test_deploying_again_updates_and_retires_what_left(
    environment: dict[str, str], repertory: Command, tmp_path: Path
) -> None:
    shop = write_config(tmp_path, "shop", cron="*/10 * * * *", alpha="/a", beta="/b", gamma="/c")
    first = repertory("deploy", shop, "--pool", POOL, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["registered"][-1] == "multi-model-training/shop"
    before = deployed(environment)
    alpha, beta, gamma = (f"model_runtime/{name}" for name in ("alpha", "beta", "gamma"))
    assert {alpha, beta, gamma, "multi_model_training/shop", "rollout/shop"} <= before.keys()
    assert before[alpha]["work_pool_name"] == POOL
    assert set(before[alpha]["tags"]) == {"config:shop", "model:alpha"}
    (schedule,) = before["evaluate/shop"]["schedules"]
    assert (schedule["schedule"]["cron"], schedule["active"]) == ("*/10 * * * *", True)

    assert repertory("deploy", write_config(tmp_path, "other", beta="/b"), "--pool", POOL).returncode == 0
    smaller = write_config(tmp_path, "shop", alpha="/a")
    again = repertory("deploy", smaller, "--pool", POOL)
    assert again.returncode == 0, again.stderr
    assert "retired model-runtime/gamma" in again.stdout
    after = deployed(environment)
    assert after[alpha]["id"] == before[alpha]["id"], "updated in place: its history stays"
    assert after[gamma]["paused"]
    assert "retired" in after[gamma]["tags"]
    assert not after[beta]["paused"], "another config trains it still"
    assert set(after[beta]["tags"]) == {"config:other", "model:beta"}
    assert after["evaluate/shop"]["schedules"] == []

    shop = write_config(tmp_path, "shop", alpha="/a", gamma="/c")
    assert repertory("deploy", shop, "--pool", POOL).returncode == 0
    back = deployed(environment)[gamma]
    assert not back["paused"]
    assert set(back["tags"]) == {"config:shop", "model:gamma"}


def test_a_pool_that_is_not_there_is_refused_with_the_command_that_makes_it(
    repertory: Command, tmp_path: Path
) -> None:
    refused = repertory("deploy", write_config(tmp_path, "shop", alpha="/a"), "--pool", "gpus")
    assert refused.returncode == 2
    assert "no work pool 'gpus'" in refused.stderr
    assert f"pools there: ['{POOL}']" in refused.stderr
    assert "prefect work-pool create gpus --type process" in refused.stderr


def test_a_run_with_a_bad_value_is_refused_by_the_server_and_never_created(
    environment: dict[str, str], repertory: Command, tmp_path: Path
) -> None:
    assert repertory("deploy", write_config(tmp_path, "shop", alpha="/a"), "--pool", POOL).returncode == 0
    training = deployed(environment)["multi_model_training/shop"]
    shown = training["parameter_openapi_schema"]["properties"]
    assert shown["models"]["default"][0]["model_id"] == "alpha"
    assert shown["seed"]["default"] == 0
    url = f"{environment['PREFECT_API_URL']}/deployments/{training['id']}/create_flow_run"
    for given, complaint in (
        ({"seed": -2}, "'seed'. Failure reason: -2 is less than the minimum of -1"),
        ({"config": {"multi_model": {"models": []}}}, "config"),
    ):
        refused = httpx.post(url, json={"parameters": given}, timeout=10, trust_env=False)
        assert refused.status_code == 409
        assert complaint in refused.json()["detail"]
    taken = httpx.post(url, json={"parameters": {"seed": 3, "max_steps": 2}}, timeout=10, trust_env=False)
    assert taken.status_code == 201


def test_prefects_own_command_line_deploys_from_prefect_yaml(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
            *("--prefect-file", "deployments/prefect.yaml", "--all"),
        ],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = deployed(environment)
    assert {"model_runtime/default", "rollout/default"} <= made.keys()
    training = made["multi_model_training/quickstart"]
    assert training["parameters"] == {"config_from": "examples/quickstart/config.yaml"}
    assert training["work_pool_name"] == POOL
    (step,) = training["pull_steps"]
    assert step["prefect.deployments.steps.set_working_directory"]["directory"] == str(ROOT)


def automations(environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    answer = _post(environment, "automations/filter", {})
    return {automation["name"]: automation for automation in answer.json()}


def _post(environment: dict[str, str], path: str, body: Any) -> httpx.Response:
    answer = httpx.post(f"{environment['PREFECT_API_URL']}/{path}", json=body, timeout=10, trust_env=False)
    answer.raise_for_status()
    return answer


def _event(name: str, resource: dict[str, str], **more: Any) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat()
    return {"event": name, "resource": resource, "id": str(uuid4()), "occurred": now, **more}


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """The address of a webhook, and what was sent to it."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fill_in(environment: dict[str, str], block_id: str, url: str) -> None:
    """As a user does on the dashboard's page Blocks."""

    def filled() -> bool:
        answer = httpx.patch(
            f"{environment['PREFECT_API_URL']}/block_documents/{block_id}",
            json={"data": {"url": url}, "merge_existing_data": True},
            timeout=10,
            trust_env=False,
        )
        if answer.status_code == 503:  # SQLite is locked: the user presses the button again
            return False
        answer.raise_for_status()
        return True

    until(filled, limit_s=30)


def until(found: Callable[[], Any], *, limit_s: float) -> Any:
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end, f"not within {limit_s:.0f} s"
        time.sleep(0.5)
    return value


def test_automations_are_made_once_keep_what_the_user_changed_and_really_tell(
    environment: dict[str, str], repertory: Command, tmp_path: Path
) -> None:
    kinds = ("zombie runs", "model failed", "no progress", "reward collapsed", "evaluation regressed")
    first = repertory("deploy", write_config(tmp_path, "mart", delta="/d"), "--pool", POOL, "--json")
    assert first.returncode == 0, first.stderr
    made = json.loads(first.stdout)["automations"]
    assert made["names"] == [f"mart: {kind}" for kind in kinds]
    before = automations(environment)
    assert all(before[name]["enabled"] for name in made["names"])
    for name in made["names"]:
        assert before[name]["actions"][-1]["type"] == "send-notification", name

    # The user switches one off and fills in where to tell; then the config changes.
    quiet = before["mart: no progress"]
    httpx.patch(
        f"{environment['PREFECT_API_URL']}/automations/{quiet['id']}",
        json={"enabled": False},
        timeout=10,
        trust_env=False,
    ).raise_for_status()
    with listener() as (url, heard):
        fill_in(environment, made["block_id"], url)
        alerts = {"reward_drop": None, "no_progress_minutes": 5}
        again = repertory("deploy", write_config(tmp_path, "mart", delta="/d", alerts=alerts), "--pool", POOL)
        assert again.returncode == 0, again.stderr
        assert "retired automation mart: reward collapsed" in again.stdout
        after = automations(environment)
        assert {after[name]["id"] for name in made["names"]} == {before[n]["id"] for n in made["names"]}
        assert not after["mart: no progress"]["enabled"]
        assert after["mart: no progress"]["trigger"]["within"] == 300
        assert not after["mart: reward collapsed"]["enabled"]
        assert "retired" in after["mart: reward collapsed"]["tags"]

        resource = {
            "prefect.resource.id": "repertory.model.delta",
            "prefect.resource.name": "delta",
            "repertory.run-id": "run-7",
            "repertory.config": "mart",
        }
        other = resource | {"repertory.config": "another with a model of that id"}
        events = [
            _event("model.failed", resource, payload={"reason": "out of memory"}),
            _event("model.failed", other, payload={"reason": "not of this config"}),
        ]
        _post(environment, "events", events)
        (told,) = until(lambda: heard, limit_s=30)
    assert "Repertory: mart: model failed" in told
    assert "delta of run run-7: out of memory" in told


@pytest.mark.slow
def test_a_flow_run_that_gives_no_sign_of_life_is_set_to_crashed_and_told(
    environment: dict[str, str], repertory: Command, tmp_path: Path
) -> None:
    config = write_config(tmp_path, "zoo", alpha="/a", alerts={"zombie_after_s": 60})
    made = json.loads(repertory("deploy", config, "--pool", POOL, "--json").stdout)["automations"]
    training = deployed(environment)["multi_model_training/zoo"]

    def start() -> str:
        run = _post(environment, f"deployments/{training['id']}/create_flow_run", {}).json()
        running = {"state": {"type": "RUNNING", "name": "Running"}, "force": True}
        _post(environment, f"flow_runs/{run['id']}/set_state", running)
        return run["id"]

    def heartbeat(run_id: str) -> None:  # as Prefect's engine sends it
        tag = {"prefect.resource.id": "prefect.tag.config:zoo", "prefect.resource.role": "tag"}
        resource = {"prefect.resource.id": f"prefect.flow-run.{run_id}"}
        _post(environment, "events", [_event("prefect.flow-run.heartbeat", resource, related=[tag])])

    def state(run_id: str) -> str:
        url = f"{environment['PREFECT_API_URL']}/flow_runs/{run_id}"
        return httpx.get(url, timeout=10, trust_env=False).json()["state"]["type"]

    silent, alive = start(), start()
    with listener() as (url, heard):
        fill_in(environment, made["block_id"], url)
        heartbeat(silent)

        def crashed() -> bool:
            heartbeat(alive)
            return state(silent) == "CRASHED"

        until(crashed, limit_s=150)
        assert state(alive) == "RUNNING"
        assert silent in until(lambda: heard, limit_s=30)[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_version_leaves_its_two_tasks_and_one_event_in_at_most_fifty_kib(
    environment: dict[str, str], repertory: Command
) -> None:
    folder, num_versions = Path(environment["PREFECT_HOME"]), 40  # the played model is measured there
    config = folder / "many.yaml"
    config.write_text(yaml.safe_dump(run_config(folder).model_dump(mode="json", exclude_defaults=True)))
    assert repertory("deploy", str(config), "--pool", POOL).returncode == 0
    played: list[str] = [sys.executable, "-m", "benchmarks.many_versions", "--play", str(folder)]
    played += ["--versions", str(num_versions), "--pace-s", "0.1", "--settle-s", "0"]
    size_before = database_bytes(folder)
    subprocess.run(played, env=environment, check=True, timeout=120, cwd=ROOT)
    found = json.loads((folder / "found.json").read_text())
    mine = {"flow_runs": {"id": {"any_": [found["flow_run_id"]]}}, "limit": 200}

    runs = _post(environment, "task_runs/filter", mine).json()
    states = {run["name"]: run["state_name"] for run in runs}
    for version in range(1, num_versions + 1):
        assert states.pop(f"train → v{version}") == states.pop(f"publish v{version}") == "Completed"
    assert states.pop(f"train → v{num_versions + 1}") == "No more versions"
    assert all(run["start_time"] <= run["end_time"] for run in runs if run["name"].startswith("train"))

    def num_events(**named: list[str]) -> int:
        of_run = {"related": {"id": [f"prefect.flow-run.{found['flow_run_id']}"]}, "event": named}
        return _post(environment, "events/filter", {"filter": of_run, "limit": 1}).json()["total"]

    until(lambda: num_events(name=["version.published"]) == num_versions + 1, limit_s=30)
    by_engine = 4  # tasks that come once in the life of a model: server, trainer, first version, last one
    assert num_events(prefix=["prefect.task-run."]) <= 3 * by_engine
    assert (database_bytes(folder) - size_before) / num_versions < MAX_KIB * 1024


def test_a_worker_runs_a_training_and_then_evaluates_its_versions(
    environment: dict[str, str], repertory: Command, tmp_path: Path
) -> None:
    config = short_config(tmp_path)
    raw = yaml.safe_load(config.read_text())
    raw["workflow"]["held_out_tasks"] = str(QUICKSTART / "tasks/held_out.jsonl")
    config.write_text(yaml.safe_dump(raw))
    assert repertory("deploy", str(config), "--pool", POOL).returncode == 0
    name = raw["name"]
    store, layout = open_store(StoreConfig(url=str(tmp_path / "runs"))), RunLayout("run-1")

    def run_deployment(flow: str, **parameters: Any) -> None:
        ended = ask_and_watch(flow, **parameters)
        assert ended.returncode == 0, ended.stdout + ended.stderr + (tmp_path / "worker.log").read_text()

    def ask_and_watch(flow: str, **parameters: Any) -> subprocess.CompletedProcess[str]:
        given = [f"--param={name}={json.dumps(value)}" for name, value in parameters.items()]
        return subprocess.run(
            [
                *(sys.executable, "-m", "prefect", "deployment", "run", f"{flow}/{name}"),
                *(*given, "--watch", "--watch-timeout", "600"),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=700,
        )

    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    with Process(worker, environment, tmp_path / "worker.log"):
        mistaken = ask_and_watch(
            "multi-model-training", config_from=name, agents=[{"agent_id": "planner_agent", "model_id": "x"}]
        )
        assert mistaken.returncode == 1
        found = re.search(r"UUID: (\S+)", mistaken.stdout)
        assert found is not None, mistaken.stdout
        failed = httpx.get(
            f"{environment['PREFECT_API_URL']}/flow_runs/{found[1]}", timeout=10, trust_env=False
        ).json()
        assert "agent_model_mapping.planner_agent: unknown model 'x'" in failed["state"]["message"]

        run_deployment("multi-model-training", run_id="run-1")
        summary = read_summary(store, layout)
        assert summary is not None
        assert [m.latest_version for m in summary.models] == [12, 12]
        assert all(m.balanced for m in summary.models)
        assert summary.held_out is not None

        run_deployment("evaluate")
        run_deployment("evaluate")  # the same versions again: nothing to do
        base = [{"model_id": m.model_id, "version": "base"} for m in summary.models]
        run_deployment("evaluate", versions=base)
    latest, of_base = read_evaluations(store, layout)
    assert latest.plan.versions == {"planner_model": 12, "solver_model": 12}
    assert latest.reward is not None
    assert latest.reward.mean == pytest.approx(summary.held_out.reward), "greedy, so the same again"
    assert of_base.plan.is_of_base
    assert of_base.reward is not None
    assert of_base.executions["finalized"] == latest.executions["finalized"] == 40
