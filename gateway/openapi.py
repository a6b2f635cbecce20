"""The gateway's own OpenAPI document: what FastAPI sees of it, completed by hand.

The model calls are plain Starlette routes that FastAPI knows nothing of, and its own notion of a refused
body is not what this gateway answers.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.sampling import RANGES

# The session's own base URL, and that of each of its agents.
BASES = ("/sessions/{session_id}", "/sessions/{session_id}/agents/{agent_id}")

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _number(name: str) -> Schema:
    low, high, _ = RANGES[name]
    kind = "integer" if name in ("top_k", "seed", "max_tokens") else "number"
    return {"anyOf": [{"type": kind, "minimum": low, "maximum": high}, _NULL]}


# ------------------------------------------------------------------ errors

_OPENAI_ERROR = _object(
    ["error"],
    error=_object(
        ["message", "type", "code", "param"],
        message=_TEXT,
        type=_TEXT,
        code=_TEXT,
        param={"anyOf": [_TEXT, _NULL]},
    ),
)
_ANTHROPIC_ERROR = _object(
    ["type", "error"], type=_one("error"), error=_object(["type", "message"], type=_TEXT, message=_TEXT)
)
_STATUSES = {
    "400": "The request can't be honoured as written",
    "401": "The key is missing, or opens something else",
    "404": "There is no such session, agent, model or path",
    "409": "The session or group is not in a state that allows this; already_done: nothing is left to do",
    "410": "The run takes no new work",
    "413": "The body is too long (gateway.max_request_bytes), or of too many values",
    "422": "The body is not what the schema says",
    "429": "A bound of the config is reached; with Retry-After where waiting helps",
    "431": "The headers are too long (gateway.max_header_bytes)",
    "503": "Not ready: the model, or the store; Retry-After says when to ask again",
}


def _errors(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": text, "content": content} for status, text in _STATUSES.items()}


# ------------------------------------------------------------------ bodies of model calls

_TEXT_PART = _object(["type", "text"], type=_one("text"), text=_TEXT)
_TEXTS: Schema = {"anyOf": [_TEXT, _list_of(_TEXT_PART)]}
_FUNCTION_CALL = _object(
    ["id", "type", "function"],
    id=_TEXT,
    type=_one("function"),
    function=_object(["name", "arguments"], name=_TEXT, arguments=_TEXT),
)
_CHAT_MESSAGE = _object(
    ["role"],
    role={
        "anyOf": [
            _one("system", "developer", "user", "assistant", "tool"),
            {"type": "string", "minLength": 1},
        ]
    },
    content={"anyOf": [_TEXTS, _NULL]},
    name=_TEXT,
    tool_call_id=_TEXT,
    tool_calls=_list_of(_FUNCTION_CALL),
    reasoning_content=_TEXT,
)
_CHAT_TOOL = _object(
    ["type", "function"],
    type=_one("function"),
    function=_object(
        ["name"], name={"type": "string", "minLength": 1}, description=_TEXT, parameters={"type": "object"}
    ),
)
_ITEM: Schema = {
    "anyOf": [
        _object(
            ["role", "content"],
            type=_one("message"),
            role=_one("user", "system", "developer", "assistant"),
            content={
                "anyOf": [
                    _TEXT,
                    _list_of(_object(["type", "text"], type=_one("input_text", "output_text"), text=_TEXT)),
                ]
            },
        ),
        _object(
            ["type", "call_id", "name", "arguments"],
            type=_one("function_call"),
            call_id=_TEXT,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _object(
            ["type", "call_id", "output"], type=_one("function_call_output"), call_id=_TEXT, output=_TEXT
        ),
    ]
}
_BLOCK: Schema = {
    "anyOf": [
        _TEXT_PART,
        _object(
            ["type", "id", "name", "input"],
            type=_one("tool_use"),
            id=_TEXT,
            name=_TEXT,
            input={"type": "object"},
        ),
        _object(["type", "tool_use_id"], type=_one("tool_result"), tool_use_id=_TEXT, content=_TEXTS),
        _object(["type", "thinking"], type=_one("thinking"), thinking=_TEXT, signature=_TEXT),
    ]
}
_TURN = _object(
    ["role", "content"], role=_one("user", "assistant"), content={"anyOf": [_TEXT, _list_of(_BLOCK)]}
)
_SAMPLING = {name: _number(name) for name in RANGES}

CHAT_FIELDS: Schema = {
    **_SAMPLING,
    "max_completion_tokens": _number("max_tokens"),
    "messages": {**_list_of(_CHAT_MESSAGE), "minItems": 1},
    "n": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 16}, _NULL]},
    "top_logprobs": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, _NULL]},
    "tools": {"anyOf": [_list_of(_CHAT_TOOL), _NULL]},
    "tool_choice": {"anyOf": [_one("auto", "none"), _NULL]},
}
RESPONSES_FIELDS: Schema = {
    **_SAMPLING,
    "max_output_tokens": _number("max_tokens"),
    "input": {"anyOf": [_TEXT, _list_of(_ITEM)]},
    "tool_choice": {"anyOf": [_one("auto", "none"), _NULL]},
}
MESSAGES_FIELDS: Schema = {
    **_SAMPLING,
    "messages": {**_list_of(_TURN), "minItems": 1},
    "system": {"anyOf": [_TEXTS, _NULL]},
}


# ------------------------------------------------------------------ the document


def document_path(
    path: str,
    *,
    tag: str,
    summary: str,
    body: type[msgspec.Struct] | None,
    fields: Schema | None = None,
) -> dict[str, Any]:
    """A route at every base. `fields` says more of the body's fields than its type does."""
    operation: dict[str, Any] = {
        "tags": [tag],
        "summary": summary,
        "security": [{"sessionKey": []}, {"anthropicKey": []}],
        "responses": {
            "200": {
                "description": f"The answer, in the shape of {tag}'s API",
                "content": {"application/json": {}, **({"text/event-stream": {}} if body else {})},
            },
            **_errors("AnthropicError" if tag == "anthropic" else "Error"),
        },
    }
    if body is not None:
        schema = msgspec.json.schema(body)["$defs"][body.__name__]
        known = {name: more for name, more in (fields or {}).items() if name in schema["properties"]}
        schema = {**schema, "properties": {**schema["properties"], **known}, "additionalProperties": False}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    paths: dict[str, Any] = {}
    for base in BASES:
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT}
            for name in re.findall(r"{(\w+)}", base)
        ]
        method = "get" if body is None else "post"
        paths[f"{base}{path}"] = {method: {**operation, "parameters": parameters}}
    return paths


def complete(document: dict[str, Any], *model_calls: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with the model calls, who may call what, and how errors look."""
    for operations in document["paths"].values():
        for operation in operations.values():
            _complete_operation(operation)
    for paths in model_calls:
        document["paths"].update(paths)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    components["securitySchemes"] = {
        "adminKey": {"type": "http", "scheme": "bearer", "description": "$REPERTORY_ADMIN_KEY"},
        "sessionKey": {"type": "http", "scheme": "bearer", "description": "the session's api_key"},
        "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return document


def _complete_operation(operation: dict[str, Any]) -> None:
    tag = operation["tags"][0]
    answers = {code: answer for code, answer in operation["responses"].items() if code.startswith("2")}
    operation["responses"] = {**answers, **_errors("Error")}
    if tag == "control":
        operation["security"] = [{"adminKey": []}]
    elif tag == "sessions":
        operation["security"] = [{"sessionKey": []}, {"adminKey": []}]
