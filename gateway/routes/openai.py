"""OpenAI's Chat Completions, per session and agent.

The hot route: the body is parsed by msgspec into what the router knows; no Pydantic, no dependency
injection. A field that can't be honoured is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.conversation import ChatCall, ChatReply, ReplyDelta, ToolCall
from gateway.responses import error_response, failure_of, json_response, openai_error
from gateway.routes.access import gateway_of, session_key
from gateway.routes.openai_messages import normal_message, offered_tools
from gateway.routes.serving import BASES, decode_body, document_path, named_agent, serve
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
# field → the values that ask for nothing
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
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
    n: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    logit_bias: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
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
        "/v1/chat/completions", tag="openai", summary="Chat Completions", body=ChatRequest
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
        if value not in neutral or (isinstance(value, bool) and name == "n"):
            raise InvalidRequestError(
                f"{name} is not supported by this gateway (got {_short(value)})", param=name
            )
    _check_stream_options(chat)
    return chat


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
    return ChatCall(
        agent_id=agent_id,
        messages=[normal_message(message, index) for index, message in enumerate(chat.messages)],
        sampling=sampling,
        stop=stop,
        tools=offered_tools(chat.tools, chat.tool_choice, parallel=chat.parallel_tool_calls),
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
    def with_texts(self) -> bool:
        return bool(self.chat.logprobs)

    def answer(self, reply: ChatReply) -> Response:
        body = {
            "id": f"chatcmpl-{reply.request_id}",
            "object": "chat.completion",
            "created": int(reply.created_at),
            "model": self.chat.model or reply.model_id,
            "choices": [
                {
                    "index": 0,
                    "message": _message(reply),
                    "finish_reason": reply.finish_reason,
                    "logprobs": _logprobs(reply.token_texts, reply.logprobs.tolist())
                    if self.with_texts
                    else None,
                }
            ],
            "usage": _usage(reply),
            **_provenance(reply),
        }
        return json_response(body, headers={"X-Request-ID": reply.request_id})

    def writer(self) -> ChunkWriter:
        return ChunkWriter(self.chat)


def _message(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [_tool_call(call) for call in reply.tool_calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _usage(reply: ChatReply) -> dict[str, Any]:
    completion_tokens = len(reply.token_ids)
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": reply.num_prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
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


class ChunkWriter:
    """Writes an answer as `chat.completion.chunk` events."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._with_usage = bool((chat.stream_options or {}).get("include_usage"))
        self._started = False
        self._num_chars = 0  # of the content written so far
        self._num_reasoning_chars = 0
        self._num_logprobs = 0

    def delta(self, delta: ReplyDelta) -> bytes:
        data = self._opening(delta) + self._reasoning(delta, delta.reasoning)
        self._num_chars += len(delta.text)
        self._num_logprobs += len(delta.logprobs)
        logprobs = _logprobs(delta.token_texts, delta.logprobs) if self._chat.logprobs else None
        if delta.text or logprobs is not None:
            data += self._chunk(delta, {"content": delta.text}, logprobs=logprobs)
        return data

    def end(self, reply: ChatReply) -> bytes:
        data = self._opening(reply)
        data += self._reasoning(reply, (reply.reasoning or "")[self._num_reasoning_chars :])
        rest = reply.content[self._num_chars :]
        texts, values = (reply.token_texts or ())[self._num_logprobs :], reply.logprobs[self._num_logprobs :]
        logprobs = _logprobs(texts, values.tolist()) if self._chat.logprobs and texts else None
        if rest or logprobs is not None:
            data += self._chunk(reply, {"content": rest}, logprobs=logprobs)
        for index, call in enumerate(reply.tool_calls):
            data += self._chunk(reply, {"tool_calls": [{"index": index, **_tool_call(call)}]})
        data += self._chunk(reply, {}, finish_reason=reply.finish_reason)
        if self._with_usage:
            data += _event(self._frame(reply) | {"choices": [], "usage": _usage(reply)})
        return data + b"data: [DONE]\n\n"

    def error(self, error: Exception) -> bytes:
        return _event(openai_error(failure_of(error)))

    def _reasoning(self, source: ReplyDelta | ChatReply, text: str) -> bytes:
        self._num_reasoning_chars += len(text)
        return self._chunk(source, {"reasoning_content": text}) if text else b""

    def _opening(self, source: ReplyDelta | ChatReply) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._chunk(source, {"role": "assistant", "content": ""})

    def _chunk(
        self,
        source: ReplyDelta | ChatReply,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event(self._frame(source) | {"choices": [choice]})

    def _frame(self, source: ReplyDelta | ChatReply) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{source.request_id}",
            "object": "chat.completion.chunk",
            "created": int(source.created_at),
            "model": self._chat.model or source.model_id,
            **({"usage": None} if self._with_usage else {}),
            **_provenance(source),
        }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _logprobs(texts: Sequence[str] | None, values: Sequence[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts or (), values, strict=True)
        ],
        "refusal": None,
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
