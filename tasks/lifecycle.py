"""How a flow run learns that it should stop, and how it stops others.

Prefect's own paths are not enough for runs of days: the cascade from parent to child is a slow poll, and the
runner stops watching for cancellations after an outage of the server. So every long flow watches its own
state, its parent's and its runner, and the parent cancels its children itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled, Cancelling

log = logging.getLogger(__name__)

T = TypeVar("T")

RUNNER_POLL_S = 1.0
"""Between two looks at the parent process."""
STATE_POLL_S = 4.0
"""Between two looks at the states of this run and its parent."""
MAX_CLEANUPS = 3
CALL_LIMIT_S = 10.0
"""Longest one call to the API may take before this round is given up."""

_ACTIVE = [
    t
    for t in StateType
    if t not in (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
]
_NOT_STARTED = (StateType.SCHEDULED, StateType.PAUSED)


# ---------------------------------------------------------------------------------------------- watching


@dataclass(frozen=True, slots=True)
class Stopped:
    """The watch ended the work; `reason` says what it saw."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """The work ended by itself."""

    value: T


async def run_watched(work: Coroutine[Any, Any, T]) -> Finished[T] | Stopped:
    """Run `work` until it ends or this flow run should stop; then cancel it and wait for its cleanup."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(stop_asked())
    told = False
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Finished(working.result())
        return Stopped(watching.result())
    except BaseException as error:
        told = told_to_stop(error)
        raise
    finally:
        for task in (watching, working):
            # The runner's SIGTERM may have cancelled every task already; once more would break off a cleanup.
            if not task.cancelling():
                task.cancel()
        await to_the_end(lambda: _all_done(watching, working))
        if told:
            confirm_cancelled()


async def _all_done(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s ended with %r", task.get_name(), task.exception())  # raised or reported elsewhere


async def to_the_end(cleanup: Callable[[], Awaitable[None]]) -> None:
    """Run an idempotent cleanup to its end, from its beginning again each time it is stopped meanwhile.

    Shielding does not do: the runner's SIGTERM cancels every task of the loop, the shielded ones too, and it
    may come after our own watch has begun to stop the work.
    """
    for _ in range(MAX_CLEANUPS):
        try:
            return await cleanup()
        except BaseException as error:
            if not told_to_stop(error):
                raise
            log.info("the cleanup was told to stop; beginning it again")
    await cleanup()


def told_to_stop(error: BaseException) -> bool:
    """Does this error say that somebody ended the work, rather than that the work went wrong?

    Prefect's handler of SIGTERM raises TerminationSignal wherever the main thread stands: while the event
    loop waits, every task is then cancelled; in the middle of a task's step, that task alone ends with it,
    in a group of errors if it stood in a task group.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(told_to_stop(inner) for inner in error.exceptions)
    return isinstance(error, (asyncio.CancelledError, TerminationSignal))


async def stop_asked() -> str:
    """Wait until this flow run should stop; the reason: cancelled, parent ended, or runner died."""
    own_id: str | None = this_run.id
    while own_id is None:  # called as a plain function: nobody but the caller can stop it
        await asyncio.Event().wait()
    parent_id = this_run.parent_flow_run_id
    watchers = [
        asyncio.ensure_future(_runner_died()),
        asyncio.ensure_future(_states_say_stop(own_id, parent_id)),
    ]
    try:
        done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in watchers:
            task.cancel()


async def _runner_died() -> str:
    runner = os.getppid()
    while os.getppid() == runner:  # noqa: ASYNC110 - nothing tells us of it
        await asyncio.sleep(RUNNER_POLL_S)
    return f"the runner process {runner} died"


async def _states_say_stop(own_id: str, parent_id: str | None) -> str:
    while True:
        try:
            async with get_client() as client:
                while True:
                    async with asyncio.timeout(CALL_LIMIT_S):
                        reason = await _stop_reason(client, own_id, parent_id)
                    if reason:
                        return reason
                    await asyncio.sleep(STATE_POLL_S)
        except Exception as error:  # the server is away or busy: keep working, look again
            log.info("own state could not be read (%s); going on", type(error).__name__)
            await asyncio.sleep(STATE_POLL_S)


async def _stop_reason(client: PrefectClient, own_id: str, parent_id: str | None) -> str | None:
    try:
        own = (await client.read_flow_run(UUID(own_id))).state
        if own and (own.is_cancelling() or own.is_cancelled()):
            return "the flow run was cancelled"
        if own and own.is_final():
            return f"the flow run was set to {own.name}"
        if parent_id:
            parent = (await client.read_flow_run(UUID(parent_id))).state
            if parent and parent.is_final():
                return f"the parent flow run is {parent.name}"
    except ObjectNotFound:
        return "the flow run or its parent was deleted"
    return None


async def final_runs(ids: Iterable[UUID]) -> dict[UUID, FlowRun]:
    """Those of the flow runs that are final now. An outage of the server reads as "none is"."""
    wanted = list(ids)
    if not wanted:
        return {}
    try:
        async with get_client() as client:
            asked = FlowRunFilter(id=FlowRunFilterId(any_=wanted))
            async with asyncio.timeout(CALL_LIMIT_S):
                runs = await client.read_flow_runs(flow_run_filter=asked)
    except Exception as error:  # asked again a moment later
        log.info("flow run states could not be read (%s); asking again", type(error).__name__)
        return {}
    return {run.id: run for run in runs if run.state is not None and run.state.is_final()}


async def wait_final(ids: Iterable[UUID], *, limit_s: float, every_s: float = 1.0) -> dict[UUID, FlowRun]:
    """Wait until all of the flow runs are final, at most `limit_s`; those that are."""
    wanted, final, until = set(ids), {}, time.monotonic() + limit_s
    while True:
        final |= await final_runs(wanted - final.keys())
        if wanted == final.keys() or time.monotonic() > until:
            return final
        await asyncio.sleep(every_s)


# ------------------------------------------------------------------------------------------- cancelling


def cancel_children_of(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Flow hook: cancel the children of a flow run that ended early. Prefect passes these by name."""
    cancel_children(flow_run.id, reason=f"the parent flow run is {state.name}")


def cancel_children(parent_id: UUID | str, *, reason: str) -> int:
    """Ask every child of a flow run to stop; how many were asked. Synchronous, so that it also works while
    the event loop is being cancelled."""
    parent = FlowRunFilterParentFlowRunId(any_=[UUID(str(parent_id))])
    with get_client(sync_client=True) as client:
        children = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
        asked = 0
        for run in children:
            state = _cancel_state(run, reason)
            if state is not None:
                asked += _set_state(client, run.id, state)
        return asked


async def tag_self(tag: str) -> None:
    """Give this flow run a tag it may lack: the launcher gives it, a start from the UI does not."""
    own_id = this_run.id
    if own_id is not None and tag not in this_run.tags:
        async with get_client() as client:
            await client.update_flow_run(UUID(own_id), tags=[*this_run.tags, tag])


async def cancel_older_runs(run_id: str, *, own_id: str | None, limit_s: float = 60.0) -> list[str]:
    """Cancel every active flow run tagged `run:<run_id>` but our own, and wait until they are final; names.

    Whoever does not stop in time has no process behind it any more, or will see the newer epoch: it is set to
    Cancelled by force.
    """
    async with get_client() as client:
        runs = await _active_runs(client, run_id, own_id)
        for run in runs:
            state = _cancel_state(run, "a newer launch of this run took over")
            if state is not None:
                await client.set_flow_run_state(run.id, state)
        final = await wait_final([r.id for r in runs], limit_s=limit_s)
        for run in runs:
            if run.id not in final:
                await client.set_flow_run_state(
                    run.id, Cancelled(message="superseded; did not stop in time"), force=True
                )
        return [run.name for run in runs]


async def _active_runs(client: PrefectClient, run_id: str, own_id: str | None) -> list[FlowRun]:
    runs = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ACTIVE)),
        )
    )
    return [run for run in runs if str(run.id) != own_id]


def confirm_cancelled() -> None:
    """Set this flow run to Cancelled if it is Cancelling: nothing of it is left. The runner that ended it
    does so too, but a quarter of a minute later, for it imports the flow to run its hooks; and the parent
    waits. Synchronous: every task of the loop has been cancelled."""
    own_id: str | None = this_run.id
    if own_id is None:
        return
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(own_id)).state
            if state is not None and state.is_cancelling():
                _set_state(client, UUID(own_id), Cancelled(message=state.message), attempts=2)
    except Exception as error:  # the runner will say it
        log.info("own end could not be told to Prefect: %s", type(error).__name__)


def _cancel_state(run: FlowRun, reason: str) -> State | None:
    """The state that stops the run: at once when it has no process yet. None when it is ending already."""
    if run.state is None or run.state.is_final() or run.state.type == StateType.CANCELLING:
        return None
    wanted = Cancelled if run.state.type in _NOT_STARTED else Cancelling
    return wanted(message=reason)


def _set_state(client: Any, flow_run_id: UUID, state: State, *, attempts: int = 5) -> bool:
    for attempt in range(attempts):
        try:
            client.set_flow_run_state(flow_run_id, state)
            return True
        except Exception as error:  # SQLite answers "database is locked" under load
            log.warning("flow run %s could not be set to %s: %s", flow_run_id, state.name, error)
            time.sleep(0.3 * (attempt + 1))
    return False
