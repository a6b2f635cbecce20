"""Everything on one machine: a Prefect server of our own, a runner that serves the deployments, one run.

    python -m deployments.local serve CONFIG.json LAUNCH    # what the launcher starts as the runner

Both processes are children that die with the launcher, whatever ends it; the flows in turn watch their
runner. A Prefect of one's own ($PREFECT_API_URL) is used instead of the embedded server when it is set.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deployments.home import (
    RunRecord,
    StackRecord,
    admin_key,
    announced_stack,
    exclusive_home,
    remember_run,
)
from deployments.infrastructure import GRAPH_LIMIT
from deployments.prefect_client import PARENT_FLOW, PrefectApi, require_api
from model_runtime.config import RunConfig
from model_runtime.config_file import load_config
from model_runtime.errors import PrefectError, ProcessError
from model_runtime.process_logs import next_numbered
from model_runtime.processes import ChildProcess, free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workspace import HOME_ENV, ONE_RUN_ENV, home

PREFECT = (sys.executable, "-m", "prefect")
PREFERRED_PORT = 4200
SERVER_LIMIT_S = 180.0
"""Longest wait for the server: the first start makes its database."""
MAX_SERVER_RESTARTS = 3
"""In a row; one that lived for SERVER_STABLE_S begins a new row."""
SERVER_STABLE_S = 600.0
SERVER_SILENT_LIMIT_S = 120.0
"""A server that lives and does not answer for this long hangs."""
SERVER_ASKED_EVERY_S = 5.0
RUNNER_LIMIT_S = 120.0
STOP_LIMIT_S = 45.0
"""Longest wait for the flow runs to end before their processes are ended."""

Say = Callable[[str], None]


@dataclass(slots=True)
class LocalStack:
    """A Prefect server (ours or given) and a runner that serves one config's deployments."""

    config: RunConfig
    say: Say
    ui: bool = True
    api: PrefectApi = field(init=False)
    server: ChildProcess | None = None
    runner: ChildProcess | None = None
    _port: int = 0
    _server_restarts: int = 0
    _server_started_at: float = 0.0
    _server_asked_at: float = 0.0
    _server_silent_s: float = 0.0

    async def start(self) -> None:
        """Bring both up, saying what is waited for. Raises ProcessError with the end of a log."""
        given = os.environ.get("PREFECT_API_URL")
        if given:
            self.api = PrefectApi(given.rstrip("/"))
            await require_api(self.api)
            self.say(f"Prefect at {self.api.api_url}")
        else:
            await self._start_server()
            for name in await self.api.bury():
                self.say(f"flow run {name} had lost its runner: set to Crashed")
        await self._start_runner()

    async def stop(self) -> None:
        """Runner first, so that no flow run outlives it; then the server. Idempotent."""
        for child in (self.runner, self.server):
            if child is not None:
                await child.stop()

    def check_alive(self) -> None:
        """Raise ProcessError when the server or the runner has died."""
        for what, child in (("Prefect server", self.server), ("runner", self.runner)):
            if child is not None and child.returncode is not None:
                raise ProcessError(
                    f"the {what} died (exit code {child.returncode}, "
                    f"log {child.log_path}):\n{child.log_tail()}"
                )

    async def _start_server(self) -> None:
        """On the usual port if it is free; another process may still take a port before our server does."""
        ports = [PREFERRED_PORT] if _is_free(PREFERRED_PORT) else []
        for port in [*ports, free_port(), free_port()]:
            self.api = PrefectApi(f"http://127.0.0.1:{port}/api")
            self.say("Prefect server: starting")
            if await self._server_listens(await self._spawn_server(port), port):
                return
        self.check_alive()

    async def _spawn_server(self, port: int) -> ChildProcess:
        if self.server is not None:
            await self.server.stop()
        self._port = port
        self._server_started_at = self._server_asked_at = time.monotonic()
        self._server_silent_s = 0.0
        self.server = await ChildProcess.start(
            [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            log_path=_new_log("prefect-server"),
            env=prefect_env(self.api.api_url, ui=self.ui),
        )
        return self.server

    async def tend(self) -> None:
        """Start a server that died or hangs again, on its port: the flows ride out its absence. Raises
        ProcessError when that happens too often, or when the runner died."""
        while (trouble := await self._server_trouble()) is not None:
            if time.monotonic() - self._server_started_at > SERVER_STABLE_S:
                self._server_restarts = 0
            if self._server_restarts == MAX_SERVER_RESTARTS:
                break
            self._server_restarts += 1
            self.say(f"Prefect server: {trouble}; starting it again, the run goes on meanwhile")
            if await self._server_listens(await self._spawn_server(self._port), self._port):
                return
        self.check_alive()

    async def _server_trouble(self) -> str | None:
        """Why our server is to be started again. Time in which this process stood still is not held against
        it."""
        if self.server is None:
            return None
        if self.server.returncode is not None:
            return "died"
        passed_s = time.monotonic() - self._server_asked_at
        if passed_s < SERVER_ASKED_EVERY_S:
            return None
        healthy = await self.api.healthy()
        self._server_asked_at = time.monotonic()
        if healthy:
            self._server_silent_s = 0.0
            return None
        self._server_silent_s += min(passed_s, 2 * SERVER_ASKED_EVERY_S)
        if self._server_silent_s < SERVER_SILENT_LIMIT_S:
            return None
        return f"silent for {self._server_silent_s:.0f} s"

    async def _server_listens(self, server: ChildProcess, port: int) -> bool:
        """Wait until it is this server that answers; False when another process has its port, or it is
        killed. Raises ProcessError when it ends by itself or takes too long."""
        until = time.monotonic() + SERVER_LIMIT_S
        while not (await self.api.healthy() and _listens(server.pid, port)):
            if server.returncode is not None and (
                server.returncode < 0 or "address already in use" in server.log_tail(60)
            ):
                return False
            self.check_alive()
            if time.monotonic() > until:
                raise ProcessError(
                    f"the Prefect server did not answer on port {port} within {SERVER_LIMIT_S:.0f} s; "
                    f"its log is {server.log_path}"
                )
            await asyncio.sleep(0.3)
        self.say(f"Prefect server: ready at {self.api.ui_url}")
        return True

    async def _start_runner(self) -> None:
        launch = uuid.uuid4().hex[:12]
        file = home() / "serve" / f"{self.config.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.config.model_dump_json(indent=1))
        self.runner = await ChildProcess.start(
            [sys.executable, "-m", "deployments.local", "serve", str(file), launch],
            log_path=_new_log("runner"),
            env=prefect_env(self.api.api_url, ui=self.ui) | {ADMIN_KEY_ENV: admin_key()},
            grace_s=20,
        )
        self.say("deployments: registering")
        until = time.monotonic() + RUNNER_LIMIT_S
        while not await self.api.served(f"{PARENT_FLOW}/{self.config.name}", launch):
            self.check_alive()
            if time.monotonic() > until:
                raise ProcessError(
                    f"the runner did not register its deployments within {RUNNER_LIMIT_S:.0f} s; "
                    f"its log is {self.runner.log_path}"
                )
            await asyncio.sleep(0.3)
        self.say(f"deployments: served, {len(self.config.models)} models")


def prefect_env(api_url: str, *, ui: bool) -> dict[str, str]:
    """Environment of the server and of everything that talks to it."""
    # Reports to Prefect's makers are off; polls are short because one machine bears them.
    ours = {
        HOME_ENV: str(home()),
        ONE_RUN_ENV: "1",
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_ENABLED": str(ui).lower(),
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model_runtime",
        "PYTHONUNBUFFERED": "1",
    }
    # A loopback server is never behind the environment's proxy.
    asked = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    if asked:  # by the server that inherits it; everybody else must say it
        ours["PREFECT_API_AUTH_STRING"] = os.environ.get("PREFECT_API_AUTH_STRING", asked)
    no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost")))
    return GRAPH_LIMIT | dict(os.environ) | ours | {"NO_PROXY": no_proxy, "no_proxy": no_proxy}


def serve_deployments(config: RunConfig, launch: str) -> None:
    """Register the deployments under the version `launch` and run what they are asked for, until ended."""
    from prefect import serve

    from deployments.registration import deployments_of

    registered = deployments_of(config, version=launch, scheduled=False)
    serve(*registered, limit=2 * (len(config.models) + 4), pause_on_shutdown=False)


# -------------------------------------------------------------------------------------------- one run


@dataclass(slots=True)
class Launch:
    """One training run of this launcher: start it, follow it, end it."""

    config: RunConfig
    run_id: str
    say: Say
    ui: bool = True
    config_path: str | None = None
    stack: LocalStack = field(init=False)
    flow_run_id: uuid.UUID | None = None
    _exit: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self.stack = LocalStack(self.config, self.say, self.ui)

    async def start(self) -> None:
        """Bring up the stack and create the parent's flow run."""
        self._exit.enter_context(exclusive_home())
        await asyncio.to_thread(open_store(self.config.store).check)
        await self.stack.start()
        api_url = self.stack.api.api_url
        remember_run(
            RunRecord(
                run_id=self.run_id,
                config=self.config,
                config_path=self.config_path,
                api_url=api_url,
                launched_at=time.time(),
            )
        )
        self._exit.enter_context(
            announced_stack(StackRecord(pid=os.getpid(), api_url=api_url, run_id=self.run_id))
        )
        self.flow_run_id = (await self.stack.api.launch(self.config, self.run_id)).id
        # Our own server has both dashboards; another's may have the older one alone.
        version = "/v2" if self.stack.server is not None else ""
        self.say(f"run {self.run_id}: {self.stack.api.ui_url}{version}/runs/flow-run/{self.flow_run_id}")

    async def cancel(self) -> list[str]:
        """Ask the run to stop and wait until its flow runs are final; names of those that are not."""
        if self.flow_run_id is None:
            return []
        try:
            await self.stack.api.cancel(self.run_id)
        except PrefectError as error:
            self.say(f"{error}; ending the processes")
            return []
        left = await self.stack.api.wait_until_none_active(self.run_id, limit_s=STOP_LIMIT_S)
        return [run.name for run in left]

    async def close(self) -> None:
        """End runner and server; nothing of this launcher is left."""
        try:
            await self.stack.stop()
        finally:
            await self._exit.aclose()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _listens(pid: int, port: int) -> bool:
    """Does this process, or one it started, listen on the port?"""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        sockets = [s for member in family for s in member.net_connections(kind="tcp")]
    except psutil.Error:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)


def _new_log(process: str) -> Path:
    """One file per process and start, never overwritten; the oldest go."""
    folder = home() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return next_numbered(folder, process, digits=4)


if __name__ == "__main__":
    _, command, path, version = sys.argv
    assert command == "serve", "usage: python -m deployments.local serve CONFIG LAUNCH"
    serve_deployments(load_config(path), version)
