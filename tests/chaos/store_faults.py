"""What may go wrong with a run's store: the way to it, by a proxy, and its server's own daemons."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.chaos.victims import Fault
from tests.fakes import read_env_file
from tests.faulty_proxy import FaultyProxy

RESTART_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Daemons:
    """The processes a store's server consists of, and the command that brings back those that are gone."""

    names: Sequence[str]
    restart: Sequence[str]

    def kill(self, draw: random.Random) -> str:
        """One of them, with SIGKILL; which."""
        victims = [p for p in psutil.process_iter(["name"]) if p.info["name"] in self.names]
        assert victims, f"no process is named any of {', '.join(self.names)}"
        victim = draw.choice(victims)
        victim.kill()
        return f"{victim.info['name']} (pid {victim.pid})"


class BreakableStore:
    """One fault at a time, each for its seconds; `tick` ends it."""

    def __init__(
        self, url: str, *, proxy: FaultyProxy | None = None, daemons: Daemons | None = None, seed: int = 0
    ) -> None:
        self.url, self._proxy, self._daemons = url, proxy, daemons
        self._draw = random.Random(seed)
        self._ends_at: float | None = None
        self._down = self._killed = False
        self._restart: subprocess.Popen[bytes] | None = None

    def break_it(self, fault: Fault) -> str:
        """What was broken, for people. Mends first what was broken before."""
        self.mend()
        what = self._kill_a_daemon() if fault.role == "store-daemon" else self._break_the_way(fault)
        self._ends_at = time.monotonic() + fault.stop_s
        return what

    def _break_the_way(self, fault: Fault) -> str:
        assert self._proxy is not None, "the way to a store can be broken only at a proxy"
        if fault.how == "down":
            self._proxy.down()
            self._down = True
        elif fault.how == "refuse":
            self._proxy.refuse_share = 0.1
        elif fault.how == "slow":
            self._proxy.bytes_per_s = 1e6
        else:
            self._proxy.silent = True
        return str(fault)

    def _kill_a_daemon(self) -> str:
        assert self._daemons is not None, "which daemons the store has was not said"
        killed = self._daemons.kill(self._draw)
        self._killed = True
        return f"killed {killed}"

    def tick(self) -> None:
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            self.mend(wait=False)

    def mend(self, *, wait: bool = True) -> None:
        """`wait`: until daemons that were killed are back, which takes some seconds more."""
        self._ends_at = None
        if self._proxy is not None:
            self._proxy.heal()
            if self._down:
                self._proxy.up()
        if self._killed:
            assert self._daemons is not None
            self._restart = subprocess.Popen(self._daemons.restart, stdout=subprocess.DEVNULL)
        self._down = self._killed = False
        if wait and self._restart is not None:
            status, self._restart = self._restart.wait(RESTART_LIMIT_S), None
            assert status == 0, f"the store's daemons did not come back: exit {status}"


@contextmanager
def store_of(
    folder: Path, env_file: Path | None, seed: int, *, daemons: Sequence[str] = (), restart: str = ""
) -> Iterator[BreakableStore]:
    """A local folder, or a prefix of a real bucket behind a proxy."""
    if env_file is None:
        yield BreakableStore(str(folder / "runs"))
        return
    values = read_env_file(env_file)
    with FaultyProxy(values["AWS_ENDPOINT_URL"], seed=seed) as proxy, contextlib.ExitStack() as stack:
        here = values | {"AWS_ENDPOINT_URL": proxy.url, "AWS_ENDPOINT_URL_S3": proxy.url}
        stack.enter_context(patch.dict(os.environ, here))
        url = f"s3://{values['S3_TEST_BUCKET']}/chaos-{uuid.uuid4().hex[:8]}"
        server = Daemons(daemons, shlex.split(restart)) if daemons else None
        store = BreakableStore(url, proxy=proxy, daemons=server, seed=seed)
        stack.callback(store.mend)
        yield store
