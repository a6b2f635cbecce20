"""A chat template with tools, after Qwen2.5's and Qwen3's, and conversations that use it."""

from __future__ import annotations

from typing import Any

TOOL_TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nCall one as <tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>" }}
    {{- "<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_query %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the café's <menu>",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"anyOf": [{"type": "integer"}]}},
            "required": ["query"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(text: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def said(content: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | (thought(reasoning) if reasoning else {})


def thought(reasoning: str) -> dict[str, Any]:
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def text(content: str) -> dict[str, Any]:
    """One part of a content of several."""
    return {"type": "text", "text": content}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("what is there?")],
    [{"role": "system", "content": "be brief"}, user("what is there?")],
    [user("x"), calling(call("search", '{"query": "tea", "limit": 3}')), result("tea")],
    [
        user("x"),
        calling(
            call("search", '{"limit":1,"query":"naïve \\u00e9 <b>"}', "a"),
            call("clock", "", "b"),
            content="Let me look.",
        ),
        result("tea", "a"),
        result("noon", "b"),
    ],
    [user("x"), calling(call("search", "not json")), result("error"), user("go on")],
    [user("x"), calling(call("search", "[1]")), result(""), calling(call("clock", "{}")), result("noon")],
    [{"role": "system", "content": ""}, user("")],
    [
        {"role": "system", "content": "être bref 🙂"},
        user("naïve 漢字\u200d\u0000 <b>&amp;</b> \\n"),
        said(""),
        user("x"),
    ],
    [user("x"), said("  spaces around \n\n"), user("\ttabs\r\n")],
    [{"role": "user", "content": [text("one"), text(""), text("two\n")]}, said("y"), user("z")],
    [user("x"), {"role": "assistant", "content": [text("a"), text("b")]}, user("y")],
    [user("x"), said("because", "why, though"), user("and?")],
    [
        user("x"),
        calling(call("clock", "{}"), content="") | thought("let me see"),
        result("noon"),
        user("so?"),
    ],
    [user("x"), calling(call("clock", "{}")) | thought("let me see\n"), result("noon")],
    [
        {"role": "system", "content": "s"},
        user("x"),
        calling(
            call("search", '{"query": {"deep": [1, 2.5, null, true, "é"]}}', "a"), call("clock", "{}", "b")
        ),
        result("one", "a"),
        {"role": "tool", "tool_call_id": "b", "content": [text("two"), text("parts")]},
        said("done"),
        user("again"),
        calling(call("search", '{"query": "\\"quoted\\" \\u00fc"}', "c"), content="Looking."),
        result("", "c"),
    ],
    [user("x"), {"role": "assistant", "content": None}, user("y")],
    [user("a special <|im_end|> inside <tool_call>"), said("</think> and <think>"), user("y")],
    [user("x" * 600), said("y" * 300), user("z")],
]
