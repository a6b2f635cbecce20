"""The gateway as a managed task: one process, restarted when it dies, at one address for the whole run."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from model_runtime.config import RunConfig
from model_runtime.documents import DesiredState
from model_runtime.errors import ConfigError, ProcessError
from model_runtime.process_logs import make_room
from model_runtime.processes import ChildProcess, free_port
from model_runtime.workspace import Workspace
from tasks.gateway_admin import ALIVE_EVERY_S, GatewayAdmin

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "gateway")
START_LIMIT_S = 90.0
"""Longest wait for a new process to answer /health, beyond the outage of the store that it waits out;
importing it on a busy machine takes seconds."""
HEALTH_POLL_S = 0.2
GRACE_S = 8.0
"""Between SIGTERM and SIGKILL: it flushes what is finalized."""
LIFE_POLL_S = 0.5
SILENT_LIMIT_S = 60.0
"""A process that does not answer /health for this long is hung."""
BACKLOG = 2048
"""Connections that may wait while no gateway runs; as many as uvicorn lets wait."""
STABLE_S = 300.0
"""A process that lived this long earns its predecessor's restart back."""


class GatewayProcess:
    """Starts, watches and restarts the gateway of one epoch. Every life is a new incarnation, hence a new
    writer of the logs.

    The listening sockets are held here and handed on: nobody takes a port while no gateway runs, and who
    connects then is served by the next process instead of being refused.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        epoch: int,
        workspace: Workspace,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`command` is replaced in tests."""
        self.config = config.gateway
        self.run_id = run_id
        self.epoch = epoch
        self.incarnation = 0
        self.port = config.gateway.port or free_port(config.gateway.host)
        self.admin_port = config.gateway.admin_port or free_port(config.gateway.admin_host)
        self.admin = GatewayAdmin(self.url)
        self.failed_models: set[str] = set()  # for good; every life of the gateway is told
        self._run_config = config
        self._logs = workspace.logs()
        self._config_file = workspace.root / f"gateway-{epoch}.json"
        self._command = command
        self._listeners: list[socket.socket] = []
        self._asking: asyncio.Task[bool] | None = None  # whether it is healthy
        self._child: ChildProcess | None = None
        self._desired: tuple[DesiredState, str] | None = None
        self._stopping = False

    @property
    def url(self) -> str:
        """Of the control API. Agents hear theirs from the session they work in."""
        return self.config.admin_url(self.admin_port)

    async def begin(self) -> None:
        """The first start, again if the process is killed on the way: what fails by itself is told at
        once."""
        while True:
            try:
                return await self.start()
            except ProcessError as error:
                was_killed = self._child is not None and (self._child.returncode or 0) < 0
                if not was_killed or self.incarnation > self.config.max_restarts:
                    raise
                log.warning("%s\nStarting it again", error)

    async def start(self) -> None:
        """Start a process and wait until it answers. Raises ProcessError with the end of its log."""
        if self.incarnation == 0:
            self._listen("gateway.port", self.config.host, self.port)
            self._listen("gateway.admin_port", self.config.admin_host, self.admin_port)
            self._config_file.write_text(self._run_config.model_dump_json(indent=1))
        self.incarnation += 1
        make_room(self._logs, "gateway", r"\d+-\d+")
        self._child = await ChildProcess.start(
            self._argv(),
            log_path=self._logs / f"gateway-{self.epoch}-{self.incarnation}.log",
            grace_s=GRACE_S,
            pass_fds=[listener.fileno() for listener in self._listeners],
        )
        limit_s = START_LIMIT_S + self._run_config.store.max_outage_s
        until = time.monotonic() + limit_s
        while not await self._is_healthy(self._child):
            if self._child.returncode is not None:
                raise ProcessError(self._death("died while it started"))
            if time.monotonic() > until:
                await self._child.stop()
                raise ProcessError(self._death(f"did not answer {self.url}/health within {limit_s:.0f} s"))
            await asyncio.sleep(HEALTH_POLL_S)

    async def _is_healthy(self, child: ChildProcess) -> bool:
        """Does the process answer? One that is dead never does, though its sockets still take connections."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.admin.healthy())
        death = asyncio.create_task(child.wait())
        await asyncio.wait({self._asking, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        await asyncio.gather(death, return_exceptions=True)
        return self._asking.done() and self._asking.result()

    def _listen(self, setting: str, host: str, port: int) -> None:
        """Raises ConfigError for a port that is taken."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{setting}: {host}:{port} can't be listened on ({error.strerror}); "
                "give another port, or leave it out for a free one"
            ) from error
        listener.listen(BACKLOG)

    async def want(self, state: DesiredState, reason: str) -> None:
        """Tell the gateway what the parent wants; a restarted one is told again."""
        self._desired = (state, reason)
        await self.admin.want(state, reason=reason)

    async def supervise(self) -> None:
        """Restart the process whenever it dies, until `stop`. Raises ProcessError when the restarts are
        used up."""
        restarts = 0
        while True:
            assert self._child is not None, "start() comes first"
            born = time.monotonic()
            await self._end_of_life(self._child)
            if self._stopping:
                return
            restarts = 1 if time.monotonic() - born > STABLE_S else restarts + 1
            message = self._death("died")
            if restarts > self.config.max_restarts:
                raise ProcessError(f"{message}\nIt was restarted {self.config.max_restarts} times; giving up")
            log.warning("%s\nRestarting it (%d of %d)", message, restarts, self.config.max_restarts)
            await asyncio.sleep(min(0.2 * 2**restarts, 5.0))
            await self._restart()

    async def _end_of_life(self, child: ChildProcess) -> None:
        """Wait until the process dies; one that is silent for too long is ended here. Meanwhile it is told
        that the parent lives, and which models have failed."""
        heard = time.monotonic()
        told = heard - ALIVE_EVERY_S
        while child.returncode is None:
            if self._stopping or await self._is_healthy(child):
                heard = time.monotonic()
                if not self._stopping and heard - told >= ALIVE_EVERY_S:
                    told = heard
                    await self.admin.alive("parent", failed_models=self.failed_models)
            elif time.monotonic() - heard > SILENT_LIMIT_S:
                log.warning(
                    "the gateway did not answer %s/health for %.0f s; ending it", self.url, SILENT_LIMIT_S
                )
                await child.stop()
            await asyncio.sleep(LIFE_POLL_S)
        await child.wait()

    async def _restart(self) -> None:
        try:
            await self.start()
        except ProcessError as error:
            log.warning("%s", error)
            assert self._child is not None
            await self._child.stop()
            return  # its death is counted by the caller
        if self._desired is not None:
            await self.admin.want(self._desired[0], reason=self._desired[1])

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace; `supervise` returns. Idempotent."""
        self._stopping = True
        if self._child is not None:
            await self._child.stop()
        for listener in self._listeners:
            listener.close()
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.admin.close()

    def _argv(self) -> list[str]:
        return [
            *self._command,
            *("--run-id", self.run_id),
            *("--epoch", str(self.epoch)),
            *("--incarnation", str(self.incarnation)),
            *("--port", str(self.port)),
            *("--admin-port", str(self.admin_port)),
            *("--listen-fd", str(self._listeners[0].fileno())),
            *("--admin-listen-fd", str(self._listeners[1].fileno())),
            *("--config", str(self._config_file)),
        ]

    def _death(self, what: str) -> str:
        assert self._child is not None
        code, tail = self._child.returncode, self._child.log_tail()
        return f"the gateway {what} (exit code {code}, log {self._child.log_path}):\n{tail}"


@task(
    name="gateway",
    task_run_name="gateway on port {process.port}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def keep_gateway(process: GatewayProcess) -> None:
    """Supervise the gateway until it is stopped; fails when its restarts are used up."""
    await process.supervise()
