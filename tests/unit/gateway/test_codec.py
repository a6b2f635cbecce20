"""Rendering equals transformers'; continuations are spliced onto sampled ids or refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gateway.codec import OFF_LOOP_CHARS, ChatCodec, TextMark
from model_runtime.errors import CorruptObjectError, InvalidRequestError
from tests.fakes import CHATML, make_tokenizer, make_tokenizer_document
from tests.tool_use import TOOL_TEMPLATE

# Llama-style: a bos variable, trimmed content, loop controls, a generation block.
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'ignored' %}{% continue %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n\n' }}"
    "{% generation %}{{ message['content'] | trim }}{% endgeneration %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# Qwen3-style: earlier thoughts are dropped once the user speaks again; JSON in the prompt.
FORGETTING = (
    "{%- set ns = namespace(last=-1) %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\n"
    "{%- endfor %}\n"
    "{{- {'tag': '<é>'} | tojson }}\n"
    "{%- for message in messages %}\n"
    "    {%- set content = message.content %}\n"
    "    {%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}\n"
    "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "forgetting": FORGETTING}

TEXTS = [
    "hello",
    "",
    "  spaces around  ",
    "two\nlines\n\n",
    "naïve 漢字 🙂 <b>&amp;</b>",
    "a special <|im_end|> inside <tool>",
    "<think>\nwhy\n</think>\n\nbecause",
    "x" * 3000,
]


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(("mention", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_s_words_are_the_system_s_to_templates_that_know_no_developer(
    mention: str, role: str
) -> None:
    codec = ChatCodec(make_tokenizer_document(chat_template=mention + CHATML))
    text = codec.render_text([message("developer", "be brief"), message("user", "x")])
    assert text.startswith(f"<|im_start|>{role}\nbe brief<|im_end|>")


def conversations() -> list[list[dict[str, Any]]]:
    roles = ("system", "user", "assistant", "tool", "user", "assistant", "user")
    found = [[message("user", text)] for text in TEXTS]
    for length, shift in itertools.product((2, 4, 7), range(len(TEXTS))):
        texts = itertools.islice(itertools.cycle(TEXTS), shift, shift + length)
        found.append([message(role, text) for role, text in zip(roles, texts, strict=False)])
    return found


def make_codec(template: str = CHATML) -> ChatCodec:
    return ChatCodec(make_tokenizer_document(chat_template=template))


def reference_ids(template: str, messages: list[dict[str, Any]]) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    ids: Any = reference.apply_chat_template(
        messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers_apply_chat_template(name: str) -> None:
    codec = make_codec(TEMPLATES[name])
    for messages in conversations():
        assert codec.render_prompt(messages).ids.tolist() == reference_ids(TEMPLATES[name], messages), (
            messages
        )


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(
    "new", [[message("user", "and then?")], [message("tool", "42"), message("user", "so?")]]
)
def test_a_spliced_continuation_equals_the_whole_conversation(stop: bool, new: list[dict[str, Any]]) -> None:
    """Where the sampled ids are those the tokenizer would write, splicing is invisible."""
    codec = make_codec()
    for text in TEXTS[:5]:
        opening = [message("system", "be brief"), message("user", text)]
        prompt = codec.render_prompt(opening)
        sampled = codec.encode("the answer is 42" + ("<|im_end|>" if stop else ""))
        so_far = [*opening, message("assistant", "the answer is 42")]
        rest = codec.render_continuation(so_far, new, last_id=int(sampled[-1]), before=prompt.mark)
        assert rest is not None
        spliced = np.concatenate([prompt.ids, sampled, rest.ids])
        assert spliced.tolist() == reference_ids(CHATML, [*so_far, *new])
        assert rest.mark == TextMark.of(codec.render_text([*so_far, *new]))


def test_sampled_ids_are_never_made_from_text_again() -> None:
    """The continuation holds only what follows the answer, however the answer was tokenised."""
    codec = make_codec()
    opening = [message("user", "hello")]
    rest = codec.render_continuation(
        [*opening, message("assistant", "hello")], [message("user", "x")], last_id=codec.eos_token_ids[0]
    )
    assert rest is not None
    assert codec.decode(rest.ids) == "\nuser\nx\nassistant\n"


def test_a_turn_cut_by_length_gets_its_end_of_turn_as_context() -> None:
    codec = make_codec()
    so_far = [message("user", "hello"), message("assistant", "hel")]
    cut = codec.render_continuation(so_far, [message("user", "x")], last_id=int(codec.encode("l")[0]))
    ended = codec.render_continuation(so_far, [message("user", "x")], last_id=codec.eos_token_ids[0])
    assert cut is not None
    assert ended is not None
    assert cut.ids.tolist() == [codec.eos_token_ids[0], *ended.ids.tolist()]


def test_a_template_that_drops_earlier_thoughts_is_not_spliced() -> None:
    codec = make_codec(FORGETTING)
    opening = [message("user", "hello")]
    before = codec.render_prompt(opening).mark
    thoughtful = [*opening, message("assistant", "<think>\nwhy\n</think>\n\nbecause")]
    assert codec.render_continuation(thoughtful, [message("user", "x")], last_id=-1, before=before) is None
    plain = [*opening, message("assistant", "because")]
    assert codec.render_continuation(plain, [message("user", "x")], last_id=-1, before=before) is not None


@pytest.mark.parametrize("said", ["goodbye", "jello"], ids=["longer", "as long"])
def test_an_answer_is_not_spliced_after_another_text_than_it_was_sampled_after(said: str) -> None:
    codec = make_codec()
    so_far = [message("user", "hello"), message("assistant", "hi")]
    other = codec.render_prompt([message("user", said)]).mark
    assert codec.render_continuation(so_far, [message("user", "x")], last_id=-1, before=other) is None


def test_templates_that_rewrite_answers_are_recognised_at_load() -> None:
    assert make_codec(CHATML).splice_problem is None
    assert "<think>" in (make_codec(FORGETTING).splice_problem or "")
    assert "led by a space" in (make_codec(TRIMMING).splice_problem or "")
    refusing = "{{ raise_exception('no ' + messages[0]['role']) }}"
    assert "no user" in (make_codec(refusing).splice_problem or "")
    # Qwen3's way with thoughts; its calls stay as they were.
    assert make_codec(TOOL_TEMPLATE).splice_problem == (
        "it leaves the reasoning of an earlier answer out once the user speaks again"
    )
    renumbering = TOOL_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>' ~ messages | length")
    assert renumbering != TOOL_TEMPLATE
    assert "tools" in (make_codec(renumbering).splice_problem or "")


def test_decoding_leaves_special_tokens_out() -> None:
    codec = make_codec()
    ids = codec.encode("naïve 漢字 🙂<|im_end|>")
    assert codec.decode(ids) == "naïve 漢字 🙂"
    assert codec.token_texts(codec.encode("hello<|im_end|>"))[-1] == "<|im_end|>"


def test_only_special_tokens_have_an_id_as_stop_strings() -> None:
    codec = make_codec()
    assert codec.special_token_id("<tool>") == 3
    assert codec.special_token_id("hello") is None


def test_a_template_that_refuses_the_messages_is_the_callers_error() -> None:
    codec = make_codec("{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}")
    with pytest.raises(InvalidRequestError, match="user first") as caught:
        codec.render_prompt([message("system", "x")])
    assert caught.value.param == "messages"


def test_a_template_can_not_reach_out_of_its_sandbox() -> None:
    codec = make_codec("{% if messages | length > 1 %}{{ messages.__class__.__mro__ }}{% endif %}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        codec.render_text([message("user", "x"), message("user", "y")])


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [("tokenizer_json", "{}", "tokenizer_json"), ("chat_template", "{% if %}", "chat_template")],
)
def test_a_broken_document_is_named(field: str, value: str, complaint: str) -> None:
    with pytest.raises(CorruptObjectError, match=f"here.*{complaint}"):
        ChatCodec(make_tokenizer_document(**{field: value}), source="here")


async def test_long_conversations_render_alike_off_the_event_loop() -> None:
    codec = make_codec()
    long = [message("user", "hello world " * OFF_LOOP_CHARS)]
    rendered = await codec.prompt(long)
    assert rendered.ids.tolist() == codec.render_prompt(long).ids.tolist()
    so_far = [*long, message("assistant", "hi")]
    there = await codec.continuation(so_far, [message("user", "x")], last_id=-1, before=rendered.mark)
    here = codec.render_continuation(so_far, [message("user", "x")], last_id=-1, before=rendered.mark)
    assert there is not None
    assert here is not None
    assert there.ids.tolist() == here.ids.tolist()


def test_the_tokens_encoded_per_turn_do_not_grow_with_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec = make_codec()
    encoded: list[int] = []
    encode = ChatCodec.encode

    def counting(self: ChatCodec, text: str) -> np.ndarray:
        ids = encode(self, text)
        encoded.append(len(ids))
        return ids

    monkeypatch.setattr(ChatCodec, "encode", counting)
    messages = [message("user", "hello world " * 50)]
    mark = codec.render_prompt(messages).mark
    for _ in range(10):
        so_far = [*messages, message("assistant", "the answer " * 50)]
        rest = codec.render_continuation(so_far, [message("user", "more")], last_id=2, before=mark)
        assert rest is not None
        messages, mark = [*so_far, message("user", "more")], rest.mark
    assert len(set(encoded[1:])) == 1


def test_a_mark_goes_on_only_over_a_text_that_begins_with_its_own():
    mark = TextMark.of("one two")
    assert mark.of_longer("one two three") == TextMark.of("one two three")
    assert mark.of_longer("one two") == mark
    assert mark.of_longer("one tw") is None
    assert mark.of_longer("One two three") is None


def test_what_was_encoded_before_is_not_encoded_again():
    """However long a conversation grows, a turn encodes what is new in it."""
    codec = ChatCodec(make_tokenizer_document(max_model_len=10**6))
    conversation, mark, encoded = [message("user", "a question of some length")], None, []
    encode, codec.encode = codec.encode, lambda text: encoded.append(encode(text)) or encoded[-1]
    for number in range(30):
        if mark is None:
            mark = codec.render_prompt(conversation).mark
        else:
            rest = codec.render_continuation(conversation[:-1], conversation[-1:], last_id=-1, before=mark)
            assert rest is not None
            mark = rest.mark
        answer, question = message("assistant", f"answer {number:02}" * 20), message("user", "and then?")
        conversation += [answer, question]
    assert len({len(ids) for ids in encoded[1:]}) == 1
    assert len(encoded[-1]) < 20
