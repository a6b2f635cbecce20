"""One execution of a workflow while it is open: its conversations, rewards and calls.

Whatever changes it goes to the journal at once, so that the next process can have it as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from gateway.calls import CallIdentity, CallLedger
from gateway.chains import AgentChains, Match, SampledTurn
from gateway.conversation import ChatReply
from gateway.journal import Append, SessionJournal
from gateway.journal_events import (
    Event,
    ExecutionKey,
    InfraLifted,
    InfraMarked,
    RewardGiven,
    RewardName,
    RewardsAwaited,
    SessionOpened,
    TurnCommitted,
    of_session,
)
from gateway.sampling import Settings
from model_runtime.errors import ConflictError, LimitExceededError
from model_runtime.protocol import FinalizeAnswer
from model_runtime.types import FINAL_STATUSES, MemberKey, SettlementStatus

# Rewards given to one session, replaced and withdrawn ones among them: the journal holds all.
MAX_REWARDS_GIVEN = 100_000
# Failed calls of one session that are told apart.
MAX_FAILURES = 64
# The journal has the tokens of a reply in its turn.
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(slots=True)
class RewardBook:
    """Rewards of one execution by level and component. What never came is not there: it is not 0."""

    workflow: dict[str, float | None] = field(default_factory=dict)
    agents: dict[str, dict[str, float | None]] = field(default_factory=dict)
    turns: dict[str, dict[str, float | None]] = field(default_factory=dict)  # by request_id
    num_given: int = 0  # replaced and withdrawn ones among them

    def put(self, given: RewardGiven) -> None:
        """Set or, with None, withdraw."""
        self.num_given += 1
        level = self._level(given)
        if given.value is None:
            level.pop(given.component, None)
        else:
            level[given.component] = given.value

    def has(self, name: RewardName) -> bool:
        return name.component in self._level(name)

    def _level(self, name: RewardGiven | RewardName) -> dict[str, float | None]:
        if name.request_id is not None:
            return self.turns.setdefault(name.request_id, {})
        if name.agent_id is not None:
            return self.agents.setdefault(name.agent_id, {})
        return self.workflow


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One execution while it is open."""

    session_id: str
    api_key: str
    member: MemberKey
    mode: str
    train: Mapping[str, bool]
    sampling: Settings
    forced_sampling: Settings
    deadline: float
    versions: Mapping[str, int] = field(
        default_factory=dict
    )  # that answer it, in place of the published ones
    journal: SessionJournal = field(default_factory=SessionJournal)
    active_at: float = 0.0  # when it was last asked for anything
    opened_at: float = field(default_factory=time.time)  # in this process
    agents: dict[str, AgentChains] = field(default_factory=dict)
    rewards: RewardBook = field(default_factory=RewardBook)
    calls: CallLedger = field(default_factory=CallLedger)
    affinity: dict[str, str] = field(default_factory=dict)
    awaits: RewardsAwaited | None = None  # it is finished but for these rewards
    failures: list[InfraMarked] = field(default_factory=list)  # calls answered with a 5xx, and not since
    outcome: tuple[SettlementStatus, str] | None = None  # how it ends, once decided
    settlement: asyncio.Task[FinalizeAnswer] | None = None

    @property
    def is_training(self) -> bool:
        return self.mode == "train"

    @property
    def execution(self) -> ExecutionKey:
        """What its end is written as."""
        return self.member, self.mode, "" if self.is_training else self.session_id

    @property
    def is_finished(self) -> bool:
        """Nothing is left to do for its member: it ends for good, or awaits rewards alone."""
        return self.awaits is not None if self.outcome is None else self.outcome[0] in FINAL_STATUSES

    def require_active(self) -> None:
        """Raises ConflictError once the session takes no more calls."""
        self.require_undecided()
        if self.awaits is not None:
            raise ConflictError(
                f"session {self.session_id} is finished and awaits rewards; it takes no calls"
            )

    def require_undecided(self) -> None:
        """Raises ConflictError once the session's end is decided: from then on nothing of it changes."""
        if self.outcome is not None:
            raise ConflictError(f"session {self.session_id} is {self.outcome[0]}; it takes no more calls")

    def require_room_for_reward(self) -> None:
        """Raises LimitExceededError."""
        if self.rewards.num_given >= MAX_REWARDS_GIVEN:
            raise LimitExceededError(
                f"session {self.session_id} was given {MAX_REWARDS_GIVEN} rewards, replaced ones included"
            )

    @property
    def infra_reason(self) -> str:
        """Why an agent of it was answered with a 5xx, and not with an answer when it asked again."""
        return self.failures[0].reason if self.failures else ""

    def has_failed(self, call: str) -> bool:
        """The call was answered with a 5xx: to ask again is to repeat it."""
        return any(failure.call == call for failure in self.failures)

    @property
    def missing_rewards(self) -> list[RewardName]:
        """Those awaited and not yet given."""
        return [name for name in (self.awaits.rewards if self.awaits else ()) if not self.rewards.has(name)]

    @property
    def is_rewarded(self) -> bool:
        """It only awaited rewards, and has them all."""
        return self.awaits is not None and self.outcome is None and not self.missing_rewards

    def chains_of(self, agent_id: str, model_id: str) -> AgentChains:
        return self.agents.setdefault(agent_id, AgentChains(agent_id, model_id))

    def mark_infra(self, reason: str, call: str = "") -> None:
        """An agent was answered with a 5xx: whatever the workflow makes of it isn't the policy's doing."""
        if len(self.failures) > MAX_FAILURES:
            return  # the last of them can't be lifted
        failure = InfraMarked(reason, call if len(self.failures) < MAX_FAILURES else "")
        self.play(failure)
        self.note(failure)

    def lift_infra(self, call: str) -> None:
        """The agent asked again, and is answered. Of equal calls at once, one of them."""
        lifted = InfraLifted(call)
        self.play(lifted)
        self.note(lifted)

    def play(self, event: InfraMarked | InfraLifted) -> None:
        if isinstance(event, InfraMarked):
            self.failures.append(event)
        else:
            index = next((i for i, f in enumerate(self.failures) if f.call == event.call), None)
            if index is not None:
                del self.failures[index]

    def note(self, event: Event) -> None:
        """Put what just happened to it into the journal."""
        self.journal.write(Append(of_session(self.session_id), event))

    def note_opened(self, *, deadline_at: float) -> None:
        """`deadline_at`: seconds since 1970, as a next process can tell it."""
        self.note(
            SessionOpened(
                session_id=self.session_id,
                api_key=self.api_key,
                member=self.member,
                mode=self.mode,
                train=dict(self.train),
                sampling=self.sampling,
                forced_sampling=self.forced_sampling,
                versions=dict(self.versions),
                deadline_at=deadline_at,
            )
        )

    def note_turn(
        self,
        owner: AgentChains,
        match: Match,
        turn: SampledTurn,
        *,
        identity: CallIdentity | None,
        reply: ChatReply,
    ) -> None:
        """A turn was just committed, and is about to be answered with `reply`."""
        chain = match.chain
        assert chain.index is not None, "it was just committed"
        bare = msgspec.structs.replace(reply, token_ids=_NO_IDS, logprobs=_NO_LOGPROBS)
        self.note(
            TurnCommitted(
                agent_id=owner.agent_id,
                model_id=owner.model_id,
                chain_index=chain.index,
                created_at=chain.created_at,
                num_turns=match.num_turns,
                turn=turn,
                point=chain.points[-1],
                identity=identity,
                reply=bare,
            )
        )

    def give_reward(self, given: RewardGiven) -> None:
        self.rewards.put(given)
        self.note(given)

    def knows_request(self, request_id: str) -> bool:
        return any(
            turn.request_id == request_id
            for owner in self.agents.values()
            for chain in owner.chains
            for turn in chain.turns
        )

    def oldest_version(self, model_id: str) -> int | None:
        """Oldest version of this model that sampled a token here."""
        spans = [o.version_range() for o in self.agents.values() if o.model_id == model_id]
        return min((span[0] for span in spans if span is not None), default=None)
