"""The log files of processes: one per life, so many lives of each process, so large each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from model_runtime.errors import ConfigError

SIZE_ENV = "REPERTORY_LOG_LIMIT_BYTES"
"""A log that grew beyond this begins anew; the one before it is kept beside it, as `….log.1`."""
LOOK_ENV = "REPERTORY_LOG_LOOK_S"
"""Seconds between two looks at the size."""
LIVES_ENV = "REPERTORY_LOG_LIVES"
"""Lives of each process of which logs are kept, the present one included."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class LogLimits:
    """What this process's environment says of the logs of those it starts."""

    max_bytes: int
    look_every_s: float
    max_lives: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> LogLimits:
        """Raises ConfigError naming the variable, its value and what is allowed."""
        return cls(
            max_bytes=_number(environ, SIZE_ENV, int, 64 * 2**20, least=4096, what="whole bytes"),
            look_every_s=_number(environ, LOOK_ENV, float, 10.0, least=0.01, what="seconds"),
            max_lives=_number(environ, LIVES_ENV, int, 10, least=2, what="a whole number"),
        )


def _number(
    environ: Mapping[str, str],
    name: str,
    kind: Callable[[str], Number],
    default: Number,
    *,
    least: Number,
    what: str,
) -> Number:
    given = environ.get(name)
    if not given:
        return default
    with suppress(ValueError):  # told as any other value that is none
        value = kind(given)
        if least <= value < float("inf"):
            return value
    raise ConfigError(f"{name}: {given!r} is set in the environment; give it {what}, {least} or more")


def make_room(folder: Path, process: str, life: str) -> None:
    """Before one more life of a process begins: remove the logs of its oldest ones, so that with the new one
    there are as many as are kept.

    They are named `<process>-<life>.log`, where `life` is a regular expression: no log of another process,
    whose name may begin alike, may fit it. Of two lives the later one has the higher numbers: a machine's
    clock may be set back.
    """
    named = re.compile(rf"{re.escape(process)}-({life})\.log")
    ended: list[tuple[list[int], Path]] = []
    for path in folder.glob("*.log"):
        if match := named.fullmatch(path.name):
            ended.append(([int(number) for number in re.findall(r"\d+", match[1])], path))
    for _, path in sorted(ended)[: -(LogLimits.read().max_lives - 1)]:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.1").unlink(missing_ok=True)


def next_numbered(folder: Path, process: str, *, digits: int) -> Path:
    """`<process>-<n>.log` with a number that no log there has had, of whichever life."""
    make_room(folder, process, rf"\d{{{digits},}}")
    named = re.compile(rf"{re.escape(process)}-(\d{{{digits},}})\.log")
    taken = [int(match[1]) for path in folder.glob("*.log") if (match := named.fullmatch(path.name))]
    return folder / f"{process}-{max(taken, default=0) + 1:0{digits}d}.log"
