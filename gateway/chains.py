"""What one agent's conversations were, token by token.

A *chain* is one linear conversation: a rendered prompt, then turns the policy sampled (mask 1) with context
between them (mask 0). It grows only by whole, successful turns, and loses its last one only when a turn that
takes its place is committed; while one is being generated the chain is
reserved, and a failed or cancelled generation leaves it as it was. Sampled ids are kept as they came and are
never made from text again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gateway.codec import TextMark
from gateway.conversation import ConversationKey, Digest, Message, ToolCall
from model_runtime.errors import InvalidTrajectoryError
from model_runtime.types import Float32Array, Int32Array, MemberKey, Rewards, Trajectory, Turn, trajectory_id

# The rollout servers run with this setting: logprobs of the distribution the token was drawn from.
LOGPROBS_MODE = "processed_logprobs"

# Shared by all turns that have none: an empty one each is the size of thirty tokens.
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """So many tokens, one after another, that one version sampled."""

    version: int
    num_tokens: int


@dataclass(slots=True)
class TokenBuffer:
    """Tokens after a prompt: 4 bytes each, 8 where they were sampled. Which those are, the turns say."""

    ids: array = field(default_factory=lambda: array("i"))
    logprobs: array = field(default_factory=lambda: array("f"))  # of sampled tokens alone
    versions: list[VersionSpan] = field(default_factory=list)  # of the same

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, turn: SampledTurn, *, context: bool) -> None:
        """What was sampled; with `context` also what came before it."""
        if context:
            self.ids.frombytes(turn.context_ids.tobytes())
        self.ids.frombytes(turn.token_ids.tobytes())
        self.logprobs.frombytes(turn.logprobs.tobytes())
        for span in turn.versions:
            self._append_span(span)

    def cut(self, length: int, num_sampled: int) -> None:
        surplus = len(self.logprobs) - num_sampled
        del self.ids[length:], self.logprobs[num_sampled:]
        while surplus:
            last = self.versions.pop()
            if last.num_tokens > surplus:
                self.versions.append(VersionSpan(last.version, last.num_tokens - surplus))
            surplus -= min(last.num_tokens, surplus)

    def token_versions(self) -> Int32Array:
        """One for each sampled token."""
        versions, counts = zip(*((s.version, s.num_tokens) for s in self.versions), strict=True)
        return np.repeat(np.array(versions, dtype=np.int32), counts)

    def _append_span(self, span: VersionSpan) -> None:
        if self.versions and self.versions[-1].version == span.version:
            span = VersionSpan(span.version, self.versions.pop().num_tokens + span.num_tokens)
        self.versions.append(span)


class SampledTurn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One successful generation and what came before it in its chain."""

    context_ids: Int32Array  # the whole prompt of a new chain, else what follows the chain's own ids
    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]  # of token_ids, in their order
    request_id: str
    finish_reason: str
    temperature: float
    top_p: float
    top_k: int
    started_at: float
    ended_at: float
    off_policy: Mapping[str, str] = NOTHING

    @property
    def version_min(self) -> int:
        return min(span.version for span in self.versions)

    @property
    def version_max(self) -> int:
        return max(span.version for span in self.versions)


@dataclass(frozen=True, slots=True)
class Point:
    """Where a chain stood after one of its turns."""

    asked: Digest  # the conversation that turn answered
    tip: Digest  # and with the answer
    num_messages: int
    mark: TextMark  # of the text the answer was sampled after
    reasoning: str | None = None  # of the answer, for agents that leave it out when they send it back


@dataclass(slots=True, eq=False)
class Chain:
    """One linear conversation of one agent. `index` is given at the first committed turn.

    What takes `num_turns` speaks of the chain as it was after so many turns."""

    index: int | None = None
    prompt_ids: array = field(default_factory=lambda: array("i"))
    response: TokenBuffer = field(default_factory=TokenBuffer)
    turns: list[Turn] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)  # one a turn
    reserved: bool = False
    updated_at: int = 0
    created_at: float = field(default_factory=time.time)

    def num_tokens(self, num_turns: int) -> int:
        return len(self.prompt_ids) + self._end(num_turns)

    def token_ids(self, num_turns: int, more: Int32Array | None = None) -> Int32Array:
        """What the server was given and gave so far, and `more` after it."""
        parts = [
            np.frombuffer(self.prompt_ids, dtype=np.int32),
            np.frombuffer(self.response.ids, dtype=np.int32)[: self._end(num_turns)],
        ]
        return np.concatenate(parts if more is None else [*parts, more])

    def turn_ids(self, num_turns: int) -> list[int]:
        """What was sampled in the last of these turns."""
        turn = self.turns[num_turns - 1]
        return self.response.ids[turn.start : turn.end].tolist()

    def _end(self, num_turns: int) -> int:
        return self.turns[num_turns - 1].end if num_turns else 0

    def with_reasoning(self, messages: Sequence[Message], num_turns: int) -> list[Message]:
        """The messages up to and with the answer of the last of these turns, each answer with the reasoning
        it came with: whether that belongs into the prompt is the template's to say, not the agent's."""
        told = list(messages[: self.points[num_turns - 1].num_messages])
        for point in self.points[:num_turns]:
            message = told[point.num_messages - 1]
            if point.reasoning is not None and "reasoning_content" not in message:
                both = {"reasoning": point.reasoning, "reasoning_content": point.reasoning}
                told[point.num_messages - 1] = message | both
        return told

    def cut(self, num_turns: int) -> None:
        """Forget later turns, and the context before them."""
        if num_turns == len(self.turns):
            return
        num_sampled = sum(turn.end - turn.start for turn in self.turns[:num_turns])
        self.response.cut(self._end(num_turns), num_sampled)
        del self.turns[num_turns:], self.points[num_turns:]


@dataclass(frozen=True, slots=True)
class Match:
    """A chain that holds the beginning of a conversation after its first `num_turns` turns."""

    chain: Chain
    num_turns: int

    @property
    def num_rolled_back_tokens(self) -> int:
        """Sampled tokens of later turns, which the conversation has taken another way."""
        return sum(turn.end - turn.start for turn in self.chain.turns[self.num_turns :])


class AgentChains:
    """All chains of one agent in one session, in the order of their first turns."""

    def __init__(self, agent_id: str, model_id: str) -> None:
        self.agent_id = agent_id
        self.model_id = model_id
        self.chains: list[Chain] = []
        self.num_breaks = 0
        self.num_ambiguous = 0
        self._commits = 0
        self._by_tip: dict[Digest, list[Chain]] = {}
        self._by_asked: dict[Digest, list[Chain]] = {}  # chains whose last turn can be rolled back
        self._versions: tuple[int, int] | None = None

    def match(self, key: ConversationKey, *, roll_back: bool = True) -> Match | None:
        """What this conversation goes on from: the free chain that holds most of its beginning.

        A conversation that has the chain's last answer in other words goes on from the turn before it, if
        that is more than any chain holds in full. Two chains of which that is true: neither."""
        for index in range(len(key) - 2, -1, -1) if roll_back and self._by_asked else ():
            digest = key.digest(index)
            if digest in self._by_tip:
                break  # held in full, if only by a chain that is under way
            if key.roles[index + 1] != "assistant":
                continue
            chains = [chain for chain in self._by_asked.get(digest, ()) if not chain.reserved]
            if len(chains) == 1:
                return Match(chains[0], len(chains[0].turns) - 1)
            if chains:
                self.num_ambiguous += 1
                return None
        exact = self.longest_prefix(key)
        return Match(exact, len(exact.turns)) if exact is not None else None

    def longest_prefix(self, key: ConversationKey) -> Chain | None:
        """The free chain that ends in most of this conversation's beginning; the newest among equals."""
        for index in range(len(key) - 2, -1, -1) if self._by_tip else ():
            free = [chain for chain in self._by_tip.get(key.digest(index), ()) if not chain.reserved]
            if free:
                return max(free, key=lambda chain: chain.updated_at)
        return None

    def commit(
        self,
        chain: Chain,
        turn: SampledTurn,
        *,
        key: ConversationKey,
        answer: str,
        mark: TextMark,
        tool_calls: Sequence[ToolCall] = (),
        reasoning: str | None = None,
        num_turns: int | None = None,
    ) -> None:
        """Append a turn after the first `num_turns` (None: after all). `key` is the request's conversation,
        `answer` and `tool_calls` what was given back for it: together they recognise the agent's next
        request."""
        tip = key.with_answer(answer, tool_calls)
        point = Point(key.digest(len(key) - 1), tip, len(key) + 1, mark, reasoning)
        self.append(chain, turn, point, num_turns=num_turns)

    def append(self, chain: Chain, turn: SampledTurn, point: Point, *, num_turns: int | None = None) -> None:
        """`commit`, where the chain's next point is known."""
        self._unlist(chain)
        if num_turns is not None:
            chain.cut(num_turns)
        is_new = chain.index is None
        if is_new:
            chain.index = len(self.chains)
            self.chains.append(chain)
            chain.prompt_ids.frombytes(turn.context_ids.tobytes())
        chain.response.append(turn, context=not is_new)
        recorded = _turn(turn, index=len(chain.turns), end=len(chain.response))
        chain.turns.append(recorded)
        low, high = self._versions or (recorded.version_min, recorded.version_max)
        self._versions = min(low, recorded.version_min), max(high, recorded.version_max)
        self._commits += 1
        chain.updated_at = self._commits
        chain.points.append(point)
        self._list(chain)

    def _list(self, chain: Chain) -> None:
        last = chain.points[-1]
        self._by_tip.setdefault(last.tip, []).append(chain)
        if len(chain.points) > 1:  # of a first turn there is nothing to keep
            self._by_asked.setdefault(last.asked, []).append(chain)

    def _unlist(self, chain: Chain) -> None:
        if chain.points:
            last = chain.points[-1]
            for index, digest in ((self._by_tip, last.tip), (self._by_asked, last.asked)):
                listed = index.get(digest, [])
                if chain in listed:
                    listed.remove(chain)
                    if not listed:
                        del index[digest]

    def version_range(self) -> tuple[int, int] | None:
        """(oldest, newest) version that sampled for this agent."""
        return self._versions


def _turn(turn: SampledTurn, *, index: int, end: int) -> Turn:
    return Turn(
        turn_index=index,
        start=end - len(turn.token_ids),
        end=end,
        request_id=turn.request_id,
        version_min=turn.version_min,
        version_max=turn.version_max,
        finish_reason=turn.finish_reason,
        temperature=turn.temperature,
        top_p=turn.top_p,
        top_k=turn.top_k,
        logprobs_mode=LOGPROBS_MODE,
        rewards=NOTHING,
        started_at=turn.started_at,
        ended_at=turn.ended_at,
        off_policy=turn.off_policy or NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRecord:
    """What the trajectories of one execution have in common."""

    run_id: str
    member: MemberKey
    session_id: str
    train: Mapping[str, bool]  # model_id → its rows may be trained
    workflow_rewards: Rewards
    agent_rewards: Mapping[str, Rewards]
    turn_rewards: Mapping[str, Rewards]  # request_id → rewards


def materialise(
    agents: Iterable[AgentChains], execution: ExecutionRecord
) -> tuple[list[Trajectory], list[InvalidTrajectoryError]]:
    """One trajectory per chain. A chain that breaks an invariant is refused, never its neighbours."""
    agents = list(agents)
    versions = _versions_by_model(agents)
    trajectories: list[Trajectory] = []
    refused: list[InvalidTrajectoryError] = []
    for owner in agents:
        partners = {model: span for model, span in versions.items() if model != owner.model_id}
        for chain in owner.chains:
            try:
                trajectories.append(_trajectory(owner, chain, execution, partners))
            except InvalidTrajectoryError as error:
                refused.append(error)
    return trajectories, refused


def _versions_by_model(agents: Sequence[AgentChains]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for owner in agents:
        span = owner.version_range()
        if span is not None:
            low, high = spans.get(owner.model_id, span)
            spans[owner.model_id] = (min(low, span[0]), max(high, span[1]))
    return spans


def _trajectory(
    owner: AgentChains, chain: Chain, execution: ExecutionRecord, partners: Mapping[str, tuple[int, int]]
) -> Trajectory:
    assert chain.index is not None, "a chain is listed only once it has a turn"
    mask = np.zeros(len(chain.response), dtype=bool)
    for turn in chain.turns:
        mask[turn.start : turn.end] = True
    logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    logprobs[mask], versions[mask] = chain.response.logprobs, chain.response.token_versions()
    turns = tuple(replace(t, rewards=execution.turn_rewards.get(t.request_id, {})) for t in chain.turns)
    return Trajectory(
        trajectory_id=trajectory_id(execution.run_id, execution.member, owner.agent_id, chain.index),
        run_id=execution.run_id,
        member=execution.member,
        session_id=execution.session_id,
        agent_id=owner.agent_id,
        model_id=owner.model_id,
        chain_index=chain.index,
        parent_trajectory_id=None,
        request_id=turns[-1].request_id,
        policy_version=min(turn.version_min for turn in turns),
        policy_version_max=max(turn.version_max for turn in turns),
        partner_versions=partners,
        prompt_ids=np.array(chain.prompt_ids, dtype=np.int32),
        response_ids=np.array(chain.response.ids, dtype=np.int32),
        response_mask=mask.astype(np.int8),
        behavior_logprobs=logprobs,
        token_versions=versions,
        turns=turns,
        workflow_rewards=execution.workflow_rewards,
        agent_rewards=execution.agent_rewards.get(owner.agent_id, {}),
        train=execution.train.get(owner.model_id, False),
        created_at=chain.created_at,
    )
