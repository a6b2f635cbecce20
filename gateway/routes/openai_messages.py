"""Messages and tools in OpenAI's shape, as chat templates read them."""

from __future__ import annotations

from typing import Any

from gateway.conversation import Message, Tool, tool_call_entry
from gateway.quoting import quoted
from model_runtime.errors import InvalidRequestError

_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}
)


def normal_message(message: dict[str, Any], index: int) -> Message:
    """Role, text content, and where there are any name, tool calls, call id and reasoning.
    Raises InvalidRequestError for anything more."""
    if _is_plain(message):
        return message  # what nearly all messages of a long conversation are
    where = f"messages[{index}]"
    for key, value in message.items():
        if key not in _MESSAGE_KEYS and value not in (None, [], {}, ""):
            raise _refused(f"{where}.{key} is not supported by this gateway", f"{where}.{key}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refused(f"{where}.role must be a name, got {quoted(role)}", f"{where}.role")
    normal: Message = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if (text := _text_or_none(message, key, where)) is not None:
            normal[key] = text
    if role != "assistant":
        if message.get("tool_calls"):
            raise _refused(f"{where}.tool_calls: only an assistant makes calls", f"{where}.tool_calls")
        return normal
    reasoning = _text_or_none(message, "reasoning_content", where)
    reasoning = reasoning or _text_or_none(message, "reasoning", where)
    if reasoning is not None:
        normal["reasoning"] = normal["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        normal["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return normal


def _text_or_none(message: dict[str, Any], key: str, where: str) -> str | None:
    """Raises InvalidRequestError for anything else: left out, it would be missed by nobody."""
    value = message.get(key)
    if not isinstance(value, str | None):
        raise _refused(f"{where}.{key} must be text, got {quoted(value)}", f"{where}.{key}")
    return value


def _is_plain(message: dict[str, Any]) -> bool:
    """A role and a text, and nothing else."""
    return (
        len(message) == 2
        and type(message.get("content")) is str
        and type(role := message.get("role")) is str
        and role != ""
    )


def text_of(content: Any, where: str) -> str:
    """Raises InvalidRequestError for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content if part["text"])  # as vLLM joins them
    raise _refused(f"{where} must be text or a list of text parts", where)


def offered_tools(tools: Any, choice: Any, *, parallel: bool | None = None) -> tuple[Tool, ...]:
    """The functions the model is shown; none with tool_choice "none". Raises InvalidRequestError."""
    shown = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if choice == "none" or not shown:
        return ()
    if parallel is False:
        raise _refused(
            "parallel_tool_calls: false can't be enforced on a sampled answer; leave it out",
            "parallel_tool_calls",
        )
    return shown


def tool_choice_of(choice: Any, shown: tuple[Tool, ...]) -> str | dict[str, Any]:
    """ "auto", "required", or one of the functions shown. Raises InvalidRequestError."""
    if choice in (None, "auto", "none"):
        return "auto"
    names = [tool["function"]["name"] for tool in shown]
    if choice == "required" and names:
        return "required"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name in names:
            return {"type": "function", "function": {"name": name}}
    raise _refused(
        f"tool_choice {quoted(choice)} can't be honoured: it must be auto, none, required, or one of the "
        f"functions offered, which are {names}",
        "tool_choice",
    )


def _tool(tool: Any, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise _refused(f"{where} must be a function tool", "tools")
    return function_tool(
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
        where=where,
        strict=function.get("strict"),
    )


def function_tool(name: Any, description: Any, parameters: Any, *, where: str, strict: Any = None) -> Tool:
    """A definition with the keys, and in the order, that vLLM hands to templates."""
    if not isinstance(name, str) or not name:
        raise _refused(f"{where}: a function needs a name, got {quoted(name)}", "tools")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise _refused(f"{where}: description must be text and parameters a JSON schema", "tools")
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(f"{where} must be a list", where)
    normal = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused(f"{where}: each entry needs a function with a name", where)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | None):
            raise _refused(f"{where}: arguments must be JSON text", where)
        normal.append(tool_call_entry(str(call.get("id") or ""), function["name"], arguments or {}))
    return normal


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _refused(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
