"""The part of a vLLM server's client that has the server's own parsers read answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from model_runtime import llm_wire as wire
from model_runtime.errors import BackendUnavailableError
from model_runtime.types import Int32Array

_DERENDER = "/v1/chat/completions/derender"
_RENDER = "/v1/chat/completions/render"

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat:
    """What parsers and grammars depend on in the request an answer belongs to."""

    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | dict[str, Any] = "auto"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}
        if self.tools:
            chat |= {"tools": list(self.tools), "tool_choice": self.tool_choice}
        if self.template_arguments:
            chat["chat_template_kwargs"] = dict(self.template_arguments)
        return chat


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart. `calls` holds (id, name, arguments as JSON text)."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What a further piece of an answer adds to it. `state` goes with the next piece."""

    content: str
    reasoning: str
    begins_call: bool
    state: msgspec.Raw


class ParserCalls:
    """Calls of the parsers that the server was started with."""

    url: str

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> bytes:
        raise NotImplementedError

    async def parse_answer(
        self,
        *,
        prompt_ids: Sequence[int] | Int32Array,
        token_ids: Sequence[int] | Int32Array,
        asked: AskedChat,
        request_id: str,
        timeout_s: float,
    ) -> ParsedAnswer:
        """What the server's own tool and reasoning parsers make of sampled ids, the stop token left out."""
        prompt, ids = plain_ids(prompt_ids), plain_ids(token_ids)
        generated = {
            "request_id": request_id,
            "prompt_token_ids": prompt,  # says whether the prompt left a thought open
            "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}],
        }
        body = {"generate_response": generated, "chat_request": asked.body(), "prompt_token_ids": prompt}
        data = await self._call("POST", _DERENDER, body, timeout_s=timeout_s)
        answer = decode(data, wire.DerenderAnswer, url=self.url)
        if len(answer.choices) != 1:
            raise BackendUnavailableError(f"{self.url}: expected one choice, got {len(answer.choices)}")
        message = answer.choices[0].message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        return ParsedAnswer(message.content or "", message.reasoning, tuple(calls))

    async def parse_piece(
        self,
        *,
        prompt_ids: Sequence[int] | Int32Array,
        token_ids: Sequence[int],
        state: msgspec.Raw | None,
        asked: AskedChat,
        request_id: str,
        timeout_s: float,
    ) -> ParsedDelta:
        """What the server's parsers make of a further piece of an answer. `state` is the last piece's."""
        body = {
            "stream": True,
            "generate_chunk": {"request_id": request_id, "choices": [{"index": 0, "token_ids": token_ids}]},
            "stream_state": state,
            "chat_request": asked.body(),
            "prompt_token_ids": plain_ids(prompt_ids),
        }
        data = await self._call("POST", _DERENDER, body, timeout_s=timeout_s)
        answer = decode(data, wire.DerenderChunkAnswer, url=self.url)
        delta = answer.chunk.choices[0].delta if answer.chunk.choices else wire.ParsedMessageDelta()
        return ParsedDelta(
            delta.content or "", delta.reasoning or "", bool(delta.tool_calls), answer.stream_state
        )

    async def call_grammar(self, *, model: str, asked: AskedChat, timeout_s: float) -> dict[str, Any]:
        """The `structured_outputs` by which this server makes its model call the tools it is asked to."""
        # A schema that is not strict would let the arguments be any JSON.
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in asked.tools]
        body = asked.body() | {"model": model, "tools": strict}
        data = await self._call("POST", _RENDER, body, timeout_s=timeout_s)
        outputs = decode(data, wire.RenderAnswer, url=self.url).sampling_params.structured_outputs
        grammar = {
            k: v for k, v in (outputs or {}).items() if v not in (None, False) and not k.startswith("_")
        }
        if not grammar:
            raise BackendUnavailableError(f"{self.url}: no grammar for tool_choice {asked.tool_choice!r}")
        return grammar


def decode(data: bytes, kind: type[_Answer], *, url: str) -> _Answer:
    try:
        return _decoder(kind).decode(data)
    except msgspec.DecodeError as error:
        raise BackendUnavailableError(f"{url}: an answer that can't be read: {error}") from error


@cache
def _decoder(kind: type[_Answer]) -> msgspec.json.Decoder[_Answer]:
    return msgspec.json.Decoder(kind)


def plain_ids(token_ids: Sequence[int] | Int32Array) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
