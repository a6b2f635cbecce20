"""Tasks that come with every version, told to Prefect by their states alone.

Prefect's engine emits an event at each state of a task run, and each event names the flow run, its
deployment, queue, pool and tags, most of it indexed: the two tasks of a version would leave 100 KiB in
Prefect's database. A narrator runs a task as the engine would, name, retries and states included, and tells
of it through the API, where states leave no events. It tells in the background, in order: Prefect being away
holds nothing up, and what happened meanwhile is told once it is back, with its times.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec
from uuid import UUID, uuid4

from prefect import Task
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run as this_run
from prefect.states import AwaitingRetry, Cancelled, Completed, Failed, Retrying, Running

from tasks.reporting import CALL_LIMIT_S, may_pass

log = logging.getLogger(__name__)

P = ParamSpec("P")

AGAIN_S = 2.0
"""Until Prefect, away, is tried again."""
LAST_WORDS_S = 30.0
"""Longest a flow that did its work waits at its end for Prefect to hear of its tasks."""
SHORT_WORDS_S = 3.0
"""The same, of a flow that failed or is being stopped."""
MAX_UNTOLD = 1000
"""Tasks remembered while Prefect is away; of more, the oldest stay untold."""
LATE_S = 5.0
"""A state told later than this says when it was: the server dates it by its arrival."""
MAX_REASON_CHARS = 2000


@dataclass(slots=True)
class _Told:
    """A task run and what Prefect has not heard of it yet."""

    task: Task[..., Any]
    run: TaskRun
    states: deque[State] = field(default_factory=deque)
    created: bool = False
    over: bool = False
    refused: bool = False

    async def tell(self, client: PrefectClient) -> None:
        """Telling again what was told already, because its answer was lost, changes nothing."""
        while self.states:
            state = _dated(self.states[0])
            if state.message is not None:
                state = state.model_copy(update={"message": _encodable(state.message)})
            if self.created:
                await client.set_task_run_state(self.run.id, state, force=True)
            else:
                await client.create_task_run(
                    self.task,
                    self.run.flow_run_id,
                    self.run.dynamic_key,
                    self.run.id,
                    self.run.name,
                    state=state,
                )
                self.created = True
            self.states.popleft()


class Narrator:
    """Runs tasks of this flow run and tells Prefect of them. Outside of a flow run it only runs them."""

    def __init__(self) -> None:
        own_id = this_run.id
        self._flow_run_id = None if own_id is None else UUID(str(own_id))
        self._untold: deque[_Told] = deque()
        self._news = asyncio.Event()
        self._heard = True

    async def run(self, task: Task[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run a task. A state it returns is its last, as with Prefect's engine."""
        told = self._begin(task, inspect.signature(task.fn).bind(*args, **kwargs))
        try:
            outcome = await self._attempts(told, lambda: task.fn(*args, **kwargs))
        except Exception:
            raise  # its last attempt has told
        except BaseException:
            self._say(told, Cancelled(message="the work was stopped"), over=True)
            raise
        self._say(told, outcome if isinstance(outcome, State) else Completed(), over=True)
        return outcome

    async def _attempts(self, told: _Told, attempt: Callable[[], Awaitable[Any]]) -> Any:
        delays_s = _retry_delays_s(told.task)
        while True:
            try:
                return await attempt()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
                delay_s = next(delays_s, None)
                failed: State[Any] = Failed(message=reason, data=error)
                if delay_s is None or not _may_retry(told, failed):
                    self._say(told, failed, over=True)
                    raise
                log.warning("%s: %s; again in %g s", told.run.name, reason, delay_s)
                until = datetime.now(UTC) + timedelta(seconds=delay_s)
                self._say(told, AwaitingRetry(scheduled_time=until, message=reason))
            await asyncio.sleep(delay_s)
            self._say(told, Retrying())

    def _begin(self, task: Task[..., Any], given: inspect.BoundArguments) -> _Told:
        template = task.task_run_name
        run = TaskRun(
            id=uuid4(),
            name=_encodable(template.format(**given.arguments)) if isinstance(template, str) else task.name,
            flow_run_id=self._flow_run_id,
            task_key=task.task_key,
            dynamic_key=uuid4().hex,
        )
        told = _Told(task, run)
        if self._flow_run_id is not None:
            if len(self._untold) >= MAX_UNTOLD:
                log.warning("Prefect is away for long: %s stays untold", self._untold.popleft().run.name)
            self._untold.append(told)
        self._say(told, Running())
        return told

    def _say(self, told: _Told, state: State[Any], *, over: bool = False) -> None:
        told.states.append(state)
        told.over = over
        self._news.set()

    # ------------------------------------------------------------------ telling

    async def tell(self) -> None:
        """Tell what comes, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._tell_all()
                self._heard = True
            except Exception as error:  # whatever the client raises while Prefect is away: tried again
                level = logging.WARNING if self._heard else logging.DEBUG
                log.log(level, "Prefect did not take a task (%s: %s): trying on", type(error).__name__, error)
                self._heard = False
                self._news.set()
                await asyncio.sleep(AGAIN_S)

    async def finish(self, limit_s: float) -> None:
        """Tell what is left, as far as Prefect takes it in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._tell_all()
        except Exception as error:  # the story lacks its last words, the run nothing
            log.warning("Prefect did not take the last %d tasks: %s", len(self._untold), type(error).__name__)

    async def _tell_all(self) -> None:
        if not self._untold:
            return
        async with get_client() as client:
            for told in list(self._untold):
                async with asyncio.timeout(CALL_LIMIT_S):
                    await self._tell_of(told, client)

    async def _tell_of(self, told: _Told, client: PrefectClient) -> None:
        try:
            await told.tell(client)
        except PrefectHTTPStatusError as error:
            if may_pass(error):
                raise
            log.warning("Prefect refused the task %s: %s", told.run.name, error)
            told.refused = True
        if (told.refused or (told.over and not told.states)) and told in self._untold:
            self._untold.remove(told)


@contextlib.asynccontextmanager
async def narrating() -> AsyncIterator[Narrator]:
    """A narrator that tells while the block runs, and what is left at its end."""
    narrator, limit_s = Narrator(), SHORT_WORDS_S
    telling = asyncio.create_task(narrator.tell())
    try:
        yield narrator
        limit_s = LAST_WORDS_S
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await narrator.finish(limit_s)


def _dated(state: State[Any]) -> State[Any]:
    """With its time in its message if that is gone by long."""
    if (datetime.now(UTC) - state.timestamp).total_seconds() < LATE_S:
        return state
    when = f"at {state.timestamp:%H:%M:%S} UTC, told when Prefect was back"
    return state.model_copy(update={"message": f"{state.message}; {when}" if state.message else when})


def _encodable(text: str) -> str:
    """With what UTF-8 does not know, as file names may hold it, written out."""
    return text.encode(errors="backslashreplace").decode()


def _retry_delays_s(task: Task[..., Any]) -> Iterator[float]:
    """One for each retry; of a list that is too short, its last again."""
    given = task.retry_delay_seconds
    delays = list(given) if isinstance(given, list) else [given or 0.0]
    return (float(delays[min(i, len(delays) - 1)]) for i in range(task.retries))


def _may_retry(told: _Told, failed: State[Any]) -> bool:
    condition = told.task.retry_condition_fn
    return condition is None or bool(condition(told.task, told.run, failed))
