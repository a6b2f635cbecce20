"""The canary: does a server that says it serves a version really use its weights?

The trainer notes, with each version, the logprobs it gives some tokens after some prompts. A server that
serves another version, the base, or a mixture gives other ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_runtime.config import ModelConfig
from model_runtime.documents import CanaryProbe
from model_runtime.errors import CanaryMismatchError

FLOAT32_TOLERANCE = 1e-4
# In bfloat16 sampler and trainer differ by up to 0.3 on the same weights. There the canary can only see a
# grossly wrong adapter; hashes and readback carry the proof.
BFLOAT16_TOLERANCE = 0.5
# Two versions are clearly different when their logprobs differ by more than this many tolerances.
CLEAR_DIFFERENCE = 10


def tolerance(model: ModelConfig) -> float:
    """Largest difference between served and trained logprobs that arithmetic alone can make."""
    exact = model.rollout.dtype == "float32" and model.trainer.dtype == "float32"
    return FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE


def check_canary(probe: CanaryProbe, served: Sequence[float], *, tolerance: float, what: str) -> float:
    """The largest difference between the served logprobs and the trainer's.

    Raises CanaryMismatchError when it exceeds `tolerance`, or when the trainer's own previous version is
    clearly different and the served logprobs are nearer to that one.
    """
    diff = _max_diff(served, probe.logprobs)
    if not diff <= tolerance:  # also when it is NaN
        raise CanaryMismatchError(
            f"{what}: logprobs differ from the trainer's by {diff:.3g}, more than {tolerance:g}: "
            "the server uses other weights"
        )
    previous = probe.previous_logprobs
    if previous is not None and _max_diff(previous, probe.logprobs) > CLEAR_DIFFERENCE * tolerance:
        to_previous = _max_diff(served, previous)
        if to_previous <= diff:
            raise CanaryMismatchError(
                f"{what}: logprobs are nearer to the version before ({to_previous:.3g}) than to this one "
                f"({diff:.3g})"
            )
    return diff


def _max_diff(left: Sequence[float], right: Sequence[float]) -> float:
    """NaN when any difference is."""
    diffs = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return next((diff for diff in diffs if diff != diff), max(diffs, default=0.0))
