from __future__ import annotations

import math

import pytest

from model_runtime.canary import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, check_canary, tolerance
from model_runtime.config import ModelConfig
from model_runtime.documents import CanaryProbe
from model_runtime.errors import CanaryMismatchError


def probe(logprobs: list[float], previous: list[float] | None = None) -> CanaryProbe:
    return CanaryProbe(
        prompt_ids=[1], token_ids=list(range(len(logprobs))), logprobs=logprobs, previous_logprobs=previous
    )


def test_equal_logprobs_pass_and_the_largest_difference_is_returned() -> None:
    diff = check_canary(probe([-1.0, -2.0]), [-1.00001, -2.00005], tolerance=1e-4, what="m@v1 on r0")
    assert diff == pytest.approx(5e-5)


@pytest.mark.parametrize("served", [[-1.0, -2.1], [-1.0, math.nan]])
def test_other_logprobs_are_refused_naming_version_and_replica(served: list[float]) -> None:
    with pytest.raises(CanaryMismatchError, match="m@v1 on r0"):
        check_canary(probe([-1.0, -2.0]), served, tolerance=1e-4, what="m@v1 on r0")


def test_within_a_loose_tolerance_the_clearly_different_version_before_is_still_told_apart() -> None:
    new, old = [-1.0, -1.0], [-7.0, -1.0]
    with pytest.raises(CanaryMismatchError):
        check_canary(probe(new, old), old, tolerance=0.5, what="m@v1")
    assert check_canary(probe(new, old), [-1.3, -1.0], tolerance=0.5, what="m@v1") == pytest.approx(0.3)


def test_versions_that_hardly_differ_are_not_compared() -> None:
    new, old = [-1.0], [-1.00001]
    assert check_canary(probe(new, old), old, tolerance=1e-4, what="m@v1") == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("trainer", "rollout", "expected"),
    [
        ("float32", "float32", FLOAT32_TOLERANCE),
        ("bfloat16", "float32", BFLOAT16_TOLERANCE),
        ("float32", "bfloat16", BFLOAT16_TOLERANCE),
    ],
)
def test_the_tolerance_is_exact_only_where_both_sides_compute_in_float32(
    trainer: str, rollout: str, expected: float
) -> None:
    model = ModelConfig.model_validate(
        {"model_id": "m", "model_path": "/m", "trainer": {"dtype": trainer}, "rollout": {"dtype": rollout}}
    )
    assert tolerance(model) == expected
