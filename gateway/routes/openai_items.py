"""A request of OpenAI's Responses API, as chat templates read it."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.conversation import ChatCall, Message, Tool, tool_call_entry
from gateway.quoting import quoted
from gateway.routes.openai_messages import function_tool, offered_tools, tool_choice_of
from gateway.routes.serving import decode_body
from gateway.sampling import check_settings
from model_runtime.errors import InvalidRequestError

# field → the values that ask for nothing
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "image": (None,),
    "stream_options": (None, {}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
_NEUTRAL_TEXT: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
# No summary is made: the reasoning itself is in the answer.
_NEUTRAL_REASONING: dict[str, Any] = {"summary": "auto", "generate_summary": "auto"}
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a Responses request."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    # Taken note of by nobody, and without effect on the answer. Nothing is ever stored.
    store: bool | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    # Refused when they ask for something.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    prompt: Any = None
    text: Any = None
    truncation: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    image: Any = None
    stream_options: Any = None


_DECODER = msgspec.json.Decoder(ResponsesRequest)


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """Raises InvalidRequestError naming what is wrong, unknown, or can't be honoured."""
    request = decode_body(_DECODER, body)
    for name, neutral in _REFUSED_UNLESS.items():
        value = getattr(request, name)
        if value not in neutral or (isinstance(value, bool) and name == "top_logprobs"):
            raise _refused(f"{name} is not supported by this gateway", name)
    _check_nested(request.text, "text", _NEUTRAL_TEXT)
    _check_nested(request.reasoning, "reasoning", _NEUTRAL_REASONING)
    extra = set(request.include or ()) - {"reasoning.encrypted_content"}
    if extra:
        raise _refused(f"include {quoted(min(extra))} is not supported by this gateway", "include")
    return request


def _check_nested(given: Any, name: str, neutral: dict[str, Any]) -> None:
    """Refuses an object of which a field asks for something."""
    if not isinstance(given, dict | None):
        raise _refused(f"{name} must be an object, got {quoted(given)}", name)
    for key, value in (given or {}).items():
        if value is not None and value != neutral.get(key):
            raise _refused(f"{name}.{key} is not supported by this gateway", f"{name}.{key}")


def to_call(agent_id: str, request: ResponsesRequest) -> ChatCall:
    """Raises InvalidRequestError."""
    settings: dict[str, float | int] = {}
    for name, value in (
        ("temperature", request.temperature),
        ("top_p", request.top_p),
        ("max_tokens", request.max_output_tokens),
    ):
        if value is not None:
            settings[name] = value
    check_settings(settings)
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    messages += _messages_of(request.input)
    if not messages:
        raise _refused("input is empty", "input")
    listed = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    tools = offered_tools(listed, request.tool_choice, parallel=request.parallel_tool_calls)
    choice = request.tool_choice
    if isinstance(choice, dict):  # named without an object around the name
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return ChatCall(
        agent_id=agent_id,
        messages=messages,
        sampling=settings,
        tools=tools,
        tool_choice=tool_choice_of(choice, tools),
    )


def _messages_of(items: str | list[dict[str, Any]]) -> list[Message]:
    """Items of one answer (reasoning, text, calls) are one assistant message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    answer: Message | None = None  # that further items of the same answer belong to
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        if kind == "function_call_output":
            answer = None
            text = _text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")})
            continue
        if kind == "message" and item.get("role") != "assistant":
            answer = None
            messages.append(_spoken(item, where))
            continue
        if kind not in ("message", "function_call", "reasoning"):
            raise _refused(f"{where}: an item of type {quoted(kind)} is not supported", where)
        # Reasoning begins an answer, as does a text after another.
        if answer is None or kind == "reasoning" or (kind == "message" and "tool_calls" in answer):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        _add_to_answer(answer, item, kind, where)
    return messages


def _add_to_answer(answer: Message, item: dict[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        text = _text_of(item.get("content"), f"{where}.content")
        answer["content"] = f"{answer['content']}\n{text}" if answer["content"] else text
    elif kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise _refused(f"{where}: a function_call needs a name and arguments", where)
        entry = tool_call_entry(str(item.get("call_id") or ""), name, arguments or {})
        answer.setdefault("tool_calls", []).append(entry)
    else:
        parts = item.get("content") or []
        texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
        if texts:
            answer["reasoning"] = answer["reasoning_content"] = "\n".join(texts)


def _spoken(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise _refused(
            f"{where}.role must be user, system, developer or assistant, got {quoted(role)}", where
        )
    return {"role": role, "content": _text_of(item.get("content"), f"{where}.content")}


def _text_of(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
        for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise _refused(f"{where} must be text or a list of text parts", where)


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise _refused(f"{where}: only functions are supported, got {quoted(tool.get('type'))}", "tools")
    return function_tool(
        tool.get("name"),
        tool.get("description"),
        tool.get("parameters"),
        where=where,
        strict=tool.get("strict"),
    )


def _refused(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
