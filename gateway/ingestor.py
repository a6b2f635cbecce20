"""Makes finished executions durable: journal first, then one shard per model's log, then done.

Everything finished within one commit interval is written together (a group commit). The journal entry holds
the exact bytes of every shard, so whatever dies in between, the next start of the gateway writes the rest,
and writing twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential, wait_random

from gateway.journal import Append, Forget, SessionJournal
from gateway.journal_events import ExecutionKey, ExecutionWritten, of_execution
from gateway.slices import in_slices
from model_runtime.config import GatewayConfig
from model_runtime.errors import (
    CorruptObjectError,
    InvalidTrajectoryError,
    ObjectExistsError,
    StoreError,
    StoreUnavailableError,
)
from model_runtime.layout import RunLayout, number_in
from model_runtime.store import Store
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import MemberKey, Settlement, SettlementStatus, Shard, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedExecution:
    """One execution of a workflow at its end, with all its chains of all its agents."""

    member: MemberKey
    status: SettlementStatus
    reason: str
    train: Mapping[str, bool]  # model_id → its rows may be trained
    trajectories: tuple[Trajectory, ...]
    mode: Literal["train", "eval"] = "train"
    session_id: str = ""  # of an evaluation

    @property
    def key(self) -> ExecutionKey:
        return self.member, self.mode, self.session_id


class JournalEntry(msgspec.Struct, frozen=True):
    """Shards on their way into the logs: key → exact bytes."""

    shards: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """Where an execution is, once durable. `seq`: the number of the shards that hold it, the same in every
    model's log (for an evaluation: of the commit). `rows_in`: those with its trajectories."""

    seq: int
    rows_in: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Pending:
    """An execution on its way. `done`: where it is once durable, or why it never will be."""

    execution: FinishedExecution
    done: asyncio.Future[Written]

    @property
    def has_failed(self) -> bool:
        return self.done.done() and self.done.exception() is not None


@dataclass(slots=True)
class _Commit:
    """Executions that are written together."""

    began_at: float
    pending: dict[ExecutionKey, _Pending] = field(default_factory=dict)
    num_rows: int = 0
    num_bytes: int = 0

    def add(self, execution: FinishedExecution) -> _Pending:
        pending = _Pending(execution, asyncio.get_running_loop().create_future())
        self.pending[execution.key] = pending
        self.num_rows += len(execution.trajectories)
        self.num_bytes += sum(t.nbytes for t in execution.trajectories)
        return pending


class TrajectoryIngestor:
    """Writes finished executions of one life of the gateway.

    `ingest` returns when all of an execution is durable. While the store fails, commits are retried in the
    background for ever, in order; a caller gives up after `ingest_timeout_s` with the store's last error,
    and may ask again: an execution that is still on its way is joined, not written twice.
    """

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        *,
        writer: str,
        trainable_models: Sequence[str],
        config: GatewayConfig,
        sessions: SessionJournal | None = None,
        ingest_timeout_s: float = 45.0,
        retry_after_s: float = 0.2,
    ) -> None:
        self._store = store
        self._layout = layout
        self.writer = writer
        self._sessions = sessions or SessionJournal()
        self._models = tuple(trainable_models)
        self._config = config
        self._ingest_timeout_s = ingest_timeout_s
        self._retry_after_s = retry_after_s
        self._collecting: _Commit | None = None
        self._writing: _Commit | None = None
        self._changed = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None
        self._next_commit = 0
        self._next_log_seq = 0
        self._next_eval_seq: Counter[str] = Counter()
        self._unclaimed: dict[ExecutionKey, asyncio.Future[Written]] = {}

    async def start(self) -> None:
        """Write what earlier lives left in the journal, then accept work. Raises StoreError, and
        CorruptObjectError naming a journal entry that can't be read."""
        num_entries = await asyncio.to_thread(self._redrive)
        if num_entries:
            logger.warning("wrote %d journal entries of an earlier gateway to the logs", num_entries)
        await asyncio.to_thread(self._find_next_numbers)
        self._task = asyncio.create_task(self._run(), name="ingestor")

    async def ingest(self, execution: FinishedExecution) -> Written:
        """Where the execution is, once it is durable.

        Raises StoreUnavailableError when it isn't within the limit, InvalidTrajectoryError when it can never
        be written, ObjectExistsError when another process writes under this writer's name.
        """
        if self._task is None or self._closing:
            raise StoreUnavailableError(
                f"execution {execution.member.workflow_id}: the ingestor is not running"
            )
        key = execution.key
        done = self._unclaimed.pop(key, None) or self._join(execution).done
        try:
            async with asyncio.timeout(self._ingest_timeout_s):
                return await asyncio.shield(done)
        except TimeoutError:
            self._unclaimed[key] = done  # it may yet be written, and must not be written twice
            raise StoreUnavailableError(
                f"execution {execution.member.workflow_id} is not durable after "
                f"{self._ingest_timeout_s:.0f} s and still being retried: {self._last_error}"
            ) from self._last_error

    async def close(self) -> None:
        """Write what is pending, once more if the store fails, and stop. What is in the journal by then is
        written by the next start."""
        self._closing = True
        self._changed.set()
        if self._task is None:
            return
        try:
            async with asyncio.timeout(self._ingest_timeout_s):
                await asyncio.shield(self._task)
        except TimeoutError:
            raise StoreUnavailableError(
                f"finished work is not durable after {self._ingest_timeout_s:.0f} s: {self._last_error}"
            ) from self._last_error
        finally:
            self._task.cancel()

    # ------------------------------------------------------------------ collecting

    def _join(self, execution: FinishedExecution) -> _Pending:
        key = execution.key
        for commit in (self._writing, self._collecting):
            if commit is not None and key in commit.pending and not commit.pending[key].has_failed:
                return commit.pending[key]
        if self._collecting is None:
            self._collecting = _Commit(began_at=time.monotonic())
        pending = self._collecting.add(execution)
        self._changed.set()
        return pending

    async def _collected(self) -> _Commit | None:
        """The next commit once it is due; None when closing and nothing is left."""
        while True:
            self._changed.clear()
            commit = self._collecting
            if commit is None and self._closing:
                return None
            left = None if commit is None else self._time_left(commit)
            if commit is not None and (left is None or left <= 0):
                self._collecting = None
                return commit
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _time_left(self, commit: _Commit) -> float:
        config = self._config
        full = commit.num_rows >= config.commit_max_rows or commit.num_bytes >= config.commit_max_bytes
        if full or self._closing:
            return 0.0
        return commit.began_at + config.commit_interval_s - time.monotonic()

    # ------------------------------------------------------------------ writing

    async def _run(self) -> None:
        """One commit after another, until closed."""
        while (commit := await self._collected()) is not None:
            self._writing = commit
            try:
                await self._write(list(commit.pending.values()))
            except Exception as error:  # fails its own callers, never the next commit
                cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                for pending in commit.pending.values():
                    _fail(pending, cause)
            finally:
                self._writing = None

    async def _write(self, pending: list[_Pending]) -> None:
        """Journal entry, shards, then the entry goes. The numbers move on only when all is durable, so that
        a log never has a gap."""
        shards, pending = await asyncio.to_thread(self._encode_all, pending)
        executions = [p.execution for p in pending]
        rows_in = await asyncio.to_thread(self._rows_in, executions, shards)
        if shards:
            await self._note_writing(executions, rows_in, min(shards))
            entry_key = self._layout.journal_entry(self.writer, self._next_commit)
            await self._persistently(entry_key, msgspec.msgpack.encode(JournalEntry(shards)))
            async with asyncio.TaskGroup() as writes:
                for key, data in shards.items():
                    writes.create_task(self._persistently(key, data))
            await self._delete_entry(entry_key)
        has_training = any(e.mode == "train" for e in executions)
        seq = self._next_log_seq if has_training else self._next_commit
        self._next_commit += bool(shards)
        self._next_log_seq += has_training
        self._next_eval_seq.update(_evaluated(executions))
        async for p, keys in in_slices(zip(pending, rows_in, strict=True)):
            p.done.set_result(Written(seq, keys))

    def _encode_all(self, pending: list[_Pending]) -> tuple[dict[str, bytes], list[_Pending]]:
        """The shards, and the executions in them: one that can't be encoded is refused alone."""
        try:
            return self._encode([p.execution for p in pending]), pending
        except Exception:
            good = [p for p in pending if self._encodes(p)]
            return self._encode([p.execution for p in good]), good

    def _encodes(self, pending: _Pending) -> bool:
        try:
            self._encode([pending.execution])
        except Exception as error:
            reason = f"execution {pending.execution.member.workflow_id} can't be encoded: {error}"
            failure = InvalidTrajectoryError(reason.encode(errors="replace").decode())
            pending.done.get_loop().call_soon_threadsafe(_fail, pending, failure)
            return False
        return True

    def _encode(self, executions: list[FinishedExecution]) -> dict[str, bytes]:
        """Key → bytes of every shard these executions need."""
        shards: dict[str, bytes] = {}
        training = [e for e in executions if e.mode == "train"]
        if training:
            for model_id in self._models:
                key = self._layout.model(model_id).log_shard(self.writer, self._next_log_seq)
                shards[key] = encode_shard(_log_shard(model_id, training))
        evaluated: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in (t for e in executions if e.mode == "eval" for t in e.trajectories):
            evaluated[trajectory.model_id].append(trajectory)
        for model_id, rows in evaluated.items():
            key = self._layout.model(model_id).eval_shard(self.writer, self._next_eval_seq[model_id])
            shards[key] = encode_shard(Shard(trajectories=tuple(rows)))
        return shards

    def _rows_in(
        self, executions: Sequence[FinishedExecution], shards: Mapping[str, bytes]
    ) -> list[tuple[str, ...]]:
        """For each the keys of the shards with its trajectories; one string for all that are in one."""
        known = {key: key for key in shards}
        return [
            tuple(known[key] for key in map(self._shard_key_of(e), _models_of(e)) if key in known)
            for e in executions
        ]

    def _shard_key_of(self, execution: FinishedExecution) -> Callable[[str], str]:
        """Model → key of the shard this commit writes for such executions."""
        if execution.mode == "train":
            return lambda model_id: self._layout.model(model_id).log_shard(self.writer, self._next_log_seq)
        return lambda model_id: self._layout.model(model_id).eval_shard(
            self.writer, self._next_eval_seq[model_id]
        )

    async def _note_writing(
        self, executions: Sequence[FinishedExecution], rows_in: Sequence[tuple[str, ...]], shard_key: str
    ) -> None:
        """Tell the next process of this epoch where to look for these executions."""
        seq = self._next_log_seq
        async for e, keys in in_slices(zip(executions, rows_in, strict=True)):
            owner = of_execution(e.key)
            note = ExecutionWritten(
                e.member, e.mode, e.status, shard_key, self.writer, seq, keys, e.session_id
            )
            self._sessions.write(Forget(owner), Append(owner, note))
        await self._sessions.durable()

    async def _persistently(self, key: str, data: bytes) -> None:
        """Create the object, whatever it takes. Raises ObjectExistsError: then another writes our name."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            wait=wait_exponential(self._retry_after_s, max=10.0) + wait_random(0, self._retry_after_s),
            reraise=True,
        ):
            with attempt:
                try:
                    await asyncio.to_thread(self._store.put_if_absent, key, data)
                except StoreError as error:
                    self._last_error = error
                    logger.warning("could not write %s, trying again: %s", key, error)
                    raise

    async def _delete_entry(self, key: str) -> None:
        try:
            await asyncio.to_thread(self._store.delete, key)
        except StoreError as error:  # harmless: the next start writes the same bytes again
            logger.warning("journal entry %s stays although its shards are written: %s", key, error)

    # ------------------------------------------------------------------ starting

    def _redrive(self) -> int:
        """Write the shards of every journal entry, oldest first; the number of entries."""
        num_entries = 0
        for writer in self._store.children(self._layout.journal_writers()):
            for key in self._store.list(f"{self._layout.journal_writers()}/{writer}"):
                for shard_key, data in self._read_entry(key).shards.items():
                    self._store.put_if_absent(shard_key, data)
                self._store.delete(key)
                num_entries += 1
        return num_entries

    def _read_entry(self, key: str) -> JournalEntry:
        try:
            return msgspec.msgpack.decode(self._store.get(key), type=JournalEntry)
        except msgspec.MsgspecError as error:
            raise CorruptObjectError(f"{self._store.uri(key)}: not a journal entry: {error}") from error

    def _find_next_numbers(self) -> None:
        """Where this writer goes on; 0 unless a process of the same name wrote before. The oldest
        of its shards may be gone, the newest never is."""
        for model_id in self._models:
            log = self._layout.model(model_id).log_writers()
            self._next_log_seq = max(self._next_log_seq, self._next_number(log))
        for model_id in self._store.children(self._layout.models()):
            self._next_eval_seq[model_id] = self._next_number(self._layout.model(model_id).eval_writers())

    def _next_number(self, writers: str) -> int:
        names = self._store.children(f"{writers}/{self.writer}")
        return max((number_in(name) + 1 for name in names), default=0)


def _fail(pending: _Pending, error: Exception) -> None:
    logger.error("execution %s can't be written: %s", pending.execution.member.workflow_id, error)
    if not pending.done.done():
        pending.done.set_exception(error)
        pending.done.exception()  # seen: its caller may have given up by now


def _may_pass(error: BaseException) -> bool:
    """Other bytes under our name stay; anything else that ails a store may pass."""
    return isinstance(error, StoreError) and not isinstance(error, ObjectExistsError)


def _models_of(execution: FinishedExecution) -> list[str]:
    return sorted({t.model_id for t in execution.trajectories})


def _evaluated(executions: Sequence[FinishedExecution]) -> set[str]:
    return {t.model_id for e in executions if e.mode == "eval" for t in e.trajectories}


def _log_shard(model_id: str, executions: Sequence[FinishedExecution]) -> Shard:
    """One model's part: its trajectories, and a settlement of every execution, those without rows too."""
    rows: list[Trajectory] = []
    settlements = []
    for execution in executions:
        own = [t for t in execution.trajectories if t.model_id == model_id]
        rows.extend(own)
        settlements.append(
            Settlement(
                member=execution.member,
                status=execution.status,
                num_rows=dict(Counter(t.agent_id for t in own)),
                train=execution.train.get(model_id, False),
                reason=execution.reason,
                settled_at=time.time(),
            )
        )
    return Shard(trajectories=tuple(rows), settlements=tuple(settlements))
