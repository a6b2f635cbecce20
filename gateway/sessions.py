"""Sessions: one per execution of a workflow, from its opening to its settlement.

A session's end is decided once (`finalized`, `aborted`, `expired`, `infra`, `retried`) and answered when it
is durable; asking again gives the same answer. Members of a group that never opened a session are settled
too when the group's time is up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway import logs
from gateway.admission import GroupAdmission, OpenGroup
from gateway.calls import CallLedger
from gateway.execution_record import Recorder, awaiting_answer, reason_of_missing, without_rows
from gateway.ingestor import FinishedExecution, TrajectoryIngestor, Written
from gateway.journal import Append, Forget, SessionJournal
from gateway.journal_events import (
    ExecutionWritten,
    OutcomeDecided,
    RewardGiven,
    RewardName,
    RewardsAwaited,
    SessionSettled,
    of_execution,
    of_session,
)
from gateway.metrics import GatewayMetrics
from gateway.quoting import quoted
from gateway.route_table import AgentModelRouteTable
from gateway.sampling import Settings, check_settings, merge_settings
from gateway.session import Session
from gateway.settled_sessions import MAX_REMEMBERED, SettledSessions, check_key
from gateway.slices import all_in_slices
from gateway.traced import trace_settled
from model_runtime.errors import (
    AlreadyDoneError,
    ConflictError,
    InvalidRequestError,
    InvalidTrajectoryError,
    RepertoryError,
    TooManyRequestsError,
    UnknownSessionError,
)
from model_runtime.gateway_config import GatewayConfig
from model_runtime.protocol import (
    AwaitedReward,
    FinalizeAnswer,
    FinalizeRequest,
    RewardRequest,
    SessionRequest,
)
from model_runtime.tracing import Traces
from model_runtime.types import DEFAULT_COMPONENT, MemberKey, SettlementStatus, Trajectory

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 300  # remembered of a session's end


@dataclass(slots=True)
class _Member:
    """What is known of one member of an open group."""

    session_id: str | None = None
    next_attempt: int = 0


class SessionRegistry:
    """All sessions of this gateway."""

    def __init__(
        self,
        *,
        run_id: str,
        routes: AgentModelRouteTable,
        admission: GroupAdmission,
        ingestor: TrajectoryIngestor,
        metrics: GatewayMetrics,
        default_sampling: Settings,
        default_timeout_s: float,
        max_sessions: int = GatewayConfig().max_sessions,
        idle_s: float | None = None,
        traces: Traces | None = None,
        keeps_unfinished: Collection[str] = (),
        journal: SessionJournal | None = None,
        allow_off_policy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._admission = admission
        self._ingestor = ingestor
        self._metrics = metrics
        self._recorder = Recorder(run_id, metrics, keeps_unfinished)
        self._default_sampling = default_sampling
        self._default_timeout_s = default_timeout_s
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._traces = traces
        self._journal = journal or SessionJournal()
        self._allow_off_policy = allow_off_policy
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._settled = SettledSessions(self._journal)
        self._groups: dict[str, dict[int, _Member]] = {}

    def __iter__(self) -> Iterator[Session]:
        """Those that are open now; one may end while its neighbours are looked at."""
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    # -------------------------------------------------------------- opening and finding

    def open(self, request: SessionRequest) -> Session:
        """A new session; for the same execution again, while nothing was sampled, the one there is.

        Raises AlreadyDoneError for a member that nothing is left to do for, ConflictError for one under way
        and a group that is not open, TooManyRequestsError while as many are open as may be."""
        self._check_sampling(request)
        member = MemberKey(
            group_id=request.group_id,
            group_size=request.group_size,
            member_index=request.member_index,
            attempt=request.attempt,
        )
        if request.member_index >= request.group_size:
            raise InvalidRequestError(
                f"member_index must be below group_size {request.group_size}, got {request.member_index}",
                param="member_index",
            )
        if request.mode == "eval":
            return self._add(request, member, train={})
        return self._open_member(request, member)

    async def end_left_open(self, group_id: str, member_index: int) -> None:
        """Settle as `retried` the session of a member that a driver that is gone left open; not one of which
        nothing was asked yet, which will do, nor one that misses rewards alone."""
        member = self._groups.get(group_id, {}).get(member_index)
        session = self._sessions.get(member.session_id or "") if member is not None else None
        if session is not None and session.agents and session.awaits is None:
            await self.settle(session, "retried", "its driver was started again")

    def find(self, session_id: str, api_key: str, *, trusted: bool = False) -> Session:
        """The open session. `trusted`: the caller has shown the admin key.

        Raises UnknownSessionError, AuthenticationError, ConflictError if it has ended."""
        answer = self._settled.answer(session_id, api_key, trusted=trusted)
        if answer is not None:
            raise ConflictError(f"session {session_id} is {answer.status}; it takes no more calls")
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"no session {session_id!r} in this gateway: it never opened here, or {MAX_REMEMBERED} have "
                "ended since it did; what it left is in the run's log"
            )
        check_key(session.api_key, api_key, trusted=trusted)
        session.active_at = self._clock()
        return session

    def settled(self, session_id: str, api_key: str, *, trusted: bool = False) -> SessionSettled | None:
        """How the session ended; None when it is not known to have. Raises AuthenticationError."""
        return self._settled.end(session_id, api_key, trusted=trusted)

    # -------------------------------------------------------------- rewards and ends

    def reward(self, session: Session, request: RewardRequest) -> None:
        """Set or withdraw one reward. The last one that a finished execution awaits settles it. Raises
        UnknownAgentError, InvalidRequestError, ConflictError, LimitExceededError."""
        session.require_undecided()
        session.require_room_for_reward()
        request_id = self._checked_request_id(session, request)
        session.give_reward(
            RewardGiven(request.component, request.reward, agent_id=request.agent_id, request_id=request_id)
        )
        if session.is_rewarded:
            self._begin_to_settle(session, "finalized")

    async def finalize(
        self, session_id: str, api_key: str, request: FinalizeRequest, *, trusted: bool = False
    ) -> FinalizeAnswer:
        """Settle as finished; returns when rows and settlements are durable. With a reward deadline while
        rewards are missing: `awaiting_reward`, and settled when they have come or the time is up.

        Raises UnknownAgentError and InvalidRequestError for rewards that can't come."""
        answer = self._settled.answer(session_id, api_key, trusted=trusted)
        if answer is not None:
            return answer
        session = self.find(session_id, api_key, trusted=trusted)
        if request.reward is not None and session.outcome is None:
            session.give_reward(RewardGiven(DEFAULT_COMPONENT, request.reward))
        if request.reward_deadline_s is not None and session.outcome is None and not session.infra_reason:
            self._await_rewards(session, request)
            if session.missing_rewards:
                await session.calls.stop_all()
                await self._journal.durable()
                return awaiting_answer(session)
        return await self.settle(session, "finalized")

    async def abort(
        self, session_id: str, api_key: str, *, status: SettlementStatus, reason: str, trusted: bool = False
    ) -> FinalizeAnswer:
        """Settle as not finished."""
        answer = self._settled.answer(session_id, api_key, trusted=trusted)
        if answer is not None:
            return answer
        return await self.settle(self.find(session_id, api_key, trusted=trusted), status, reason)

    async def settle(self, session: Session, status: SettlementStatus, reason: str = "") -> FinalizeAnswer:
        """Decide how the session ends, if that is still open, and wait until it is durable. One that is
        finished and only awaits rewards does not expire: it ends as finished, with those that came."""
        return await asyncio.shield(self._begin_to_settle(session, status, reason))

    def _begin_to_settle(
        self, session: Session, status: SettlementStatus, reason: str = ""
    ) -> asyncio.Task[FinalizeAnswer]:
        if session.outcome is None:
            if session.awaits is not None and status == "expired":
                status, reason = "finalized", reason_of_missing(session)
            if status == "finalized" and session.infra_reason:
                status, reason = "infra", session.infra_reason
            session.outcome = (status, reason)
            session.note(OutcomeDecided(status, reason))
        if session.settlement is None or _has_failed(session.settlement):
            session.settlement = asyncio.create_task(self._settle(session, *session.outcome))
        return session.settlement

    def _await_rewards(self, session: Session, request: FinalizeRequest) -> None:
        """Asked again, the first deadline stays."""
        if session.awaits is not None or request.reward_deadline_s is None:
            return
        awaited = [self._awaited(session, reward) for reward in request.awaits or [AwaitedReward()]]
        session.awaits = RewardsAwaited(awaited, time.time() + request.reward_deadline_s)
        session.deadline = self._clock() + request.reward_deadline_s
        session.note(session.awaits)

    def _awaited(self, session: Session, reward: AwaitedReward) -> RewardName:
        request_id = self._checked_request_id(session, reward)
        return RewardName(reward.component, agent_id=reward.agent_id, request_id=request_id)

    # -------------------------------------------------------------- deadlines

    async def sweep(self) -> None:
        """Settle sessions and groups whose time is up, and those whose settlement failed. Called every half
        second or so."""
        now = self._clock()
        for session in self:
            session.calls.forget_old()
        overdue = [s for s in self if now >= s.deadline or s.is_rewarded or _has_failed(s.settlement)]
        ends = [self.settle(s, "expired", "the execution's time was up") for s in overdue]
        for session in self._idle_sessions(now):
            reason = f"nothing was asked of it for gateway.session_idle_s = {self._idle_s:g} s"
            ends.append(self.settle(session, "expired", reason))
        for group in self._admission.expired_groups():
            ends += self._ends_of_group(group)
        for error in await all_in_slices(ends):
            if isinstance(error, RepertoryError):
                logger.warning("a settlement is not durable yet and will be tried again: %s", error)
            elif isinstance(error, BaseException):
                raise error

    def oldest_open_version(self, model_id: str) -> int | None:
        """Oldest version of the model among the tokens of open sessions that may be trained."""
        versions = [s.oldest_version(model_id) for s in self if s.train.get(model_id)]
        return min((v for v in versions if v is not None), default=None)

    # -------------------------------------------------------------- an earlier process's

    def restore(
        self, sessions: Iterable[Session], settled: Iterable[SessionSettled], members: Iterable[MemberKey]
    ) -> None:
        """Take over what the journal holds: open sessions, answers of settled ones, and members of open
        groups whose attempts are over."""
        for key in members:
            self._member(key).next_attempt = key.attempt + 1
        for session in sessions:
            self._sessions[session.session_id] = session
            if session.is_training:
                self._member(session.member).session_id = session.session_id
        for end in settled:
            self._settled.add(end)

    def finish(self, written: Iterable[ExecutionWritten]) -> None:
        """Settle what is in the logs already, and go on settling what had been decided. What fails is tried
        again by the sweep."""
        found = {s.execution: s for s in self}
        for note in written:
            session = found.get(note.key)
            if session is not None and session.outcome is not None:
                execution, num_refused = self._recorder.execution(session, *session.outcome)
                self._note_durable(execution, note.writer, note.seq)
                self._end(session, execution, num_refused, rows_in=note.rows_in)
            elif session is None:
                if note.mode == "train":  # its member never opened one
                    execution = without_rows(note.member, note.status, {})
                    self._note_durable(execution, note.writer, note.seq)
                self._journal.write(Forget(of_execution(note.key)))
        for session in self:
            if session.outcome is not None:
                session.settlement = asyncio.create_task(self._settle(session, *session.outcome))

    # -------------------------------------------------------------- inside

    def _checked_request_id(self, session: Session, named: RewardRequest | AwaitedReward) -> str | None:
        """Of the turn a reward is for, if it is for one. Raises UnknownAgentError, InvalidRequestError."""
        if named.agent_id is not None:
            self._routes.model_of(named.agent_id)
        if named.request_id is not None and not session.knows_request(named.request_id):
            raise InvalidRequestError(
                f"session {session.session_id} has no recorded call {quoted(named.request_id)}",
                param="request_id",
            )
        return named.request_id

    def _idle_sessions(self, now: float) -> list[Session]:
        if self._idle_s is None:
            return []
        quiet = [s for s in self if not s.calls.num_running and s.awaits is None]
        return [s for s in quiet if now - max(s.active_at, s.calls.ended_at) >= self._idle_s]

    def _member(self, key: MemberKey) -> _Member:
        return self._groups.setdefault(key.group_id, {}).setdefault(key.member_index, _Member())

    def _check_sampling(self, request: SessionRequest) -> None:
        for settings in (request.sampling, request.forced_sampling):
            check_settings(settings)
        merge_settings(
            defaults=self._default_sampling,
            session=request.sampling,
            request={},
            forced=request.forced_sampling,
            training=request.mode == "train",
            allow_off_policy=self._allow_off_policy,
        )

    def _open_member(self, request: SessionRequest, key: MemberKey) -> Session:
        group = self._admission.require_open(key.group_id)
        self._check_group(group, key)
        member = self._member(key)
        who = f"member {key.member_index} of group {key.group_id!r}"
        if request.takes_over:
            key = replace(key, attempt=max(key.attempt, member.next_attempt))
        running = self._sessions.get(member.session_id or "")
        if running is not None:
            if running.is_finished:
                raise AlreadyDoneError(f"{who} is finished: it ends, or awaits its rewards alone")
            if running.member == key and running.outcome is None and not running.agents:
                return running  # the answer to the first request got lost
            raise ConflictError(
                f"{who} has an open session (attempt {running.member.attempt}); settle it as `retried` first"
            )
        if key.attempt < member.next_attempt:
            raise ConflictError(f"attempt {key.attempt} at {who} is over; next is {member.next_attempt}")
        session = self._add(request, key, train=dict(group.train))
        member.session_id = session.session_id
        return session

    def _check_group(self, group: OpenGroup, key: MemberKey) -> None:
        """Raises AlreadyDoneError for a member that is settled, ConflictError where this execution can't
        belong to the open group."""
        if key.group_size != group.group_size:
            raise ConflictError(
                f"group {group.group_id!r} was opened with size {group.group_size}, not {key.group_size}"
            )
        if key.member_index in group.settled:
            raise AlreadyDoneError(f"member {key.member_index} of group {group.group_id!r} is settled")
        if self._clock() >= group.deadline_at:
            raise ConflictError(f"the time of group {group.group_id!r} is up")

    def _add(self, request: SessionRequest, member: MemberKey, *, train: Mapping[str, bool]) -> Session:
        if len(self._sessions) >= self._max_sessions:
            self._metrics.count_refusal("sessions")
            raise TooManyRequestsError(
                f"{len(self._sessions)} sessions are open; gateway.max_sessions is {self._max_sessions}"
            )
        session = Session(
            session_id=f"s-{secrets.token_hex(12)}",
            api_key=f"rk-{secrets.token_urlsafe(24)}",
            member=member,
            mode=request.mode,
            train=train,
            sampling=request.sampling,
            forced_sampling=request.forced_sampling,
            versions=request.versions,
            deadline=self._clock() + (request.timeout_s or self._default_timeout_s),
            journal=self._journal,
            active_at=self._clock(),
            calls=CallLedger(recorded=self._journal.durable, clock=self._clock),
        )
        self._sessions[session.session_id] = session
        session.note_opened(deadline_at=time.time() + session.deadline - self._clock())
        return session

    async def _settle(self, session: Session, status: SettlementStatus, reason: str) -> FinalizeAnswer:
        await session.calls.stop_all()
        self._metrics.count_joined(session.calls.num_joined)
        logs.session_id.set(session.session_id)
        logger.info("session ends: %s", status)
        began = time.time()
        execution, num_refused = self._recorder.execution(session, status, reason)
        try:
            written = await self._record(execution)
        except InvalidTrajectoryError as error:
            # Asking again would change nothing, and its group waits for its end.
            session.outcome = ("infra", str(error))
            session.note(OutcomeDecided(*session.outcome))
            num_refused += len(execution.trajectories)
            execution, _ = self._recorder.execution(session, *session.outcome)
            written = await self._record(execution)
        if self._traces is not None:
            trace_settled(self._traces, session, execution, written, began=began)
        return self._end(session, execution, num_refused, rows_in=written.rows_in)

    def _end(
        self, session: Session, execution: FinishedExecution, num_refused: int, *, rows_in: tuple[str, ...]
    ) -> FinalizeAnswer:
        """It is durable: all that stays of the session is its answer."""
        end = SessionSettled(
            session_id=session.session_id,
            api_key=session.api_key,
            status=execution.status,
            num_rows=dict(Counter(row.model_id for row in execution.trajectories)),
            num_refused=num_refused,
            workflow_id=execution.member.workflow_id,
            mode=execution.mode,
            reason=execution.reason[:MAX_REASON_CHARS],
            rows_in=rows_in,
        )
        del self._sessions[session.session_id]
        owner = of_session(session.session_id)
        self._journal.write(Forget(owner), Append(owner, end), Forget(of_execution(execution.key)))
        return self._settled.add(end)

    async def _record(self, execution: FinishedExecution) -> Written:
        """Make an execution's end durable, then known to admission and the counters."""
        written = await self._ingestor.ingest(execution)
        self._note_durable(execution, self._ingestor.writer, written.seq)
        return written

    def _note_durable(self, execution: FinishedExecution, writer: str, seq: int) -> None:
        if execution.mode == "eval":
            return
        key = execution.member
        self._metrics.count_settlement(execution.status)
        self._metrics.count_recorded(execution.trajectories)
        member = self._member(key)
        member.next_attempt = key.attempt + 1
        member.session_id = None
        self._admission.member_settled(
            key.group_id,
            key.member_index,
            attempt=key.attempt,
            status=execution.status,
            writer=writer,
            seq=seq,
        )
        if not self._admission.is_open(key.group_id):
            del self._groups[key.group_id]

    def trajectories_so_far(self, session: Session) -> list[Trajectory]:
        """What an open session would leave if it were finalized now."""
        return self._recorder.so_far(session)

    def _ends_of_group(self, group: OpenGroup) -> list[Coroutine[Any, Any, Any]]:
        """Settlements still missing of a group whose time is up, those of unopened members among them."""
        members = self._groups.setdefault(group.group_id, {})
        ends: list[Coroutine[Any, Any, Any]] = []
        for index in group.unsettled:
            member = members.setdefault(index, _Member())
            session = self._sessions.get(member.session_id or "")
            if session is not None:
                ends.append(self.settle(session, "expired", "the group's time was up"))
            else:
                key = MemberKey(
                    group_id=group.group_id,
                    group_size=group.group_size,
                    member_index=index,
                    attempt=member.next_attempt,
                )
                ends.append(self._settle_unopened(without_rows(key, "expired", group.train)))
        return ends

    async def _settle_unopened(self, execution: FinishedExecution) -> None:
        await self._record(execution)
        self._journal.write(Forget(of_execution(execution.key)))


def _has_failed(task: asyncio.Task[FinalizeAnswer] | None) -> bool:
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)
