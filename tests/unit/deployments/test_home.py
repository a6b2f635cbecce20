"""What one machine remembers."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.home import StackRecord, admin_key, announced_stack, exclusive_home, standing_stack
from model_runtime.errors import ConfigError
from model_runtime.protocol import ADMIN_KEY_ENV


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path))
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    return tmp_path


def test_the_key_is_made_once_and_only_its_owner_can_read_it(own_home: Path) -> None:
    key = admin_key()
    assert len(key) >= 32
    assert admin_key() == key
    assert stat.S_IMODE((own_home / "admin_key").stat().st_mode) == 0o600


def test_a_key_of_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "given-by-the-user")
    assert admin_key() == "given-by-the-user"
    assert not (own_home / "admin_key").exists()


def test_a_second_launcher_is_told_who_holds_the_home() -> None:
    script = "from deployments.home import exclusive_home\nwith exclusive_home(): print('in')"
    with exclusive_home():
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert f"held by process {os.getpid()}" in second.stderr
    with exclusive_home():
        pass


def test_a_second_launcher_is_told_how_to_stop_the_run() -> None:
    script = "from deployments.home import exclusive_home\nwith exclusive_home(): print('in')"
    record = StackRecord(pid=os.getpid(), api_url="http://127.0.0.1:1/api", run_id="run-1")
    with exclusive_home(), announced_stack(record):
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "stop it (`repertory stop run-1`)" in second.stderr


def test_the_home_is_free_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="boom"), exclusive_home():
        raise ValueError("boom")
    with exclusive_home():
        pass


def test_a_stack_stands_while_its_launcher_lives(own_home: Path) -> None:
    record = StackRecord(pid=os.getpid(), api_url="http://x/api", run_id="r")
    with announced_stack(record):
        assert standing_stack() == record
    assert standing_stack() is None
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (own_home / "stack.json").write_text(record.model_copy(update={"pid": dead.pid}).model_dump_json())
    assert standing_stack() is None


def test_one_home_one_error_type() -> None:
    with exclusive_home(), pytest.raises(ConfigError, match="set REPERTORY_HOME"), exclusive_home():
        pass
