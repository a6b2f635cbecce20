"""Who can be hit in a run that `repertory up` launched, and with what."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from deployments.prefect_client import PrefectApi
from model_runtime.errors import PrefectError
from tests.integration.test_prefect_lifecycle import Up

FLOWS = ("parent", "runtime", "rollout")
ROLES = (*FLOWS, "trainer", "vllm-api", "vllm-engine", "gateway", "serve", "prefect-server")
OF_THINGS = {
    "store": ("down", "refuse", "slow", "silent"),
    "store-daemon": ("killed",),
    "prefect-database": ("locked",),
}
"""What may be broken that is none of the run's processes, and how."""
ENDS_THE_LAUNCH = ("parent", "serve")
"""Roles whose death ends `repertory up`: the run goes on by `--resume`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, `after_s` after the one before it."""

    role: str
    how: str  # SIGKILL, SIGTERM, SIGSTOP, or one of OF_THINGS
    after_s: float
    stop_s: float = 0.0  # how long it lasts, where it ends by itself

    def __str__(self) -> str:
        lasting = f" for {self.stop_s:.0f} s" if self.stop_s else ""
        return f"{self.role} {self.how}{lasting}"


def schedule(
    seed: int, count: int, *, roles: Sequence[str], hows: Sequence[str], stop_s: float
) -> list[Fault]:
    """The faults of one run, the same for the same seed."""
    draw = random.Random(seed)
    faults = []
    for _ in range(count):
        role = draw.choice(roles)
        how = draw.choice(OF_THINGS.get(role, hows))
        lasts = stop_s if how not in ("SIGKILL", "SIGTERM") else 0.0
        faults.append(Fault(role, how, round(draw.uniform(4.0, 16.0), 1), lasts))
    return faults


def find(up: Up, role: str, draw: random.Random) -> psutil.Process | None:
    """A process that has this role just now; None when there is none."""
    if role in FLOWS:
        return _flow(up, role, draw)
    found = [p for p in up.marked() if _has_role(p, role)]
    return draw.choice(found) if found else None


def _has_role(process: psutil.Process, role: str) -> bool:
    matches: dict[str, Callable[[list[str], str], bool]] = {
        "trainer": lambda argv, _: "model_runtime.trainer" in argv,
        "vllm-api": lambda argv, _: any("api_server" in part for part in argv),
        "vllm-engine": lambda argv, name: name.startswith("VLLM::Engine") or "VLLM::Engine" in " ".join(argv),
        "gateway": lambda argv, _: argv[1:3] == ["-m", "gateway"],
        "serve": lambda argv, _: argv[1:4] == ["-m", "deployments.local", "serve"],
        "prefect-server": lambda argv, _: "prefect server start" in " ".join(argv),
    }
    try:
        argv, name = process.cmdline(), process.name()
    except psutil.Error:
        return False
    if any("guardian.py" in part for part in argv):
        return False
    return bool(argv) and matches[role](argv, name)


def _flow(up: Up, role: str, draw: random.Random) -> psutil.Process | None:
    try:
        stack = json.loads((up.folder / "home" / "stack.json").read_text())
        runs = asyncio.run(PrefectApi(stack["api_url"]).active_runs("run-1"))
    except (PrefectError, OSError, ValueError):
        return None
    # By what they are given: their names are for people, and come when they begin.
    wanted = {
        "parent": lambda run: run.parent_task_run_id is None,
        "runtime": lambda run: "model_id" in run.parameters,
        "rollout": lambda run: run.parent_task_run_id is not None and "model_id" not in run.parameters,
    }[role]
    ids = [str(run.id) for run in runs if wanted(run)]
    draw.shuffle(ids)
    for flow_run_id in ids:
        try:
            return up.flow_process(flow_run_id)
        except (AssertionError, psutil.Error):
            continue
    return None


def hit(process: psutil.Process, how: str) -> bool:
    """False when it was gone already."""
    try:
        process.send_signal(getattr(signal, how))
    except psutil.NoSuchProcess:
        return False
    return True
