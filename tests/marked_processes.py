"""The processes that a launch of a test has started, however far down."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

MARK = "LAUNCH_TEST_MARK"
"""Environment variable that a test sets for what it launches, and that all below inherit; no name that a
process of ours keeps from its children."""


def marked(mark: str, folder: Path) -> list[psutil.Process]:
    """Those alive that bear the mark, or write their output to a file below the launch's folder: vLLM's
    engines write their title over their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.environ().get(MARK) == mark or _output(process).is_relative_to(folder)
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _output(process: psutil.Process) -> Path:
    return Path(os.readlink(f"/proc/{process.pid}/fd/1"))
