"""A gated feed-forward block under LoRA as one step: y = down(silu(gate(x)) · up(x)).

Its activations are most of what a layer keeps for its backward pass. Here gate and up are kept alone: what
follows from them by the element is computed again, which costs next to nothing beside the products.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from model_runtime.lora_linear import Factors, factors_of, is_plain_lora, product, product_backward

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Relative distance of the block's own output and the fused one that rounding explains.
_PROBE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

logger = logging.getLogger(__name__)


def fuse_gated_mlps(model: nn.Module, *, dtype: torch.dtype | None) -> int:
    """Give every such block the fused forward pass; returns how many there are. Blocks that are built
    otherwise, or have a projection without LoRA, stay as they are. `dtype` as in fuse_lora."""
    blocks: list[Any] = [module for module in model.modules() if _is_gated(module)]
    if not blocks or not _computes_the_same(blocks[0], dtype):
        return 0
    for block in blocks:
        block.__class__ = _fused(type(block))
        block.fused_dtype = dtype
    return len(blocks)


def _is_gated(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if set(children) != {*_PROJECTIONS, "act_fn"}:
        return False
    activation = type(children["act_fn"])
    return activation in (SiLUActivation, nn.SiLU) and all(
        is_plain_lora(children[name]) for name in _PROJECTIONS
    )


@torch.no_grad()
def _computes_the_same(block: Any, dtype: torch.dtype | None) -> bool:
    """Modules of these names might still be put together in another way: one block is tried."""
    weight = block.gate_proj.base_layer.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, weight.shape[1], generator=generator).to(weight.device, dtype or weight.dtype)
    want, got = block(x).float(), _forward(block, dtype, x).float()
    distance = ((got - want).norm() / want.norm()).item()
    if distance <= _PROBE_TOLERANCE[dtype or weight.dtype]:
        return True
    logger.info("%s is not the gated block it looks like (off by %.1e)", type(block).__name__, distance)
    return False


@cache
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    """A class, as in FusedLoRALinear: what is compiled for one layer serves them all."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _forward(self, self.fused_dtype, x)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def _forward(block: Any, dtype: torch.dtype | None, x: Tensor) -> Tensor:
    gate, up, down = (factors_of(getattr(block, name)) for name in _PROJECTIONS)
    function: Any = _GatedMLP
    return function.apply(x, dtype, *gate, *up, *down)


class _GatedMLP(torch.autograd.Function):
    """Takes the factors of its three projections laid end to end: autograd sees tensors in no other place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype | None, *factors: Any) -> Tensor:
        of_gate, of_up, of_down = _grouped(factors)
        flat = x.reshape(-1, x.shape[-1])
        gate, inner_gate = product(flat, of_gate, dtype)
        up, inner_up = product(flat, of_up, dtype)
        output, inner_down = product(torch.nn.functional.silu(gate).mul_(up), of_down, dtype)
        inners = (inner_gate, inner_up, inner_down)
        matrices = [t for f in (of_gate, of_up, of_down) for t in (f.weight, f.a, f.b)]
        ctx.save_for_backward(x, gate, up, *inners, *matrices)
        ctx.scales, ctx.dtype = (of_gate.scale, of_up.scale, of_down.scale), dtype
        return output.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, gate, up, inner_gate, inner_up, inner_down, *matrices = ctx.saved_tensors
        of_gate, of_up, of_down = (
            Factors(matrices[3 * i], None, matrices[3 * i + 1], matrices[3 * i + 2], scale)
            for i, scale in enumerate(ctx.scales)
        )
        flat = x.reshape(-1, x.shape[-1])
        activated = torch.nn.functional.silu(gate)
        grad = grad.reshape(-1, grad.shape[-1])
        grad_gated, *down = product_backward(grad, activated * up, inner_down, of_down, ctx.dtype)
        grad_gated = grad_gated.to(gate.dtype)
        activated *= grad_gated  # now the gradient of up
        grad_x, *of_ups = product_backward(activated, flat, inner_up, of_up, ctx.dtype)
        grad_gate = torch.ops.aten.silu_backward(grad_gated.mul_(up), gate)
        through_gate, *of_gates = product_backward(grad_gate, flat, inner_gate, of_gate, ctx.dtype)
        grad_x = grad_x.add_(through_gate).to(x.dtype).view(x.shape)
        return grad_x, None, *_laid(of_gates), *_laid(of_ups), *_laid(down)


def _grouped(factors: tuple[Any, ...]) -> tuple[Factors, Factors, Factors]:
    size = len(Factors._fields)
    gate, up, down = (Factors(*factors[i * size : (i + 1) * size]) for i in range(3))
    return gate, up, down


def _laid(grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of A and B in the places of a projection's factors."""
    grad_a, grad_b = grads
    return None, None, grad_a, grad_b, None
