"""From the journal's events back to what the gateway was when its last process of this epoch died.

Turns are played back into chains, so a conversation goes on where it was; executions that were being written
are looked up in the logs, so that none is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.admission import GroupAdmission, OpenGroup
from gateway.calls import CallLedger
from gateway.chains import Chain
from gateway.journal import Owned, SessionJournal
from gateway.journal_events import (
    Event,
    ExecutionWritten,
    GatesMoved,
    GroupClosed,
    GroupOpened,
    InfraLifted,
    InfraMarked,
    MemberSettled,
    OutcomeDecided,
    RewardGiven,
    RewardsAwaited,
    SessionOpened,
    SessionSettled,
    TurnCommitted,
)
from gateway.session import Session
from gateway.sessions import SessionRegistry
from model_runtime.errors import CorruptObjectError
from model_runtime.removed_log import is_in_log
from model_runtime.store import Store
from model_runtime.types import MemberKey

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _State:
    """What the events amount to."""

    groups: list[OpenGroup] = field(default_factory=list)
    closed: list[GroupClosed] = field(default_factory=list)
    counts: GatesMoved | None = None
    sessions: list[Session] = field(default_factory=list)
    settled: list[SessionSettled] = field(default_factory=list)
    members: list[MemberKey] = field(default_factory=list)  # attempts that are over, of open groups
    written: list[ExecutionWritten] = field(default_factory=list)


async def recover(
    journal: SessionJournal, *, admission: GroupAdmission, sessions: SessionRegistry, store: Store
) -> None:
    """Load the journal, take over what it holds, and start it. Comes after the store's own journal has been
    written out. Raises StoreError, and ConfigError when another process has the journal."""
    owned = await asyncio.to_thread(journal.load)
    try:
        state = _played_back(owned, journal)
    except CorruptObjectError as error:
        await asyncio.to_thread(journal.set_aside, str(error))
        state = _State()
    written = await asyncio.to_thread(_found, store, state.written)
    journal.start()
    admission.restore(state.groups, state.closed, state.counts)
    sessions.restore(state.sessions, state.settled, state.members)
    if state.groups or state.sessions:
        logger.warning(
            "took over %d open sessions and %d open groups of an earlier process",
            len(state.sessions),
            len(state.groups),
        )
    sessions.finish(written)


def _found(store: Store, notes: Iterable[ExecutionWritten]) -> list[ExecutionWritten]:
    """Those executions that are in the logs, or were."""
    notes = list(notes)
    there = {key for key in {note.shard_key for note in notes} if is_in_log(store, key)}
    return [note for note in notes if note.shard_key in there]


def _played_back(owned: Owned, journal: SessionJournal) -> _State:
    """Raises CorruptObjectError for events that make no sense together."""
    state = _State()
    for owner, events in owned.items():
        match events[0]:
            case GroupOpened() as opened:
                ends = _ends_of_members(events[1:], owner)
                state.groups.append(_group(opened, ends))
                state.members += [_member(opened, end) for end in ends]
            case GroupClosed() as closed:
                state.closed.append(closed)
            case GatesMoved() as counts:
                state.counts = counts
            case SessionOpened() as opened:
                state.sessions.append(_session(opened, events[1:], journal))
            case SessionSettled() as end:
                state.settled.append(end)
            case ExecutionWritten() as note:
                state.written.append(note)
            case other:
                raise CorruptObjectError(f"{owner} begins with {type(other).__name__}")
    return state


def _ends_of_members(events: Sequence[Event], owner: str) -> list[MemberSettled]:
    ends = [event for event in events if isinstance(event, MemberSettled)]
    if len(ends) < len(events):
        raise CorruptObjectError(f"{owner} holds more than the ends of members")
    return ends


def _group(opened: GroupOpened, ends: Iterable[MemberSettled]) -> OpenGroup:
    monotonic = time.monotonic() - time.time()
    group = OpenGroup(
        group_id=opened.group_id,
        group_size=opened.group_size,
        train=opened.train,
        opened_at=opened.opened_at + monotonic,
        deadline_at=opened.deadline_at + monotonic,
        settled=dict(opened.settled),
    )
    for end in ends:
        group.take(end)
    return group


def _member(group: GroupOpened, end: MemberSettled) -> MemberKey:
    return MemberKey(
        group_id=group.group_id,
        group_size=group.group_size,
        member_index=end.member_index,
        attempt=end.attempt,
    )


def _session(opened: SessionOpened, events: Iterable[Event], journal: SessionJournal) -> Session:
    now = time.monotonic()
    session = Session(
        session_id=opened.session_id,
        api_key=opened.api_key,
        member=opened.member,
        mode=opened.mode,
        train=opened.train,
        sampling=opened.sampling,
        forced_sampling=opened.forced_sampling,
        versions=opened.versions,
        deadline=now + opened.deadline_at - time.time(),
        journal=journal,
        active_at=now,
        calls=CallLedger(recorded=journal.durable),
    )
    for event in events:
        match event:
            case TurnCommitted():
                _play_turn(session, event)
            case RewardGiven():
                session.rewards.put(event)
            case RewardsAwaited():
                session.awaits = event
                session.deadline = now + event.until - time.time()
            case InfraMarked() | InfraLifted():
                session.play(event)
            case OutcomeDecided(status, reason):
                session.outcome = (status, reason)
            case _:
                raise CorruptObjectError(f"session {opened.session_id} holds {type(event).__name__}")
    return session


def _play_turn(session: Session, event: TurnCommitted) -> None:
    owner = session.chains_of(event.agent_id, event.model_id)
    chains, index = owner.chains, event.chain_index
    if index > len(chains) or event.num_turns > (len(chains[index].turns) if index < len(chains) else 0):
        raise CorruptObjectError(
            f"session {session.session_id}: turn {event.num_turns} of chain {index} of {event.agent_id!r} "
            "follows on nothing"
        )
    chain = chains[index] if index < len(chains) else Chain(created_at=event.created_at)
    owner.append(chain, event.turn, event.point, num_turns=event.num_turns)
    if event.identity is not None and event.reply is not None:
        turn = event.turn
        reply = msgspec.structs.replace(event.reply, token_ids=turn.token_ids, logprobs=turn.logprobs)
        session.calls.restore(event.identity, reply)
