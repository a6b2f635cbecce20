"""How per-token losses become one number: the weight of a row's tokens, and the batch's denominator.

Every mode is Σ weight × loss / denominator, with one weight per row. Both come from the counts of the whole
batch, so parts of a batch add up to it however it is split over forward passes or processes. Rows without a
trained token count nowhere, as in verl (TRL keeps them in its row means).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_runtime.objective_config import AggregationMode


@dataclass(frozen=True, slots=True, eq=False)
class Aggregation:
    """Σ over tokens of weight_B[row] × loss, / denominator."""

    weight_B: npt.NDArray[np.float64]
    denominator: float


def aggregation(
    mode: AggregationMode,
    num_tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    scale_tokens: float = 1.0,
    sessions: Sequence[object] | None = None,
    num_rows: int | None = None,
    batch_num_tokens: int | None = None,
) -> Aggregation:
    """Weights for rows of `num_tokens` trained tokens each, the whole batch.

    `scale_tokens` is the constant that seq-mean-token-sum-norm divides by. `sessions` names the workflow
    execution of each row: with session-balanced each weighs the same, however many chains it split into,
    and within one all tokens do. `num_rows` and `batch_num_tokens` replace the counts of rows and tokens
    where these rows are only a part of the batch.
    """
    tokens_B = np.asarray(num_tokens, dtype=np.float64)
    trained_B = tokens_B > 0
    ones_B = np.ones_like(tokens_B)
    rows = float(trained_B.sum() if num_rows is None else num_rows)
    if mode == "token-mean":
        return Aggregation(ones_B, float(tokens_B.sum() if batch_num_tokens is None else batch_num_tokens))
    if mode == "token-sum":
        return Aggregation(ones_B, 1.0)
    if mode == "seq-mean-token-sum":
        return Aggregation(ones_B, rows)
    if mode == "seq-mean-token-sum-norm":
        return Aggregation(ones_B, rows * scale_tokens)
    if mode == "seq-mean-token-mean":
        return Aggregation(1.0 / np.maximum(tokens_B, 1), rows)
    if sessions is None:
        raise ValueError("session-balanced needs the session of each row")
    index: dict[object, int] = {}
    session_B = np.asarray([index.setdefault(session, len(index)) for session in sessions], dtype=np.intp)
    tokens_S = np.bincount(session_B, weights=tokens_B, minlength=len(index))
    return Aggregation(1.0 / np.maximum(tokens_S[session_B], 1), float((tokens_S > 0).sum()))
