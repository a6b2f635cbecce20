"""What the session journal keeps: one event for each thing that must outlive the gateway's process.

An *owner* is what events belong to and are forgotten with: a session, a group, or one of the few owners
below that stand alone. Times are wall clock: the next process has another monotonic one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from gateway.calls import CallIdentity
from gateway.chains import Point, SampledTurn
from gateway.conversation import ChatReply
from gateway.sampling import Settings
from model_runtime.types import MemberKey, SettlementStatus

GATES = "gates"


def of_session(session_id: str) -> str:
    return f"session/{session_id}"


def of_group(group_id: str) -> str:
    return f"group/{group_id}"


ExecutionKey = tuple[MemberKey, str, str]
"""What is written once: an attempt of a member, in a mode, and of evaluations, of which several may work on
one member, the session; empty in training."""


def of_execution(key: ExecutionKey) -> str:
    """Owner of the note that an execution is being written to the logs."""
    member, mode, session_id = key
    return f"writing/{mode}/{session_id or member.workflow_id}"


class _Event(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array that begins with the event's name."""


# ------------------------------------------------------------------ groups


class GroupOpened(_Event, frozen=True, tag="group"):
    """A group opened; what its members need to be admitted again."""

    group_id: str
    group_size: int
    train: dict[str, bool]
    opened_at: float
    deadline_at: float
    settled: dict[int, str]


class MemberSettled(_Event, frozen=True, tag="member"):
    """An execution of the group is durable in the logs, at `seq` of `writer`. `retried` settles nothing but
    uses up the attempt."""

    member_index: int
    attempt: int
    status: str
    writer: str
    seq: int


class GroupClosed(_Event, frozen=True, tag="closed"):
    """Every member is settled. `unread`: model → writer → newest shard its trainer must have read before the
    group leaves the model's budget."""

    group_id: str
    unread: dict[str, dict[str, int]]


class GatesMoved(_Event, frozen=True, tag="gates"):
    """How many groups were opened so far: model → (to be trained, as surplus)."""

    counts: dict[str, tuple[int, int]]


# ------------------------------------------------------------------ sessions


class SessionOpened(_Event, frozen=True, tag="open"):
    session_id: str
    api_key: str
    member: MemberKey
    mode: str
    train: dict[str, bool]
    sampling: Settings
    forced_sampling: Settings
    deadline_at: float
    versions: dict[str, int] = {}


class TurnCommitted(_Event, frozen=True, tag="turn"):
    """One turn, what was answered for it, and which call of the client it answers."""

    agent_id: str
    model_id: str
    chain_index: int
    created_at: float  # of the chain
    num_turns: int  # the chain keeps so many earlier turns
    turn: SampledTurn
    point: Point
    identity: CallIdentity | None
    reply: ChatReply | None  # without the turn's own arrays


class RewardGiven(_Event, frozen=True, tag="reward"):
    """Of a turn with `request_id`, else of an agent with `agent_id`, else of the workflow."""

    component: str
    value: float | None
    agent_id: str | None = None
    request_id: str | None = None


class RewardName(msgspec.Struct, frozen=True, array_like=True):
    """A reward that is to come: of a turn with `request_id`, else of an agent with `agent_id`, else of the
    workflow."""

    component: str
    agent_id: str | None = None
    request_id: str | None = None

    def __str__(self) -> str:
        whose = self.request_id or self.agent_id
        return f"{self.component} of {whose}" if whose else self.component


class RewardsAwaited(_Event, frozen=True, tag="awaits"):
    """The execution is finished; only these rewards are still to come."""

    rewards: list[RewardName]
    until: float


class InfraMarked(_Event, frozen=True, tag="infra"):
    """A call was answered with a 5xx. `call` is its identity's key; empty: it had none yet."""

    reason: str
    call: str = ""


class InfraLifted(_Event, frozen=True, tag="no infra"):
    """The call was asked again and answered."""

    call: str


class OutcomeDecided(_Event, frozen=True, tag="outcome"):
    status: SettlementStatus
    reason: str


class ExecutionWritten(_Event, frozen=True, tag="writing"):
    """An execution is about to be written: it is durable if, and only if, this object exists once the
    store's own journal has been written out."""

    member: MemberKey
    mode: Literal["train", "eval"]
    status: SettlementStatus
    shard_key: str
    writer: str
    seq: int
    rows_in: tuple[str, ...] = ()  # the shards that hold its trajectories
    session_id: str = ""  # of an evaluation

    @property
    def key(self) -> ExecutionKey:
        return self.member, self.mode, self.session_id


class SessionSettled(_Event, frozen=True, tag="settled"):
    """All that is left of a session: what its `finalize` answered, and where its trajectories are."""

    session_id: str
    api_key: str
    status: str
    num_rows: dict[str, int]
    num_refused: int
    workflow_id: str = ""
    mode: str = "train"
    reason: str = ""
    rows_in: tuple[str, ...] = ()


Event = (
    GroupOpened
    | MemberSettled
    | GroupClosed
    | GatesMoved
    | SessionOpened
    | TurnCommitted
    | RewardGiven
    | RewardsAwaited
    | InfraMarked
    | InfraLifted
    | OutcomeDecided
    | ExecutionWritten
    | SessionSettled
)


# ------------------------------------------------------------------ bytes


def _array_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"the journal can't keep a {type(value).__name__}")


def _array(kind: Any, data: Any) -> Any:
    """`kind` is an alias of `types.py`, which names the element type."""
    _, dtype = kind.__args__
    return np.frombuffer(data, dtype=dtype.__args__[0])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_bytes)
_DECODER = msgspec.msgpack.Decoder(Event, dec_hook=_array)


def encode_event(event: Event) -> bytes:
    return _ENCODER.encode(event)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.MsgspecError."""
    return _DECODER.decode(data)
