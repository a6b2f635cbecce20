"""The numbers of tests/data/algorithms: computed with verl's and TRL's own functions on random inputs.

Inputs are [B, T] with a mask; the product works on the masked-in tokens alone. Values at masked places are
absurd on purpose. Each case brings its own tolerance, and its source: project, version and function.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

_FOLDER = Path(__file__).parent / "data" / "algorithms"


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads((_FOLDER / f"{name}.json").read_text())


def cases(name: str) -> list[Any]:
    """Every case of a file as a parameter named after it."""
    return [pytest.param(case, id=case["name"]) for case in document(name)["cases"]]


def batch(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a case: its own, or the batch it names."""
    if "inputs" in case:
        return case["inputs"]
    found = document(name)
    batches = found.get("batches") or document(Path(found["batches_file"]).stem)["batches"]
    return batches[case["batch"]]


def numbers(values: Any) -> npt.NDArray[np.float64]:
    """Non-finite values are strings in the files."""
    return np.asarray(values).astype(np.float64)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    got, want = np.asarray(got, dtype=np.float64), numbers(want)
    same = np.isclose(got, want, rtol=0, atol=0, equal_nan=True)  # infinities and NaN
    with np.errstate(invalid="ignore"):
        close = np.abs(got - want) <= tolerance * np.maximum(1, np.abs(want))
    assert (same | close).all(), (got, want)
