"""A real trainer process that kills itself with SIGKILL at a chosen moment: no clean-up, no last words.

Processes come from a fork server that has torch loaded, so that a test can afford many of them.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("update", "export", "checkpoint", "queue read", "journal")
SIGKILLED = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Moment:
    """The `count`-th operation of this kind, before it or after it (an update's: amid it)."""

    kind: str
    count: int
    after: bool


def run_trainer_process(spec: Path, moment: Moment | None, *, timeout_s: float = 120.0) -> int:
    """Run the trainer in a process of its own; its exit code, −9 when it died at the moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["model_runtime.learner", "model_runtime.trainer", __name__])
    process = context.Process(target=_live, args=(str(spec), moment))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the trainer was still running after {timeout_s} s ({moment})")
    assert process.exitcode is not None
    return process.exitcode


def _live(spec: str, moment: Moment | None) -> None:
    from model_runtime.protocol import TrainerSpec
    from model_runtime.trainer import run_trainer

    logging.basicConfig(filename=Path(spec).with_suffix(".log"), level=logging.INFO)
    if moment is not None:
        _arm(moment)
    loaded = TrainerSpec.model_validate_json(Path(spec).read_bytes())
    raise SystemExit(run_trainer(loaded, stop=threading.Event()))


def _arm(moment: Moment) -> None:
    from model_runtime.local_store import LocalStore

    if moment.kind == "update":
        from model_runtime.policy import Policy

        _die_at(Policy, "logprobs", moment, lambda *_, **__: True)
    elif moment.kind == "queue read":
        _die_at(LocalStore, "get", moment, lambda _, key: "/log/" in key)
    else:
        folder = {"export": "/versions/", "checkpoint": "/checkpoints/", "journal": "/batches/"}[moment.kind]
        left = _die_at(LocalStore, "put_if_absent", moment, lambda _, key, __: folder in key)
        _die_at(LocalStore, "put", moment, lambda _, key, __: folder in key, left)


def _die_at(
    owner: Any, name: str, moment: Moment, counts: Callable[..., bool], left: list[int] | None = None
) -> list[int]:
    original = getattr(owner, name)
    left = left if left is not None else [moment.count]

    @functools.wraps(original)
    def dying(*args: Any, **options: Any) -> Any:
        mine = counts(*args, **options)
        left[0] -= mine
        if mine and left[0] == 0 and not moment.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if mine and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
    return left
