"""Waiting for what happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""Long enough for a machine with other work; nothing is proven by how long it took."""


def until(
    condition: Callable[[], object], what: str = "what was waited for", limit_s: float = PATIENCE_S
) -> None:
    """Return once `condition` holds; fail saying `what` never came."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.005)
