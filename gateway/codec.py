"""Messages to token ids and back, with a model's own tokenizer and chat template.

Templates are compiled the way transformers compiles them, so that the ids equal `apply_chat_template`'s;
transformers itself stays out of this process.

A conversation goes on by *splicing*: the ids sampled so far stay as they are and only the text the template
puts after the last answer is encoded. `ChatCodec.render` proves for each continuation that the template
would have written the earlier text unchanged; where it would not (a reasoning model that drops earlier
thoughts), there is nothing to splice onto.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import msgspec
import numpy as np
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.byte_decoder import ByteDecoder
from gateway.conversation import Message, Tool
from gateway.template_probe import splice_problem
from model_runtime.documents import TokenizerDocument
from model_runtime.errors import CorruptObjectError, InvalidRequestError
from model_runtime.types import Int32Array

# Encoding costs about 1 µs a token. Above this many characters it leaves the event loop's thread.
OFF_LOOP_CHARS = 4000
LONG_TEXT_CHARS = 400_000
# Of SHA-256, for which processors have instructions: each turn reads the whole conversation's text.
MARK_BYTES = 16

TemplateArguments = Mapping[str, Any]
"""What a request hands to the template beside its messages and tools (`enable_thinking`, …)."""

Rendered = TypeVar("Rendered")


@dataclass(frozen=True, slots=True)
class TextMark:
    """What is remembered of a rendered conversation, to tell later whether another begins with it. The same
    in every process: marks outlive the one that made them."""

    num_chars: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> TextMark:
        return cls(len(text), _rolling_digest(text).digest()[:MARK_BYTES])

    def of_longer(self, text: str) -> TextMark | None:
        """The mark of a text that begins with the one this is of; None for a text that does not."""
        rolling = _rolling_digest(text[: self.num_chars])
        if len(text) < self.num_chars or rolling.digest()[:MARK_BYTES] != self.digest:
            return None
        rolling.update(text[self.num_chars :].encode(errors="surrogatepass"))
        return TextMark(len(text), rolling.digest()[:MARK_BYTES])


def _rolling_digest(text: str) -> hashlib._Hash:
    return hashlib.sha256(text.encode(errors="surrogatepass"))


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompt:
    """Ids of a conversation up to where the assistant speaks next.

    For a continuation: only the ids that follow the chain's own."""

    ids: Int32Array
    mark: TextMark  # of the whole conversation's text


@dataclass(frozen=True, slots=True)
class _Around:
    """An answer, the last of `messages`, and what stands around it."""

    messages: Sequence[Message]
    new_messages: Sequence[Message]
    tools: Sequence[Tool]
    arguments: TemplateArguments | None

    @property
    def answer(self) -> Message:
        return self.messages[-1]


class ChatCodec:
    """Renders, splices and decodes for one model."""

    def __init__(self, document: TokenizerDocument, *, source: str = "tokenizer document") -> None:
        try:
            self._tokenizer = Tokenizer.from_str(document.tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise CorruptObjectError(f"{source}: tokenizer_json can't be loaded: {error}") from error
        # tokenizer.json may carry both; transformers switches them off for a single conversation.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            self._template = _environment().from_string(document.chat_template)
            # jinja2 keeps a chain of mappings here, and would copy it name by name for every rendering.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise CorruptObjectError(f"{source}: chat_template can't be compiled: {error}") from error
        self._special_tokens = document.special_tokens
        self._knows_developers = "developer" in document.chat_template
        self._special_ids = {
            token.content: id_
            for id_, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._byte_decoder = ByteDecoder.of(self._tokenizer, self._special_ids.values())
        self._sentinel = f"[[answer-{secrets.token_hex(12)}]]"
        self.eos_token_ids = tuple(document.eos_token_ids)
        self.max_model_len = document.max_model_len
        self.splice_problem = splice_problem(self.render_text, document.chat_template)

    # -------------------------------------------------------------- rendering

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        arguments: TemplateArguments | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text. Raises InvalidRequestError where the template refuses the messages."""
        try:
            return self._template.render(
                dict(arguments or {}),
                messages=[self._for_template(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def encode(self, text: str) -> Int32Array:
        """Ids of a text the template wrote; no special tokens are added to those in it."""
        # The batch call, unlike the single one, lets other threads run.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        arguments: TemplateArguments | None = None,
    ) -> RenderedPrompt:
        """The whole conversation, for the start of a chain."""
        text = self.render_text(messages, tools=tools, arguments=arguments)
        return RenderedPrompt(self.encode(text), TextMark.of(text))

    def render_continuation(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        *,
        last_id: int,
        before: TextMark | None = None,
        tools: Sequence[Tool] = (),
        arguments: TemplateArguments | None = None,
        sampled_ids: Sequence[int] = (),
    ) -> RenderedPrompt | None:
        """The ids that follow a chain whose last sampled id is `last_id`.

        `messages` ends with the assistant's answer; `before` marks the text that answer was sampled after,
        `sampled_ids` is what was sampled.
        None: the template does not write the earlier text unchanged, so the chain can't be continued.
        """
        whole = self.render_text([*messages, *new_messages], tools=tools, arguments=arguments)
        mark = TextMark.of(whole) if before is None else before.of_longer(whole)
        if mark is None:
            return None
        rest = None if before is None else whole[before.num_chars :]
        around = _Around(messages, new_messages, tools, arguments)
        if is_text(messages[-1]):
            # An answer cut before a stop string does not say all that was sampled. One the model ended does.
            ended = last_id in self.eos_token_ids
            if len(sampled_ids) and not ended and self.decode(sampled_ids) != messages[-1]["content"]:
                return None
            tail = self._text_after_answer(around, whole=whole, rest=rest)
        else:
            tail = self._text_after_calls(around, self._text_of_turn(sampled_ids), rest=rest)
        if tail is None:
            return None
        ids = self.encode(tail)
        # The end-of-turn token the model sampled is already in the chain; a turn cut by length has none.
        if len(ids) and last_id in self.eos_token_ids and ids[0] == last_id:
            ids = ids[1:]
        return RenderedPrompt(ids, mark)

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        arguments: TemplateArguments | None = None,
    ) -> RenderedPrompt:
        """`render_prompt`, off the event loop's thread when it is long."""
        if _num_chars(messages) + _num_chars_around(tools, arguments) > OFF_LOOP_CHARS:
            return await _off_loop(self.render_prompt, messages, tools, arguments)
        return self.render_prompt(messages, tools, arguments)

    async def continuation(
        self, messages: Sequence[Message], new_messages: Sequence[Message], **proof: Any
    ) -> RenderedPrompt | None:
        """`render_continuation`, off the event loop's thread when it is long."""
        # What was there before is only written again, which costs a thousandth of encoding it.
        before: TextMark | None = proof.get("before")
        num_before = _num_chars(messages) if before is None else before.num_chars
        if _num_chars(new_messages) > OFF_LOOP_CHARS or num_before > LONG_TEXT_CHARS:
            return await _off_loop(self.render_continuation, messages, new_messages, **proof)
        return self.render_continuation(messages, new_messages, **proof)

    # -------------------------------------------------------------- decoding

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        """The text, without special tokens."""
        plain = _plain(ids)
        text = None if self._byte_decoder is None else self._byte_decoder.text(plain)
        return self._tokenizer.decode(plain, skip_special_tokens=True) if text is None else text

    def decode_all(self, ids: Sequence[int] | Int32Array) -> str:
        """The text with its special tokens."""
        return self._tokenizer.decode(_plain(ids), skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int] | Int32Array) -> list[str]:
        """Each id's own text, special tokens included."""
        return self._tokenizer.decode_batch([[id_] for id_ in _plain(ids)], skip_special_tokens=False)

    def token_bytes(self, ids: Sequence[int] | Int32Array) -> list[bytes]:
        """Each id's own bytes, special tokens included: a token may be a part of a character."""
        pieces = [text.encode() for text in self.token_texts(ids)]
        if self._byte_decoder is not None:
            for place, id_ in enumerate(_plain(ids)):
                pieces[place] = self._byte_decoder[id_] or pieces[place]
        return pieces

    def top_bytes(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[list[tuple[bytes, float]]]:
        """Likeliest tokens as bytes instead of ids."""
        if not tops:
            return []
        pieces = iter(self.token_bytes([id_ for top in tops for id_, _ in top]))
        return [[(next(pieces), logprob) for _, logprob in top] for top in tops]

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that reads `text`, if there is one."""
        return self._special_ids.get(text)

    def _for_template(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows_developers:
            # OpenAI's later word for it. Templates leave out what roles they don't know say, or refuse it.
            message = {**message, "role": "system"}
        return _with_argument_objects(message) if "tool_calls" in message else message

    # -------------------------------------------------------------- the proof

    def _text_after_answer(self, around: _Around, *, whole: str, rest: str | None) -> str | None:
        """What the template writes after the answer.

        None unless `whole` is exactly: what was there before, the answer, and that. `rest` is what follows
        the text before; where that isn't known, a sentinel in the answer's place finds it."""
        answer = around.answer["content"]
        if rest is not None:
            return rest[len(answer) :] if rest.startswith(answer) else None
        head, tail = self._around_answer(around)
        return None if tail is None or whole != head + answer + tail else tail

    def _text_after_calls(self, around: _Around, sampled: str, *, rest: str | None) -> str | None:
        """As `_text_after_answer`, for an answer with tool calls or reasoning, which the template writes in
        a form of its own.

        None unless `rest` is the text that was sampled, and what follows. White space inside the answer may
        differ: models and templates write JSON with other spaces."""
        if rest is None:
            return None
        if rest.startswith(sampled):
            return rest[len(sampled) :]
        try:
            _, tail = self._around_answer(around)
        except InvalidRequestError:
            return None  # a template that wants tool messages after calls only
        if tail is None or not rest.endswith(tail):
            return None
        written = rest[: len(rest) - len(tail)]
        return tail if "".join(written.split()) == "".join(sampled.split()) else None

    def _around_answer(self, around: _Around) -> tuple[str, str | None]:
        """The template's text before and after the answer, were it only text."""
        stand_in = {"role": around.answer["role"], "content": self._sentinel}
        if "name" in around.answer:
            stand_in["name"] = around.answer["name"]
        messages = [*around.messages[:-1], stand_in, *around.new_messages]
        marked = self.render_text(messages, tools=around.tools, arguments=around.arguments)
        head, found, tail = marked.partition(self._sentinel)
        return head, tail if found and self._sentinel not in tail else None

    def _text_of_turn(self, ids: Sequence[int]) -> str:
        """The text of sampled ids with all their markup, the token that ended the turn left out."""
        kept = _plain(ids)
        if kept and kept[-1] in self.eos_token_ids:
            kept = kept[:-1]
        return self.decode_all(kept)


# Threads of their own: a burst of long prompts must not keep the store's writes waiting.
_RENDERING = ThreadPoolExecutor(max_workers=4, thread_name_prefix="rendering")


async def _off_loop(work: Callable[..., Rendered], *args: Any, **kwargs: Any) -> Rendered:
    return await asyncio.get_running_loop().run_in_executor(_RENDERING, partial(work, *args, **kwargs))


def _num_chars(messages: Sequence[Message]) -> int:
    """About as many as a template writes."""
    return sum(len(m["content"]) if len(m) == 2 else len(msgspec.json.encode(m)) for m in messages)


def _num_chars_around(tools: Sequence[Tool], arguments: TemplateArguments | None) -> int:
    return sum(len(msgspec.json.encode(given)) for given in (tools, arguments) if given)


def is_text(message: Message) -> bool:
    """Whether a message holds nothing but text."""
    return "tool_calls" not in message and "reasoning_content" not in message


def _with_argument_objects(message: Message) -> Message:
    """Arguments that are no JSON object are shown to templates as an empty one, as vLLM does: they are in
    the history, where an error would end the conversation."""
    calls = message["tool_calls"]
    if all(isinstance(call["function"]["arguments"], dict) for call in calls):
        return message
    shown = []
    for call in calls:
        arguments = call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, dict) else {}
        shown.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": shown}


def _plain(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


# ------------------------------------------------------------------ transformers' template environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for trainers; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    @staticmethod
    def _body(caller: jinja2.runtime.Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
