"""Sampling settings of one model call: who may set what, and what training allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.quoting import quoted
from model_runtime.errors import InvalidRequestError

Settings = Mapping[str, float | int]

# name → (lowest, highest, the value that leaves the model's own distribution alone; None: any value does)
RANGES: dict[str, tuple[float, float, float | None]] = {
    "temperature": (0.0, 100.0, None),
    "top_p": (0.0, 1.0, 1.0),
    "top_k": (-1, 2**31 - 1, 0),
    "min_p": (0.0, 1.0, 0.0),
    "presence_penalty": (-2.0, 2.0, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (1e-6, 100.0, 1.0),
    "seed": (-(2**63), 2**63 - 1, None),
    "max_tokens": (1, 2**31 - 1, None),
}
_NEUTRAL = {name: neutral for name, (_, _, neutral) in RANGES.items() if neutral is not None}
_INTEGERS = frozenset({"top_k", "seed", "max_tokens"})

MAX_STOPS = 64
MAX_STOP_CHARS = 1_000


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError naming the first setting that is unknown or out of range."""
    for name, value in settings.items():
        if name not in RANGES:
            raise InvalidRequestError(
                f"unknown sampling setting {name!r}; known are {sorted(RANGES)}", param=name
            )
        low, high, _ = RANGES[name]
        wanted = "an integer" if name in _INTEGERS else "a number"
        kinds = (int,) if name in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidRequestError(f"{name} must be {wanted}, got {quoted(value)}", param=name)
        if not low <= value <= high:  # nor is NaN; an integer may be larger than any float
            raise InvalidRequestError(
                f"{name} must be from {low:g} to {high:g}, got {quoted(value)}", param=name
            )


def check_stop(stop: Sequence[str]) -> None:
    """Every token is compared with all of them. Raises InvalidRequestError."""
    if "" in stop:
        raise InvalidRequestError("stop holds an empty text, which ends every answer", param="stop")
    if len(stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequestError(
            f"stop may hold {MAX_STOPS} texts of {MAX_STOP_CHARS} characters at most", param="stop"
        )


def merge_settings(
    *,
    defaults: Settings,
    session: Settings,
    request: Settings,
    forced: Settings,
    training: bool,
    allow_off_policy: bool = False,
) -> dict[str, float | int]:
    """The settings in force, the later argument winning. Raises InvalidRequestError for what a training
    session can't take; `allow_off_policy` lets those pass that only change the distribution."""
    merged = {**defaults, **session, **request, **forced}
    if merged.get("top_k") == -1:
        merged["top_k"] = 0  # both spell "off"
    if training:
        _refuse_off_policy(merged, allowed=allow_off_policy)
    return merged


def off_policy_settings(settings: Settings) -> dict[str, float | int]:
    """Settings by which tokens are drawn from another distribution than the model's own."""
    return {name: value for name, value in settings.items() if _NEUTRAL.get(name, value) != value}


def _refuse_off_policy(settings: Settings, *, allowed: bool) -> None:
    """Training needs logprobs of the very distribution that was sampled, over the whole vocabulary."""
    off_policy = {} if allowed else off_policy_settings(settings)
    for name, value in off_policy.items():
        raise InvalidRequestError(
            f"{name} must be {RANGES[name][2]:g} in a training session, got {value!r}: the trainer computes "
            "logprobs over the whole vocabulary; use an evaluation session, leave it out, or set "
            "gateway.allow_off_policy_sampling",
            param=name,
        )
    if settings.get("temperature", 1.0) <= 0:
        raise InvalidRequestError(
            "temperature must be above 0 in a training session: greedy answers have no distribution to learn "
            "from; use an evaluation session",
            param="temperature",
        )
