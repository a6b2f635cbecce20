"""OpenAI's Chat Completions, per session and agent.

The hot route: the body is parsed by msgspec into what the router knows; no Pydantic, no dependency
injection. A field that can't be honoured is refused by name, never ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.calls import CallIdentity
from gateway.chains import Message
from gateway.responses import error_response, json_response
from gateway.router import ChatCall, ChatReply
from gateway.routes.access import bearer_key, gateway_of
from gateway.sampling import check_settings
from model_runtime.errors import InvalidRequestError, UnknownAgentError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499  # never seen by the client; for the counters

_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_call_id"})
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
    "stream": (None, False),
    "stream_options": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
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
    logprobs: bool | None = None
    metadata: dict[str, Any] | None = None
    # Taken note of by nobody, and without effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    # Refused when they ask for something.
    n: Any = None
    stream: Any = None
    stream_options: Any = None
    tools: Any = None
    tool_choice: Any = None
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
    gateway = gateway_of(request)
    agent_id, session = request.path_params.get("agent_id", ""), None
    try:
        session = gateway.sessions.find(request.path_params["session_id"], bearer_key(request))
        body = await request.body()
        chat = parse_chat_request(body)
        agent_id = agent_id or _named_agent(request, chat, gateway.routes)
        call = to_call(agent_id, chat)
        gateway.router.check(session, call)
        identity = _identity(request, agent_id, body)
        reply = await _until_disconnect(
            request,
            session.calls.run(
                identity,
                lambda: gateway.router.chat_completion(session, call, with_texts=bool(chat.logprobs)),
            ),
        )
    except _ClientDisconnected:
        response = Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:  # the edge: every error has an answer in one table
        response = error_response(error)
        if response.status_code == 500:
            logger.exception("a model call failed unexpectedly")
        if session is not None and response.status_code >= 500:
            session.mark_infra(f"agent {agent_id!r} was answered {response.status_code}: {error}")
    else:
        response = _answer(chat, reply)
    known_agent = agent_id if agent_id in gateway.routes else "unknown"
    gateway.metrics.count_request(known_agent, response.status_code)
    return response


async def list_models(request: Request) -> Response:
    """GET /sessions/{session_id}[/agents/{agent_id}]/v1/models: the agents a session may speak as."""
    gateway = gateway_of(request)
    gateway.sessions.find(request.path_params["session_id"], bearer_key(request))
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


_BASES = ("/sessions/{session_id}", "/sessions/{session_id}/agents/{agent_id}")


def add_routes(app: FastAPI) -> None:
    """Plain Starlette routes: FastAPI's dependency machinery costs more than the rest of a call."""
    for base in _BASES:
        app.add_route(f"{base}/v1/chat/completions", chat_completions, methods=["POST"])
        app.add_route(f"{base}/v1/models", list_models, methods=["GET"])


def openapi_paths() -> dict[str, Any]:
    """What FastAPI's document lacks."""
    schema = msgspec.json.schema(ChatRequest)
    definition = schema["$defs"]["ChatRequest"]
    paths: dict[str, Any] = {}
    for base in _BASES:
        names = re.findall(r"{(\w+)}", base)
        parameters = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names
        ]
        answers = {
            "200": {"description": "The answer, in OpenAI's shape"},
            "4XX": {"description": "The request can't be honoured"},
            "503": {"description": "The model is not ready; Retry-After says when to ask again"},
        }
        content = {"application/json": {"schema": definition}}
        paths[f"{base}/v1/chat/completions"] = {
            "post": {
                "tags": ["openai"],
                "summary": "Chat Completions",
                "parameters": parameters,
                "requestBody": {"required": True, "content": content},
                "responses": answers,
            }
        }
        listing = {"200": {"description": "The agents of this session"}}
        paths[f"{base}/v1/models"] = {
            "get": {"tags": ["openai"], "summary": "Agents", "parameters": parameters, "responses": listing}
        }
    return paths


# ------------------------------------------------------------------ request


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequestError naming the field that is wrong, unknown, or can't be honoured."""
    try:
        chat = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), param=_field_named_in(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    for name, neutral in _REFUSED_UNLESS.items():
        value = getattr(chat, name)
        if value not in neutral or (isinstance(value, bool) and name == "n"):
            raise InvalidRequestError(
                f"{name} is not supported by this gateway (got {_short(value)})", param=name
            )
    return chat


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
    )


def normal_message(message: dict[str, Any], index: int) -> Message:
    """Role, text content and name, as templates read them. Raises InvalidRequestError for anything more."""
    where = f"messages[{index}]"
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value not in (None, [], {}, ""):
            raise InvalidRequestError(
                f"{where}.{key} is not supported by this gateway", param=f"{where}.{key}"
            )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a name, got {role!r}", param=f"{where}.role")
    normal: Message = {"role": role, "content": _text(message.get("content"), where)}
    if isinstance(message.get("name"), str):
        normal["name"] = message["name"]
    return normal


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)  # as vLLM joins them
    raise InvalidRequestError(
        f"{where}.content must be text or a list of text parts", param=f"{where}.content"
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _named_agent(request: Request, chat: ChatRequest, routes: Any) -> str:
    """The agent a request to the session's own base URL speaks as."""
    named = request.headers.get("x-agent-id") or (chat.metadata or {}).get("agent_id") or chat.model
    if not isinstance(named, str) or not named:
        raise UnknownAgentError(
            "no agent is named: use the base URL …/agents/<agent_id>/v1, the X-Agent-ID header, "
            f"metadata.agent_id, or model = an agent's id; agents are {sorted(routes.agents)}"
        )
    return named


def _identity(request: Request, agent_id: str, body: bytes) -> CallIdentity:
    digest = hashlib.blake2b(body, digest_size=16).digest()
    key = request.headers.get("idempotency-key")
    if key:
        return CallIdentity(f"key {agent_id} {key}", digest)
    # OpenAI's SDKs say which attempt this is: a first one is a call of its own, whatever its body.
    fresh = request.headers.get("x-stainless-retry-count") == "0"
    return CallIdentity(f"body {agent_id} {digest.hex()}", digest, fresh=fresh)


class _ClientDisconnected(Exception):
    """Nobody is left to answer."""


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancelled as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    # The body has been read, so the next thing to come is the end of the connection.
    hang_up = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientDisconnected
    finally:
        hang_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------ answer


def _answer(chat: ChatRequest, reply: ChatReply) -> Response:
    completion_tokens = len(reply.token_ids)
    body = {
        "id": f"chatcmpl-{reply.request_id}",
        "object": "chat.completion",
        "created": int(reply.created_at),
        "model": chat.model or reply.model_id,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply.content, "refusal": None},
                "finish_reason": reply.finish_reason,
                "logprobs": _logprobs(reply) if chat.logprobs else None,
            }
        ],
        "usage": {
            "prompt_tokens": reply.num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": reply.num_prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        },
        "agent_id": reply.agent_id,
        "model_id": reply.model_id,
        "policy_version": reply.policy_version,
        "workflow_id": reply.workflow_id,
        "request_id": reply.request_id,
    }
    return json_response(body, headers={"X-Request-ID": reply.request_id})


def _logprobs(reply: ChatReply) -> dict[str, Any]:
    texts = reply.token_texts or ()
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, reply.logprobs.tolist(), strict=True)
        ],
        "refusal": None,
    }


def _field_named_in(message: str) -> str | None:
    found = re.search(r"at `\$\.(\w+)|unknown field `(\w+)`|required field `(\w+)`", message)
    return next((name for name in found.groups() if name), None) if found else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
