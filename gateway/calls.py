"""One generation for one model call, however often a client asks for it.

A client whose connection broke, or whose patience ran out, sends the same request again. The second request
joins the first while it runs and is answered from the record just after. A generation nobody waits for is
cancelled: at once, or, where the client says of itself that it repeats requests, when it has not come back.
What is sampled meanwhile is recorded only once somebody waits for it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from model_runtime.errors import ConflictError, InvalidRequestError

Reply = TypeVar("Reply")

REMEMBERED_FOR_S = 30.0
RETURN_WITHIN_S = 5.0
"""The official SDKs come back after 0.5 s, 1 s, 2 s, …, each time up to a quarter sooner."""
MAX_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """What makes two requests the same call.

    `key` is the client's Idempotency-Key, or the agent and the body. `fresh` requests say of themselves
    that they are no repetition: two of them with one body are two samples. `repeats`: the client is one that
    asks again when it gave up."""

    key: str
    body_digest: bytes
    fresh: bool = False
    repeats: bool = False


Claimed = Callable[[], Awaitable[object]]
"""Returns once somebody waits for the call."""


@dataclass(slots=True, eq=False)
class _Call(Generic[Reply]):
    task: asyncio.Task[Reply]
    body_digest: bytes
    waiters: int = 0
    claimed: asyncio.Event = field(default_factory=asyncio.Event)  # set while somebody waits
    giving_up: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Finished(Generic[Reply]):
    """What is remembered of a call: no more than another request for it needs."""

    reply: Reply
    body_digest: bytes
    finished_at: float


class CallLedger(Generic[Reply]):
    """The calls of one session that run or just finished. Failures are not remembered."""

    def __init__(
        self,
        *,
        recorded: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recorded` returns when what finished calls left in the record may be spoken of."""
        self._recorded = recorded
        self._clock = clock
        self._calls: dict[str, _Call[Reply]] = {}  # that run
        self._finished: OrderedDict[str, _Finished[Reply]] = OrderedDict()  # the first to finish first
        self._running: set[asyncio.Task[Reply]] = set()
        self._num_attended = 0
        self._is_stopped = False
        self.num_joined = 0
        self.ended_at = float("-inf")  # when the last of them did, however it ended

    @property
    def num_running(self) -> int:
        return len(self._running) + self._num_attended

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Something else is answered that may take long: it counts as running and is not remembered."""
        self._num_attended += 1
        try:
            yield
        finally:
            self._num_attended -= 1
            self.ended_at = self._clock()

    async def run(
        self, identity: CallIdentity, start: Callable[[Claimed], Coroutine[Any, Any, Reply]]
    ) -> Reply:
        """The reply of this call, started only if it neither runs nor has just finished. Before it records
        what it did, it awaits what `start` is given.

        Raises what the call raised; ConflictError if it was stopped because its session ended."""
        self.forget_old()
        earlier = None if identity.fresh else self._earlier(identity)
        if earlier is not None:
            while isinstance(earlier, _Call) and earlier.task.cancelling():
                await self._let_go(earlier)
                earlier = self._earlier(identity)
            self.num_joined += earlier is not None
        if isinstance(earlier, _Finished):
            reply = earlier.reply
        else:
            reply = await self._wait(earlier or self._start(identity, start), repeats=identity.repeats)
        # Not in the call's own task: a client that hangs up now must find this reply when it asks again.
        if self._recorded is not None:
            await self._recorded()
        return reply

    def restore(self, identity: CallIdentity, reply: Reply) -> None:
        """Remember a call that an earlier process finished."""
        self._remember(identity, reply, self._clock())

    def forget_old(self) -> None:
        """Let go of calls that finished too long ago to be asked for again."""
        horizon = self._clock() - REMEMBERED_FOR_S
        finished = self._finished
        while finished:
            oldest = next(iter(finished))
            if len(finished) <= MAX_REMEMBERED and finished[oldest].finished_at >= horizon:
                return
            del finished[oldest]

    async def stop_all(self) -> None:
        """Cancel what runs and wait until it has let go of its reservations."""
        self._is_stopped = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _earlier(self, identity: CallIdentity) -> _Call[Reply] | _Finished[Reply] | None:
        """The same call, asked for before. Raises InvalidRequestError for another under the same name."""
        earlier = self._calls.get(identity.key) or self._finished.get(identity.key)
        if earlier is None:
            return None
        if earlier.body_digest != identity.body_digest:
            raise InvalidRequestError(
                "this Idempotency-Key was used with another request", param="Idempotency-Key"
            )
        return earlier

    async def _let_go(self, given_up: _Call[Reply]) -> None:
        """Wait until a call that was given up is over: until then its chain is reserved, and the same call
        would begin another. Raises ConflictError if it was stopped because the session ended."""
        await asyncio.wait({given_up.task})
        if self._is_stopped:
            raise _session_ended()

    def _start(
        self, identity: CallIdentity, start: Callable[[Claimed], Coroutine[Any, Any, Reply]]
    ) -> _Call[Reply]:
        claimed = asyncio.Event()
        task = asyncio.create_task(start(claimed.wait))
        call: _Call[Reply] = _Call(task, identity.body_digest, claimed=claimed)
        self._calls[identity.key] = call
        self._finished.pop(identity.key, None)
        self._running.add(task)
        task.add_done_callback(lambda task: self._finish(identity, call, task))
        return call

    async def _wait(self, call: _Call[Reply], *, repeats: bool) -> Reply:
        call.waiters += 1
        call.claimed.set()
        if call.giving_up is not None:
            call.giving_up.cancel()
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if call.task.cancelled() and not (caller and caller.cancelling()):
                raise _session_ended() from None
            raise
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                call.claimed.clear()
                patience_s = RETURN_WITHIN_S if repeats else 0.0
                call.giving_up = asyncio.get_running_loop().call_later(patience_s, call.task.cancel)

    def _finish(self, identity: CallIdentity, call: _Call[Reply], task: asyncio.Task[Reply]) -> None:
        self._running.discard(task)
        self.ended_at = now = self._clock()
        if self._calls.get(identity.key) is not call:
            return  # a later one of that name is what is asked for again
        del self._calls[identity.key]
        if not (task.cancelled() or task.exception() is not None):
            self._remember(identity, task.result(), now)

    def _remember(self, identity: CallIdentity, reply: Reply, finished_at: float) -> None:
        self._finished.pop(identity.key, None)
        self._finished[identity.key] = _Finished(reply, identity.body_digest, finished_at)


def _session_ended() -> ConflictError:
    return ConflictError("the session ended while this call was running")
