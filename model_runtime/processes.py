"""Child processes that can't be orphaned, and free ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_runtime.errors import ProcessError
from model_runtime.process_logs import LogLimits

_GUARDIAN = Path(__file__).with_name("guardian.py")
_POLL_INTERVAL_S = 0.05
_GUARDIAN_START_TIMEOUT_S = 30.0
# What the guardian needs beyond the grace: SIGKILL, and reaping what it hit.
_GUARDIAN_STOP_MARGIN_S = 10.0
_TAIL_BYTES = 64 * 1024


class ChildProcess:
    """A command in a session and process group of its own, with its output in a log file.

    A small guardian process stands between this process and the command. When this process ends, however
    it ends, the guardian terminates the command and everything it started; likewise when the command ends
    and leaves processes behind. May be started from any thread and any event loop.
    """

    def __init__(
        self, guardian: subprocess.Popen[bytes], lifeline: socket.socket, log_path: Path, grace_s: float
    ) -> None:
        """Use `start`."""
        self.pid = 0
        self.log_path = log_path
        self._guardian = guardian
        self._lifeline = lifeline
        self._grace_s = grace_s

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        grace_s: float = 10,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start `argv`, appending its output to `log_path`. `env` is its whole environment; None: this
        process's own. `grace_s` lies between SIGTERM and SIGKILL when it is stopped. The file descriptors
        `pass_fds` are open in it under the same numbers.

        Raises ProcessError when there is no such program or its log can't be written, ConfigError for limits
        of logs that are none.
        """
        limits = LogLimits.read()
        if shutil.which(argv[0]) is None:
            raise ProcessError(f"can't run {argv[0]!r}: no such program, or it is not executable")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", str(_GUARDIAN), str(theirs.fileno()), str(grace_s)]
        command += [str(limits.max_bytes), str(limits.look_every_s), *argv]
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with theirs, log_path.open("ab") as log:
                # Popen, not asyncio's: that needs a child watcher, which depends on the loop and its thread.
                guardian = subprocess.Popen(  # noqa: ASYNC220
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=None if env is None else dict(env),
                    cwd=cwd,
                    pass_fds=[theirs.fileno(), *pass_fds],
                    start_new_session=True,
                )
        except OSError as error:
            for end in (ours, theirs):
                end.close()
            raise ProcessError(f"can't run {argv[0]!r} with the log {log_path}: {error}") from error
        ours.setblocking(False)
        child = cls(guardian, ours, log_path, grace_s)
        try:
            child.pid = await child._read_pid()
        except BaseException:
            await child.stop()
            raise
        return child

    @property
    def returncode(self) -> int | None:
        """None while anything of it runs; else its exit code, or −n when signal n ended it."""
        return self._guardian.poll()

    async def wait(self) -> int:
        """Wait until the command and all it started have ended."""
        while (code := self.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._lifeline.close()
        if code == -signal.SIGKILL and self.pid:
            # Perhaps it was the guardian that was killed; then its work is to be done here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return code

    async def stop(self) -> None:
        """SIGTERM to the group, `grace_s`, SIGKILL to what is left. Returns when it has ended; may be
        called again, and goes on by itself if this call is cancelled."""
        with contextlib.suppress(OSError):  # it ended just now
            self._lifeline.shutdown(socket.SHUT_WR)  # the end of the stream is the guardian's order
        try:
            async with asyncio.timeout(self._grace_s + _GUARDIAN_STOP_MARGIN_S):
                await self.wait()
        except TimeoutError:
            self._guardian.kill()  # the command dies with its guardian
            await self.wait()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        return read_tail(self.log_path, lines)

    async def _read_pid(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_GUARDIAN_START_TIMEOUT_S):
                answer = await loop.sock_recv(self._lifeline, 32)
        except TimeoutError as error:
            message = f"the guardian of {self.log_path.name} did not start in {_GUARDIAN_START_TIMEOUT_S:g} s"
            raise ProcessError(message) from error
        if not answer:
            raise ProcessError(f"the guardian of {self.log_path.name} did not start:\n{self.log_tail()}")
        return int(answer)


def read_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a file; empty when there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


# A port given out is not given again soon: its server may not listen yet.
_recent_ports: deque[int] = deque(maxlen=64)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nothing on `host` listens on. Another process may still take it before its user does."""
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        if port not in _recent_ports:
            _recent_ports.append(port)
            return port
