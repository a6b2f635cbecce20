"""Anthropic's Messages API, per session and agent: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.conversation import ChatCall, ChatReply, ReplyDelta, ToolCall, arguments_object
from gateway.openapi import BASES, MESSAGES_FIELDS, document_path
from gateway.responses import Failure, failure_of, json_response, status_of
from gateway.routes.access import gateway_of, session_key
from gateway.routes.anthropic_messages import MessagesRequest, parse_messages_request, to_call
from gateway.routes.serving import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    body_of,
    named_agent,
    serve,
    until_disconnect,
)

logger = logging.getLogger(__name__)

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# ------------------------------------------------------------------ routes


async def messages(request: Request) -> Response:
    """POST /sessions/{session_id}[/agents/{agent_id}]/v1/messages."""
    return await serve(request, _parse, refusal)


async def count_tokens(request: Request) -> Response:
    """POST …/v1/messages/count_tokens: what the same request would be billed for as input."""
    try:
        gateway = gateway_of(request)
        session = gateway.sessions.find(request.path_params["session_id"], session_key(request))
        call = _parse(request, await body_of(request)).call
        gateway.router.check(session, call)
        with session.calls.attending():
            counting = gateway.router.count_tokens(session, call)
            return json_response({"input_tokens": await until_disconnect(request, counting)})
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:  # the edge: every error has an answer in one table
        if status_of(error) == 500:
            logger.error("tokens could not be counted", exc_info=error)
        return refusal(error)


def add_routes(app: FastAPI) -> None:
    """Plain Starlette routes, as those of Chat Completions."""
    for base in BASES:
        app.add_route(f"{base}/v1/messages", messages, methods=["POST"])
        app.add_route(f"{base}/v1/messages/count_tokens", count_tokens, methods=["POST"])


def openapi_paths() -> dict[str, Any]:
    count = "/v1/messages/count_tokens"
    return document_path(
        "/v1/messages", tag="anthropic", summary="Messages", body=MessagesRequest, fields=MESSAGES_FIELDS
    ) | document_path(
        count, tag="anthropic", summary="Count tokens", body=MessagesRequest, fields=MESSAGES_FIELDS
    )


# ------------------------------------------------------------------ answers


def _parse(request: Request, body: bytes) -> MessagesExchange:
    parsed = parse_messages_request(body)
    agent_id = named_agent(request, (parsed.metadata or {}).get("agent_id"), parsed.model)
    return MessagesExchange(parsed, to_call(agent_id, parsed))


@dataclass(frozen=True, slots=True)
class MessagesExchange:
    """One Messages request and the shape of its answers."""

    request: MessagesRequest
    call: ChatCall

    @property
    def streams(self) -> bool:
        return bool(self.request.stream)

    @property
    def with_token_bytes(self) -> bool:
        return False

    def answer(self, reply: ChatReply) -> Response:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content or not reply.tool_calls:  # clients look at the first block without asking
            content.append({"type": "text", "text": reply.content, "citations": None})
        content += [_tool_use(call, arguments_object(call.arguments)) for call in reply.tool_calls]
        body = _frame(self.request, reply) | {
            "content": content,
            **_stop(reply),
            "usage": _usage(reply.num_prompt_tokens, len(reply.token_ids), reply.num_cached_tokens),
        }
        return json_response(body, headers=_headers(reply.request_id))

    def writer(self) -> MessageEventWriter:
        return MessageEventWriter(self.request)


def _frame(request: MessagesRequest, source: ChatReply | ReplyDelta) -> dict[str, Any]:
    return {
        "id": f"msg_{source.request_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model or source.model_id,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(source.num_prompt_tokens, 0, 0),
        "agent_id": source.agent_id,
        "model_id": source.model_id,
        "policy_version": source.policy_version,
        "policy_version_max": source.policy_version_max,
        "workflow_id": source.workflow_id,
        "request_id": source.request_id,
    }


def _stop(reply: ChatReply) -> dict[str, Any]:
    by_sequence = reply.finish_reason == "stop" and reply.stopped_by is not None
    reason = "stop_sequence" if by_sequence else _STOP_REASONS[reply.finish_reason]
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by if by_sequence else None}


def _usage(num_prompt: int, num_sampled: int, num_cached: int) -> dict[str, Any]:
    # Anthropic's input_tokens are those that were not read from a cache.
    return {
        "input_tokens": num_prompt - num_cached,
        "output_tokens": num_sampled,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
    }


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


class MessageEventWriter:
    """Writes an answer as message_start … message_stop."""

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._started = False
        self._num_blocks = 0
        self._open: str | None = None  # the kind of block that is being written
        self._num_chars = 0
        self._num_reasoning_chars = 0

    def delta(self, delta: ReplyDelta) -> bytes:
        return self._opening(delta) + self._think(delta.reasoning) + self._text(delta.text)

    def end(self, reply: ChatReply) -> bytes:
        data = self._opening(reply)
        data += self._think((reply.reasoning or "")[self._num_reasoning_chars :])
        data += self._text(reply.content[self._num_chars :]) + self._close()
        for call in reply.tool_calls:
            piece = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
            data += self._block(_tool_use(call, {}), piece)
        usage = _usage(reply.num_prompt_tokens, len(reply.token_ids), reply.num_cached_tokens)
        data += _event("message_delta", {"delta": _stop(reply), "usage": usage})
        return data + _event("message_stop", {})

    def error(self, error: Exception) -> bytes:
        return _event("error", {"error": _error(failure_of(error))})

    def _opening(self, source: ReplyDelta | ChatReply) -> bytes:
        if self._started:
            return b""
        self._started = True
        return _event("message_start", {"message": _frame(self._request, source)})

    def _think(self, text: str) -> bytes:
        if not text or self._num_chars:  # a thought after the answer began has no block to go to
            return b""
        self._num_reasoning_chars += len(text)
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._piece(block, {"type": "thinking_delta", "thinking": text})

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        self._num_chars += len(text)
        block = {"type": "text", "text": "", "citations": None}
        return self._piece(block, {"type": "text_delta", "text": text})

    def _piece(self, block: dict[str, Any], piece: dict[str, Any]) -> bytes:
        """A piece of the block that is open, or of a new one of its kind."""
        data = b""
        if self._open != block["type"]:
            data = self._close() + self._start(block)
            self._open = block["type"]
        return data + _event("content_block_delta", {"index": self._num_blocks - 1, "delta": piece})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._num_blocks - 1})

    def _block(self, block: dict[str, Any], piece: dict[str, Any]) -> bytes:
        """A block that comes as one piece."""
        data = self._start(block)
        index = self._num_blocks - 1
        data += _event("content_block_delta", {"index": index, "delta": piece})
        return data + _event("content_block_stop", {"index": index})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})


def _event(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **body}) + b"\n\n"


def _headers(request_id: str) -> dict[str, str]:
    return {"X-Request-ID": request_id, "request-id": request_id}


def refusal(error: Exception) -> Response:
    failure = failure_of(error)
    body = {"type": "error", "error": _error(failure), "request_id": None}
    return json_response(body, failure.status_code, failure.headers)


def _error(failure: Failure) -> dict[str, Any]:
    status = failure.status_code
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": failure.message, "code": failure.code}
    if failure.param == "thread":  # the SDK's tool runner then sends whole conversations, as it must here
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return error
