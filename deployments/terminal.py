"""What the commands print on, and how they name themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console

FILE_WIDTH = 160
"""Columns where nobody's window sets them, so that a file or a pipe gets whole tables."""


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console of the window's width, or of FILE_WIDTH where the output goes to no window."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
    return Console(stderr=stderr, quiet=quiet, width=width)


def command() -> str:
    """How this command was called, to be pasted into a hint: `repertory` where the shell finds it by that."""
    called = Path(sys.argv[0])
    if called.name != "repertory":  # python -m, or the library
        return "repertory"
    found = shutil.which("repertory")
    if found is not None and os.path.realpath(found) == os.path.realpath(called):
        return "repertory"
    return shlex.quote(sys.argv[0])
