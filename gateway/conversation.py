"""What passes between the APIs and the router, whatever API a call came by: messages, answers, deltas.

Messages are as chat templates read them: a role, a text content, and where there are any a name, tool calls
with their arguments as an object, the id of the call a tool message answers, and the reasoning of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.sampling import Settings
from model_runtime.types import Float32Array, Int32Array

Message = dict[str, Any]
Tool = dict[str, Any]
Digest = bytes
TopBytes = Sequence[Sequence[tuple[bytes, float]]]
"""For each token the likeliest ones in its place, with their logprobs, the likeliest first."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model made. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One model call. `tools` are function definitions, as templates read them."""

    agent_id: str
    messages: list[Message]
    sampling: Settings
    stop: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: str | dict[str, Any] = "auto"  # else "required", or a function in OpenAI's shape
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    num_choices: int = 1  # answers, each a chain of its own
    num_top_logprobs: int = 0  # likeliest tokens to name beside each sampled one

    @property
    def forces_call(self) -> bool:
        """A grammar lets the model say nothing but a call."""
        return self.tool_choice != "auto"


class ChatReply(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The answer, and what the record says of it."""

    request_id: str
    agent_id: str
    model_id: str
    policy_version: int  # the oldest that sampled a token of it
    policy_version_max: int
    workflow_id: str
    content: str
    finish_reason: str  # "stop" | "length" | "tool_calls"
    token_ids: Int32Array
    logprobs: Float32Array
    token_bytes: tuple[bytes, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    created_at: float
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    top_logprobs: TopBytes = ()  # one for each token, when they were asked for
    stopped_by: str | None = None  # the stop string that ended it
    siblings: tuple[ChatReply, ...] = ()  # the further choices of a call that asked for several


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyDelta:
    """A piece of an answer while it is being sampled. Its text may be empty: a character not yet whole."""

    request_id: str
    agent_id: str
    model_id: str
    policy_version: int
    workflow_id: str
    created_at: float
    num_prompt_tokens: int
    text: str
    reasoning: str = ""
    logprobs: Sequence[float] = ()
    token_bytes: Sequence[bytes] | None = None  # one for each logprob, when they were asked for
    top_logprobs: TopBytes = ()
    choice: int = 0

    @property
    def policy_version_max(self) -> int:
        return self.policy_version


DeltaSink = Callable[[ReplyDelta], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer's token ids say: text, and what the model's parsers found in it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())

    @property
    def is_plain(self) -> bool:
        return not self.tool_calls and self.reasoning is None


# ------------------------------------------------------------------ which conversations are the same


class ConversationKey:
    """Rolling digests of a conversation: `digest(k)` identifies messages 0 … k, the tools offered and the
    template's arguments.

    Role, content, name and tool calls count. Ids of tool calls do not, nor how their arguments' JSON is
    written, nor reasoning: agents make up ids, re-serialise arguments and leave reasoning out.

    Where a conversation goes on, it is found by its digests from the last answer onward; those before are
    made when somebody asks for one."""

    __slots__ = ("_beginning", "_counted", "_early", "_late", "_num_early", "_rolling", "roles")

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._beginning = hashlib.blake2b(digest_size=16)
        if tools:
            self._beginning.update(_ENCODER.encode(tools))
        if template_arguments:
            self._beginning.update(b"\0" + _ENCODER.encode(template_arguments))
        self.roles = [message["role"] for message in messages]
        self._counted = [message if len(message) == 2 else _counted(message) for message in messages]
        answers = (index for index in range(len(messages) - 1, 0, -1) if self.roles[index] == "assistant")
        self._num_early = next(answers, 0)
        self._early: list[Digest] = []
        self._rolling = self._beginning.copy()
        self._rolling.update(_ENCODER.encode_lines(self._counted[: self._num_early]))
        self._late = _digests(self._rolling, self._counted[self._num_early :])

    def __len__(self) -> int:
        return len(self.roles)

    def digest(self, index: int) -> Digest:
        if index >= self._num_early:
            return self._late[index - self._num_early]
        if not self._early:
            self._early = _digests(self._beginning, self._counted[: self._num_early])
        return self._early[index]

    def with_answer(self, content: str, tool_calls: Sequence[ToolCall] = ()) -> Digest:
        """The digest of this conversation and the assistant's answer to it."""
        answer = _counted(answer_message(content, tool_calls))
        return _digests(self._rolling.copy(), [answer])[0]


def answer_message(
    content: str, tool_calls: Sequence[ToolCall] = (), reasoning: str | None = None
) -> Message:
    """An answer as the message it is in the conversation that goes on from it."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [tool_call_entry(c.call_id, c.name, c.arguments) for c in tool_calls]
    return message


def tool_call_entry(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One entry of a message's `tool_calls`, its arguments an object where they are one."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments_object(arguments)},
    }


def arguments_object(arguments: Any) -> Any:
    """Arguments written as a JSON object, as that object; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


_ENCODER = msgspec.json.Encoder(order="deterministic")


def _counted(message: Message) -> Message:
    """What counts of a message: of one with a role and a text alone, all."""
    counted = {"role": message["role"], "content": message["content"]}
    if (name := message.get("name")) is not None:
        counted["name"] = name
    if calls := message.get("tool_calls"):
        counted["tool_calls"] = [[c["function"]["name"], c["function"]["arguments"]] for c in calls]
    return counted


def _digests(rolling: hashlib.blake2b, counted: Sequence[Message]) -> list[Digest]:
    """One after each of these messages, which `rolling` is updated with."""
    digests = []
    for message in counted:
        rolling.update(_ENCODER.encode_lines([message]))
        digests.append(rolling.digest())
    return digests
