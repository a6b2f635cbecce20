"""The gateway as a managed task, with a small stand-in process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError, ProcessError
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.workspace import Workspace
from tasks import gateway as module
from tasks.gateway import GatewayProcess

# Answers /health, takes PUT /admin/desired, and notes every life and every wish beside itself.
STAND_IN = """
import argparse, http.server, json, os, pathlib, socket, sys
p = argparse.ArgumentParser()
names = "run-id epoch incarnation config port admin-port listen-fd admin-listen-fd"
for name in names.split():
    p.add_argument(f"--{name}")
a = p.parse_args()
folder = pathlib.Path(a.config).parent
assert json.loads(pathlib.Path(a.config).read_text())["name"] == "default"
(folder / "life").write_text(str(os.getpid()))
os.replace(folder / "life", folder / f"life-{a.incarnation}")
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_GET(self): self.answer()
    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        (folder / f"wish-{a.incarnation}").write_text(body); self.answer()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        (folder / f"alive-{a.incarnation}").write_text(self.path + body); self.answer()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(a.admin_port)), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(a.admin_listen_fd))
assert server.socket.getsockname()[1] == int(a.admin_port)
server.serve_forever()
"""


def config(**gateway: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
            "agent_model_mapping": {"x": "a"},
            "gateway": gateway,
        }
    )


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.setenv(ADMIN_KEY_ENV, "k" * 20)
    monkeypatch.setattr(module, "LIFE_POLL_S", 0.05)
    return Workspace("run-1")


def process(workspace: Workspace, script: str = STAND_IN, **gateway: object) -> GatewayProcess:
    file = workspace.root / "stand_in.py"
    file.write_text(script)
    return GatewayProcess(
        config(**gateway), run_id="run-1", epoch=3, workspace=workspace, command=[sys.executable, str(file)]
    )


@pytest.fixture
async def running(workspace: Workspace) -> AsyncIterator[GatewayProcess]:
    gateway = process(workspace)
    await gateway.start()
    yield gateway
    await gateway.stop()


def life(workspace: Workspace, incarnation: int) -> int:
    return int((workspace.root / f"life-{incarnation}").read_text())


async def until(condition: object, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - files appear unannounced
            await asyncio.sleep(0.02)


async def test_a_killed_gateway_comes_back_on_its_port_as_a_new_incarnation(
    running: GatewayProcess, workspace: Workspace
) -> None:
    url = running.url
    await running.want("drain", "enough")
    supervising = asyncio.create_task(running.supervise())
    os.kill(life(workspace, 1), signal.SIGKILL)
    await until(lambda: (workspace.root / "wish-2").exists())
    assert running.url == url
    assert await running.admin.healthy()
    assert '"drain"' in (workspace.root / "wish-2").read_text()
    supervising.cancel()


async def test_who_connects_while_no_gateway_runs_is_served_by_the_next(
    running: GatewayProcess, workspace: Workspace
) -> None:
    os.kill(life(workspace, 1), signal.SIGKILL)
    assert running._child is not None
    await running._child.wait()
    async with httpx.AsyncClient(base_url=running.url, timeout=30) as http:
        asking = asyncio.create_task(http.get("/health"))
        await asyncio.sleep(0.2)
        assert not asking.done()
        supervising = asyncio.create_task(running.supervise())
        assert (await asking).status_code == 200
        supervising.cancel()


async def test_the_logs_of_the_oldest_lives_go(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPERTORY_LOG_LIVES", "2")
    for number, name in enumerate(("1-1", "1-2", "2-1")):
        log = workspace.logs() / f"gateway-{name}.log"
        log.touch()
        os.utime(log, (number, number))
    gateway = process(workspace)
    await gateway.start()
    await gateway.stop()
    assert sorted(path.name for path in workspace.logs().iterdir()) == ["gateway-2-1.log", "gateway-3-1.log"]


async def test_restarts_are_bounded_and_the_error_shows_the_log(workspace: Workspace) -> None:
    gateway = process(workspace, max_restarts=1)
    await gateway.start()
    supervising = asyncio.create_task(gateway.supervise())
    os.kill(life(workspace, 1), signal.SIGKILL)
    await until(lambda: (workspace.root / "life-2").exists())
    await until(lambda: gateway.incarnation == 2)
    os.kill(life(workspace, 2), signal.SIGKILL)
    with pytest.raises(ProcessError, match="restarted 1 times; giving up"):
        await asyncio.wait_for(supervising, 10)
    await gateway.stop()


async def test_a_gateway_that_dies_while_starting_shows_its_log(workspace: Workspace) -> None:
    gateway = process(workspace, script="raise SystemExit('the store is locked')")
    with pytest.raises(ProcessError, match="the store is locked"):
        await gateway.start()
    await gateway.stop()


async def test_a_port_in_use_is_refused_by_name(workspace: Workspace) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        gateway = process(workspace, port=port)
        with pytest.raises(ConfigError, match=rf"gateway.port: 127.0.0.1:{port} can't be listened on"):
            await gateway.start()
        await gateway.stop()


async def test_stop_leaves_no_process(running: GatewayProcess, workspace: Workspace) -> None:
    pid = life(workspace, 1)
    await running.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


KILLED_AT_FIRST = """
import os, sys
if sys.argv[sys.argv.index("--incarnation") + 1] in ("1", "2"):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("max_restarts", "lives"), [(5, 3), (1, None)])
async def test_a_gateway_that_is_killed_while_it_first_starts_is_started_again_within_its_budget(
    workspace: Workspace, max_restarts: int, lives: int | None
) -> None:
    gateway = process(workspace, KILLED_AT_FIRST + STAND_IN, max_restarts=max_restarts)
    try:
        if lives is None:
            with pytest.raises(ProcessError, match=r"died while it started \(exit code -9"):
                await gateway.begin()
        else:
            await gateway.begin()
            assert gateway.incarnation == lives
    finally:
        await gateway.stop()


async def test_the_gateway_is_told_that_the_parent_lives(
    running: GatewayProcess, workspace: Workspace
) -> None:
    supervising = asyncio.create_task(running.supervise())
    await until(lambda: (workspace.root / "alive-1").exists(), limit_s=20)
    supervising.cancel()
    sign = '/admin/alive{"role":"parent","failed_models":[]}'
    assert (workspace.root / "alive-1").read_text() == sign


async def test_every_life_of_the_gateway_is_told_which_models_have_failed(
    running: GatewayProcess, workspace: Workspace
) -> None:
    running.failed_models.add("a")
    supervising = asyncio.create_task(running.supervise())
    os.kill(life(workspace, 1), signal.SIGKILL)
    await until(lambda: (workspace.root / "alive-2").exists(), limit_s=20)
    supervising.cancel()
    assert '"failed_models":["a"]' in (workspace.root / "alive-2").read_text()


async def test_a_silent_gateway_is_ended_and_restarted(
    running: GatewayProcess, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_LIMIT_S", 0.2)
    monkeypatch.setattr("tasks.gateway_admin.ATTEMPT_LIMIT_S", 0.2)
    running.admin._http.timeout = 0.2
    supervising = asyncio.create_task(running.supervise())
    os.kill(life(workspace, 1), signal.SIGSTOP)
    await until(lambda: (workspace.root / "life-2").exists(), limit_s=20)
    supervising.cancel()
