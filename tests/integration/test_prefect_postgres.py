"""A Prefect server as teams run it: on PostgreSQL, behind a password. No secret of a run reaches it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from model_runtime.processes import free_port
from tests.conftest import S3_BUCKET
from tests.integration.test_deploy import ADMIN_KEY, POOL, Process, until_healthy
from tests.integration.test_prefect_lifecycle import short_config

pytestmark = pytest.mark.integration

PASSWORD = "team:a-password-of-this-test"
S3_SECRET = "a-secret-key-of-this-test"


def _binaries() -> Path | None:
    """Folder of PostgreSQL's programs: where the one on the PATH really is, or where Debian keeps them."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


BINARIES = _binaries()


def _as_owner(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """PostgreSQL refuses to run as root: there it runs as its own user."""
    assert BINARIES is not None
    call = [str(BINARIES / command[0]), *command[1:]]
    if os.geteuid() == 0:
        call = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *call]
    with (folder / "postgres.log").open("a") as log:  # not a pipe: the server would keep it open
        return subprocess.run(call, cwd="/", stdout=log, stderr=log, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL of a database of this test's own."""
    if BINARIES is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    import tempfile

    with tempfile.TemporaryDirectory(prefix="repertory-postgres-") as name:
        folder, port = Path(name), free_port()
        data = folder / "data"
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        _as_owner(folder, "initdb", "-D", str(data), "--auth=trust", "--username=prefect", "--no-sync")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        _as_owner(folder, "pg_ctl", "-D", str(data), "-w", "-o", options, "start")
        try:
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
        finally:
            _as_owner(folder, "pg_ctl", "-D", str(data), "-w", "-m", "immediate", "stop")


@pytest.fixture(scope="module")
def server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of who may talk to a server on that database."""
    folder, port = tmp_path_factory.mktemp("prefect"), free_port()
    env = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "REPERTORY_HOME": str(folder / "home"),
        "REPERTORY_ADMIN_KEY": ADMIN_KEY,
        "COLUMNS": "200",
    }
    of_server = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres,
        "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with Process(command, env | of_server, folder / "server.log"):
        until_healthy(f"http://127.0.0.1:{port}/api/health")
        yield env


def run(env: dict[str, str], *command: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], env=env, capture_output=True, text=True, timeout=limit_s
    )


@pytest.fixture(scope="module")
def pool(server: dict[str, str]) -> None:
    done = run(server, "prefect", "work-pool", "create", POOL, "--type", "process")
    assert done.returncode == 0, done.stdout + done.stderr


def test_deploying_takes_the_password_from_the_environment(
    server: dict[str, str], pool: None, tmp_path: Path
) -> None:
    config = str(short_config(tmp_path))
    stranger = {name: value for name, value in server.items() if name != "PREFECT_API_AUTH_STRING"}
    refused = run(stranger, "deployments.cli", "deploy", config, "--pool", POOL)
    assert refused.returncode == 2
    assert "PREFECT_API_AUTH_STRING" in refused.stderr
    assert "Traceback" not in refused.stderr

    done = run(server, "deployments.cli", "deploy", config, "--pool", POOL, "--json")
    assert done.returncode == 0, done.stderr
    assert "multi-model-training/quickstart" in json.loads(done.stdout)["registered"]
    assert PASSWORD not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_through_that_server_leaves_no_secret_in_its_database_or_in_a_log(
    server: dict[str, str], postgres: str, moto_endpoint: str, tmp_path: Path
) -> None:
    config = short_config(tmp_path, max_steps=3)
    raw = yaml.safe_load(config.read_text())
    raw["store"]["url"] = f"s3://{S3_BUCKET}/{tmp_path.name}"
    config.write_text(yaml.safe_dump(raw))
    env = server | {
        "REPERTORY_HOME": str(tmp_path / "home"),
        "AWS_ENDPOINT_URL": moto_endpoint,
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = run(env, "deployments.cli", "up", str(config), "--run-id", "run-1", "--json", limit_s=800)
    assert done.returncode == 0, done.stderr[-4000:]
    assert BINARIES is not None
    dump = subprocess.run(
        [str(BINARIES / "pg_dump"), postgres.replace("+asyncpg", "")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "planner-model-curve" in dump, "artifacts, parameters and logs are in it"
    assert f"s3://{S3_BUCKET}/" in dump
    secrets = {S3_SECRET, ADMIN_KEY, PASSWORD, PASSWORD.split(":")[1]}
    assert [secret for secret in secrets if secret in dump] == []
    logs = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.suffix == ".log"]
    assert len(logs) > 5
    assert [(path.name, s) for path in logs for s in secrets if s in path.read_text(errors="replace")] == []
    assert [s for s in secrets if s in done.stdout + done.stderr] == []


def test_the_server_refuses_who_does_not_know_the_password(server: dict[str, str]) -> None:
    url = f"{server['PREFECT_API_URL']}/flows/filter"
    body: dict[str, Any] = {}
    assert httpx.post(url, json=body, timeout=10, trust_env=False).status_code == 401
    user, password = PASSWORD.split(":")
    known = httpx.post(url, json=body, timeout=10, trust_env=False, auth=(user, password))
    assert known.status_code == 200
