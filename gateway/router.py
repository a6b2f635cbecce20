"""MultiModelGatewayRouter: from an agent's messages to a sampled, recorded answer.

agent → model → ready binding → chain → ids → that model's server → chain
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gateway import logs
from gateway.bindings import GatewayBindingRegistry, ModelBinding
from gateway.calls import CallIdentity, Claimed
from gateway.chains import AgentChains, Chain, Match, SampledTurn
from gateway.codec import ChatCodec, RenderedPrompt, TextMark
from gateway.conversation import ChatCall, ChatReply, ConversationKey, DeltaSink
from gateway.metrics import GatewayMetrics
from gateway.route_table import AgentModelRouteTable
from gateway.sampler import Sampled, Sampler, Sampling, or_ask_again
from gateway.sampling import Settings, check_stop, merge_settings, off_policy_settings
from gateway.session import Session
from gateway.slices import in_step
from gateway.traced import trace_call
from model_runtime.config import RunConfig
from model_runtime.errors import ConflictError, InvalidRequestError, LimitExceededError, ModelNotReadyError
from model_runtime.tracing import Traces
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
    def is_new(self) -> bool:
        return self.match.chain.index is None

    @property
    def num_context_tokens(self) -> int:
        return self.match.chain.num_tokens(self.match.num_turns) + len(self.new_ids)

    def prompt_ids(self) -> Int32Array:
        return self.match.chain.token_ids(self.match.num_turns, self.new_ids)


class MultiModelGatewayRouter:
    """Answers model calls. One instance per gateway."""

    def __init__(
        self,
        config: RunConfig,
        *,
        routes: AgentModelRouteTable,
        bindings: GatewayBindingRegistry,
        metrics: GatewayMetrics,
        traces: Traces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.model_id: model for model in config.models}
        self._timeout_s = config.gateway.request_timeout_s
        self._max_chains = config.gateway.max_chains_per_session
        self._roll_back = config.gateway.roll_back_rewritten_turns
        self._allow_off_policy = config.gateway.allow_off_policy_sampling
        self._defaults: Settings = {"temperature": config.workflow.temperature}
        self._routes = routes
        self._bindings = bindings
        limit_s = config.gateway.attempt_timeout_s
        self._sampler = Sampler(bindings, metrics, clock, attempt_timeout_s=limit_s, traces=traces)
        self._metrics, self._traces = metrics, traces
        self._clock = clock

    def check(self, session: Session, call: ChatCall) -> None:
        """Refuse at once what waiting would not mend. Raises ConflictError, UnknownAgentError,
        InvalidRequestError."""
        session.require_active()
        model_id = self._routes.model_of(call.agent_id)
        if call.tools and self._models[model_id].rollout.tool_call_parser is None:
            raise InvalidRequestError(
                f"model {model_id!r} takes no tools: no parser reads its tool calls; set "
                "rollout.tool_call_parser to vLLM's for this model family",
                param="tools",
            )
        check_stop(call.stop)
        if call.forces_call and session.is_training and not self._allow_off_policy:
            raise InvalidRequestError(
                "tool_choice must be auto or none in a training session: a grammar forces the call, and its "
                "logprobs are another distribution's than the model's; use an evaluation session, or set "
                "gateway.allow_off_policy_sampling",
                param="tool_choice",
            )

    async def chat_completion(
        self,
        session: Session,
        call: ChatCall,
        *,
        identity: CallIdentity | None = None,
        claimed: Claimed | None = None,
        with_token_bytes: bool = False,
        on_delta: DeltaSink | None = None,
        wait_s: float | None = None,
    ) -> ChatReply:
        """One generation for each choice, recorded in the session's chains. `on_delta` hears of them as they
        grow; `identity` is the call they answer, `claimed` is awaited before they are recorded; `wait_s` is
        what the call may wait before it begins.

        Raises ModelNotReadyError at the deadline, TooManyRequestsError when it could not begin in time, and
        BackendRejectedError for the server's own 4xx; leaves the record untouched then and when cancelled."""
        started_at = time.time()
        deadline = self._clock() + self._timeout_s
        model_id = self._routes.model_of(call.agent_id)
        settings = self._settings(session, call)
        begin_by = None if wait_s is None else min(deadline, self._clock() + wait_s)
        binding = await self._ready(model_id, deadline, begin_by)
        codec = binding.ready_codec()
        choices = await self._prepare(session, binding, call)
        try:
            rooms = [self._room(binding, settings, choice.num_context_tokens) for choice in choices]
            if min(rooms) <= 0:
                return self._out_of_room(session, call, binding, choices)
            samplings = [
                Sampling(
                    session=session,
                    call=call,
                    choice=index,
                    model_id=model_id,
                    parses=self._parses(call, model_id),
                    partial_rollout=model_id not in session.versions
                    and self._models[model_id].async_training.partial_rollout,
                    kept_whole_by=_kept_whole_by(call, settings),
                    request_id=_new_request_id(),
                    prompt_ids=choice.prompt_ids(),
                    settings=_server_sampling(settings, call, codec, max_tokens=room, choice=index),
                    deadline=deadline,
                    begin_by=begin_by,
                    started_at=started_at,
                    codec=codec,
                    with_token_bytes=with_token_bytes,
                    on_delta=on_delta,
                )
                for index, (choice, room) in enumerate(zip(choices, rooms, strict=True))
            ]
            try:
                await in_step(binding.running)
                sampled = await _together([self._sampler.sample(sampling) for sampling in samplings])
                if claimed is not None:
                    await claimed()
                session.require_active()
            except BaseException as error:
                self._discard(samplings, error)
                raise
            first, *others = zip(choices, samplings, sampled, strict=True)
            if not others:
                return self._commit(*first, settings=settings, identity=identity)
            with session.journal.together():
                siblings = tuple(self._commit(*one, settings=settings) for one in others)
                return self._commit(*first, settings=settings, siblings=siblings, identity=identity)
        finally:
            _release(choices)

    def _discard(self, samplings: list[Sampling], error: BaseException) -> None:
        """Account for what was sampled for nothing."""
        nobody_waits = isinstance(error, asyncio.CancelledError | ConflictError)
        for sampling in samplings:
            reason = "cancelled" if nobody_waits else "broken"
            self._metrics.count_discarded(sampling.model_id, reason, sampling.num_received_tokens)
            if self._traces is not None:
                trace_call(self._traces, sampling, num_sampled_tokens=0, error=type(error).__name__)

    def _commit(
        self,
        prepared: _Prepared,
        sampling: Sampling,
        sampled: Sampled,
        *,
        settings: Settings,
        siblings: tuple[ChatReply, ...] = (),
        identity: CallIdentity | None = None,
    ) -> ChatReply:
        """Append the turn to its chain. The first choice comes last and is noted with the call's identity and
        all that it is answered with."""
        call, model_id, answer = sampling.call, sampling.model_id, sampled.answer
        num_prompt_tokens = prepared.num_context_tokens
        turn = _sampled_turn(prepared, sampling, sampled, settings)
        self._note_rollback(model_id, prepared.match)
        prepared.owner.commit(
            prepared.match.chain,
            turn,
            num_turns=prepared.match.num_turns,
            key=prepared.key,
            answer=answer.content,
            tool_calls=answer.tool_calls,
            reasoning=answer.reasoning,
            mark=prepared.mark,
        )
        reply = _reply(sampling, turn, sampled, siblings)
        sampling.session.note_turn(prepared.owner, prepared.match, turn, identity=identity, reply=reply)
        num_broken = sampling.num_received_tokens - len(turn.token_ids)
        self._metrics.count_discarded(model_id, "broken", num_broken)
        logs.request_id.set(turn.request_id)
        if logger.isEnabledFor(logging.DEBUG):
            _log_turn(call.agent_id, model_id, turn, num_prompt_tokens)
        self._metrics.observe_turn(
            model_id,
            call.agent_id,
            num_prompt_tokens=num_prompt_tokens,
            num_sampled_tokens=len(turn.token_ids),
            seconds=turn.ended_at - sampling.started_at,
        )
        if self._traces is not None:
            trace_call(self._traces, sampling, num_sampled_tokens=len(turn.token_ids))
        return reply

    async def count_tokens(self, session: Session, call: ChatCall) -> int:
        """Tokens of these messages as the start of a conversation. Raises ModelNotReadyError,
        InvalidRequestError."""
        session.require_active()
        deadline = self._clock() + self._timeout_s
        binding = await self._ready(self._routes.model_of(call.agent_id), deadline, None)
        return len(
            (await binding.ready_codec().prompt(call.messages, call.tools, call.template_arguments)).ids
        )

    # -------------------------------------------------------------- before

    def _settings(self, session: Session, call: ChatCall) -> dict[str, float | int]:
        return merge_settings(
            defaults=self._defaults,
            session=session.sampling,
            request=call.sampling,
            forced=session.forced_sampling,
            training=session.is_training,
            allow_off_policy=self._allow_off_policy,
        )

    async def _ready(self, model_id: str, deadline: float, begin_by: float | None) -> ModelBinding:
        began = self._clock()
        try:
            return await self._bindings.wait_until_ready(model_id, deadline if begin_by is None else begin_by)
        except ModelNotReadyError as error:
            raise or_ask_again(error, begin_by) from None
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

    async def _prepare(self, session: Session, binding: ModelBinding, call: ChatCall) -> list[_Prepared]:
        """For each choice the chain this conversation continues, or a new one, reserved until it is released.
        One chain goes on with one choice: the others start anew."""
        owner = session.chains_of(call.agent_id, binding.model_id)
        key = ConversationKey(call.messages, call.tools, call.template_arguments)
        continued = await self._continue(owner, binding, call, key)
        choices = [] if continued is None else [continued]
        num_new = call.num_choices - len(choices)
        if not num_new:
            return choices
        try:
            self._require_room_for_chains(session, num_new=num_new)
            whole = await binding.ready_codec().prompt(call.messages, call.tools, call.template_arguments)
        except BaseException:
            _release(choices)
            raise
        for _ in range(num_new):
            match = Match(Chain(reserved=True), 0)
            choices.append(_Prepared(owner, match, key, whole.ids, whole.mark))
        return choices

    async def _continue(
        self, owner: AgentChains, binding: ModelBinding, call: ChatCall, key: ConversationKey
    ) -> _Prepared | None:
        """Reserve what this conversation goes on from. None: nothing, or the template won't have it."""
        num_ambiguous = owner.num_ambiguous
        match = owner.match(key, roll_back=self._roll_back)
        if owner.num_ambiguous > num_ambiguous:
            self._metrics.count_ambiguous(binding.model_id)
        if match is None:
            return None
        match.chain.reserved = True
        rendered = None
        try:
            rendered = await _render_continuation(binding.ready_codec(), match, call)
        finally:
            match.chain.reserved = rendered is not None
        if rendered is not None:
            return _Prepared(owner, match, key, rendered.ids, rendered.mark)
        owner.num_breaks += 1
        self._metrics.count_chain_break(binding.model_id)
        return None

    def _require_room_for_chains(self, session: Session, *, num_new: int) -> None:
        num_chains = sum(len(owner.chains) for owner in session.agents.values())
        if num_chains + num_new > self._max_chains:
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

    # -------------------------------------------------------------- after

    def _out_of_room(
        self, session: Session, call: ChatCall, binding: ModelBinding, choices: list[_Prepared]
    ) -> ChatReply:
        """No token fits: empty answers cut by length, without asking the server and without a record."""
        self._metrics.count_out_of_room(binding.model_id)
        replies = [
            ChatReply(
                request_id=_new_request_id(),
                agent_id=call.agent_id,
                model_id=binding.model_id,
                policy_version=binding.published_version or 0,
                policy_version_max=binding.published_version or 0,
                workflow_id=session.member.workflow_id,
                content="",
                finish_reason="length",
                token_ids=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                token_bytes=(),
                num_prompt_tokens=choice.num_context_tokens,
                num_cached_tokens=0,
                created_at=time.time(),
            )
            for choice in choices
        ]
        return msgspec.structs.replace(replies[0], siblings=tuple(replies[1:]))


async def _together(samples: list[Coroutine[Any, Any, Sampled]]) -> list[Sampled]:
    """All of them, or the first failure and none."""
    if len(samples) == 1:
        return [await samples[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sample) for sample in samples]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _kept_whole_by(call: ChatCall, settings: Settings) -> str:
    """Why another attempt can't go on with the call's generation exactly: the server looks at what it sampled
    itself, and to it what is continued is prompt. Empty when one can."""
    if call.forces_call:
        return "tool_choice"
    return next((name for name in ("presence_penalty", "frequency_penalty") if settings.get(name)), "")


def _release(choices: Iterable[_Prepared]) -> None:
    """Let others continue these chains."""
    for choice in choices:
        choice.match.chain.reserved = False


def _new_request_id() -> str:
    return secrets.token_hex(16)


async def _render_continuation(codec: ChatCodec, match: Match, call: ChatCall) -> RenderedPrompt | None:
    chain, num_turns = match.chain, match.num_turns
    point = chain.points[num_turns - 1]
    so_far, new = chain.with_reasoning(call.messages, num_turns), call.messages[point.num_messages :]
    sampled_ids = chain.turn_ids(num_turns)
    return await codec.continuation(
        so_far,
        new,
        last_id=sampled_ids[-1],
        before=point.mark,
        tools=call.tools,
        arguments=call.template_arguments,
        sampled_ids=sampled_ids,
    )


def _server_sampling(
    settings: Settings, call: ChatCall, codec: ChatCodec, *, max_tokens: int, choice: int
) -> dict[str, Any]:
    """What the server is asked for. A stop string that is one special token never shows in a text: such
    tokens end the turn by their ids, as the model's own do."""
    special = {text: codec.special_token_id(text) for text in call.stop}
    ids = [*codec.eos_token_ids, *(id_ for id_ in special.values() if id_ is not None)]
    sampling: dict[str, Any] = {**settings, "max_tokens": max_tokens, "stop_token_ids": ids}
    texts = [text for text, id_ in special.items() if id_ is None]
    if texts:
        sampling["stop"] = texts
    if call.num_top_logprobs:
        sampling["logprobs"] = call.num_top_logprobs
    if "seed" in settings:
        sampling["seed"] = int(settings["seed"]) + choice  # else every choice would be the same
    return sampling


def _sampled_turn(
    prepared: _Prepared, sampling: Sampling, sampled: Sampled, settings: Settings
) -> SampledTurn:
    generation = sampled.generation
    off_policy = {name: msgspec.json.encode(v).decode() for name, v in off_policy_settings(settings).items()}
    if sampling.call.forces_call:
        off_policy["tool_choice"] = msgspec.json.encode(sampling.call.tool_choice).decode()
    return SampledTurn(
        context_ids=prepared.new_ids,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=sampled.versions,
        request_id=sampling.request_id,
        finish_reason=generation.finish_reason,
        temperature=float(settings.get("temperature", 1.0)),
        top_p=float(settings.get("top_p", 1.0)),
        top_k=int(settings.get("top_k", 0)),
        started_at=sampling.started_at,
        ended_at=time.time(),
        off_policy=off_policy,
    )


def _reply(
    sampling: Sampling, turn: SampledTurn, sampled: Sampled, siblings: tuple[ChatReply, ...]
) -> ChatReply:
    generation, answer, codec = sampled.generation, sampled.answer, sampling.codec
    pieces = tuple(codec.token_bytes(generation.token_ids)) if sampling.with_token_bytes else None
    stopped = generation.finish_reason == "stop"
    return ChatReply(
        request_id=turn.request_id,
        agent_id=sampling.call.agent_id,
        model_id=sampling.model_id,
        policy_version=turn.version_min,
        policy_version_max=turn.version_max,
        workflow_id=sampling.session.member.workflow_id,
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
        finish_reason="tool_calls" if stopped and answer.tool_calls else generation.finish_reason,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        token_bytes=pieces,
        top_logprobs=codec.top_bytes(generation.top_logprobs),
        stopped_by=_stopped_by(sampling, generation.stop_reason),
        siblings=siblings,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        created_at=turn.started_at,
    )


def _stopped_by(sampling: Sampling, reason: int | str | None) -> str | None:
    """The stop string of the call that ended the answer, itself or as a special token."""
    if reason is None or isinstance(reason, str):
        return reason
    return next(
        (text for text in sampling.call.stop if sampling.codec.special_token_id(text) == reason), None
    )


def _log_turn(agent_id: str, model_id: str, turn: SampledTurn, num_prompt_tokens: int) -> None:
    logger.debug(
        "agent %s of %s: %d prompt tokens, %d sampled, %.3f s",
        agent_id,
        model_id,
        num_prompt_tokens,
        len(turn.token_ids),
        turn.ended_at - turn.started_at,
    )
