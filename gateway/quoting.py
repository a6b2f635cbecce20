"""How messages quote what a caller sent."""

from __future__ import annotations

MAX_CHARS = 60


def quoted(value: object) -> str:
    """As Python writes it, cut where it is long: a body may hold anything in any place."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; brackets a thousand deep
        return f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "…"
