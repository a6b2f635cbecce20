"""What the gateway decodes itself is what the tokenizers library would have decoded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from gateway.byte_decoder import ByteDecoder
from gateway.codec import ChatCodec
from tests.fakes import make_tokenizer, make_tokenizer_document

FILES = sorted(Path(__file__).parents[3].glob("examples/quickstart/models/*/tokenizer.json"))


def with_added_tokens() -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", AddedToken("naïve ☃ word", special=False), "Ġodd"])
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> list[int]:
    return [id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special]


@pytest.mark.parametrize(
    "source", ["fake", "added", *FILES], ids=lambda s: s if isinstance(s, str) else s.parent.name
)
def test_random_ids_are_the_librarys_text(source: str | Path) -> None:
    kinds = {"fake": make_tokenizer, "added": with_added_tokens}
    tokenizer = kinds[source]() if isinstance(source, str) else Tokenizer.from_file(str(source))
    decoder = ByteDecoder.of(tokenizer, special_ids(tokenizer))
    assert decoder is not None
    draw, size = random.Random(0), tokenizer.get_vocab_size()
    samples = [[draw.randrange(size + 2) for _ in range(draw.randrange(12))] for _ in range(3000)]
    samples += [
        tokenizer.encode(text).ids for text in ("", "é", "snow ☃ and 🤖", "<tool_call>{}", " naïve ☃ word")
    ]
    samples += [[id_] for id_ in range(size + 2)]
    num_read = 0
    for ids in samples:
        text = decoder.text(ids)
        num_read += text is not None
        assert text in (None, tokenizer.decode(ids, skip_special_tokens=True)), ids
    assert num_read > len(samples) / 4


def test_bytes_that_are_no_text_are_left_to_the_library() -> None:
    tokenizer = make_tokenizer()
    half = tokenizer.encode("🤖").ids[:2]
    decoder = ByteDecoder.of(tokenizer, ())
    assert decoder is not None
    assert decoder.text(half) is None
    codec = ChatCodec(make_tokenizer_document())
    assert codec.decode(half) == tokenizer.decode(half)


def test_a_tokenizer_of_another_kind_is_left_to_the_library() -> None:
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    assert ByteDecoder.of(tokenizer, ()) is None
