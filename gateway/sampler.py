"""One generation on a model's servers: tried until it is whole, told as it grows, read when it is done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from gateway import logs
from gateway.answer_stream import AnswerStream, Heard, ParsedStream, PlainStream
from gateway.bindings import GatewayBindingRegistry, ModelBinding, Placement
from gateway.chains import VersionSpan
from gateway.codec import ChatCodec
from gateway.conversation import Answer, ChatCall, DeltaSink, ReplyDelta, ToolCall, arguments_object
from gateway.interruption import (
    Pieces,
    StopAtSeam,
    broken_off,
    cut_at_stop,
    interrupted_at_a_new_version,
    joined_early,
)
from gateway.metrics import GatewayMetrics
from gateway.session import Session
from gateway.slices import in_step
from gateway.text_stream import before_stop
from model_runtime.errors import (
    BackendRejectedError,
    BackendUnavailableError,
    ModelNotReadyError,
    TooManyRequestsError,
)
from model_runtime.layout import served_name
from model_runtime.llm_client import AskedChat, Generation, GenerationChunk, ParsedDelta, join_chunks
from model_runtime.tracing import Traces
from model_runtime.types import Int32Array

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0

# The gateway chose the key and the model's name itself: a server that knows neither has just been
# restarted, and the request is not to blame.
_NOT_THE_CALLERS_FAULT = frozenset({401, 403, 404})


@dataclass(slots=True, eq=False, kw_only=True)
class Sampling:
    """What is asked of the server, and who hears of it while it is being sampled."""

    session: Session
    call: ChatCall
    choice: int
    model_id: str
    parses: bool  # the server's parsers are to read the answer
    partial_rollout: bool  # a new version takes it over
    kept_whole_by: str  # why no other attempt can go on with it exactly; empty when one can
    request_id: str
    prompt_ids: Int32Array
    settings: dict[str, Any]
    deadline: float
    begin_by: float | None  # when the caller doesn't want to wait until the deadline
    started_at: float
    codec: ChatCodec
    with_token_bytes: bool = False
    on_delta: DeltaSink | None = None
    place: Placement | None = None  # of the attempt that is told
    stream: AnswerStream | None = None  # what the listener hears of it
    num_received_tokens: int = 0  # by all attempts, kept or not
    stream_is_ahead: bool = False  # it was given tokens of an attempt that may still break off
    unfinished: Generation | None = None  # what the attempt that just failed had streamed

    @property
    def asked(self) -> AskedChat:
        call = self.call
        return AskedChat(
            tools=call.tools, tool_choice=call.tool_choice, template_arguments=call.template_arguments
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A whole answer: its tokens, the versions that sampled them, and what they say."""

    generation: Generation
    versions: tuple[VersionSpan, ...]
    answer: Answer


class Sampler:
    """Samples on whichever ready replica of a model."""

    def __init__(
        self,
        bindings: GatewayBindingRegistry,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        *,
        attempt_timeout_s: float | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._bindings = bindings
        self._ask = self._generate if traces is None else partial(self._generate_traced, traces)
        self._attempt_timeout_s = attempt_timeout_s
        self._metrics = metrics
        self._clock = clock

    async def sample(self, sampling: Sampling) -> Sampled:
        """A whole generation, what it says, and the versions that made it.

        A replica that breaks off is replaced by a ready one until the deadline. A stream goes on from the
        tokens it brought, under the version that sampled them or where the model takes a new one over; else
        nothing of the attempt is kept, and if a listener has heard of it there is no other: half of one
        answer and half of another is none. One that was interrupted by a new version goes on under it."""
        logs.request_id.set(sampling.request_id)
        pieces = Pieces(self._bindings.get(sampling.model_id).kept_versions)
        try:
            return await self._sample(sampling, pieces)
        finally:
            pieces.let_go()
            await _stop_telling(sampling)

    async def _sample(self, sampling: Sampling, pieces: Pieces) -> Sampled:
        pause, attempt = _FIRST_RETRY_S, 0
        model_id, request_id = sampling.model_id, sampling.request_id
        while True:
            binding = await self._room(sampling, ahead=attempt > 0)
            held = sampling.session.versions.get(model_id)
            if held is not None and binding.has_lost(held):
                raise ModelNotReadyError(
                    f"version {held} of model {model_id!r}, held for this session, is not in service any more"
                )
            with self._bindings.place(binding, sampling.session.affinity, held=held) as place:
                await _require_version(sampling, pieces, place)
                try:
                    sampled = await self._attempt(sampling, binding, place, pieces, f"{request_id}-{attempt}")
                except (BackendUnavailableError, BackendRejectedError) as error:
                    failure = error
                else:
                    self._bindings.note_answer(binding, place.replica_id)
                    if sampled is not None:
                        return sampled
                    attempt += 1
                    continue
            if _is_the_callers_fault(failure):
                raise failure
            if held is None or not _is_an_unknown_name(failure):
                self._bindings.note_failure(binding, place.replica_id)
            if not _keep_unfinished(sampling, pieces, place):
                await _forget_attempt(sampling, failure)
            self._metrics.count_retry(model_id)
            logger.warning(
                "request %s to %s, attempt %d: %s", request_id, place.replica_id, attempt + 1, failure
            )
            if self._clock() + pause >= sampling.deadline:
                raise ModelNotReadyError(f"model {model_id!r} did not answer in time: {failure}") from failure
            await asyncio.sleep(pause)
            pause, attempt = min(2 * pause, _LONGEST_RETRY_S), attempt + 1

    async def _room(self, sampling: Sampling, *, ahead: bool) -> ModelBinding:
        if ahead or sampling.begin_by is None:
            return await self._bindings.wait_for_room(sampling.model_id, sampling.deadline, ahead=ahead)
        try:
            return await self._bindings.wait_for_room(sampling.model_id, sampling.begin_by)
        except ModelNotReadyError as error:
            raise or_ask_again(error, sampling.begin_by) from None

    async def _attempt(
        self, sampling: Sampling, binding: ModelBinding, place: Placement, pieces: Pieces, request_id: str
    ) -> Sampled | None:
        """The whole answer; None when a new version interrupted it, with what there is of it in `pieces`."""
        if not sampling.partial_rollout or sampling.kept_whole_by:
            generation, interrupted = await self._ask(sampling, place, pieces, request_id), False
        else:
            async with interrupted_at_a_new_version(self._bindings, binding, place, request_id) as watch:
                generation = await self._ask(sampling, place, pieces, request_id)
            interrupted = watch.ended(generation)
        if interrupted:
            if pieces.num_tokens + len(generation.token_ids) < sampling.settings["max_tokens"]:
                pieces.add(generation, place.version)
                sampling.stream_is_ahead = False
                self._metrics.count_interruption(sampling.model_id)
                return None
            generation = replace(generation, finish_reason="length")  # ended by itself at that very moment
        elif sampling.stream_is_ahead and generation.finish_reason == "abort":
            sampling.unfinished = generation
        await in_step(binding.running - 1)
        _require_whole(generation)
        if sampling.partial_rollout and sampling.kept_whole_by and binding.published_version != place.version:
            self._metrics.count_kept_whole(sampling.model_id, sampling.kept_whole_by)
        await _stop_telling(sampling)
        whole, versions = pieces.joined(generation, place.version)
        return Sampled(whole, versions, await self._read(sampling, place, whole))

    async def _generate(
        self, sampling: Sampling, place: Placement, pieces: Pieces, request_id: str
    ) -> Generation:
        arguments: dict[str, Any] = {
            "model": served_name(sampling.model_id, place.version),
            "token_ids": pieces.after(sampling.prompt_ids),
            "sampling": pieces.settings_for_the_rest(await self._settings(sampling, place)),
            "request_id": request_id,
        }
        left_s, limit_s = self._seconds_left(sampling), self._attempt_limit_s(sampling, place)
        seam = pieces.seam(sampling.codec.decode, sampling.settings.get("stop", ()))
        if sampling.on_delta is None and not seam.is_open:
            generation = await place.client.generate(**arguments, timeout_s=limit_s)
            sampling.num_received_tokens += len(generation.token_ids)
            return generation
        if sampling.on_delta is not None:
            self._go_on_telling(sampling, place, pieces)
        events = place.client.generate_stream(**arguments, timeout_s=left_s, stall_timeout_s=limit_s)
        num_prompt_tokens, url = len(arguments["token_ids"]), place.client.url
        return await _joined(sampling, events, seam, num_prompt_tokens=num_prompt_tokens, url=url)

    async def _generate_traced(
        self, traces: Traces, sampling: Sampling, place: Placement, pieces: Pieces, request_id: str
    ) -> Generation:
        began, num_tokens, error = time.time(), 0, "interrupted"
        try:
            generation = await self._generate(sampling, place, pieces, request_id)
            num_tokens, error = len(generation.token_ids), ""
            return generation
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            traces.span(
                "generate",
                sampling.session.member.workflow_id,
                started_at=began,
                ended_at=time.time(),
                attributes={
                    "repertory.replica": place.replica_id,
                    "repertory.version": place.version,
                    "repertory.sampled_tokens": num_tokens,
                },
                under=sampling.request_id,
                error=error,
            )

    def _go_on_telling(self, sampling: Sampling, place: Placement, pieces: Pieces) -> None:
        """A listener that hears of this attempt has heard of what it goes on from."""
        sampling.place = place
        if sampling.stream is not None:
            return
        sampling.stream = self._listen(sampling, place)
        for piece in pieces.generations:
            told = GenerationChunk(
                piece.token_ids.tolist(), piece.logprobs.tolist(), top_logprobs=piece.top_logprobs
            )
            sampling.stream.push(told)

    async def _settings(self, sampling: Sampling, place: Placement) -> dict[str, Any]:
        if not sampling.call.forces_call:
            return sampling.settings
        grammar = await place.client.call_grammar(
            model=served_name(sampling.model_id, place.version),
            asked=sampling.asked,
            timeout_s=self._seconds_left(sampling),
        )
        return {**sampling.settings, "structured_outputs": grammar}

    def _listen(self, sampling: Sampling, place: Placement) -> AnswerStream:
        codec, sampling.place = sampling.codec, place

        def now_at() -> Placement:
            return sampling.place or place

        def tell(heard: Heard) -> None:
            _tell(sampling, heard, now_at().version)

        if not sampling.parses:
            return PlainStream(codec.decode, tell, sampling.call.stop)

        async def parse(ids: list[int], state: msgspec.Raw | None) -> ParsedDelta:
            return await now_at().client.parse_piece(
                prompt_ids=sampling.prompt_ids,
                token_ids=ids,
                state=state,
                asked=sampling.asked,
                request_id=sampling.request_id,
                timeout_s=self._seconds_left(sampling),
            )

        return ParsedStream(parse, tell, eos=codec.eos_token_ids, stop=sampling.call.stop)

    def _seconds_left(self, sampling: Sampling) -> float:
        return max(sampling.deadline - self._clock(), 0.001)

    def _attempt_limit_s(self, sampling: Sampling, place: Placement) -> float:
        """A server that hangs must leave time to try another."""
        left_s = self._seconds_left(sampling)
        if self._attempt_timeout_s is not None:
            return min(left_s, self._attempt_timeout_s)
        return left_s / 2 if place.has_alternative else left_s

    async def _read(self, sampling: Sampling, place: Placement, generation: Generation) -> Answer:
        """What the answer says, as the agent will have it."""
        answer = await self._parse(sampling, place, generation)
        return answer if sampling.stream is None else sampling.stream.settle(answer)

    async def _parse(self, sampling: Sampling, place: Placement, generation: Generation) -> Answer:
        """Text, and what the server's parsers find in it. What they can't read is handed over as text."""
        codec, ids = sampling.codec, generation.token_ids
        stop = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        text = before_stop(codec.decode(ids), stop)
        if ids[-1] in codec.eos_token_ids:
            ids = ids[:-1]
        if not sampling.parses or not len(ids):
            return Answer(text)
        answer = await self._ask_parser(sampling, place, ids, sampling.asked)
        if answer is not None and not _are_objects(answer.tool_calls):
            answer = await self._ask_parser(sampling, place, ids, replace(sampling.asked, tools=()))
        if answer is None or (
            answer.is_plain and _readable(answer.content) == _readable(codec.decode_all(ids))
        ):
            return Answer(text)
        # Markup without a thought in it: the answer is still not what was sampled.
        reasoning = answer.reasoning or (None if answer.tool_calls else "")
        return replace(answer, content=before_stop(answer.content, stop), reasoning=reasoning)

    async def _ask_parser(
        self, sampling: Sampling, place: Placement, ids: Int32Array, asked: AskedChat
    ) -> Answer | None:
        """None: the server refuses to parse this answer."""
        try:
            parsed = await place.client.parse_answer(
                prompt_ids=sampling.prompt_ids,
                token_ids=ids,
                asked=asked,
                request_id=sampling.request_id,
                timeout_s=self._seconds_left(sampling),
            )
        except BackendRejectedError as error:
            if error.status_code in _NOT_THE_CALLERS_FAULT:
                raise BackendUnavailableError(f"the server does not parse answers: {error}") from error
            logger.warning("request %s: an answer that can't be parsed: %s", sampling.request_id, error)
            return None
        calls = tuple(ToolCall(*call) for call in parsed.calls)
        return Answer(parsed.content, parsed.reasoning, calls)


def _readable(text: str) -> str:
    """Without the marks for bytes that are no text, of which every decoder writes another number."""
    return text.replace("\ufffd", "")


def _are_objects(calls: Sequence[ToolCall]) -> bool:
    return all(isinstance(arguments_object(call.arguments), dict) for call in calls)


async def _joined(
    sampling: Sampling,
    events: AsyncGenerator[GenerationChunk, None],
    seam: StopAtSeam,
    *,
    num_prompt_tokens: int,
    url: str,
) -> Generation:
    """What a stream amounts to, told as it comes; left early at a stop string only the gateway can see.
    Leaves in `sampling` what there is of one that breaks off."""
    chunks: list[GenerationChunk] = []
    try:
        async with aclosing(events) as stream:
            async for chunk in stream:
                sampling.num_received_tokens += len(chunk.token_ids)
                stop = seam.push(chunk.token_ids)
                chunks.append(chunk if stop is None else cut_at_stop(chunk, *stop))
                if chunk.token_ids and sampling.stream is not None:
                    sampling.stream_is_ahead = True
                    sampling.stream.push(chunks[-1])
                if stop is not None:
                    return joined_early(chunks, num_prompt_tokens=num_prompt_tokens, url=url)
        return join_chunks(chunks, url=url)
    except BackendUnavailableError:
        sampling.unfinished = broken_off(chunks, num_prompt_tokens=num_prompt_tokens, url=url)
        raise


def _keep_unfinished(sampling: Sampling, pieces: Pieces, place: Placement) -> bool:
    """Let the next attempt go on from what the failed one streamed, if it can exactly."""
    unfinished, sampling.unfinished = sampling.unfinished, None
    if unfinished is None or sampling.kept_whole_by or not len(unfinished.token_ids):
        return False
    settings, num_tokens = sampling.settings, pieces.num_tokens + len(unfinished.token_ids)
    if unfinished.token_ids[-1] in settings["stop_token_ids"] or num_tokens >= settings["max_tokens"]:
        return False  # it was at its end
    pieces.add(unfinished, place.version)
    sampling.stream_is_ahead = False
    return True


async def _require_version(sampling: Sampling, pieces: Pieces, place: Placement) -> None:
    """A model whose generations finish under their version goes on with a broken one under it alone. Under
    another it begins anew, unless a listener has heard of it: raises BackendUnavailableError then."""
    kept = pieces.versions[-1].version if pieces.versions else place.version
    if sampling.partial_rollout or kept == place.version:
        return
    pieces.forget()
    sampling.stream_is_ahead = True
    await _forget_attempt(
        sampling,
        BackendUnavailableError(
            f"a stream broke off under version {kept} of {sampling.model_id!r}, and version {place.version} "
            "has been published since; with async_training.partial_rollout it would go on"
        ),
    )


async def _stop_telling(sampling: Sampling) -> None:
    if sampling.stream is not None:
        await sampling.stream.close()


async def _forget_attempt(sampling: Sampling, failure: Exception) -> None:
    """Let a listener hear nothing more of an attempt that broke off. Raises the failure when it has heard
    of it already."""
    if sampling.stream is None or not sampling.stream_is_ahead:
        return
    await sampling.stream.close()
    if sampling.stream.was_heard:
        raise failure
    sampling.stream, sampling.stream_is_ahead = None, False


def or_ask_again(error: ModelNotReadyError, begin_by: float | None) -> Exception:
    """A caller that said how long it would wait is told to ask again: nothing has failed."""
    if begin_by is None:
        return error
    return TooManyRequestsError(f"{error}; the call was not to wait longer (Prefer: wait)")


def _is_the_callers_fault(failure: Exception) -> bool:
    return isinstance(failure, BackendRejectedError) and failure.status_code not in _NOT_THE_CALLERS_FAULT


def _is_an_unknown_name(failure: Exception) -> bool:
    """The server does not serve what it was asked for: of a held version that says nothing of the others."""
    return isinstance(failure, BackendRejectedError) and failure.status_code == 404


def _tell(sampling: Sampling, heard: Heard, version: int) -> None:
    """Hand a piece of the answer on as it comes."""
    assert sampling.on_delta is not None, "somebody listens"
    ids = [id_ for chunk in heard.chunks for id_ in chunk.token_ids]
    sampling.on_delta(
        ReplyDelta(
            request_id=sampling.request_id,
            agent_id=sampling.call.agent_id,
            model_id=sampling.model_id,
            policy_version=version,
            workflow_id=sampling.session.member.workflow_id,
            created_at=sampling.started_at,
            num_prompt_tokens=len(sampling.prompt_ids),
            text=heard.text,
            reasoning=heard.reasoning,
            logprobs=[value for chunk in heard.chunks for value in chunk.logprobs],
            token_bytes=sampling.codec.token_bytes(ids) if sampling.with_token_bytes else None,
            top_logprobs=sampling.codec.top_bytes([t for chunk in heard.chunks for t in chunk.top_logprobs]),
            choice=sampling.choice,
        )
    )


def _require_whole(generation: Generation) -> None:
    """An answer the server aborted, or of no token, is not an answer: it must not look like a normal end."""
    if generation.finish_reason not in ("stop", "length") or not len(generation.token_ids):
        raise BackendUnavailableError(
            f"the server ended the generation after {len(generation.token_ids)} tokens with "
            f"{generation.finish_reason!r}"
        )
