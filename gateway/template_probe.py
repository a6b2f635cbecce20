"""What a chat template does to answers once they are history, found by trying.

A template that writes an earlier answer in other words than it was sampled in can't be spliced onto: such
turns start new chains. That is right, but costs tokens, so it is said when the template is taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gateway.conversation import Message, Tool
from model_runtime.errors import InvalidRequestError

# Assistant answers that templates are known to rewrite when they render them as history.
_ANSWERS = ("plain", "<think>\nwhy\n</think>\n\nplain", " led by a space", "two\nlines\n")

_TOOL: Tool = {
    "type": "function",
    "function": {"name": "look", "description": "Look", "parameters": {"type": "object", "properties": {}}},
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_THOUGHT = "a thought of its own"

Render = Callable[..., str]


def splice_problem(render: Render, template: str) -> str | None:
    """What the template rewrites, in words; None: nothing that was tried. `render` takes messages, tools and
    add_generation_prompt."""
    try:
        found = list(_rewritten_answers(render))
        if "reasoning" in template:
            found += _rewritten_reasoning(render)
        if "tool" in template:
            found += _rewritten_calls(render)
    except InvalidRequestError as error:
        return f"it refuses a plain conversation: {error}"
    return "; ".join(found) or None


def _rewritten_answers(render: Render) -> Iterator[str]:
    opening, follow_up = _user("question"), _user("and then?")
    for answer in _ANSWERS:
        before = render([opening])
        whole = render([opening, {"role": "assistant", "content": answer}, follow_up])
        if not whole.startswith(before + answer):
            yield f"it does not render an earlier answer {answer!r} as it was"
            return


def _rewritten_reasoning(render: Render) -> Iterator[str]:
    thoughtful = {"reasoning": _THOUGHT, "reasoning_content": _THOUGHT}
    answer: Message = {"role": "assistant", "content": "plain", **thoughtful}
    conversation = [_user("question"), answer, _user("and then?")]
    if _THOUGHT not in render(conversation) or not _keeps_answers(render, conversation):
        yield "it leaves the reasoning of an earlier answer out once the user speaks again"


def _rewritten_calls(render: Render) -> Iterator[str]:
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    found: Message = {"role": "tool", "content": "found", "tool_call_id": "call_1"}
    said: Message = {"role": "assistant", "content": "plain"}
    conversation = [_user("question"), calling, found, said, _user("and then?")]
    try:
        kept = _keeps_answers(render, conversation, tools=[_TOOL])
    except InvalidRequestError as error:
        yield f"it refuses a conversation with tools: {error}"
        return
    if not kept:
        yield "it rewrites earlier turns of a conversation with tools"


def _keeps_answers(render: Render, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
    """Whether each beginning that ends with an answer is a beginning of the whole text."""
    whole = render(messages, tools=tools)
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    return all(
        whole.startswith(render(messages[:end], tools=tools, add_generation_prompt=False)) for end in ends
    )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
