"""Bringing up Prefect on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from deployments import local
from deployments.infrastructure import GRAPH_LIMIT
from deployments.local import (
    MAX_SERVER_RESTARTS,
    SERVER_STABLE_S,
    LocalStack,
    _is_free,
    _listens,
    prefect_env,
)
from deployments.prefect_client import PrefectApi
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError, PrefectError, ProcessError
from model_runtime.processes import free_port

CONFIG = RunConfig.model_validate(
    {
        "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
        "agent_model_mapping": {"x": "a"},
    }
)


def test_a_port_is_free_until_somebody_listens_on_it() -> None:
    port = free_port()
    assert _is_free(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not _is_free(port)


def test_who_listens_on_a_port_is_told_apart() -> None:
    with (
        socket.socket() as ours,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        port = ours.getsockname()[1]
        assert _listens(os.getpid(), port)
        assert not _listens(other.pid, port)
        assert other.stdin is not None
        other.stdin.close()


def test_nothing_is_reported_to_prefects_makers_and_no_proxy_stands_before_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "internal")
    env = prefect_env("http://127.0.0.1:1/api", ui=False)
    assert env["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert env["DO_NOT_TRACK"] == "1"
    assert env["PREFECT_SERVER_UI_ENABLED"] == "false"
    assert env["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert env["NO_PROXY"] == "internal,127.0.0.1,localhost"


def test_graphs_too_large_for_a_browser_are_not_drawn_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ((name, value),) = GRAPH_LIMIT.items()
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    assert prefect_env("http://127.0.0.1:1/api", ui=True)[name] == value
    monkeypatch.setenv(name, "10000")
    assert prefect_env("http://127.0.0.1:1/api", ui=True)[name] == "10000"


async def test_a_prefect_of_ones_own_that_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    stack = LocalStack(CONFIG, lambda line: None)
    with pytest.raises(ConfigError, match="PREFECT_API_URL: no Prefect server answers"):
        await stack.start()
    await stack.stop()


class Server:
    """Stands for the process of a Prefect server."""

    pid = 1
    returncode: int | None = None

    def log_tail(self, lines: int = 20) -> str:
        return "its last words"

    log_path = Path("server.log")


class Trouble:
    """A stack whose server is answered for, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
        self.now, self.healthy, self.said = 0.0, True, list[str]()
        self.num_killed_at_start = 0
        self.stack = LocalStack(CONFIG, self.said.append)
        self.stack.server = Server()  # type: ignore[assignment]
        self.stack.api = SimpleNamespace(healthy=self._healthy)  # type: ignore[assignment]
        monkeypatch.setattr(local.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LocalStack, "_spawn_server", self._spawn)
        monkeypatch.setattr(LocalStack, "_server_listens", self._listens)

    async def _healthy(self) -> bool:
        return self.healthy

    async def _spawn(self, port: int) -> Any:
        self.stack.server = Server()  # type: ignore[assignment]
        self.stack._server_started_at = self.stack._server_asked_at = self.now
        self.stack._server_silent_s = 0.0
        return self.stack.server

    async def _listens(self, server: Any, port: int) -> bool:
        if self.num_killed_at_start:
            self.num_killed_at_start -= 1
            server.returncode = -9
            return False
        return True

    async def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            await self.stack.tend()

    async def die(self) -> None:
        assert self.stack.server is not None
        self.stack.server.returncode = -9  # type: ignore[misc]
        await self.stack.tend()


async def test_a_prefect_server_that_hangs_is_started_again_and_one_that_pauses_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trouble = Trouble(monkeypatch, tmp_path)
    trouble.healthy = False
    await trouble.pass_time(60)
    trouble.healthy = True
    await trouble.pass_time(60)
    trouble.healthy = False
    trouble.now += 500.0  # this process stood still: nobody asked
    await trouble.pass_time(60)
    assert trouble.said == []
    await trouble.pass_time(100)
    assert trouble.said == ["Prefect server: silent for 120 s; starting it again, the run goes on meanwhile"]


async def test_a_prefect_server_that_lived_long_earns_its_restarts_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trouble = Trouble(monkeypatch, tmp_path)
    for _ in range(4 * MAX_SERVER_RESTARTS):
        await trouble.pass_time(int(SERVER_STABLE_S) + 1)
        await trouble.die()
    for _ in range(MAX_SERVER_RESTARTS - 1):
        await trouble.die()
    with pytest.raises(ProcessError, match="Prefect server died"):
        await trouble.die()


async def test_a_prefect_server_that_is_killed_while_it_starts_again_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trouble = Trouble(monkeypatch, tmp_path)
    trouble.num_killed_at_start = 1
    await trouble.die()
    assert len(trouble.said) == 2
    trouble.num_killed_at_start = MAX_SERVER_RESTARTS
    with pytest.raises(ProcessError, match="Prefect server died"):
        await trouble.die()
    assert len(trouble.said) == MAX_SERVER_RESTARTS


async def test_a_prefect_server_that_is_killed_while_it_first_starts_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    stack = LocalStack(CONFIG, lambda _: None)
    stack.api = SimpleNamespace(healthy=_never)  # type: ignore[assignment]
    killed = Server()
    killed.returncode = -9  # type: ignore[misc]
    assert not await stack._server_listens(killed, 4200)  # type: ignore[arg-type]
    killed.returncode = 1  # type: ignore[misc]
    stack.server = killed  # type: ignore[assignment]
    with pytest.raises(ProcessError, match="its last words"):
        await stack._server_listens(killed, 4200)  # type: ignore[arg-type]


async def _never() -> bool:
    return False


def test_the_dashboard_is_beside_the_api() -> None:
    assert PrefectApi("http://127.0.0.1:4200/api").ui_url == "http://127.0.0.1:4200"


class Deleted:
    """A Prefect client of a server that knows none of the flow runs and deployments it is asked for."""

    async def __aenter__(self) -> Deleted:
        return self

    async def __aexit__(self, *_: Any) -> None:
        return

    async def read_flow_run(self, flow_run_id: UUID) -> Any:
        response = httpx.Response(404, request=httpx.Request("GET", "http://prefect"))
        raise ObjectNotFound(httpx.HTTPStatusError("404", request=response.request, response=response))

    async def set_flow_run_state(self, flow_run_id: UUID, state: Any, **_: Any) -> None:
        await self.read_flow_run(flow_run_id)

    async def read_deployment_by_name(self, name: str) -> Any:
        await self.read_flow_run(uuid4())


async def test_a_flow_run_that_was_deleted_has_ended_and_is_not_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = PrefectApi("http://prefect/api")
    monkeypatch.setattr(api, "_client", Deleted)
    state = await api.state(uuid4())
    assert state is not None
    assert state.is_final()
    assert state.message == "its flow run was deleted from Prefect"
    run: Any = SimpleNamespace(id=uuid4(), state=None, name="run-1", parent_task_run_id=None)

    async def one_run(_: Any) -> list[Any]:
        return [run]

    monkeypatch.setattr(api, "_active", one_run)
    assert await api.cancel("run-1") == 1
    assert await api.bury() == ["run-1"]


async def test_a_deployment_that_was_deleted_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = PrefectApi("http://prefect/api")
    monkeypatch.setattr(api, "_client", Deleted)
    with pytest.raises(PrefectError, match="the run could not be created: it is not there"):
        await api.launch(CONFIG, "run-1")
