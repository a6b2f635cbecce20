"""Text of token ids where tokens are bytes (in GPT-2's alphabet, as those of Llama 3, Qwen, SmolLM): the
tokenizers library's own, at a tenth of its cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tokenizers import Tokenizer, decoders


def _bytes_by_character() -> dict[str, int]:
    """Printable characters of Latin-1 stand for themselves, the other bytes for what follows on 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_by_character()


class ByteDecoder(dict[int, bytes]):
    """Token id → its bytes, none for a token that is left out. Filled by what is decoded."""

    def __init__(self, tokenizer: Tokenizer, left_out: Collection[int]) -> None:
        super().__init__(dict.fromkeys(left_out, b""))
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, left_out: Collection[int]) -> ByteDecoder | None:
        """None for a tokenizer of another kind."""
        return cls(tokenizer, left_out) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None

    def text(self, ids: Iterable[int]) -> str | None:
        """None where the bytes are no text."""
        try:
            return b"".join(map(self.__getitem__, ids)).decode()
        except UnicodeDecodeError:
            return None

    def __missing__(self, id_: int) -> bytes:
        token = self._tokenizer.id_to_token(id_) or ""
        known = all(character in _BYTES for character in token)
        self[id_] = data = bytes(_BYTES[c] for c in token) if known else token.encode()
        return data
