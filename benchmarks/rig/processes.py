"""Processes under measurement: each on the core of the measured, watched by its CPU time and memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil

START_LIMIT_S = 120.0

# One core for what is measured, one for what loads it. With a single core they share it.
_CORES = sorted(os.sched_getaffinity(0))
MEASURED_CORE, LOAD_CORE = _CORES[-1], _CORES[0]


class Measured:
    """A server's process and its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        return sum(_cpu_seconds(p.pid) for p in self._tree())

    def memory_bytes(self) -> int:
        return sum(p.memory_info().rss for p in self._tree())

    def num_descriptors(self) -> int:
        return sum(p.num_fds() for p in self._tree())

    def _tree(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    """Of all threads, ended ones too, to the nanosecond: /proc counts in ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) of Linux makes of a process id


def use_load_core() -> None:
    """This process, and what it starts from now on, keeps off the measured core."""
    os.sched_setaffinity(0, {LOAD_CORE})


def start_python(stack: ExitStack, target: Callable[..., None], *args: Any, measured: bool) -> Measured:
    """A function in a process of its own, until the stack closes."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    stack.callback(process.join, 10)
    stack.callback(process.terminate)
    assert process.pid is not None
    os.sched_setaffinity(process.pid, {MEASURED_CORE if measured else LOAD_CORE})
    return Measured(process.pid)


def start_command(
    stack: ExitStack, command: Sequence[str | Path], *, env: dict[str, str] | None = None, log: Path
) -> Measured:
    """A command on the measured core, until the stack closes."""
    process = subprocess.Popen(
        command, env=os.environ | (env or {}), stdout=log.open("wb"), stderr=subprocess.STDOUT
    )
    stack.callback(_end, process)
    os.sched_setaffinity(process.pid, {MEASURED_CORE})
    return Measured(process.pid)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def wait_until_up(url: str) -> None:
    """Any answer at all will do."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(START_LIMIT_S):
        while True:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
