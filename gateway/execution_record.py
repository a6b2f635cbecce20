"""What is recorded of an execution at its end: its trajectories, or why there are none."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.chains import ExecutionRecord, materialise
from gateway.ingestor import FinishedExecution
from gateway.metrics import GatewayMetrics
from gateway.session import Session
from model_runtime.protocol import AwaitedReward, FinalizeAnswer
from model_runtime.types import UNFINISHED_STATUSES, MemberKey, SettlementStatus, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Makes the records of one run. `keeps_unfinished` are the models that are shown what executions left
    that did not finish."""

    run_id: str
    metrics: GatewayMetrics
    keeps_unfinished: Collection[str] = ()

    def execution(
        self, session: Session, status: SettlementStatus, reason: str
    ) -> tuple[FinishedExecution, int]:
        """The record, and how many of its trajectories are refused."""
        trajectories, num_refused = self._trajectories(session, status)
        execution = FinishedExecution(
            member=session.member,
            status=status,
            reason=reason,
            train=session.train,
            trajectories=tuple(trajectories),
            mode="train" if session.is_training else "eval",
            session_id="" if session.is_training else session.session_id,
        )
        return execution, num_refused

    def so_far(self, session: Session) -> list[Trajectory]:
        """What an open session would leave if it were finalized now."""
        return materialise(session.agents.values(), self._record_of(session))[0]

    def _record_of(self, session: Session) -> ExecutionRecord:
        return ExecutionRecord(
            run_id=self.run_id,
            member=session.member,
            session_id=session.session_id,
            train=session.train,
            workflow_rewards=session.rewards.workflow,
            agent_rewards=session.rewards.agents,
            turn_rewards=session.rewards.turns,
        )

    def _trajectories(self, session: Session, status: SettlementStatus) -> tuple[list[Trajectory], int]:
        """Of an execution that did not finish only what its model wants to see; the rest is counted and let
        go."""
        owners = [o for o in session.agents.values() if self._is_kept(o.model_id, session, status)]
        for owner in session.agents.values():
            if owner not in owners:
                self.metrics.count_unrecorded(owner.model_id, status, owner.chains)
        trajectories, refused = materialise(owners, self._record_of(session))
        for error in refused:
            logger.error("session %s: %s", session.session_id, error)
        if refused:
            recorded = {(row.agent_id, row.chain_index) for row in trajectories}
            for owner in owners:
                lost = [c for c in owner.chains if (owner.agent_id, c.index) not in recorded]
                self.metrics.count_unrecorded(owner.model_id, "refused", lost)
        return trajectories, len(refused)

    def _is_kept(self, model_id: str, session: Session, status: SettlementStatus) -> bool:
        if status == "finalized":
            return True
        wanted = session.is_training and status in UNFINISHED_STATUSES
        return wanted and model_id in self.keeps_unfinished


def without_rows(member: MemberKey, status: SettlementStatus, train: Mapping[str, bool]) -> FinishedExecution:
    """Of a member whose time was up before it began."""
    return FinishedExecution(
        member=member,
        status=status,
        reason="the group's time was up before this member began",
        train=train,
        trajectories=(),
        mode="train",
    )


def awaiting_answer(session: Session) -> FinalizeAnswer:
    missing = [
        AwaitedReward(component=r.component, agent_id=r.agent_id, request_id=r.request_id)
        for r in session.missing_rewards
    ]
    return FinalizeAnswer(
        session_id=session.session_id, status="awaiting_reward", num_rows={}, awaits=missing
    )


def reason_of_missing(session: Session) -> str:
    """Reason of a settlement without all rewards; empty when they are there."""
    names = [str(reward) for reward in session.missing_rewards]
    return f"rewards that never came: {', '.join(names)}" if names else ""
