"""ParameterSynchronizer: puts a committed version into service on a model's rollout servers.

    fetch    the adapter is brought here; its hashes, tensors and values are verified
    room     versions nobody uses any more leave, until a server has a slot free
    load     every ready replica loads `<model>@v<k>` beside the versions it serves: no pause, no flush
    verify   each replica lists the name, and gives the canary the logprobs the trainer gave it
    flip     the gateway acknowledges it for new requests

Until the flip nothing changes for anybody; a failure before it leaves the old version serving. A replica
that fails on its own leaves the ready set and is restored in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from model_runtime import adapters
from model_runtime.canary import check_canary, tolerance
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.documents import CanaryProbe, VersionDocument
from model_runtime.errors import (
    AdapterLoadError,
    BackendRejectedError,
    BackendUnavailableError,
    PublishError,
    StoreError,
)
from model_runtime.layout import ModelLayout, number_in, served_name
from model_runtime.llm_client import LLMServerClient
from model_runtime.store import Store
from model_runtime.versions import Changed, VersionTracker

logger = logging.getLogger(__name__)

_R = TypeVar("_R")


class Replica(Protocol):
    """What is used of a rollout server (rollout_server.ReplicaServer)."""

    ready: bool

    @property
    def replica_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def client(self) -> LLMServerClient: ...

    def request_restart(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLimits:
    """Limits of one publish, in seconds."""

    fetch_s: float = 300.0
    room_s: float = 60.0
    attempt_s: float = 30.0  # one call to one server
    attempts: int = 3
    retry_wait_s: float = 0.5  # longest wait before the second attempt; doubles
    load_s: float = 120.0  # loading on one server, all attempts
    verify_s: float = 60.0  # readback and canary on one server, all attempts
    flip_s: float = 30.0
    restores: int = 3  # of a failed replica, before its server is restarted
    restore_pause_s: float = 2.0  # between them

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Those that outlast a gateway which waits for its store, and a model call of full length."""
        flip_s = cls().flip_s + config.store.max_outage_s
        return cls(room_s=config.gateway.request_timeout_s + flip_s, flip_s=flip_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """How a version got into service."""

    version: int
    step: int
    timings_s: Mapping[str, float]  # phase → seconds, and `total`
    replicas: tuple[str, ...]  # those that serve it
    failed_replicas: Mapping[str, str] = field(default_factory=dict)  # replica → why it left the ready set
    canary_max_diff: float | None = None  # None: nothing to compare with
    num_bytes: int = 0

    def as_row(self) -> dict[str, object]:
        return {
            "version": self.version,
            "step": self.step,
            **_columns(self.timings_s),
            "replicas": list(self.replicas),
            "failed_replicas": dict(self.failed_replicas),
            "canary_max_diff": self.canary_max_diff,
            "num_bytes": self.num_bytes,
            "at": time.time(),
        }


class ParameterSynchronizer:
    """Publishes versions of one model, one at a time.

    `replicas` is the rollout runtime's own list. `flip(version)` returns when the gateway has acknowledged
    the version. `record(row)` keeps a publish in the metrics and may block: it is called in a thread.
    `base_served`: a frozen model without an adapter; its version 0 is the base, under the same
    kind of name, and nothing is loaded. `before_load(version)` is awaited before the servers load: a test
    makes a sync slow with it.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        store: Store,
        layout: ModelLayout,
        folder: Path,
        replicas: Sequence[Replica],
        versions: VersionTracker,
        record: Callable[[Mapping[str, object]], None],
        flip: Callable[[int], Awaitable[None]],
        limits: SyncLimits = SyncLimits(),
        before_load: Callable[[int], Awaitable[None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._store = store
        self._layout = layout
        self._folder = folder
        self._replicas = replicas
        self._versions = versions
        self._record = record
        self._flip = flip
        self._limits = limits
        self._before_load = before_load
        self._on_change = on_change
        self._turn = asyncio.Lock()  # of one publish, from first to last
        self._lock = asyncio.Lock()  # of whoever changes what servers hold
        self._holdings: dict[str, _Holding] = {}
        self._documents: dict[int, VersionDocument] = {}
        self._inflight: Mapping[int, int] | None = None
        self._idle_dropped = Changed()
        self._reported: int | None = None
        self._restoring: set[asyncio.Task[None]] = set()
        self.base_served = model.kind == "frozen" and model.adapter_path is None

    # ------------------------------------------------------------------ what others ask for

    async def publish(
        self, version: int, *, columns: Mapping[str, object] = MappingProxyType({})
    ) -> PublishReport:
        """Put a committed version into service. Publishing the published version again does nothing.
        `columns` are noted in its row.

        Raises PublishError (or StoreError, CorruptObjectError when the version can't be read); the version
        before it keeps serving and the call may be repeated.
        """
        async with self._turn:
            return await self._publish_in_turn(version, columns)

    async def _publish_in_turn(self, version: int, columns: Mapping[str, object]) -> PublishReport:
        clock = _Clock()
        if version == self._reported:
            return PublishReport(
                version=version, step=0, timings_s=clock.done(), replicas=self._serving(version)
            )
        if self._versions.published is not None and version < self._versions.published:
            raise PublishError(
                f"{self._name(version)}: v{self._versions.published} is published; versions only rise"
            )
        try:
            document = await self._prepare(version, clock)
            async with self._lock:
                report = await self._publish(version, document, clock)
                self._reported = version
        except PublishError as error:
            await self._note(
                {
                    "version": version,
                    "error": str(error),
                    **_columns(clock.done()),
                    **columns,
                    "at": time.time(),
                }
            )
            raise
        await self._note({**report.as_row(), **columns})
        return report

    async def restore(self, replica: Replica) -> None:
        """Load and verify every live version on a server that has just started, before it counts as ready.
        Raises PublishError when it can't."""
        async with self._lock:
            self._holdings[replica.replica_id] = _Holding(replica.attempt)
            for version in self._versions.live:
                await self._load(replica, version)
                await self._verify(replica, version)

    async def unload_idle(self, inflight: Mapping[int, int]) -> None:
        """Drop the live versions that are neither published nor in `inflight` (version → requests), which
        must come from an answer to a renewal of the announced version: an older one may miss requests
        that began since."""
        self._inflight = inflight
        if not self._lock.locked():  # a publish under way does it itself, or the next answer brings it back
            async with self._lock:
                await self._drop_idle()
            self._idle_dropped.notify()

    def serves(self, replica: Replica, version: int) -> bool:
        """Whether this life of the replica has the version loaded and verified."""
        holding = self._holdings.get(replica.replica_id)
        return holding is not None and holding.attempt == replica.attempt and version in holding.versions

    async def close(self) -> None:
        """End the background restores."""
        tasks = list(self._restoring)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ publish, phase by phase

    async def _prepare(self, version: int, clock: _Clock) -> VersionDocument | None:
        """Without the lock: servers that come back meanwhile are restored, and who cancels this waits for
        none of them."""
        async with _limited(self._limits.fetch_s, f"{self._name(version)}: fetching it"):
            document = await self._fetch(version)
        clock.lap("fetch")
        async with _limited(
            self._limits.room_s, f"{self._name(version)}: waiting for older versions to leave"
        ):
            await self._make_room(version)
        clock.lap("room")
        return document

    async def _publish(self, version: int, document: VersionDocument | None, clock: _Clock) -> PublishReport:
        if self._before_load is not None:
            await self._before_load(version)
            clock.lap("delay")
        ready = {replica.replica_id: replica for replica in self._replicas if replica.ready}
        if not ready:
            raise PublishError(f"{self._name(version)}: no rollout server of {self._model.model_id} is ready")
        loaded, failed = await _on_each(ready, ready, lambda replica: self._load(replica, version))
        clock.lap("load")
        verified, unverified = await _on_each(ready, loaded, lambda replica: self._verify(replica, version))
        clock.lap("verify")
        failed |= unverified
        if not verified:
            await self._unload(version, ready.values())
            raise next(iter(failed.values()))
        self._versions.add_live(version)
        for replica_id, error in failed.items():
            self._leave_ready_set(ready[replica_id], error)
        for replica in self._replicas:
            if replica.ready and replica.replica_id not in ready:
                self._leave_ready_set(replica, PublishError(f"came back while v{version} was being loaded"))
        await self._go_live(version)
        clock.lap("flip")
        return PublishReport(
            version=version,
            step=document.step if document else 0,
            timings_s=clock.done(),
            replicas=tuple(verified),
            failed_replicas={replica_id: str(error) for replica_id, error in failed.items()},
            canary_max_diff=max((diff for diff in verified.values() if diff is not None), default=None),
            num_bytes=document.num_bytes if document else 0,
        )

    async def _fetch(self, version: int) -> VersionDocument | None:
        if self.base_served:
            return None
        read = asyncio.to_thread(adapters.read_version, self._store, self._layout, version, self._folder)
        self._documents[version] = document = await read
        return document

    async def _make_room(self, version: int) -> None:
        """Wait until a server can hold one version more. What is in flight is never evicted: its requests
        would go on with another version's weights."""
        while version not in self._versions.live and len(self._versions.live) >= self._max_live:
            async with self._lock:
                await self._drop_idle()
            if len(self._versions.live) >= self._max_live:
                await self._idle_dropped.wait()

    async def _load(self, replica: Replica, version: int) -> None:
        """Raises AdapterLoadError. A version this replica has verified before stays as it is: requests
        may be using it."""
        if self.base_served or self.serves(replica, version):
            return
        name = served_name(self._model.model_id, version)
        path = str(adapters.version_folder(self._folder, version))
        limit_s = self._limits.attempt_s
        async with self._on_server(replica, f"loading {name}", self._limits.load_s):
            async for attempt in self._attempts():
                with attempt:
                    if name in await replica.client.list_models(timeout_s=limit_s):
                        # From an attempt whose answer was lost: never verified, so not to be trusted.
                        await replica.client.unload_adapter(name, timeout_s=limit_s)
                    await replica.client.load_adapter(name, path, timeout_s=limit_s)

    async def _verify(self, replica: Replica, version: int) -> float | None:
        """Readback and canary; the largest difference on the canary, None without one. Raises
        AdapterLoadError or CanaryMismatchError."""
        name = served_name(self._model.model_id, version)
        document = self._documents.get(version)
        diff = None
        async with self._on_server(replica, f"verifying {name}", self._limits.verify_s):
            async for attempt in self._attempts():
                with attempt:
                    listed = await replica.client.list_models(timeout_s=self._limits.attempt_s)
                    if name not in listed:
                        raise AdapterLoadError(
                            f"{replica.replica_id} does not list {name} after loading it, but {listed}"
                        )
                    diff = await self._probe(replica, name, document.canary if document else ())
        holding = self._holdings.get(replica.replica_id)
        if holding is None or holding.attempt != replica.attempt:
            holding = self._holdings[replica.replica_id] = _Holding(replica.attempt)
        holding.versions.add(version)
        return diff

    async def _probe(self, replica: Replica, name: str, canary: Iterable[CanaryProbe]) -> float | None:
        diffs = []
        for probe in canary:
            served = await replica.client.next_token_logprobs(
                model=name,
                prompt_ids=probe.prompt_ids,
                token_ids=probe.token_ids,
                cache_salt=uuid.uuid4().hex,  # no cached prefix, of whatever weights, can answer for these
                timeout_s=self._limits.attempt_s,
            )
            diffs.append(
                check_canary(
                    probe, served, tolerance=tolerance(self._model), what=f"{name} on {replica.replica_id}"
                )
            )
        return max(diffs, default=None)

    async def _go_live(self, version: int) -> None:
        """From here on renewals name the new version. When the gateway's answer does not come it stays
        announced: it is whole, and a repeated publish only has to wait for the answer."""
        self._inflight = None  # counted before the flip: requests of the old version may have begun since
        self._versions.announce(version)
        await self._flip(version)
        self._versions.acknowledge(version)

    async def _note(self, row: Mapping[str, object]) -> None:
        try:
            await asyncio.to_thread(self._record, row)
        except StoreError as error:  # what it tells of has happened all the same
            logger.warning("%s: its row in the metrics is lost: %s", row["version"], error)

    # ------------------------------------------------------------------ versions that leave

    async def _drop_idle(self) -> None:
        if self._inflight is None:
            return
        kept = (self._versions.published, self._versions.announced)
        idle = [v for v in self._versions.live if v not in kept and not self._inflight.get(v)]
        for version in idle:
            self._versions.remove_live(version)  # renewals stop naming it before the servers do
            await self._unload(version, self._replicas)
            self._documents.pop(version, None)
        if idle:
            await asyncio.to_thread(self._remove_old_files, self._versions.live)

    async def _unload(self, version: int, replicas: Iterable[Replica]) -> None:
        if self.base_served:
            return
        name = served_name(self._model.model_id, version)

        async def one(replica: Replica) -> None:
            holding = self._holdings.get(replica.replica_id)
            if holding is not None:
                holding.versions.discard(version)
            try:
                await replica.client.unload_adapter(name, timeout_s=self._limits.attempt_s)
            except (BackendRejectedError, BackendUnavailableError) as error:
                logger.warning("%s: %s was not unloaded: %s", replica.replica_id, name, error)

        await asyncio.gather(*(one(replica) for replica in replicas))

    def _remove_old_files(self, live: Sequence[int]) -> None:
        """Local copies of versions older than the newest live one, and what a killed process left of one."""
        for path in [*self._folder.glob("v*"), *self._folder.glob(".v*-*")]:
            version = number_in(path.name.partition("-")[0])
            if version not in live and version < max(live):
                shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------ replicas that fail

    def _leave_ready_set(self, replica: Replica, error: PublishError) -> None:
        logger.warning("%s leaves the ready set and is restored: %s", replica.replica_id, error)
        replica.ready = False
        self._on_change()
        task = asyncio.create_task(self._restore_until_ready(replica, replica.attempt))
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)

    async def _restore_until_ready(self, replica: Replica, attempt: int) -> None:
        """Load what is live again; if that keeps failing have the server restarted. A server that was
        restarted meanwhile comes back by `restore` like any other."""
        trouble = ""
        for _ in range(self._limits.restores):
            if replica.attempt != attempt:
                return
            try:
                await self.restore(replica)
            except PublishError as error:
                trouble = str(error)
                logger.warning("%s is still out of the ready set: %s", replica.replica_id, error)
                await asyncio.sleep(self._limits.restore_pause_s)
            else:
                replica.ready = replica.attempt == attempt
                self._on_change()
                return
        if replica.attempt == attempt:
            replica.request_restart(f"could not be restored: {trouble}")

    # ------------------------------------------------------------------ small parts

    @property
    def _max_live(self) -> int:
        return self._model.rollout.max_live_versions

    def _name(self, version: int) -> str:
        return served_name(self._model.model_id, version)

    def _serving(self, version: int) -> tuple[str, ...]:
        return tuple(replica.replica_id for replica in self._replicas if self.serves(replica, version))

    def _attempts(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(BackendUnavailableError),
            stop=stop_after_attempt(self._limits.attempts),
            wait=wait_random_exponential(multiplier=self._limits.retry_wait_s, max=5),
            reraise=True,
        )

    @contextlib.asynccontextmanager
    async def _on_server(self, replica: Replica, what: str, seconds: float) -> AsyncIterator[None]:
        """Bound work on one server, and say of every failure where it was."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise AdapterLoadError(f"{replica.replica_id}: {what} took longer than {seconds:g} s") from None
        except (BackendRejectedError, BackendUnavailableError) as error:
            raise AdapterLoadError(f"{replica.replica_id}: {what}: {error}") from error


async def _on_each(
    replicas: Mapping[str, Replica], ids: Iterable[str], work: Callable[[Replica], Awaitable[_R]]
) -> tuple[dict[str, _R], dict[str, PublishError]]:
    """Do the same on all of these replicas at once: results and failures by replica id."""
    done: dict[str, _R] = {}
    failed: dict[str, PublishError] = {}

    async def one(replica_id: str) -> None:
        try:
            done[replica_id] = await work(replicas[replica_id])
        except PublishError as error:
            failed[replica_id] = error

    async with asyncio.TaskGroup() as group:
        for replica_id in ids:
            group.create_task(one(replica_id))
    return done, failed


@contextlib.asynccontextmanager
async def _limited(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PublishError(f"{what} took longer than {seconds:g} s") from None


@dataclass(slots=True)
class _Holding:
    """What one life of a server has loaded and verified."""

    attempt: int
    versions: set[int] = field(default_factory=set)


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self._laps[phase] = now - self._last
        self._last = now

    def done(self) -> dict[str, float]:
        return {**self._laps, "total": time.monotonic() - self._began}


def _columns(timings_s: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase}_s": round(seconds, 6) for phase, seconds in timings_s.items()}
