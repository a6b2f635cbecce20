"""What a vLLM server answers: the part of its JSON that is read."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class GenerateAnswer(msgspec.Struct):
    choices: list[Choice]
    usage: Usage
    model: str | None = None


class ProbedToken(msgspec.Struct):
    """A sampled token and the logprobs of the others that were asked for."""

    top_logprobs: list[TokenLogprob] = []


class ProbedLogprobs(msgspec.Struct):
    content: list[ProbedToken] | None = None


class ProbedChoice(msgspec.Struct):
    logprobs: ProbedLogprobs | None = None


class ProbeAnswer(msgspec.Struct):
    choices: list[ProbedChoice]


class ErrorBody(msgspec.Struct):
    message: str


class StreamChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class StreamAnswer(msgspec.Struct):
    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


class ParsedFunction(msgspec.Struct):
    name: str
    arguments: str


class ParsedCall(msgspec.Struct):
    function: ParsedFunction
    id: str = ""


class ParsedMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedCall] | None = None


class ParsedChoice(msgspec.Struct):
    message: ParsedMessage


class DerenderAnswer(msgspec.Struct):
    choices: list[ParsedChoice]


class ParsedCallDelta(msgspec.Struct):
    index: int = 0


class ParsedMessageDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedCallDelta] | None = None


class ParsedChunkChoice(msgspec.Struct):
    delta: ParsedMessageDelta


class ParsedChunk(msgspec.Struct):
    choices: list[ParsedChunkChoice]


class DerenderChunkAnswer(msgspec.Struct):
    chunk: ParsedChunk
    stream_state: msgspec.Raw


class ResolvedSampling(msgspec.Struct):
    structured_outputs: dict[str, Any] | None = None


class RenderAnswer(msgspec.Struct):
    sampling_params: ResolvedSampling
