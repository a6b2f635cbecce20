"""RolloutRuntime: the vLLM servers of one model, started, watched and stopped."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from model_runtime.config import ModelConfig
from model_runtime.errors import (
    BackendRejectedError,
    BackendUnavailableError,
    ProcessError,
    PublishError,
    RolloutServerError,
)
from model_runtime.llm_client import LLMServerClient
from model_runtime.process_logs import next_numbered
from model_runtime.processes import ChildProcess, free_port, read_tail
from model_runtime.protocol import ServerLoad
from model_runtime.vllm_command import base_name, check_paths, server_argv, server_env
from model_runtime.vllm_environment import VLLMEnvironment, check_build, find_vllm

_HEALTH_INTERVAL_S = 0.2
_PORT_ATTEMPTS = 3
_STOP_GRACE_S = 10.0
_MAX_BACKOFF_S = 30.0
# A server that has been ready for this long has its budget of restarts back.
_STABLE_AFTER_S = 600.0
_LOAD_INTERVAL_S = 5.0
_LOAD_TIMEOUT_S = 2.0

# What vLLM's API process says of an engine process that a signal ended, with its exit code or before there is
# one; and what an engine or worker says itself when it fails.
_KILLED_ENGINE = re.compile(r"Failed core proc\(s\): \{[^}]*: -\d+")
_ENDED_ENGINE = "Failed core proc(s): {}"
_FAILED_BY_ITSELF = "failed to start."

logger = logging.getLogger(__name__)

# What vLLM says, and what helps.
_HINTS = (
    ("KV cache is needed", "raise rollout.kv_cache_bytes or set rollout.max_model_len"),
    ("address already in use", "another process took the port"),
    ("Free memory on device", "lower rollout.gpu_memory_fraction, or leave the device to this server"),
)


class ReplicaServer:
    """One vLLM server. `url` and `client` change with each attempt; `ready` means that it answers and
    holds every live version."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.api_key = secrets.token_urlsafe(32)
        self.url = ""
        self.ready = False
        self.attempt = 0
        self.child: ChildProcess | None = None
        self.restart_reason: str | None = None
        self.load = ServerLoad()  # as it last said
        self._client: LLMServerClient | None = None

    def __repr__(self) -> str:
        return f"ReplicaServer({self.replica_id!r}, {self.url!r}, ready={self.ready}, attempt={self.attempt})"

    @property
    def client(self) -> LLMServerClient:
        if self._client is None:
            raise RolloutServerError(f"server {self.replica_id} was not started")
        return self._client

    @property
    def pid(self) -> int | None:
        """The server's process, while there is one."""
        return None if self.child is None else self.child.pid

    def request_restart(self, reason: str) -> None:
        """Take it out of service and have `RolloutRuntime.watch` restart it."""
        self.ready = False
        self.restart_reason = reason

    async def connect(self, url: str) -> None:
        """Point `client` at a new address."""
        await self.disconnect()
        self.url = url
        self._client = LLMServerClient(url, self.api_key)

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()


class RolloutRuntime:
    """The servers of one model.

    `logs` gets one file per server and attempt. `gpu_ids` are shared out in order, tensor_parallel_size to
    each server. A server is probed with a one-token generation every `probe_interval_s`; it is hung when
    that takes longer than `probe_timeout_s` while it processes no tokens for anyone else either.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        logs: Path,
        gpu_ids: list[int] | None = None,
        probe_interval_s: float = 10.0,
        probe_timeout_s: float = 45.0,
    ) -> None:
        self.model = model
        self.replicas = [ReplicaServer(f"{model.model_id}-{i}") for i in range(model.rollout.num_replicas)]
        self._logs = logs
        self._gpu_ids = gpu_ids or []
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s

    @property
    def base_name(self) -> str:
        """Name the base model is served under. Version 0 where there will never be an adapter; else a
        name no request of an agent is sent to."""
        return base_name(self.model)

    @property
    def load(self) -> ServerLoad:
        """How busy the servers are, as of a few seconds ago."""
        loads = [replica.load for replica in self.replicas if replica.ready]
        return ServerLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            kv_cache_use=max((u for load in loads if (u := load.kv_cache_use) is not None), default=None),
            num_preemptions=sum(load.num_preemptions for load in loads),
        )

    async def start(self) -> None:
        """Start all servers in parallel. Returns when each has answered a real generation of the base;
        raises RolloutServerError, with all stopped, when one did not."""
        environment = find_vllm()
        check_build(environment, model_id=self.model.model_id, num_gpus=self.model.rollout.n_gpus)
        check_paths(self.model)
        starts = (self._start_replica(i, environment) for i in range(len(self.replicas)))
        try:
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        except BaseException:
            await self.stop()
            raise
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self.stop()
            raise failures[0]
        for replica in self.replicas:
            replica.ready = True

    async def watch(
        self, on_restarted: Callable[[ReplicaServer], Awaitable[None]], on_change: Callable[[], None]
    ) -> None:
        """Restart servers that died, hang or were asked to restart. Runs until cancelled.

        A restarted server is ready only after `on_restarted` returned (it reloads the live versions).
        `on_change` is called at each change of a server's readiness. Raises RolloutServerError when a server
        used up its restarts.
        """
        watchers = [
            asyncio.create_task(self._watch_replica(i, on_restarted, on_change))
            for i in range(len(self.replicas))
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all servers. May be called again."""
        for replica in self.replicas:
            replica.ready = False
        await asyncio.gather(*(self._stop_replica(replica) for replica in self.replicas))

    # -------------------------------------------------------------- one server

    async def _start_replica(self, index: int, environment: VLLMEnvironment) -> None:
        """What fails by itself fails again, and is told at once; what was killed, or lost its port, is tried
        again."""
        ports, restarts = 1, 0
        while True:
            try:
                await self._start_attempt(index, environment)
                return
            except RolloutServerError as error:
                replica = self.replicas[index]
                killed = _was_killed(replica.child)
                await self._stop_replica(replica)
                if killed and restarts < self.model.rollout.max_restarts:
                    restarts += 1
                    logger.warning("%s; starting it again (%d)", str(error).partition("\n")[0], restarts)
                    await asyncio.sleep(backoff_s(restarts))
                elif "address already in use" in str(error).lower() and ports < _PORT_ATTEMPTS:
                    ports += 1
                else:
                    raise

    async def _start_attempt(self, index: int, environment: VLLMEnvironment) -> None:
        replica, rollout = self.replicas[index], self.model.rollout
        replica.attempt += 1
        replica.restart_reason = None
        port = free_port(rollout.host)
        replica.child = await ChildProcess.start(
            server_argv(self.model, environment, port=port),
            env=server_env(self.model, api_key=replica.api_key, gpu_ids=self._gpus_of(index)),
            log_path=next_numbered(self._logs, f"vllm-{replica.replica_id}", digits=3),
            grace_s=_STOP_GRACE_S,
        )
        await replica.connect(f"http://{_in_url(rollout.host)}:{port}")
        await self._until_ready(replica)

    async def _until_ready(self, replica: ReplicaServer) -> None:
        limit_s = self.model.rollout.start_timeout_s
        deadline = time.monotonic() + limit_s
        while not await replica.client.health():
            self._require_running(replica)
            if time.monotonic() > deadline:
                raise self._start_failure(replica, f"did not become healthy within {limit_s:g} s")
            await asyncio.sleep(_HEALTH_INTERVAL_S)
        try:
            await self._generate_one(replica, timeout_s=max(1.0, deadline - time.monotonic()))
        except (BackendRejectedError, BackendUnavailableError) as error:
            raise self._start_failure(replica, f"is healthy but does not generate: {error}") from error

    def _require_running(self, replica: ReplicaServer) -> None:
        if replica.child is None or (code := replica.child.returncode) is not None:
            code = None if replica.child is None else replica.child.returncode
            raise self._start_failure(replica, f"ended with exit code {code} before it was ready")

    def _start_failure(self, replica: ReplicaServer, what: str) -> RolloutServerError:
        log = replica.child.log_path if replica.child else None
        return RolloutServerError(
            f"vLLM server {replica.replica_id} of model {self.model.model_id!r} {what}{describe_log(log)}"
        )

    async def _generate_one(self, replica: ReplicaServer, *, timeout_s: float) -> None:
        await replica.client.generate(
            model=self.base_name,
            token_ids=[0],  # in every vocabulary
            sampling={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            request_id=f"probe-{secrets.token_hex(8)}",
            timeout_s=timeout_s,
        )

    async def _stop_replica(self, replica: ReplicaServer) -> None:
        if replica.child is not None:
            await replica.child.stop()
        await replica.disconnect()

    def _gpus_of(self, index: int) -> list[int]:
        size = self.model.rollout.tensor_parallel_size
        return self._gpu_ids[index * size : (index + 1) * size]

    # -------------------------------------------------------------- watching

    async def _watch_replica(
        self,
        index: int,
        on_restarted: Callable[[ReplicaServer], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        replica = self.replicas[index]
        restarts = 0
        while True:
            ready_since = time.monotonic()
            reason = await self._until_unfit(replica)
            if time.monotonic() - ready_since > _STABLE_AFTER_S:
                restarts = 0
            replica.ready = False
            on_change()
            while not replica.ready:
                restarts += 1
                if restarts > self.model.rollout.max_restarts:
                    raise self._budget_used_up(replica, reason)
                reason = await self._restart(index, on_restarted, delay_s=backoff_s(restarts)) or reason
            on_change()

    async def _until_unfit(self, replica: ReplicaServer) -> str:
        """Wait until the server died, hangs, or was asked to restart; returns which."""
        next_probe = time.monotonic() + self._probe_interval_s
        next_load = time.monotonic() + _LOAD_INTERVAL_S
        while True:
            if replica.child is None or replica.child.returncode is not None:
                code = replica.child.returncode if replica.child else None
                return f"ended with exit code {code}"
            if replica.restart_reason is not None:
                return replica.restart_reason
            if time.monotonic() >= next_probe:
                if await self._is_hung(replica):
                    return f"generated nothing for {self._probe_timeout_s:g} s"
                next_probe = time.monotonic() + self._probe_interval_s
            if time.monotonic() >= next_load:
                await self._read_load(replica)
                next_load = time.monotonic() + _LOAD_INTERVAL_S
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _read_load(self, replica: ReplicaServer) -> None:
        try:
            replica.load = await replica.client.load(timeout_s=_LOAD_TIMEOUT_S)
        except (BackendRejectedError, BackendUnavailableError):
            return  # the probe says whether it hangs; what it last said stands

    async def _is_hung(self, replica: ReplicaServer) -> bool:
        before = await self._tokens_processed(replica)
        try:
            await self._generate_one(replica, timeout_s=self._probe_timeout_s)
        except BackendRejectedError:
            return False  # it answers
        except BackendUnavailableError:
            # A long queue may have held the probe up while others made progress.
            after = await self._tokens_processed(replica)
            return after is None or after == before
        return False

    async def _tokens_processed(self, replica: ReplicaServer) -> float | None:
        try:
            return await replica.client.num_tokens_processed()
        except (BackendRejectedError, BackendUnavailableError):
            return None

    async def _restart(
        self, index: int, on_restarted: Callable[[ReplicaServer], Awaitable[None]], *, delay_s: float
    ) -> str | None:
        """One restart. Returns None and leaves the server ready, or returns why it failed."""
        replica = self.replicas[index]
        await self._stop_replica(replica)
        await asyncio.sleep(delay_s)
        try:
            await self._start_replica(index, find_vllm())
            await on_restarted(replica)
        except (ProcessError, PublishError, BackendRejectedError, BackendUnavailableError) as error:
            return str(error)
        replica.ready = True
        return None

    def _budget_used_up(self, replica: ReplicaServer, reason: str) -> RolloutServerError:
        log = replica.child.log_path if replica.child else None
        return RolloutServerError(
            f"vLLM server {replica.replica_id} of model {self.model.model_id!r} failed after "
            f"{self.model.rollout.max_restarts} restarts (rollout.max_restarts); last: {reason}"
            f"{describe_log(log)}"
        )


# ------------------------------------------------------------------ small parts


def backoff_s(restarts: int) -> float:
    """Wait before the n-th restart: none, 1, 2, 4 … 30 s."""
    return 0.0 if restarts <= 1 else min(_MAX_BACKOFF_S, 2.0 ** (restarts - 2))


def _was_killed(child: ChildProcess | None) -> bool:
    """Did a signal end the server, or one of its engine processes, rather than a fault of its own?"""
    if child is None or child.returncode is None:
        return False
    tail = child.log_tail(400)
    engine_was = _KILLED_ENGINE.search(tail) or (_ENDED_ENGINE in tail and _FAILED_BY_ITSELF not in tail)
    return child.returncode < 0 or bool(engine_was)


def describe_log(log: Path | None) -> str:
    """The cause found in a server's log, what helps against it, and the log's last lines."""
    if log is None:
        return ""
    tail = read_tail(log, 400)
    # vLLM's own last words only point further up.
    causes = [
        line
        for line in re.findall(r"(?:^|\s)(\w*(?:Error|Exception): .+)$", tail, re.MULTILINE)
        if "Engine core initialization failed" not in line
    ]
    hints = [f" ({hint})" for sign, hint in _HINTS if sign.lower() in tail.lower()]
    cause = f": {causes[-1]}" if causes else ""
    last_lines = "\n".join(tail.splitlines()[-20:])
    return f"{cause}{''.join(hints)}\nThe end of its log {log}:\n{last_lines}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
