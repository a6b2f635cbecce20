"""Bringing up Prefect on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.local import LocalStack, _is_free, _listens, prefect_env
from deployments.prefect_client import PrefectApi
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError
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


async def test_a_prefect_of_ones_own_that_does_not_answer_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    stack = LocalStack(CONFIG, lambda line: None)
    with pytest.raises(ConfigError, match="PREFECT_API_URL: no Prefect server answers"):
        await stack.start()
    await stack.stop()


def test_the_dashboard_is_beside_the_api() -> None:
    assert PrefectApi("http://127.0.0.1:4200/api").ui_url == "http://127.0.0.1:4200"
