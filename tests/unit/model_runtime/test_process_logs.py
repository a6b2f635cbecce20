"""Logs of processes: how many lives are kept, and what the environment may say of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from model_runtime.errors import ConfigError
from model_runtime.process_logs import LIVES_ENV, LOOK_ENV, SIZE_ENV, LogLimits, make_room, next_numbered
from model_runtime.processes import ChildProcess


def write(folder: Path, *names: str) -> None:
    """One after another."""
    for name in names:
        path = folder / name
        path.write_text("x")
        os.utime(path, (len(list(folder.iterdir())), len(list(folder.iterdir()))))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_of_each_process_the_last_lives_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIVES_ENV, "3")
    for number in range(1, 10):
        path = next_numbered(tmp_path, "vllm-m-0", digits=3)
        assert path.name == f"vllm-m-0-{number:03d}.log", "no number comes twice"
        write(tmp_path, path.name, f"{path.name}.1")
    assert names(tmp_path) == [f"vllm-m-0-{n:03d}.log{end}" for n in (7, 8, 9) for end in ("", ".1")]


def test_the_logs_of_the_newest_lives_stay_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIVES_ENV, "3")
    for number in range(1, 14):
        path = next_numbered(tmp_path, "vllm-m-0", digits=3)
        path.write_text("x")
        os.utime(path, (1000 - number, 1000 - number))
    assert names(tmp_path) == [f"vllm-m-0-{n:03d}.log" for n in (11, 12, 13)]
    for life in ("9-9", "10-1", "10-2"):
        write(tmp_path, f"gateway-{life}.log")
        os.utime(tmp_path / f"gateway-{life}.log", (0, 0))
    make_room(tmp_path, "gateway", r"\d+-\d+")
    assert [name for name in names(tmp_path) if "gateway" in name] == ["gateway-10-1.log", "gateway-10-2.log"]


def test_the_first_log_begins_in_a_folder_that_is_made_later(tmp_path: Path) -> None:
    assert next_numbered(tmp_path / "logs", "vllm-m-0", digits=3) == tmp_path / "logs/vllm-m-0-001.log"


def test_logs_of_processes_whose_names_begin_alike_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIVES_ENV, "2")
    others = ["vllm-m-0-0-001.log", "vllm-m-0-0-002.log", "vllm-m-001.log", "m-0-trainer-e1-1-1.log"]
    write(tmp_path, *others)
    for _ in range(4):
        write(tmp_path, next_numbered(tmp_path, "vllm-m-0", digits=3).name)
    trainers = [f"m-trainer-e1-1-{n}.log" for n in range(4)] + ["m-trainer-trainer-e1-1-1.log"]
    write(tmp_path, *trainers)
    make_room(tmp_path, "m-trainer", r"e\d+-\d+-\d+")
    mine = ["vllm-m-0-003.log", "vllm-m-0-004.log", "m-trainer-e1-1-3.log", "m-trainer-trainer-e1-1-1.log"]
    assert names(tmp_path) == sorted(others + mine)


def test_by_default_ten_lives_of_64_mib_are_kept() -> None:
    assert LogLimits.read({}) == LogLimits(max_bytes=64 * 2**20, look_every_s=10.0, max_lives=10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (SIZE_ENV, "64MiB"),
        (SIZE_ENV, "1e6"),
        (SIZE_ENV, "-1"),
        (LOOK_ENV, "0"),
        (LOOK_ENV, "nan"),
        (LOOK_ENV, "inf"),
        (LIVES_ENV, "1"),
    ],
)
async def test_a_value_that_is_no_limit_is_refused_with_its_variable_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"{name}: '{value}' is set in the environment; give it .* or more"
    ):
        await ChildProcess.start([sys.executable, "-c", ""], log_path=tmp_path / "x.log")
    assert names(tmp_path) == []
