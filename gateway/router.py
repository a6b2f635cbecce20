"""MultiModelGatewayRouter: from an agent's messages to a sampled, recorded answer.

agent → model → ready binding → chain → ids → that model's server → chain
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.bindings import GatewayBindingRegistry, ModelBinding, Placement
from gateway.chains import AgentChains, Chain, SampledTurn
from gateway.codec import ChatCodec, RenderedPrompt, TextMark
from gateway.conversation import ChatCall, ChatReply, ConversationKey, DeltaSink, Message, ReplyDelta
from gateway.metrics import GatewayMetrics
from gateway.route_table import AgentModelRouteTable
from gateway.sampling import Settings, merge_settings
from gateway.sessions import Session
from gateway.text_stream import TextStream
from model_runtime.config import RunConfig
from model_runtime.errors import (
    BackendRejectedError,
    BackendUnavailableError,
    InvalidRequestError,
    ModelNotReadyError,
)
from model_runtime.layout import served_name
from model_runtime.llm_client import Generation, GenerationChunk, join_chunks
from model_runtime.types import Int32Array

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0

# The gateway chose the key and the model's name itself: a server that knows neither has just been
# restarted, and the request is not to blame.
_NOT_THE_CALLERS_FAULT = frozenset({401, 403, 404})


@dataclass(slots=True, eq=False)
class _Prepared:
    """A reserved chain and the ids that come next in it."""

    owner: AgentChains
    chain: Chain
    key: ConversationKey
    new_ids: Int32Array
    mark: TextMark

    @property
    def num_context_tokens(self) -> int:
        return self.chain.num_tokens + len(self.new_ids)

    def prompt_ids(self) -> list[int]:
        return self.chain.token_ids() + self.new_ids.tolist()


@dataclass(slots=True, eq=False, kw_only=True)
class _Sampling:
    """What is asked of the server, and who hears of it while it is being sampled."""

    session: Session
    call: ChatCall
    model_id: str
    request_id: str
    prompt_ids: list[int]
    settings: dict[str, float | int | list[int]]
    deadline: float
    started_at: float
    codec: ChatCodec
    with_texts: bool = False
    on_delta: DeltaSink | None = None
    text: TextStream | None = None  # what the listener has heard so far


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
        self._defaults: Settings = {"temperature": config.workflow.temperature}
        self._routes = routes
        self._bindings = bindings
        self._metrics = metrics
        self._clock = clock

    def check(self, session: Session, call: ChatCall) -> None:
        """Refuse at once what waiting would not mend. Raises ConflictError, UnknownAgentError,
        InvalidRequestError."""
        session.require_active()
        self._routes.model_of(call.agent_id)
        self._settings(session, call)

    async def chat_completion(
        self,
        session: Session,
        call: ChatCall,
        *,
        with_texts: bool = False,
        on_delta: DeltaSink | None = None,
    ) -> ChatReply:
        """One generation, recorded in the session's chains. `on_delta` hears of it as it grows.

        Raises ModelNotReadyError at the deadline, BackendRejectedError for the server's own 4xx, and
        leaves the record untouched then and when cancelled."""
        started_at = time.time()
        deadline = self._clock() + self._timeout_s
        model_id = self._routes.model_of(call.agent_id)
        settings = self._settings(session, call)
        binding = await self._ready(model_id, deadline)
        codec = binding.ready_codec()
        request_id = uuid.uuid4().hex
        async with self._prepare(session, binding, call) as prepared:
            max_tokens = self._room(binding, settings, prepared.num_context_tokens)
            if max_tokens <= 0:
                return self._out_of_room(session, call, binding, request_id, prepared)
            sampling = _Sampling(
                session=session,
                call=call,
                model_id=model_id,
                request_id=request_id,
                prompt_ids=prepared.prompt_ids(),
                settings=_server_sampling(settings, max_tokens, _stop_ids(codec, call.stop)),
                deadline=deadline,
                started_at=started_at,
                codec=codec,
                with_texts=with_texts,
                on_delta=on_delta,
            )
            generation, version = await self._generate(sampling)
            session.require_active()
            num_prompt_tokens = prepared.num_context_tokens
            turn = _sampled_turn(prepared, generation, settings, version, request_id, started_at)
            content = codec.decode(generation.token_ids)
            if sampling.text is not None:
                sampling.text.finish(content)
                content = sampling.text.text  # what the listener has heard is what it will send back
            prepared.owner.commit(prepared.chain, turn, key=prepared.key, answer=content, mark=prepared.mark)
        self._metrics.observe_turn(
            model_id,
            call.agent_id,
            num_prompt_tokens=num_prompt_tokens,
            num_sampled_tokens=len(generation.token_ids),
            seconds=turn.ended_at - started_at,
        )
        return _reply(session, call, model_id, turn, generation, content, codec if with_texts else None)

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
        key = ConversationKey(call.messages)
        chain = owner.longest_prefix(key)
        if chain is not None:
            with _reserved(chain):
                rendered = await _render_continuation(codec, chain, call.messages)
                if rendered is not None:
                    yield _Prepared(owner, chain, key, rendered.ids, rendered.mark)
                    return
            owner.num_breaks += 1
            self._metrics.count_chain_break(binding.model_id)
        rendered = await codec.prompt(call.messages)
        with _reserved(Chain()) as chain:
            yield _Prepared(owner, chain, key, rendered.ids, rendered.mark)

    # -------------------------------------------------------------- the generation

    async def _generate(self, sampling: _Sampling) -> tuple[Generation, int]:
        """A whole generation and the version that made it. A replica that breaks off is replaced by a ready
        one until the deadline; nothing of a broken attempt is kept. Once a listener has heard of an attempt
        there is no other: half of one answer and half of another is none."""
        pause, attempt = _FIRST_RETRY_S, 0
        model_id, request_id = sampling.model_id, sampling.request_id
        while True:
            binding = await self._bindings.wait_until_ready(model_id, sampling.deadline)
            with self._bindings.place(binding, sampling.session.affinity) as place:
                try:
                    generation = await self._attempt(sampling, place, f"{request_id}-{attempt}")
                    _require_whole(generation)
                    return generation, place.version
                except (BackendUnavailableError, BackendRejectedError) as error:
                    failure = error
            if (
                isinstance(failure, BackendRejectedError)
                and failure.status_code not in _NOT_THE_CALLERS_FAULT
            ):
                raise failure
            self._bindings.note_failure(binding, place.replica_id)
            if sampling.text is not None:
                raise failure
            self._metrics.count_retry(model_id)
            logger.warning(
                "request %s to %s, attempt %d: %s", request_id, place.replica_id, attempt + 1, failure
            )
            if self._clock() + pause >= sampling.deadline:
                raise ModelNotReadyError(f"model {model_id!r} did not answer in time: {failure}") from failure
            await asyncio.sleep(pause)
            pause, attempt = min(2 * pause, _LONGEST_RETRY_S), attempt + 1

    async def _attempt(self, sampling: _Sampling, place: Placement, request_id: str) -> Generation:
        arguments: dict[str, Any] = {
            "model": served_name(sampling.model_id, place.version),
            "token_ids": sampling.prompt_ids,
            "sampling": sampling.settings,
            "request_id": request_id,
            "timeout_s": max(sampling.deadline - self._clock(), 0.001),
        }
        if sampling.on_delta is None:
            return await place.client.generate(**arguments)
        chunks: list[GenerationChunk] = []
        async with aclosing(place.client.generate_stream(**arguments)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if chunk.token_ids:
                    _tell(sampling, sampling.on_delta, chunk, place.version)
        return join_chunks(chunks, url=place.client.url)

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


def _tell(sampling: _Sampling, listener: DeltaSink, chunk: GenerationChunk, version: int) -> None:
    """Hand a piece of the answer on as it comes."""
    codec = sampling.codec
    if sampling.text is None:
        sampling.text = TextStream(codec.decode)
    listener(
        ReplyDelta(
            request_id=sampling.request_id,
            agent_id=sampling.call.agent_id,
            model_id=sampling.model_id,
            policy_version=version,
            workflow_id=sampling.session.member.workflow_id,
            created_at=sampling.started_at,
            num_prompt_tokens=len(sampling.prompt_ids),
            text=sampling.text.push(chunk.token_ids),
            logprobs=chunk.logprobs,
            token_texts=codec.token_texts(chunk.token_ids) if sampling.with_texts else None,
        )
    )


@contextmanager
def _reserved(chain: Chain) -> Iterator[Chain]:
    """Nobody else continues the chain meanwhile."""
    chain.reserved = True
    try:
        yield chain
    finally:
        chain.reserved = False


async def _render_continuation(
    codec: ChatCodec, chain: Chain, messages: list[Message]
) -> RenderedPrompt | None:
    assert chain.mark is not None, "a committed chain knows the text it was sampled after"
    so_far, new = messages[: chain.num_messages], messages[chain.num_messages :]
    return await codec.continuation(so_far, new, last_id=chain.last_id, before=chain.mark)


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


def _require_whole(generation: Generation) -> None:
    """An answer the server aborted, or of no token, is not an answer: it must not look like a normal end."""
    if generation.finish_reason not in ("stop", "length") or not len(generation.token_ids):
        raise BackendUnavailableError(
            f"the server ended the generation after {len(generation.token_ids)} tokens with "
            f"{generation.finish_reason!r}"
        )


def _sampled_turn(
    prepared: _Prepared,
    generation: Generation,
    settings: Settings,
    version: int,
    request_id: str,
    started_at: float,
) -> SampledTurn:
    return SampledTurn(
        context_ids=prepared.new_ids,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        version=version,
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
    generation: Generation,
    content: str,
    codec: ChatCodec | None,
) -> ChatReply:
    texts = None if codec is None else tuple(codec.token_texts(generation.token_ids))
    return ChatReply(
        request_id=turn.request_id,
        agent_id=call.agent_id,
        model_id=model_id,
        policy_version=turn.version,
        workflow_id=session.member.workflow_id,
        content=content,
        finish_reason=generation.finish_reason,
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        token_texts=texts,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        created_at=turn.started_at,
    )
