"""Attention over packed rows (packing.py), as an attention implementation of transformers.

The reference implementation works anywhere: blocks of queries against just the keys they see, as plain matrix
products, whose scores are computed again in the backward pass instead of being kept. With `flash` the same
segments go to flash-attention's variable-length kernel (CUDA, half precision).

Rows that aren't packed (no `packed` among the model's arguments) are plain causal attention: padding stands
on the right, so no mask is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from model_runtime.packing import Segment

IMPLEMENTATION = "repertory_packed"
# Queries of one block. Larger: fewer, larger products; more scores above the diagonal, computed for nothing.
_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class PackedLayout:
    """The segments of one packed row, and by which kernel they are attended."""

    segments: tuple[Segment, ...]
    device: torch.device
    flash: bool = False

    @cached_property
    def key_index(self) -> Tensor:
        """Where in the flat row the keys of every segment lie, one segment's after the other's."""
        ranges = [r for s in self.segments for r in s.keys]
        return torch.cat([torch.arange(*r, device=self.device) for r in ranges])

    @cached_property
    def query_bounds(self) -> Tensor:
        return self._bounds([s.end - s.start for s in self.segments])

    @cached_property
    def key_bounds(self) -> Tensor:
        return self._bounds([s.num_keys for s in self.segments])

    def _bounds(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths], device=self.device).cumsum(0).int()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, N, D] → output [1, N, heads, D]."""
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    # Norms of queries and keys leave float32 behind under autocast; values are what the products came in.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if packed.flash:
        return _flash(query, key, value, packed, scale), None
    blockwise: Any = _BlockAttention
    return blockwise.apply(query, key, value, packed.segments, scale), None


# Not compiled: loops over segments of a hundred lengths.
AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))


def _flash(query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scale: float) -> Tensor:
    """Keys are gathered for each segment; the kernel aligns causality at their ends, so that a segment's
    tokens see all that stands before it."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    query_NHD, key_NHD, value_NHD = (t[0].transpose(0, 1) for t in (query, key, value))
    return flash_attn_varlen_func(
        query_NHD,
        key_NHD.index_select(0, packed.key_index),
        value_NHD.index_select(0, packed.key_index),
        packed.query_bounds,
        packed.key_bounds,
        max(s.end - s.start for s in packed.segments),
        max(s.num_keys for s in packed.segments),
        softmax_scale=scale,
        causal=True,
    )[None]


def _blocks(segments: Sequence[Segment]) -> list[Segment]:
    """Segments cut into blocks: what came earlier of a segment is seen whole by a later block."""
    return [
        Segment(
            start,
            min(start + _BLOCK_TOKENS, s.end),
            (*s.before, *([(s.start, start)] if start > s.start else [])),
        )
        for s in segments
        for start in range(s.start, s.end, _BLOCK_TOKENS)
    ]


class _BlockAttention(torch.autograd.Function):
    """Grouped heads are attended as one product: [key heads, queries × heads per key head, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.segments, ctx.scale = segments, scale
        _, heads, num_tokens, _ = query.shape
        output = query.new_empty(1, num_tokens, heads, value.shape[-1])
        for block in _blocks(segments):
            weights = _weights(_queries(query, block, key.shape[1]), _keys(key, block), block, scale)
            attended = torch.bmm(weights, _keys(value, block))
            # [key heads, queries × group, D] → [queries, heads, D]
            output[0, block.start : block.end] = (
                attended.unflatten(1, (-1, block.end - block.start)).flatten(0, 1).transpose(0, 1)
            )
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (query, key, value))
        grad_output = grad_output.transpose(1, 2)
        for block in _blocks(ctx.segments):
            queries = _queries(query, block, key.shape[1])
            keys, values = _keys(key, block), _keys(value, block)
            weights = _weights(queries, keys, block, ctx.scale)
            grad = _queries(grad_output, block, key.shape[1])
            _add(grad_value, block, torch.bmm(weights.transpose(1, 2), grad))
            grad_weights = torch.bmm(grad, values.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_scores *= ctx.scale
            grad_query[0, :, block.start : block.end] = torch.bmm(grad_scores, keys).view(
                query.shape[1], -1, query.shape[-1]
            )
            _add(grad_key, block, torch.bmm(grad_scores.transpose(1, 2), queries))
        return grad_query, grad_key, grad_value, None, None


def _queries(query: Tensor, block: Segment, key_heads: int) -> Tensor:
    part = query[0, :, block.start : block.end]
    return part.reshape(key_heads, -1, part.shape[-1])


def _keys(key: Tensor, block: Segment) -> Tensor:
    parts = [key[0, :, start:end] for start, end in block.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weights(queries: Tensor, keys: Tensor, block: Segment, scale: float) -> Tensor:
    """Softmax, in float32, of the scores a block's queries give the keys they see."""
    # Scores of half precision are off by more than a softmax forgives.
    scores = torch.bmm(queries.float(), keys.float().transpose(1, 2))
    scores *= scale
    own = block.end - block.start
    above = torch.ones(own, own, dtype=torch.bool, device=scores.device).triu(1)
    scores.unflatten(1, (-1, own))[..., -own:].masked_fill_(above, -torch.inf)
    return torch.softmax(scores, dim=-1).to(keys.dtype)


def _add(grad: Tensor, block: Segment, part: Tensor) -> None:
    offset = 0
    for start, end in block.keys:
        grad[0, :, start:end] += part[:, offset : offset + end - start]
        offset += end - start
