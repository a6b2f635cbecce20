"""What goes to a file or a pipe is whole, and hints can be pasted."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from deployments.terminal import FILE_WIDTH, command, console


def test_a_file_gets_whole_lines_whatever_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert console().width == FILE_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert console().width == 70


def test_hints_name_the_command_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "bin" / "repertory"
    installed.parent.mkdir()
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(installed), "up"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert command() == str(installed)
    monkeypatch.setenv("PATH", str(installed.parent))
    assert command() == "repertory"
    monkeypatch.setattr(sys, "argv", ["/somewhere/pytest"])
    assert command() == "repertory"
