"""Rows of a batch → micro-batches of token arrays.

Rows are cut off after their last trained token: what comes later can't change the loss. Packed (packing.py),
they need no padding, and what they have in common is read once. Padded, for models that can't be packed,
they are sorted by length, so that little is padding; it stands on the right, where a causal model never looks
at it from a real token; so no attention mask is needed and every row's result is exactly its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from model_runtime.packing import Segment, pack
from model_runtime.types import Float32Array, Int8Array, Trajectory

if TYPE_CHECKING:
    import torch

Int64Array = npt.NDArray[np.int64]
RowLayout = Literal["padded", "packed", "shared"]
"""shared: packed, and a common beginning of rows is read once."""

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
    """One forward pass and the T trained tokens in it: B rows padded to L, or (with segments) one packed row.

    Token t stands in row row_T[t] of these, is predicted after its first position_T[t] + 1 tokens, by the
    hidden state at place_T[t] of the flattened input, and is target_T[t].
    """

    input_ids_BL: Int64Array
    positions_BL: Int64Array
    batch_row_B: Int64Array  # place of each row in the whole batch
    row_T: Int64Array  # row in this micro-batch
    position_T: Int64Array
    place_T: Int64Array
    target_T: Int64Array
    temperature_T: Float32Array
    behavior_logprobs_T: Float32Array
    advantages_T: Float32Array
    segments: tuple[Segment, ...] | None = None

    @property
    def num_trained_tokens(self) -> int:
        return len(self.target_T)

    def tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """The arrays by field name, on the device."""
        import torch

        arrays = {name: getattr(self, name) for name in self.__slots__ if name != "segments"}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def micro_batches(
    rows: Sequence[Row], *, micro_batch_tokens: int, layout: RowLayout = "padded"
) -> list[MicroBatch]:
    """Split a batch into forward passes of at most `micro_batch_tokens` tokens, padding included, the longest
    first.

    A single row longer than that gets a pass of its own. Rows without a trained token are left out. The
    same rows always give the same split.
    """
    if layout != "padded":
        return _packed(rows, micro_batch_tokens, share_prefixes=layout == "shared")
    lengths = [_num_inputs(row) for row in rows]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    passes: list[MicroBatch] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        count = max(1, micro_batch_tokens // longest)
        passes.append(_padded(rows, order[start : start + count], longest))
        start += count
    return passes


def num_trained_tokens(rows: Sequence[Row]) -> int:
    """The batch's denominator."""
    return sum(int(row.loss_mask.sum()) for row in rows)


def _num_inputs(row: Row) -> int:
    """Tokens the model has to read: everything before the last trained token; 0 without one."""
    trained = np.flatnonzero(row.loss_mask)
    return len(row.trajectory.prompt_ids) + int(trained[-1]) if len(trained) else 0


def _inputs(row: Row) -> npt.NDArray[np.int32]:
    trajectory = row.trajectory
    return np.concatenate([trajectory.prompt_ids, trajectory.response_ids])[: _num_inputs(row)]


def _padded(rows: Sequence[Row], members: Sequence[int], length: int) -> MicroBatch:
    input_ids_BL = np.zeros((len(members), length), dtype=np.int64)
    for b, i in enumerate(members):
        inputs = _inputs(rows[i])
        input_ids_BL[b, : len(inputs)] = inputs
    tokens = _trained_tokens(rows, members)
    return MicroBatch(
        input_ids_BL=input_ids_BL,
        positions_BL=np.tile(np.arange(length), (len(members), 1)),
        place_T=tokens["row_T"] * length + tokens["position_T"],
        batch_row_B=np.asarray(members, dtype=np.int64),
        **tokens,
    )


def _packed(rows: Sequence[Row], max_tokens: int, *, share_prefixes: bool) -> list[MicroBatch]:
    inputs = [_inputs(row) for row in rows]
    passes = []
    for packed in pack(inputs, max_tokens=max_tokens, share_prefixes=share_prefixes):
        members = list(packed.places)
        tokens = _trained_tokens(rows, members)
        starts = np.cumsum([0, *(len(place) for place in packed.places.values())])[:-1]
        flat = np.concatenate(list(packed.places.values()))
        passes.append(
            MicroBatch(
                input_ids_BL=packed.ids_N[None],
                positions_BL=packed.position_N[None],
                place_T=flat[starts[tokens["row_T"]] + tokens["position_T"]],
                batch_row_B=np.asarray(members, dtype=np.int64),
                segments=packed.segments,
                **tokens,
            )
        )
    return passes


def _trained_tokens(rows: Sequence[Row], members: Sequence[int]) -> dict[str, Any]:
    """What a micro-batch says of each trained token, one row's after the other's."""
    parts: list[tuple[npt.NDArray, ...]] = []
    for b, i in enumerate(members):
        row, trajectory = rows[i], rows[i].trajectory
        trained = np.flatnonzero(row.loss_mask)
        parts.append(
            (
                np.full(len(trained), b),
                len(trajectory.prompt_ids) - 1 + trained,
                trajectory.response_ids[trained],
                temperatures(trajectory)[trained],
                trajectory.behavior_logprobs[trained],
                token_advantages(row)[trained],
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    names = ("row_T", "position_T", "target_T", "temperature_T", "behavior_logprobs_T", "advantages_T")
    types = (np.int64, np.int64, np.int64, np.float32, np.float32, np.float32)
    return {name: c.astype(t) for name, t, c in zip(names, types, columns, strict=True)}


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
