"""The quickstart on two machines: parent, gateway and agents on one, the models on the other. Prefect is on
PostgreSQL behind a password, the store is a real S3; the network goes away for a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from model_runtime.adapters import latest_version
from model_runtime.config import StoreConfig
from model_runtime.coordinator import read_run
from model_runtime.documents import RunDocument
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.store import open_store
from model_runtime.summary import RunSummary, read_summary
from tests.e2e.quickstart import below_the_bar, write_config
from tests.e2e.two_machines import Network, Passage, require_namespaces
from tests.integration.test_deploy import ADMIN_KEY, Process, until_healthy
from tests.integration.test_prefect_postgres import PASSWORD, postgres

__all__ = ["postgres"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.real_s3, pytest.mark.slow]

RUN_ID = "on-two-machines"
LAYOUT = RunLayout(RUN_ID)
AWAY_S = 20.0
MODELS = ("planner_model", "solver_model")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True)
class Site:
    """A Prefect server and a store that both machines reach."""

    network: Network
    env: dict[str, str]
    store: StoreConfig
    folder: Path

    def on(self, machine: str, *command: str) -> Process:
        """A worker of one machine, which knows its own address."""
        here = {
            "REPERTORY_HOST": self.network.addresses[machine],
            "REPERTORY_HOME": str(self.folder / machine),
        }
        return Process(
            self.network.on(machine, sys.executable, "-m", *command),
            self.env | here,
            self.folder / f"{machine}.log",
        )

    def run(self, *command: str, limit_s: float = 120) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=self.env, capture_output=True, text=True, timeout=limit_s
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state_of_run(self) -> str:
        with httpx.Client(auth=httpx.BasicAuth(*PASSWORD.split(":")), timeout=15, trust_env=False) as http:
            wanted = {"flow_runs": {"name": {"any_": [RUN_ID]}}}
            runs = http.post(f"{self.env['PREFECT_API_URL']}/flow_runs/filter", json=wanted).json()
        return runs[0]["state_type"] if runs else "none"

    def versions(self) -> list[int]:
        store = open_store(self.store)
        found = [latest_version(store, LAYOUT.model(model_id)) for model_id in MODELS]
        return [-1 if version is None else version for version in found]

    def document(self) -> RunDocument:
        document = read_run(open_store(self.store), LAYOUT)
        assert document is not None
        return document


def wait_until(reached: Any, what: str, *, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < until, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.5)


@pytest.fixture
def site(
    postgres: str,
    real_s3_store_config: StoreConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    require_namespaces()
    endpoint = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    assert endpoint.hostname is not None
    with ExitStack() as stack:
        network = stack.enter_context(Network("agents", "models"))
        target = (endpoint.hostname, endpoint.port or 80)
        passage = stack.enter_context(Passage(network.here, target))
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(name, passage.url)
        url = f"http://{network.here}:{free_port()}"
        env = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES} | {
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_API_URL": f"{url}/api",
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "REPERTORY_HOME": str(tmp_path / "home"),
            "REPERTORY_ADMIN_KEY": ADMIN_KEY,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        of_server = {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres,
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
        }
        place = ["--host", network.here, "--port", url.rpartition(":")[2]]
        server = [sys.executable, "-m", "prefect", "server", "start", *place]
        stack.enter_context(Process(server, env | of_server, tmp_path / "server.log"))
        until_healthy(f"{url}/api/health")
        yield Site(network, env, real_s3_store_config, tmp_path)


def deploy(site: Site) -> None:
    """The quickstart, on a pool for each machine."""
    config = write_config(
        site.folder,
        model={"rollout": {"host": "auto"}},
        gateway={"host": "auto", "admin_host": "auto"},
        store={"url": site.store.url},
    )
    for pool in ("agents", "models"):
        site.run("prefect", "work-pool", "create", pool, "--type", "process")
    site.run("deployments.cli", "deploy", str(config), "--pool", "agents", "--models-pool", "models")


def start(site: Site) -> None:
    run_id = f"run_id={json.dumps(RUN_ID)}"
    site.run("prefect", "deployment", "run", "multi-model-training/quickstart", "--param", run_id)


def finished(site: Site) -> RunSummary:
    """Wait for the run's end; its summary."""
    final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
    wait_until(lambda: site.state_of_run() in final, "the run's end", limit_s=1200)
    logs = "\n".join((site.folder / f"{m}.log").read_text()[-3000:] for m in ("agents", "models"))
    assert site.state_of_run() == "COMPLETED", logs
    summary = read_summary(open_store(site.store), LAYOUT)
    assert summary is not None
    return summary


@pytest.mark.timeout(1800)
def test_the_quickstart_learns_on_two_machines_and_a_pulled_link_loses_nothing(site: Site) -> None:
    agents = site.on("agents", "prefect", "worker", "start", "--pool", "agents")
    models = site.on("models", "prefect", "worker", "start", "--pool", "models")
    deploy(site)
    with agents, models:
        start(site)
        wait_until(lambda: min(site.versions()) >= 3, "three versions of each model", limit_s=400)
        assert site.network.addresses["agents"] in (site.document().gateway_url or "")
        site.network.pull("models")
        time.sleep(AWAY_S)
        at_pull = site.versions()
        site.network.plug_in("models")
        summary = finished(site)
    for model in summary.models:
        assert model.balanced
        assert model.finalized == model.trained + sum(model.dropped.values()) + model.in_log
    assert all(m.latest_version > v for m, v in zip(summary.models, at_pull, strict=True) if m.latest_version)
    assert below_the_bar(summary) == []
