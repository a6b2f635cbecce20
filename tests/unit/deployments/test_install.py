"""`deployments/install.sh` with an interpreter that only notes what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERPRETER = """#!/bin/bash
echo "$@" >>"$NOTES"
if [ "$1 $2" = "-m venv" ]; then rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi
"""


class Installer:
    """A project's folder with the installer in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notes = folder / "notes"
        (folder / "deployments").mkdir()
        for name in ("deployments/install.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self._python = folder / "python"
        self._python.write_text(INTERPRETER)
        self._python.chmod(0o755)

    def install(self, device: str) -> list[str]:
        """What the interpreters were asked."""
        self._notes.write_text("")
        given = {"NOTES": str(self._notes), "PYTHON": str(self._python), "REPERTORY_DEVICE": device}
        command = [self.folder / "deployments/install.sh"]
        subprocess.run(command, env=os.environ | given, check=True, capture_output=True, timeout=60)
        return self._notes.read_text().splitlines()


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(tmp_path)


def made(asked: list[str]) -> list[str]:
    return sorted(line for line in asked if "venv --clear" in line)


BOTH = ["-m venv --clear .venv", "-m venv --clear .venv-vllm"]


def test_what_is_up_to_date_is_left_alone(installer: Installer) -> None:
    assert made(installer.install("cpu")) == BOTH
    again = installer.install("cpu")
    assert not [line for line in again if "pip install" in line]
    assert made(again) == []


def test_a_changed_project_is_installed_into_the_same_environments(installer: Installer) -> None:
    installer.install("cpu")
    with (installer.folder / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    asked = installer.install("cpu")
    assert [line for line in asked if "pip install" in line]
    assert made(asked) == []


def test_another_device_gets_environments_without_the_builds_of_the_one_before(installer: Installer) -> None:
    installer.install("cpu")
    assert made(installer.install("cuda")) == BOTH


@pytest.mark.parametrize(
    ("target", "given", "installed", "device"),
    [
        ("run", {}, None, "cpu"),
        ("run", {}, "cuda", "cpu"),
        ("test", {}, None, "cpu"),
        ("doctor", {}, None, "cpu"),
        ("gpu-check", {}, "cpu", "cuda"),
        ("run", {"REPERTORY_DEVICE": "cuda"}, None, "cuda"),
        ("lint", {}, "cpu", "cpu"),
        ("lint", {}, "cuda", "cuda"),
        ("lint", {}, None, "by what the machine has"),
        ("install", {}, "cpu", "by what the machine has"),
    ],
)
def test_what_runs_on_the_cpu_is_installed_for_it_on_every_machine(
    tmp_path: Path, target: str, given: dict[str, str], installed: str | None, device: str
) -> None:
    # Only the installation is wanted: what follows it ends at once, for there is no environment.
    installer = tmp_path / "deployments/install.sh"
    installer.parent.mkdir()
    installer.write_text('#!/bin/bash\necho "${REPERTORY_DEVICE:-by what the machine has}"\n')
    installer.chmod(0o755)
    if installed:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv/device").write_text(f"{installed}\n")
    shutil.copy(ROOT / "Makefile", tmp_path)
    # A make that called these tests hands its own variables down.
    handed_down = {"REPERTORY_DEVICE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}
    outside = {name: value for name, value in os.environ.items() if name not in handed_down}
    command = ["make", "--no-print-directory", "-C", tmp_path, target]
    made = subprocess.run(command, env=outside | given, capture_output=True, text=True, timeout=60)
    assert made.stdout.splitlines()[0] == device
