"""MultiModelGatewayRouter: from an agent's messages to a sampled, recorded answer.

agent → model → ready binding → chain → ids → that model's server → chain
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np

from gateway.bindings import GatewayBindingRegistry, ModelBinding
from gateway.calls import CallIdentity
from gateway.chains import AgentChains, Chain, Match, SampledTurn
from gateway.codec import ChatCodec, RenderedPrompt, TextMark
from gateway.conversation import ChatCall, ChatReply, ConversationKey, DeltaSink
from gateway.metrics import GatewayMetrics
from gateway.route_table import AgentModelRouteTable
from gateway.sampler import Sampled, Sampler, Sampling, or_ask_again
from gateway.sampling import Settings, merge_settings
from gateway.session import Session
from model_runtime.config import RunConfig
from model_runtime.errors import InvalidRequestError, LimitExceededError
from model_runtime.types import Int32Array

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prepared:
    """A reserved chain and the ids that come next in it."""

    owner: AgentChains
    match: Match
    key: ConversationKey
    new_ids: Int32Array
    mark: TextMark

    @property
    def num_context_tokens(self) -> int:
        return self.match.chain.num_tokens(self.match.num_turns) + len(self.new_ids)

    def prompt_ids(self) -> list[int]:
        return self.match.chain.token_ids(self.match.num_turns) + self.new_ids.tolist()


class MultiModelGatewayRouter:
    """Answers model calls. One instance per gateway."""

    def __init__(
        self,
        config: RunConfig,
        *,
        routes: AgentModelRouteTable,
        bindings: GatewayBindingRegistry,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.model_id: model for model in config.models}
        self._timeout_s = config.gateway.request_timeout_s
        self._max_chains = config.gateway.max_chains_per_session
        self._roll_back = config.gateway.roll_back_rewritten_turns
        self._defaults: Settings = {"temperature": config.workflow.temperature}
        self._routes = routes
        self._bindings = bindings
        self._sampler = Sampler(bindings, metrics, clock, attempt_timeout_s=config.gateway.attempt_timeout_s)
        self._metrics = metrics
        self._clock = clock

    def check(self, session: Session, call: ChatCall) -> None:
        """Refuse at once what waiting would not mend. Raises ConflictError, UnknownAgentError,
        InvalidRequestError."""
        session.require_active()
        model_id = self._routes.model_of(call.agent_id)
        self._settings(session, call)
        if call.tools and self._models[model_id].rollout.tool_call_parser is None:
            raise InvalidRequestError(
                f"model {model_id!r} takes no tools: no parser reads its tool calls; set "
                "rollout.tool_call_parser to vLLM's for this model family",
                param="tools",
            )

    async def chat_completion(
        self,
        session: Session,
        call: ChatCall,
        *,
        identity: CallIdentity | None = None,
        with_texts: bool = False,
        on_delta: DeltaSink | None = None,
        wait_s: float | None = None,
    ) -> ChatReply:
        """One generation, recorded in the session's chains. `on_delta` hears of it as it grows; `identity` is
        the call it answers; `wait_s` is what it may wait before it begins.

        Raises ModelNotReadyError at the deadline, TooManyRequestsError when it could not begin in time, and
        BackendRejectedError for the server's own 4xx; leaves the record untouched then and when cancelled."""
        started_at = time.time()
        deadline = self._clock() + self._timeout_s
        model_id = self._routes.model_of(call.agent_id)
        settings = self._settings(session, call)
        begin_by = None if wait_s is None else min(deadline, self._clock() + wait_s)
        with or_ask_again(begin_by):
            binding = await self._ready(model_id, deadline if begin_by is None else begin_by)
        codec = binding.ready_codec()
        request_id = uuid.uuid4().hex
        async with self._prepare(session, binding, call) as prepared:
            max_tokens = self._room(binding, settings, prepared.num_context_tokens)
            if max_tokens <= 0:
                return self._out_of_room(session, call, binding, request_id, prepared)
            sampling = Sampling(
                session=session,
                call=call,
                model_id=model_id,
                parses=self._parses(call, model_id),
                interruptible=self._interruptible(model_id, settings),
                request_id=request_id,
                prompt_ids=prepared.prompt_ids(),
                settings=_server_sampling(settings, max_tokens, _stop_ids(codec, call.stop)),
                deadline=deadline,
                begin_by=begin_by,
                started_at=started_at,
                codec=codec,
                with_texts=with_texts,
                on_delta=on_delta,
            )
            sampled = await self._sampler.sample(sampling)
            answer = sampled.answer
            session.require_active()
            num_prompt_tokens = prepared.num_context_tokens
            turn = _sampled_turn(prepared, sampled, settings, request_id, started_at)
            self._note_rollback(model_id, prepared.match)
            prepared.owner.commit(
                prepared.match.chain,
                turn,
                num_turns=prepared.match.num_turns,
                key=prepared.key,
                answer=answer.content,
                tool_calls=answer.tool_calls,
                mark=prepared.mark,
            )
            reply = _reply(session, call, model_id, turn, sampled, codec if with_texts else None)
            session.note_turn(prepared.owner, prepared.match, turn, identity=identity, reply=reply)
        self._metrics.observe_turn(
            model_id,
            call.agent_id,
            num_prompt_tokens=num_prompt_tokens,
            num_sampled_tokens=len(turn.token_ids),
            seconds=turn.ended_at - started_at,
        )
        return reply

    async def count_tokens(self, session: Session, call: ChatCall) -> int:
        """Tokens of these messages as the start of a conversation. Raises ModelNotReadyError,
        InvalidRequestError."""
        session.require_active()
        binding = await self._ready(self._routes.model_of(call.agent_id), self._clock() + self._timeout_s)
        return len((await binding.ready_codec().prompt(call.messages, call.tools)).ids)

    # -------------------------------------------------------------- before

    def _settings(self, session: Session, call: ChatCall) -> dict[str, float | int]:
        return merge_settings(
            defaults=self._defaults,
            session=session.sampling,
            request=call.sampling,
            forced=session.forced_sampling,
            training=session.is_training,
        )

    async def _ready(self, model_id: str, deadline: float) -> ModelBinding:
        began = self._clock()
        try:
            return await self._bindings.wait_until_ready(model_id, deadline)
        finally:
            self._metrics.observe_wait(model_id, self._clock() - began)

    def _room(self, binding: ModelBinding, settings: Settings, num_context_tokens: int) -> int:
        """Tokens this answer may have; none are left when ≤ 0."""
        model = self._models[binding.model_id]
        capacity = binding.ready_codec().max_model_len
        if model.rollout.max_model_len is not None:
            capacity = min(capacity, model.rollout.max_model_len)
        asked = settings.get("max_tokens", model.max_response_tokens)
        return min(int(asked), model.max_response_tokens, capacity - num_context_tokens)

    @asynccontextmanager
    async def _prepare(
        self, session: Session, binding: ModelBinding, call: ChatCall
    ) -> AsyncIterator[_Prepared]:
        """Reserve the chain this conversation continues, or a new one, until the block ends."""
        codec = binding.ready_codec()
        owner = session.chains_of(call.agent_id, binding.model_id)
        key = ConversationKey(call.messages, call.tools)
        num_ambiguous = owner.num_ambiguous
        match = owner.match(key, roll_back=self._roll_back)
        if owner.num_ambiguous > num_ambiguous:
            self._metrics.count_ambiguous(binding.model_id)
        if match is not None:
            with _reserved(match.chain):
                rendered = await _render_continuation(codec, match, call)
                if rendered is not None:
                    yield _Prepared(owner, match, key, rendered.ids, rendered.mark)
                    return
            owner.num_breaks += 1
            self._metrics.count_chain_break(binding.model_id)
        self._require_room_for_a_chain(session)
        rendered = await codec.prompt(call.messages, call.tools)
        with _reserved(Chain()) as chain:
            yield _Prepared(owner, Match(chain, 0), key, rendered.ids, rendered.mark)

    def _require_room_for_a_chain(self, session: Session) -> None:
        num_chains = sum(len(owner.chains) for owner in session.agents.values())
        if num_chains >= self._max_chains:
            self._metrics.count_refusal("chains")
            raise LimitExceededError(
                f"session {session.session_id} holds {num_chains} conversations; "
                f"gateway.max_chains_per_session is {self._max_chains}"
            )

    def _note_rollback(self, model_id: str, match: Match) -> None:
        if match.num_turns < len(match.chain.turns):
            self._metrics.count_rollback(model_id, match.num_rolled_back_tokens)

    def _parses(self, call: ChatCall, model_id: str) -> bool:
        rollout = self._models[model_id].rollout
        return bool(call.tools and rollout.tool_call_parser) or rollout.reasoning_parser is not None

    def _interruptible(self, model_id: str, settings: Settings) -> bool:
        """May a generation go on under another version? Not where the server weighs what it sampled so
        far: to it, what is continued is prompt."""
        weighs = any(settings.get(name) for name in ("presence_penalty", "frequency_penalty"))
        return self._models[model_id].async_training.partial_rollout and not weighs

    # -------------------------------------------------------------- after

    def _out_of_room(
        self, session: Session, call: ChatCall, binding: ModelBinding, request_id: str, prepared: _Prepared
    ) -> ChatReply:
        """No token fits: an empty answer cut by length, without asking the server and without a record."""
        self._metrics.count_out_of_room(binding.model_id)
        return ChatReply(
            request_id=request_id,
            agent_id=call.agent_id,
            model_id=binding.model_id,
            policy_version=binding.published_version or 0,
            policy_version_max=binding.published_version or 0,
            workflow_id=session.member.workflow_id,
            content="",
            finish_reason="length",
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            token_texts=(),
            num_prompt_tokens=prepared.num_context_tokens,
            num_cached_tokens=0,
            created_at=time.time(),
        )


@contextmanager
def _reserved(chain: Chain) -> Iterator[Chain]:
    """Nobody else continues the chain meanwhile."""
    chain.reserved = True
    try:
        yield chain
    finally:
        chain.reserved = False


async def _render_continuation(codec: ChatCodec, match: Match, call: ChatCall) -> RenderedPrompt | None:
    chain, num_turns = match.chain, match.num_turns
    point = chain.points[num_turns - 1]
    so_far, new = call.messages[: point.num_messages], call.messages[point.num_messages :]
    sampled_ids = chain.turn_ids(num_turns)
    return await codec.continuation(
        so_far,
        new,
        last_id=sampled_ids[-1],
        before=point.mark,
        tools=call.tools,
        sampled_ids=sampled_ids,
    )


def _stop_ids(codec: ChatCodec, stop: tuple[str, ...]) -> list[int]:
    """Tokens that end the turn: the model's own, and stop strings that are one special token each."""
    ids = list(codec.eos_token_ids)
    for text in stop:
        id_ = codec.special_token_id(text)
        if id_ is None:
            raise InvalidRequestError(
                f"stop {text!r} can't be honoured: only a special token of the model can end a turn",
                param="stop",
            )
        ids.append(id_)
    return ids


def _server_sampling(
    settings: Settings, max_tokens: int, stop_token_ids: list[int]
) -> dict[str, float | int | list[int]]:
    return {**settings, "max_tokens": max_tokens, "stop_token_ids": stop_token_ids}


def _sampled_turn(
    prepared: _Prepared, sampled: Sampled, settings: Settings, request_id: str, started_at: float
) -> SampledTurn:
    generation = sampled.generation
    return SampledTurn(
        context_ids=prepared.new_ids,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=sampled.versions,
        request_id=request_id,
        finish_reason=generation.finish_reason,
        temperature=float(settings.get("temperature", 1.0)),
        top_p=float(settings.get("top_p", 1.0)),
        top_k=int(settings.get("top_k", 0)),
        started_at=started_at,
        ended_at=time.time(),
    )


def _reply(
    session: Session,
    call: ChatCall,
    model_id: str,
    turn: SampledTurn,
    sampled: Sampled,
    codec: ChatCodec | None,
) -> ChatReply:
    generation, answer = sampled.generation, sampled.answer
    texts = None if codec is None else tuple(codec.token_texts(generation.token_ids))
    stopped = generation.finish_reason == "stop"
    return ChatReply(
        request_id=turn.request_id,
        agent_id=call.agent_id,
        model_id=model_id,
        policy_version=turn.version_min,
        policy_version_max=turn.version_max,
        workflow_id=session.member.workflow_id,
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
        finish_reason="tool_calls" if stopped and answer.tool_calls else generation.finish_reason,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        token_texts=texts,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        created_at=turn.started_at,
    )
