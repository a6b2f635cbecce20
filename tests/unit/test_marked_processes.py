"""What a launch has started is found by the mark it bears, or by the log it writes to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.marked_processes import MARK, marked

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_process_is_found_by_its_mark_or_by_its_log(tmp_path: Path) -> None:
    folder, mark = tmp_path / "launch", tmp_path.name
    folder.mkdir()
    plain = {key: value for key, value in os.environ.items() if key != MARK}
    with (folder / "engine.log").open("wb") as log, (tmp_path / "other.log").open("wb") as other:
        started = [
            subprocess.Popen(SLEEP, env=plain | {MARK: mark}, stdout=other),
            subprocess.Popen(SLEEP, env=plain, stdout=log),
            subprocess.Popen(SLEEP, env=plain, stdout=other),
            subprocess.Popen(SLEEP, env=plain | {MARK: "another launch"}, stdout=other),
        ]
    try:
        found = {process.pid for process in marked(mark, folder)}
        assert found == {started[0].pid, started[1].pid}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert marked(mark, folder) == []
