"""OpenAI's Chat Completions, per session and agent.

The hot route: the body is parsed by msgspec into what the router knows; no Pydantic, no dependency
injection. A field that can't be honoured is refused by name, never ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.conversation import ChatCall, ChatReply, ReplyDelta, ToolCall, TopBytes
from gateway.openapi import BASES, CHAT_FIELDS, document_path
from gateway.quoting import quoted
from gateway.responses import error_response, failure_of, json_response, openai_error
from gateway.routes.access import gateway_of, session_key
from gateway.routes.openai_messages import normal_message, offered_tools, tool_choice_of
from gateway.routes.serving import decode_body, named_agent, serve
from gateway.sampling import check_settings
from model_runtime.errors import InvalidRequestError

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# OpenAI's own bounds.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

# What templates are given anyway.
_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# field → the values that ask for nothing
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a Chat Completions request."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's extension
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    # Taken note of by nobody, and without effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    # Refused when they ask for something.
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logit_bias: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_DECODER = msgspec.json.Decoder(ChatRequest)


# ------------------------------------------------------------------ routes


async def chat_completions(request: Request) -> Response:
    """POST /sessions/{session_id}[/agents/{agent_id}]/v1/chat/completions."""
    return await serve(request, parse, error_response)


async def list_models(request: Request) -> Response:
    """GET /sessions/{session_id}[/agents/{agent_id}]/v1/models: the agents a session may speak as."""
    gateway = gateway_of(request)
    gateway.sessions.find(request.path_params["session_id"], session_key(request))
    cards = [
        {
            "id": agent_id,
            "object": "model",
            "created": int(gateway.started_at),
            "owned_by": "repertory",
            "model_id": gateway.routes.model_of(agent_id),
        }
        for agent_id in gateway.routes.agents
    ]
    return json_response({"object": "list", "data": cards})


def add_routes(app: FastAPI) -> None:
    """Plain Starlette routes: FastAPI's dependency machinery costs more than the rest of a call."""
    for base in BASES:
        app.add_route(f"{base}/v1/chat/completions", chat_completions, methods=["POST"])
        app.add_route(f"{base}/v1/models", list_models, methods=["GET"])


def openapi_paths() -> dict[str, Any]:
    return document_path(
        "/v1/chat/completions", tag="openai", summary="Chat Completions", body=ChatRequest, fields=CHAT_FIELDS
    ) | document_path("/v1/models", tag="openai", summary="Agents", body=None)


# ------------------------------------------------------------------ request


def parse(request: Request, body: bytes) -> ChatExchange:
    """Raises InvalidRequestError, UnknownAgentError."""
    chat = parse_chat_request(body)
    agent_id = named_agent(request, (chat.metadata or {}).get("agent_id"), chat.model)
    return ChatExchange(chat, to_call(agent_id, chat))


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequestError naming the field that is wrong, unknown, or can't be honoured."""
    chat = decode_body(_DECODER, body)
    for name, neutral in _REFUSED_UNLESS.items():
        value = getattr(chat, name)
        if value is None:
            continue
        if value not in neutral:
            raise InvalidRequestError(
                f"{name} is not supported by this gateway (got {quoted(value)})", param=name
            )
    _check_stream_options(chat)
    _check_choices(chat)
    return chat


def _check_choices(chat: ChatRequest) -> None:
    if chat.n is not None and not 1 <= chat.n <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be from 1 to {MAX_CHOICES}, got {chat.n}", param="n")
    if chat.top_logprobs is not None and not 0 <= chat.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {chat.top_logprobs}",
            param="top_logprobs",
        )
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequestError("top_logprobs asks for logprobs: true", param="top_logprobs")
    taken = _TEMPLATES_OWN.intersection(chat.chat_template_kwargs or ())
    if taken:
        raise InvalidRequestError(
            f"chat_template_kwargs.{min(taken)} is set by the request itself", param="chat_template_kwargs"
        )


def _check_stream_options(chat: ChatRequest) -> None:
    options = chat.stream_options
    if options is None:
        return
    if not chat.stream:
        raise InvalidRequestError("stream_options asks for stream: true", param="stream_options")
    # Obfuscation pads events against listeners on the line; without it they are as good.
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise InvalidRequestError(
            f"stream_options.{min(unknown)} is not supported by this gateway", param="stream_options"
        )


def to_call(agent_id: str, chat: ChatRequest) -> ChatCall:
    """Raises InvalidRequestError."""
    if not chat.messages:
        raise InvalidRequestError("messages is empty", param="messages")
    sampling = {name: value for name in _SAMPLING_FIELDS if (value := getattr(chat, name)) is not None}
    limits = [m for m in (chat.max_tokens, chat.max_completion_tokens) if m is not None]
    if limits:
        sampling["max_tokens"] = min(limits)
    check_settings(sampling)
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    tools = offered_tools(chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls)
    return ChatCall(
        agent_id=agent_id,
        messages=[normal_message(message, index) for index, message in enumerate(chat.messages)],
        sampling=sampling,
        stop=stop,
        tools=tools,
        tool_choice=tool_choice_of(chat.tool_choice, tools),
        template_arguments=chat.chat_template_kwargs or {},
        num_choices=chat.n or 1,
        num_top_logprobs=chat.top_logprobs or 0,
    )


# ------------------------------------------------------------------ answer


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One Chat Completions request and the shape of its answers."""

    chat: ChatRequest
    call: ChatCall

    @property
    def streams(self) -> bool:
        return bool(self.chat.stream)

    @property
    def with_token_bytes(self) -> bool:
        return bool(self.chat.logprobs)

    def answer(self, reply: ChatReply) -> Response:
        replies = (reply, *reply.siblings)
        body = {
            "id": f"chatcmpl-{reply.request_id}",
            "object": "chat.completion",
            "created": int(reply.created_at),
            "model": self.chat.model or reply.model_id,
            "choices": [self._choice(index, one) for index, one in enumerate(replies)],
            "usage": _usage(replies),
            **_provenance(reply),
        }
        return json_response(body, headers={"X-Request-ID": reply.request_id})

    def _choice(self, index: int, reply: ChatReply) -> dict[str, Any]:
        logprobs = None
        if self.with_token_bytes:
            logprobs = _logprobs(reply.token_bytes, reply.logprobs.tolist(), reply.top_logprobs)
        return {
            "index": index,
            "message": _message(reply),
            "finish_reason": reply.finish_reason,
            "logprobs": logprobs,
            "request_id": reply.request_id,  # rewards of single turns name it
        }

    def writer(self) -> ChunkWriter:
        return ChunkWriter(self.chat)


def _message(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [_tool_call(call) for call in reply.tool_calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _usage(replies: Sequence[ChatReply]) -> dict[str, Any]:
    first, completion_tokens = replies[0], sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": first.num_prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.num_prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": first.num_cached_tokens},
    }


def _provenance(reply: ChatReply | ReplyDelta) -> dict[str, Any]:
    return {
        "agent_id": reply.agent_id,
        "model_id": reply.model_id,
        "policy_version": reply.policy_version,
        "policy_version_max": reply.policy_version_max,
        "workflow_id": reply.workflow_id,
        "request_id": reply.request_id,
    }


@dataclass(slots=True)
class _Written:
    """What one choice's chunks held so far."""

    num_chars: int = 0
    num_reasoning_chars: int = 0
    num_logprobs: int = 0


class ChunkWriter:
    """Writes an answer as `chat.completion.chunk` events."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._with_usage = bool((chat.stream_options or {}).get("include_usage"))
        self._id = ""  # of the first choice that was heard of
        self._written: dict[int, _Written] = {}

    def delta(self, delta: ReplyDelta) -> bytes:
        index = delta.choice
        data = self._opening(index, delta) + self._reasoning(index, delta, delta.reasoning)
        written = self._written[index]
        written.num_chars += len(delta.text)
        written.num_logprobs += len(delta.logprobs)
        logprobs = None
        if self._chat.logprobs and delta.logprobs:
            logprobs = _logprobs(delta.token_bytes, delta.logprobs, delta.top_logprobs)
        if delta.text or logprobs is not None:
            data += self._chunk(index, delta, {"content": delta.text}, logprobs=logprobs)
        return data

    def end(self, reply: ChatReply) -> bytes:
        replies = (reply, *reply.siblings)
        data = b"".join(self._end_of(index, one) for index, one in enumerate(replies))
        if self._with_usage:
            data += _event(self._frame(reply) | {"choices": [], "usage": _usage(replies)})
        return data + b"data: [DONE]\n\n"

    def error(self, error: Exception) -> bytes:
        return _event(openai_error(failure_of(error)))

    def _end_of(self, index: int, reply: ChatReply) -> bytes:
        data = self._opening(index, reply)
        written = self._written[index]
        data += self._reasoning(index, reply, (reply.reasoning or "")[written.num_reasoning_chars :])
        rest, told = reply.content[written.num_chars :], written.num_logprobs
        tokens, values = (reply.token_bytes or ())[told:], reply.logprobs[told:].tolist()
        logprobs = None
        if self._chat.logprobs and tokens:
            logprobs = _logprobs(tokens, values, reply.top_logprobs[told:])
        if rest or logprobs is not None:
            data += self._chunk(index, reply, {"content": rest}, logprobs=logprobs)
        for number, call in enumerate(reply.tool_calls):
            data += self._chunk(index, reply, {"tool_calls": [{"index": number, **_tool_call(call)}]})
        return data + self._chunk(index, reply, {}, finish_reason=reply.finish_reason)

    def _reasoning(self, index: int, source: ReplyDelta | ChatReply, text: str) -> bytes:
        self._written[index].num_reasoning_chars += len(text)
        return self._chunk(index, source, {"reasoning_content": text}) if text else b""

    def _opening(self, index: int, source: ReplyDelta | ChatReply) -> bytes:
        if index in self._written:
            return b""
        self._written[index] = _Written()
        self._id = self._id or source.request_id
        return self._chunk(index, source, {"role": "assistant", "content": ""})

    def _chunk(
        self,
        index: int,
        source: ReplyDelta | ChatReply,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event(self._frame(source) | {"choices": [choice]})

    def _frame(self, source: ReplyDelta | ChatReply) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._id}",
            "object": "chat.completion.chunk",
            "created": int(source.created_at),
            "model": self._chat.model or source.model_id,
            **({"usage": None} if self._with_usage else {}),
            **_provenance(source),
        }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _logprobs(tokens: Sequence[bytes] | None, values: Sequence[float], tops: TopBytes) -> dict[str, Any]:
    """`tops` is empty, or has the likeliest tokens for each value."""
    entries = zip(tokens or (), values, tops or itertools.repeat(()), strict=False)
    content = [
        _token(token, logprob) | {"top_logprobs": [_token(*top) for top in likeliest]}
        for token, logprob, likeliest in entries
    ]
    return {"content": content, "refusal": None}


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
