"""Text of an answer while it grows, token by token, never cut inside a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A character has at most four bytes; what is still unreadable after this many tokens is not going to
# become one.
MAX_HELD_TOKENS = 32

_UNREADABLE = "\ufffd"


class TextStream:
    """Decodes ids as they come. Each token is decoded with the one before it, because some tokenizers write
    a token's first space only after another; text that ends in half a character waits for the rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # ids from the last token given out onward
        self._num_given = 0  # of the window
        self._given = ""  # the text of those
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """What can be given out now."""
        self._window.extend(ids)
        return self._advance(final=False)

    def finish(self, whole: str) -> str:
        """The rest. `whole` is the text of all ids decoded at once."""
        rest = whole[len(self.text) :] if whole.startswith(self.text) else self._advance(final=True)
        self.text = whole if whole.startswith(self.text) else self.text
        return rest

    def _advance(self, *, final: bool) -> str:
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_given
        if text.endswith(_UNREADABLE) and not final and num_pending <= MAX_HELD_TOKENS:
            return ""
        if len(text) <= len(self._given) and not final:
            return ""  # special tokens so far
        new = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        self.text += new
        return new
