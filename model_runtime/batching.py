"""Rows of a batch → micro-batches of padded token arrays.

Rows are sorted by length, so that little is padding, and cut off after their last trained token: what
comes later can't change the loss. Padding stands on the right, where a causal model never looks at it
from a real token; so no attention mask is needed and every row's result is exactly its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from model_runtime.types import Float32Array, Int8Array, Trajectory

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]

# vLLM's own threshold: below it a request is greedy and its logprobs are those of temperature 1.
_GREEDY_BELOW = 1e-5


class Row(Protocol):
    """What a trained row brings (training_queue.TrainingRow)."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def advantage(self) -> float: ...
    @property
    def loss_mask(self) -> Int8Array: ...
    @property
    def turn_advantages(self) -> Sequence[float] | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward pass: B rows padded to L, and the T trained tokens in them.

    Token t is predicted by the hidden state at (row_T[t], position_T[t]) and is target_T[t].
    """

    input_ids_BL: Int64Array
    batch_row_B: Int64Array  # place of each row in the whole batch
    row_T: Int64Array  # row in this micro-batch
    position_T: Int64Array
    target_T: Int64Array
    temperature_T: Float32Array
    behavior_logprobs_T: Float32Array
    advantages_T: Float32Array

    @property
    def num_trained_tokens(self) -> int:
        return len(self.target_T)

    def tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """The arrays by field name, on the device."""
        import torch

        return {name: torch.from_numpy(getattr(self, name)).to(device) for name in self.__slots__}


def micro_batches(rows: Sequence[Row], *, micro_batch_tokens: int) -> list[MicroBatch]:
    """Split a batch into forward passes of at most `micro_batch_tokens` padded tokens, longest first.

    A single row longer than that gets a pass of its own. Rows without a trained token are left out. The
    same rows always give the same split.
    """
    lengths = [_num_inputs(row) for row in rows]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    passes: list[MicroBatch] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        count = max(1, micro_batch_tokens // longest)
        places = order[start : start + count]
        passes.append(_pad([rows[i] for i in places], places, longest))
        start += count
    return passes


def num_trained_tokens(rows: Sequence[Row]) -> int:
    """The batch's denominator."""
    return sum(int(row.loss_mask.sum()) for row in rows)


def _num_inputs(row: Row) -> int:
    """Tokens the model has to read: everything before the last trained token; 0 without one."""
    trained = np.flatnonzero(row.loss_mask)
    return len(row.trajectory.prompt_ids) + int(trained[-1]) if len(trained) else 0


def _pad(rows: Sequence[Row], places: Sequence[int], length: int) -> MicroBatch:
    input_ids_BL = np.zeros((len(rows), length), dtype=np.int64)
    parts: list[tuple[npt.NDArray, ...]] = []
    for b, row in enumerate(rows):
        trajectory, trained = row.trajectory, np.flatnonzero(row.loss_mask)
        num_prompt = len(trajectory.prompt_ids)
        num_inputs = num_prompt + int(trained[-1])
        input_ids_BL[b, :num_prompt] = trajectory.prompt_ids
        input_ids_BL[b, num_prompt:num_inputs] = trajectory.response_ids[: trained[-1]]
        parts.append(
            (
                np.full(len(trained), b),
                num_prompt - 1 + trained,
                trajectory.response_ids[trained],
                temperatures(trajectory)[trained],
                trajectory.behavior_logprobs[trained],
                token_advantages(row)[trained],
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    row_T, position_T, target_T = (column.astype(np.int64) for column in columns[:3])
    temperature_T, behavior_T, advantages_T = (column.astype(np.float32) for column in columns[3:])
    batch_row_B = np.asarray(places, dtype=np.int64)
    return MicroBatch(
        input_ids_BL, batch_row_B, row_T, position_T, target_T, temperature_T, behavior_T, advantages_T
    )


def token_advantages(row: Row) -> Float32Array:
    """The advantage of each response token: its row's, or its turn's where turns are credited."""
    per_token = np.full(len(row.trajectory.response_ids), row.advantage, dtype=np.float32)
    for turn, advantage in zip(row.trajectory.turns, row.turn_advantages or (), strict=False):
        per_token[turn.start : turn.end] = advantage
    return per_token


def temperatures(trajectory: Trajectory) -> Float32Array:
    """The temperature each response token was sampled at: its turn's, and 1 outside turns."""
    per_token = np.ones(len(trajectory.response_ids), dtype=np.float32)
    for turn in trajectory.turns:
        if turn.temperature >= _GREEDY_BELOW:
            per_token[turn.start : turn.end] = turn.temperature
    return per_token
