"""A request of Anthropic's Messages API, as chat templates read it."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.conversation import ChatCall, Message, Tool, tool_call_entry
from gateway.quoting import quoted
from gateway.routes.openai_messages import function_tool, tool_choice_of
from gateway.routes.serving import decode_body
from gateway.sampling import check_settings
from model_runtime.errors import InvalidRequestError

# Claude Code's first system line; a part of it changes with every request, and with it all that follows.
_BILLING_HEADER = "x-anthropic-billing-header:"

# field → the values that ask for nothing
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}, {"type": "adaptive"}),
    "container": (None,),
    "mcp_servers": (None, []),
    "context_management": (None, {}, {"edits": []}),
    "output_config": (None, {}),
    "output_format": (None,),
    "inference_geo": (None,),
    "speed": (None, "standard"),
    "thread": (None,),
}


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a Messages request."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    # Taken note of by nobody, and without effect on the answer.
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Refused when they ask for something.
    thinking: Any = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    output_config: Any = None
    output_format: Any = None
    inference_geo: Any = None
    speed: Any = None
    thread: Any = None


_DECODER = msgspec.json.Decoder(MessagesRequest)


def parse_messages_request(body: bytes) -> MessagesRequest:
    """Raises InvalidRequestError naming what is wrong, unknown, or can't be honoured."""
    request = decode_body(_DECODER, body)
    for name, neutral in _REFUSED_UNLESS.items():
        if getattr(request, name) not in neutral:
            raise _refused(f"{name} is not supported by this gateway", name)
    return request


def to_call(agent_id: str, request: MessagesRequest) -> ChatCall:
    """Raises InvalidRequestError."""
    if not request.messages:
        raise _refused("messages: at least one message is needed", "messages")
    settings = {
        name: value
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if (value := getattr(request, name)) is not None
    }
    check_settings(settings)
    messages: list[Message] = []
    system = _system_text(request.system)
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(request.messages):
        messages.extend(_messages_of(message, f"messages.{index}"))
    tools = _offered_tools(request)
    return ChatCall(
        agent_id=agent_id,
        messages=messages,
        sampling=settings,
        stop=tuple(request.stop_sequences or ()),
        tools=tools,
        tool_choice=tool_choice_of(_tool_choice(request.tool_choice), tools),
    )


def _system_text(system: str | list[dict[str, Any]] | None) -> str:
    if system is None:
        return ""
    texts = [system] if isinstance(system, str) else [_text(block, "system") for block in system]
    kept = [text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text for text in texts]
    return "\n".join(text for text in kept if text)


def _messages_of(message: dict[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    unknown = set(message) - {"role", "content"}
    if unknown:
        raise _refused(f"{where}.{min(unknown)} is not supported by this gateway", where)
    if role not in ("user", "assistant", "system"):
        raise _refused(f"{where}.role must be user, assistant or system, got {quoted(role)}", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _refused(f"{where}.content must be text or a list of blocks", where)
    if role == "assistant":
        return [_assistant(content, where)]
    return _user(role, content, where)


def _user(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Results of tools are messages of their own; text between them stays where it is."""
    messages: list[Message] = []
    texts: list[str] = []

    def close_text() -> None:
        if texts:
            messages.append({"role": role, "content": "\n".join(text for text in texts if text)})
            texts.clear()

    for index, block in enumerate(blocks):
        at = f"{where}.content.{index}"
        if block.get("type") == "tool_result" and role == "user":
            close_text()
            call_id = block.get("tool_use_id")
            if not isinstance(call_id, str):
                raise _refused(f"{at}.tool_use_id must name the call", at)
            text = _result_text(block.get("content"), at)
            messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
        else:
            texts.append(_text(block, at))
    close_text()
    return messages or [{"role": role, "content": ""}]


def _result_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refused(f"{where}.content must be text or a list of text blocks", where)
    return "\n".join(_text(block, where) for block in content)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at, kind = f"{where}.content.{index}", block.get("type")
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise _refused(f"{at}: a tool_use needs a name and an input object", at)
            calls.append(tool_call_entry(str(block.get("id") or ""), name, arguments))
        else:
            texts.append(_text(block, at))
    message: Message = {"role": "assistant", "content": "\n".join(text for text in texts if text)}
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: Any, where: str) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    kind = block.get("type") if isinstance(block, dict) else block
    raise _refused(f"{where}: a block of type {quoted(kind)} is not supported here", where)


def _offered_tools(request: MessagesRequest) -> tuple[Tool, ...]:
    choice = request.tool_choice or {}
    if choice.get("disable_parallel_tool_use") and request.tools:
        raise _refused("disable_parallel_tool_use can't be enforced on a sampled answer", "tool_choice")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())]
    return () if choice.get("type") == "none" else tuple(tools)


def _tool_choice(choice: dict[str, Any] | None) -> Any:
    """As OpenAI spells it."""
    kind = (choice or {}).get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    return "required" if kind == "any" else kind


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise _refused(f"{where}: {quoted(tool['type'])} is no tool of the caller's own", "tools")
    schema = tool.get("input_schema")
    return function_tool(tool.get("name"), tool.get("description"), schema, where=where)


def _refused(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
