"""OpenAI's Responses API, per session and agent: stateless, with function tools.

Every request carries its whole conversation; nothing is stored, so what refers to a stored response is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gateway.conversation import ChatCall, ChatReply, ReplyDelta, ToolCall
from gateway.openapi import BASES, RESPONSES_FIELDS, document_path
from gateway.responses import error_response, failure_of, json_response, openai_error
from gateway.routes.openai_items import ResponsesRequest, parse_responses_request, to_call
from gateway.routes.serving import named_agent, serve


async def responses(request: Request) -> Response:
    """POST /sessions/{session_id}[/agents/{agent_id}]/v1/responses."""
    return await serve(request, _parse, error_response)


def add_routes(app: FastAPI) -> None:
    """Plain Starlette routes, as those of Chat Completions."""
    for base in BASES:
        app.add_route(f"{base}/v1/responses", responses, methods=["POST"])


def openapi_paths() -> dict[str, Any]:
    return document_path(
        "/v1/responses", tag="openai", summary="Responses", body=ResponsesRequest, fields=RESPONSES_FIELDS
    )


def _parse(request: Request, body: bytes) -> ResponsesExchange:
    parsed = parse_responses_request(body)
    agent_id = named_agent(request, (parsed.metadata or {}).get("agent_id"), parsed.model)
    return ResponsesExchange(parsed, to_call(agent_id, parsed))


@dataclass(frozen=True, slots=True)
class ResponsesExchange:
    """One Responses request and the shape of its answers."""

    request: ResponsesRequest
    call: ChatCall

    @property
    def streams(self) -> bool:
        return bool(self.request.stream)

    @property
    def with_token_bytes(self) -> bool:
        return False

    def answer(self, reply: ChatReply) -> Response:
        return json_response(_finished(self.request, reply), headers={"X-Request-ID": reply.request_id})

    def writer(self) -> ResponseEventWriter:
        return ResponseEventWriter(self.request)


# ------------------------------------------------------------------ answers


def _frame(request: ResponsesRequest, source: ChatReply | ReplyDelta) -> dict[str, Any]:
    return {
        "id": f"resp_{source.request_id}",
        "object": "response",
        "created_at": int(source.created_at),
        "model": request.model or source.model_id,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_output_tokens,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "usage": None,
        "agent_id": source.agent_id,
        "model_id": source.model_id,
        "policy_version": source.policy_version,
        "policy_version_max": source.policy_version_max,
        "workflow_id": source.workflow_id,
        "request_id": source.request_id,
    }


def _finished(request: ResponsesRequest, reply: ChatReply) -> dict[str, Any]:
    cut = reply.finish_reason == "length"
    completion_tokens = len(reply.token_ids)
    return _frame(request, reply) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + completion_tokens,
        },
    }


def _items(reply: ChatReply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items = []
    if reply.reasoning:
        items.append(_reasoning_item(reply.request_id, reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(_message_item(reply.request_id, reply.content, status))
    return items + [
        _call_item(reply.request_id, i, call, call.arguments) for i, call in enumerate(reply.tool_calls)
    ]


def _message_item(request_id: str, text: str, status: str, *, begun: bool = False) -> dict[str, Any]:
    content = [] if begun else [_text_part(text)]
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_item(request_id: str, reasoning: str, *, begun: bool = False) -> dict[str, Any]:
    content = [] if begun else [{"type": "reasoning_text", "text": reasoning}]
    return {"id": f"rs_{request_id}", "type": "reasoning", "summary": [], "content": content}


def _call_item(request_id: str, index: int, call: ToolCall, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{request_id}_{index}",
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": arguments,
        "status": "completed",
    }


class ResponseEventWriter:
    """Writes an answer as response.created … response.completed."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._num_events = 0
        self._num_items = 0
        self._text_open = False
        self._num_chars = 0
        self._reasoning = ""
        self._reasoning_open = False
        self._pieces: list[bytes] = []

    def delta(self, delta: ReplyDelta) -> bytes:
        self._open(delta)
        self._think(delta.request_id, delta.reasoning)
        self._text(delta.request_id, delta.text)
        return self._taken()

    def end(self, reply: ChatReply) -> bytes:
        self._open(reply)
        self._think(reply.request_id, (reply.reasoning or "")[len(self._reasoning) :])
        self._close_reasoning(reply.request_id)
        self._text(reply.request_id, reply.content[self._num_chars :])
        if reply.content or not reply.tool_calls:
            self._close_text(reply)
        for index, call in enumerate(reply.tool_calls):
            self._call(reply.request_id, index, call)
        kind = "response.incomplete" if reply.finish_reason == "length" else "response.completed"
        self._write(kind, response=_finished(self._request, reply))
        return self._taken()

    def error(self, error: Exception) -> bytes:
        failure = failure_of(error)
        fields = {"code": failure.code, "message": failure.message, "param": failure.param}
        self._write("error", **fields, **openai_error(failure))
        return self._taken()

    def _open(self, source: ChatReply | ReplyDelta) -> None:
        if not self._num_events:
            self._write("response.created", response=_frame(self._request, source))
            self._write("response.in_progress", response=_frame(self._request, source))

    def _text(self, request_id: str, text: str) -> None:
        if not text:
            return
        self._close_reasoning(request_id)
        self._open_text(request_id)
        self._num_chars += len(text)
        self._write("response.output_text.delta", **self._place(request_id), delta=text, logprobs=[])

    def _think(self, request_id: str, text: str) -> None:
        if not text or self._text_open:  # thoughts after the answer began stand in the whole response alone
            return
        if not self._reasoning_open:
            self._reasoning_open = True
            item = _reasoning_item(request_id, "", begun=True)
            self._write("response.output_item.added", output_index=self._num_items, item=item)
        self._reasoning += text
        self._write("response.reasoning_text.delta", **self._place(request_id, "rs"), delta=text)

    def _close_reasoning(self, request_id: str) -> None:
        if not self._reasoning_open:
            return
        self._reasoning_open = False
        item = _reasoning_item(request_id, self._reasoning)
        self._write("response.reasoning_text.done", **self._place(request_id, "rs"), text=self._reasoning)
        self._write("response.output_item.done", output_index=self._num_items, item=item)
        self._num_items += 1

    def _open_text(self, request_id: str) -> None:
        if self._text_open:
            return
        self._text_open = True
        item = _message_item(request_id, "", "in_progress", begun=True)
        self._write("response.output_item.added", output_index=self._num_items, item=item)
        self._write("response.content_part.added", **self._place(request_id), part=_text_part(""))

    def _close_text(self, reply: ChatReply) -> None:
        self._open_text(reply.request_id)
        place = self._place(reply.request_id)
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        item = _message_item(reply.request_id, reply.content, status)
        self._write("response.output_text.done", **place, text=reply.content, logprobs=[])
        self._write("response.content_part.done", **place, part=_text_part(reply.content))
        self._write("response.output_item.done", output_index=self._num_items, item=item)
        self._num_items += 1

    def _place(self, request_id: str, kind: str = "msg") -> dict[str, Any]:
        return {"item_id": f"{kind}_{request_id}", "output_index": self._num_items, "content_index": 0}

    def _call(self, request_id: str, index: int, call: ToolCall) -> None:
        begun = _call_item(request_id, index, call, "") | {"status": "in_progress"}
        place = {"item_id": begun["id"], "output_index": self._num_items}
        self._write("response.output_item.added", output_index=self._num_items, item=begun)
        self._write("response.function_call_arguments.delta", **place, delta=call.arguments)
        self._write(
            "response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments
        )
        whole = _call_item(request_id, index, call, call.arguments)
        self._write("response.output_item.done", output_index=self._num_items, item=whole)
        self._num_items += 1

    def _write(self, kind: str, **fields: Any) -> None:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._pieces.append(f"event: {kind}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n")

    def _taken(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data
