"""One execution of a workflow, from its session's opening to its settlement."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from model_runtime.config import WorkflowConfig
from model_runtime.errors import (
    AlreadyDoneError,
    ConflictError,
    GatewayError,
    RunEndedError,
    UnknownSessionError,
)
from model_runtime.evaluation_config import EvaluationConfig
from model_runtime.gateway_client import GatewayClient, is_infrastructure
from model_runtime.protocol import (
    AbortRequest,
    FinalizeAnswer,
    FinalizeRequest,
    GroupAnswer,
    GroupRequest,
    SessionAnswer,
    SessionRequest,
)
from model_runtime.types import DEFAULT_COMPONENT, UNFINISHED_STATUSES, MemberKey
from model_runtime.workflow_session import WorkflowSession, is_finite_number
from model_runtime.workflow_tasks import Task, TaskGroup, WorkflowFunction

logger = logging.getLogger(__name__)

Mode = Literal["train", "eval"]
Unfinished = Literal["aborted", "expired", "infra", "retried"]

CONTROL_TIMEOUT_S = 60.0  # one attempt at a control call; a finalize waits for the store
GROUP_WAIT_S = 25.0  # one attempt's wait for admission
SESSION_SLACK_S = 10.0  # the gateway's own limit of an execution stands behind the driver's
GROUP_END_MARGIN_S = 2.0  # so near its group's end a member that is refused counts as expired
LEAVING_TIMEOUT_S = 5.0  # for letting go of a session while this driver is being stopped
MAX_LOST_SESSIONS = 5  # per member: sessions that a restarted gateway forgot; not held against max_attempts
FINISHED = ("finalized", "awaiting_reward", "done_before")
TELLING = ("finalized", "aborted", "expired")  # how an execution ends by its own doing, its reward known
SUCCESS = "success"  # reward component that is reported by agent


@dataclass(slots=True)
class OpenGroup:
    """A group this driver works on."""

    group: TaskGroup
    size: int
    settled: set[int] = field(default_factory=set)  # members that are settled in every model's log
    deadline: float = 0.0  # monotonic; afterwards the gateway has settled what was missing
    finished: bool = False  # an execution was
    failed: bool = False  # one was not, by its own doing


class _WorkflowFault(Exception):
    """The workflow ended in a way that is its own doing; the message is the settlement's reason."""


@dataclass(slots=True)
class Tally:
    """Counts of one rollout."""

    executions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    successes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    task_rewards: dict[str, list[float]] | None = None  # group → rewards; kept in an evaluation alone
    task_unknown: Counter[str] = field(default_factory=Counter)  # group → members that say nothing of it
    num_calls: int = 0
    running: int = 0
    groups_opened: int = 0
    groups_done_before: int = 0
    skipped_tasks: set[int] = field(default_factory=set)  # by their place in the task file
    ended: bool = False

    @property
    def mean_reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def note_rewards(self, session: WorkflowSession, group_id: str) -> None:
        for (agent_id, component), value in session.rewards.items():
            if agent_id is None and component == DEFAULT_COMPONENT:
                self.rewards.append(value)
                if self.task_rewards is not None:
                    self.task_rewards[group_id].append(value)
            elif agent_id is not None and component == SUCCESS:
                self.successes[agent_id].append(value)


class WorkflowExecutor:
    """Opens groups and takes their members to a settlement, counting what happens in `tally`.

    An execution that fails for its own sake is aborted; one that fails for the infrastructure's is tried
    again. Errors that come out of here are those no other execution would escape either.
    """

    def __init__(
        self,
        config: WorkflowConfig,
        *,
        mode: Mode,
        workflow: WorkflowFunction,
        gateway: GatewayClient,
        call_timeout_s: float,
        tally: Tally,
        evaluation: EvaluationConfig | None = None,
        seed: int = 0,
        versions: Mapping[str, int] = MappingProxyType({}),
        stop_signals: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    ) -> None:
        """`evaluation` and `seed` say how to sample in mode `eval`, `versions` which ones answer there, of
        those that are held; the published ones otherwise. `stop_signals` are what a signal to this process
        raises wherever it stands, in a workflow too."""
        self._config = config
        self._evaluation = evaluation or EvaluationConfig()
        self._seed = seed
        self._versions = dict(versions)
        self._stop_signals = (GeneratorExit, *stop_signals)
        self._mode: Mode = mode
        self._workflow = workflow
        self._gateway = gateway
        self._call_timeout_s = call_timeout_s
        self._tally = tally

    async def open_group(self, group: OpenGroup) -> None:
        """Wait until the group is open. Raises RunEndedError when the run takes no new work, AlreadyDoneError
        for a group that is settled."""
        request = GroupRequest(
            group_id=group.group.group_id,
            group_size=group.size,
            wait_s=GROUP_WAIT_S,
            deadline_s=self._config.group_timeout_s,
            settled_members=sorted(group.settled),
        )
        while True:
            answer = await self._gateway.control(
                "/groups", request, GroupAnswer, timeout_s=GROUP_WAIT_S + CONTROL_TIMEOUT_S
            )
            if answer.status == "ended":
                raise RunEndedError(f"group {request.group_id} was not opened: the run takes no new work")
            if answer.status == "open":
                group.deadline = time.monotonic() + self._config.group_timeout_s
                return

    async def settle_member(self, group: OpenGroup, index: int, first_attempt: int) -> None:
        """Run the member until it is settled. Raises RunEndedError when the run stopped before that."""
        attempts_left, lost_left, attempt = self._config.max_attempts, MAX_LOST_SESSIONS, first_attempt
        while True:
            status = await self._attempt(group, self._key(group, index, attempt), last=attempts_left <= 1)
            self._tally.executions[status] += 1
            if status not in ("retried", "lost"):
                if status not in TELLING:
                    self._tally.task_unknown[group.group.group_id] += 1
                if status != "unsettled":
                    group.settled.add(index)
                    group.finished |= status in FINISHED
                    group.failed |= status in UNFINISHED_STATUSES
                return
            attempt += 1
            if status == "retried":
                attempts_left -= 1
            elif (lost_left := lost_left - 1) < 0:
                logger.error(
                    "%s: its session was lost too often", self._key(group, index, attempt).workflow_id
                )
                self._tally.executions["unsettled"] += 1
                return

    def _key(self, group: OpenGroup, index: int, attempt: int) -> MemberKey:
        return MemberKey(
            group_id=group.group.group_id, group_size=group.size, member_index=index, attempt=attempt
        )

    async def _attempt(self, group: OpenGroup, member: MemberKey, *, last: bool) -> str:
        """How the attempt ended: a settlement's status, `lost` when the gateway forgot the session,
        `done_before` when it gave none because nothing is left to do, or `unsettled` when it gave none."""
        try:
            session = await self._open_session(group, member)
        except ConflictError as error:
            return self._no_session(group, member, error)
        try:
            answer = await self._run(session, group.group.task, last=last)
        except UnknownSessionError:
            return "lost"
        except asyncio.CancelledError:
            await self._let_go(session)
            raise
        finally:
            self._tally.num_calls += session.num_calls
        if answer.status == "finalized":
            self._tally.note_rewards(session, member.group_id)
        return answer.status

    # -------------------------------------------------------------- one session

    async def _open_session(self, group: OpenGroup, member: MemberKey) -> WorkflowSession:
        """Raises AlreadyDoneError when nothing is left to do for this member, ConflictError when the gateway
        keeps refusing it."""
        evaluating = self._mode == "eval"
        request = SessionRequest(
            mode=self._mode,
            group_id=member.group_id,
            group_size=member.group_size,
            member_index=member.member_index,
            attempt=member.attempt,
            takes_over=not evaluating,
            sampling={} if evaluating else {"temperature": self._config.temperature},
            forced_sampling=self._forced_sampling(member.member_index) if evaluating else {},
            timeout_s=self._config.execution_timeout_s + SESSION_SLACK_S,
            versions=self._versions,
        )
        answer = await self._session_answer(group, request)
        return WorkflowSession(
            answer, member=member, mode=self._mode, gateway=self._gateway, call_timeout_s=self._call_timeout_s
        )

    def _forced_sampling(self, sample: int) -> dict[str, float | int]:
        """Each sample of a task has a seed of its own, the same in every evaluation of the task set."""
        if self._evaluation.temperature == 0:
            return {"temperature": 0.0}
        seed = self._seed * self._evaluation.samples_per_task + sample
        return {"temperature": self._evaluation.temperature, "seed": seed}

    async def _session_answer(self, group: OpenGroup, request: SessionRequest) -> SessionAnswer:
        ask_until, pause_s = self._asks_until(group, request), 0.2
        while True:
            try:
                return await self._gateway.control(
                    "/sessions", request, SessionAnswer, timeout_s=CONTROL_TIMEOUT_S
                )
            except AlreadyDoneError:
                raise
            except ConflictError:
                if time.monotonic() >= ask_until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
            if request.mode == "train":
                deadline = group.deadline
                await self.open_group(group)
                group.deadline = deadline  # asking again does not give the group more time

    def _asks_until(self, group: OpenGroup, request: SessionRequest) -> float:
        """Until when a refusal may pass: a gateway that was restarted knows the group no more until it is
        opened again, nor what is held for an evaluation until that renews it."""
        now = time.monotonic()
        give_up = now + (request.timeout_s or 0.0)
        if request.mode == "train":
            return min(give_up, group.deadline - GROUP_END_MARGIN_S)
        return give_up if request.versions else now

    def _no_session(self, group: OpenGroup, member: MemberKey, error: ConflictError) -> str:
        if self._mode == "train" and time.monotonic() >= group.deadline - GROUP_END_MARGIN_S:
            return "expired"  # the gateway settles what is missing when the group's time is up
        if isinstance(error, AlreadyDoneError):
            logger.info("%s is left to the gateway: %s", member.workflow_id, error)
            return "done_before"
        logger.error("%s could not be opened: %s", member.workflow_id, error)
        return "unsettled"

    async def _run(self, session: WorkflowSession, task: Task, *, last: bool) -> FinalizeAnswer:
        """Work on the task and settle. Raises UnknownSessionError when the gateway forgot the session."""
        limit = asyncio.timeout(self._config.execution_timeout_s)
        try:
            async with limit:
                returned = await self._workflow(task.fresh(), session)
            if session.infrastructure_error is not None:
                raise session.infrastructure_error
            reward = _checked_reward(returned)
        except BaseException as error:  # a workflow may call sys.exit(), or await a task it has cancelled
            if isinstance(error, (UnknownSessionError, RunEndedError)) or self._stops_driver(error):
                raise
            if limit.expired():
                reason = f"no end within execution_timeout_s = {self._config.execution_timeout_s:g} s"
                return await self._abort(session, "expired", reason)
            reason = self._reason(error)
            if is_infrastructure(error):
                return await self._abort(session, "infra" if last else "retried", reason)
            self._log_once(error, reason)
            return await self._abort(session, "aborted", reason)
        if reward is not None:
            session.rewards[None, DEFAULT_COMPONENT] = reward
        request = FinalizeRequest(
            reward=reward, reward_deadline_s=session.reward_deadline_s, awaits=session.awaits
        )
        return await self._settle(session, "finalize", request)

    async def _abort(self, session: WorkflowSession, status: Unfinished, reason: str) -> FinalizeAnswer:
        return await self._settle(session, "abort", AbortRequest(status=status, reason=reason[:500]))

    async def _settle(
        self, session: WorkflowSession, how: str, body: FinalizeRequest | AbortRequest
    ) -> FinalizeAnswer:
        return await self._gateway.control(
            f"/sessions/{session.session_id}/{how}", body, FinalizeAnswer, timeout_s=CONTROL_TIMEOUT_S
        )

    async def _let_go(self, session: WorkflowSession) -> None:
        """This driver is being stopped: free the member for the next one, if the gateway is there to hear."""
        body = AbortRequest(status="retried", reason="the driver was stopped")
        path = f"/sessions/{session.session_id}/abort"
        try:
            await self._gateway.control(
                path, body, FinalizeAnswer, timeout_s=LEAVING_TIMEOUT_S, patience_s=LEAVING_TIMEOUT_S
            )
        except GatewayError as error:
            logger.info("%s is left to its own limit: %s", session.workflow_id, error)

    # -------------------------------------------------------------- what went wrong

    def _stops_driver(self, error: BaseException) -> bool:
        """Is this driver being stopped, and not one workflow broken?"""
        if isinstance(error, BaseExceptionGroup):
            return any(self._stops_driver(inner) for inner in error.exceptions)
        if isinstance(error, asyncio.CancelledError):
            execution = asyncio.current_task()
            return execution is not None and execution.cancelling() > 0
        return isinstance(error, self._stop_signals)

    def _reason(self, error: BaseException) -> str:
        text = str(error)
        if isinstance(error, _WorkflowFault):
            return text
        return f"{type(error).__name__}: {text}" if text else type(error).__name__

    def _log_once(self, error: BaseException, reason: str) -> None:
        """Each kind of failure once with its traceback; all of them are counted."""
        kind = _kind_of(error)
        self._tally.errors[kind] += 1
        if self._tally.errors[kind] == 1:
            shown = None if isinstance(error, _WorkflowFault) else error
            logger.error(
                "an execution was aborted, others go on (further ones of this kind are only counted): %s",
                reason,
                exc_info=shown,
            )


def _checked_reward(value: Any) -> float | None:
    """Raises _WorkflowFault for anything but None or a finite number."""
    if value is None:
        return None
    if not is_finite_number(value):
        raise _WorkflowFault(f"the workflow returned {value!r}; a reward must be a finite number or None")
    return float(value)


def _kind_of(error: BaseException) -> str:
    if isinstance(error, _WorkflowFault):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = next((f for f in reversed(frames) if "site-packages" not in f.filename), None)
    return type(error).__name__ if own is None else f"{type(error).__name__} at {own.filename}:{own.lineno}"
