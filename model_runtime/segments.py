"""Sums over the rows of a flat token tensor.

`row_T` says which row each token belongs to. Rows without a token are rows too: their sum is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values_T: Tensor, row_T: Tensor, num_rows: int) -> Tensor:
    return values_T.new_zeros(num_rows).index_add(0, row_T, values_T)


def row_counts(row_T: Tensor, num_rows: int) -> Tensor:
    return torch.bincount(row_T, minlength=num_rows)


def row_means(values_T: Tensor, row_T: Tensor, num_rows: int) -> Tensor:
    """0 for a row without a token."""
    counts_B = row_counts(row_T, num_rows).clamp(min=1)
    return row_sums(values_T, row_T, num_rows) / counts_B


def row_maxima(values_T: Tensor, row_T: Tensor, num_rows: int) -> Tensor:
    """0 for a row without a token."""
    lowest_B = values_T.new_full((num_rows,), -torch.inf)
    maxima_B = lowest_B.scatter_reduce(0, row_T, values_T, reduce="amax")
    return torch.where(maxima_B == -torch.inf, torch.zeros_like(maxima_B), maxima_B)
