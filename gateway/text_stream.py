"""Text of an answer while it grows, token by token, never cut inside a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

# A character has at most four bytes; what is still unreadable after this many tokens is not going to
# become one.
MAX_HELD_TOKENS = 32

UNREADABLE = "\ufffd"
"""What decoders write for the first bytes of a character."""


def before_stop(text: str, stop: str | None) -> str:
    """The text up to the stop string that ended it."""
    return text.partition(stop)[0] if stop else text


def num_begun(text: str, stops: Iterable[str]) -> int:
    """Characters at the end of the text that one of the stop strings begins with."""
    begun = (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
    return max(begun, default=0)


class HeldText:
    """Lets text pass up to a stop string, and holds what may become the beginning of one."""

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self._stop = [text for text in stop if text]
        self.held = ""

    def push(self, text: str) -> str:
        """What can be given out now."""
        text = self.held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        num_safe = min(found) if found else len(text) - num_begun(text, self._stop)
        self.held = text[num_safe:]
        return text[:num_safe]


class TextStream:
    """Decodes ids as they come. Each token is decoded with the one before it, because some tokenizers write
    a token's first space only after another; text that ends in half a character waits for the rest, and
    so does what may be a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Iterable[str] = ()) -> None:
        self._decode = decode
        self._held = HeldText(stop)
        self._window: list[int] = []  # ids from the last token given out onward
        self._num_given = 0  # of the window
        self._given = ""  # the text of those
        self.text = ""

    def push(self, ids: Sequence[int]) -> str:
        """What can be given out now."""
        self._window.extend(ids)
        return self._advance(final=False)

    def finish(self, whole: str) -> str:
        """The rest. `whole` is the text of all ids decoded at once, up to the stop string that ended it."""
        rest = whole[len(self.text) :] if whole.startswith(self.text) else self._advance(final=True)
        self.text = whole if whole.startswith(self.text) else self.text
        return rest

    def _advance(self, *, final: bool) -> str:
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_given
        if text.endswith(UNREADABLE) and not final and num_pending <= MAX_HELD_TOKENS:
            return ""
        if len(text) <= len(self._given) and not final:
            return ""  # special tokens so far
        new = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        given = self._held.push(new)
        self.text += given
        return given
