"""A Prefect server of a benchmark's own, on SQLite, with the dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from deployments.infrastructure import GRAPH_LIMIT
from model_runtime.processes import free_port

SERVER_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class PrefectServer:
    url: str
    pid: int
    env: dict[str, str]  # of what talks to it


@contextmanager
def prefect_server(folder: Path) -> Iterator[PrefectServer]:
    """Its database and its log are in `folder`; what `repertory up` sets for the dashboard holds here too."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = (
        GRAPH_LIMIT
        | dict(os.environ)
        | {
            "PREFECT_HOME": str(folder),
            "PREFECT_API_URL": f"{url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
    )
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(f"{url}/api/health", server)
        yield PrefectServer(url, server.pid, env)
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
            pass  # it is starting
        time.sleep(0.3)
    raise SystemExit(f"the Prefect server did not answer at {url}")
