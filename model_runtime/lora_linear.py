"""A LoRA layer's arithmetic as one step: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ with W frozen.

PEFT computes the same from separate modules, whose intermediate results each pass through memory once more,
and does the adapter's part in float32 whatever the base is. PEFT still owns the parameters and their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

_ADAPTER = "default"


class Factors(NamedTuple):
    """What a LoRA layer multiplies by."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


def fuse_lora(model: nn.Module, *, dtype: torch.dtype | None) -> None:
    """Give every plain LoRA layer over a plain linear module the fused forward pass.

    `dtype`: what its products are computed in (autocast); None: the base weight's, with the adapter's own
    part in float32.
    """
    fused: Any
    for fused in filter(is_plain_lora, model.modules()):
        fused.__class__ = FusedLoRALinear
        fused.fused_dtype = dtype


def is_plain_lora(module: nn.Module) -> TypeGuard[PeftLinear]:
    """Whether it is a LoRA layer over a plain linear module."""
    return isinstance(module, PeftLinear) and type(module.base_layer) is nn.Linear


def factors_of(module: PeftLinear) -> Factors:
    base: Any = module.base_layer
    a, b = (getattr(module, f"lora_{side}")[_ADAPTER].weight for side in "AB")
    return Factors(base.weight, base.bias, a, b, module.scaling[_ADAPTER])


class FusedLoRALinear(PeftLinear):
    """A class, and not a function of each module's own: what is compiled for one layer serves them all."""

    fused_dtype: torch.dtype | None

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        function: Any = _LoRALinear
        return function.apply(x, self.fused_dtype, *factors_of(self))


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        factors = Factors(weight, bias, a, b, scale)
        output, inner = product(x.reshape(-1, x.shape[-1]), factors, dtype)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale, ctx.dtype = scale, dtype
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, a, b, inner = ctx.saved_tensors
        factors = Factors(weight, None, a, b, ctx.scale)
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x, grad_a, grad_b = product_backward(
            grad, flat, inner, factors, ctx.dtype, of_x=ctx.needs_input_grad[0]
        )
        if grad_x is not None:
            grad_x = grad_x.to(x.dtype).view(x.shape)
        return grad_x, None, None, None, grad_a, grad_b, None


def _types(factors: Factors, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Of the base's product and of the adapter's."""
    return (factors.weight.dtype, factors.a.dtype) if dtype is None else (dtype, dtype)


def product(x: Tensor, factors: Factors, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """(y, x·Aᵀ) of flat x; the latter is for `product_backward`."""
    weight, bias, a, b, scale = factors
    base_dtype, adapter_dtype = _types(factors, dtype)
    inner = x.to(adapter_dtype) @ a.to(adapter_dtype).t()
    output = torch.nn.functional.linear(
        x.to(base_dtype), weight.to(base_dtype), None if bias is None else bias.to(base_dtype)
    )
    if adapter_dtype == base_dtype:
        output.addmm_(inner, b.to(adapter_dtype).t(), alpha=scale)
    else:
        output = torch.addmm(output.to(adapter_dtype), inner, b.t(), alpha=scale).to(base_dtype)
    return output, inner


def product_backward(
    grad: Tensor,
    x: Tensor,
    inner: Tensor,
    factors: Factors,
    dtype: torch.dtype | None,
    *,
    of_x: bool = True,
) -> tuple[Any, Tensor, Tensor]:
    """Gradients of flat x (None unless `of_x`), A and B."""
    weight, _, a, b, scale = factors
    base_dtype, adapter_dtype = _types(factors, dtype)
    adapter_grad = grad.to(adapter_dtype)
    grad_b = (adapter_grad.t() @ inner).to(b.dtype).mul_(scale)
    grad_inner = adapter_grad @ b.to(adapter_dtype)
    grad_inner *= scale
    grad_a = (grad_inner.t() @ x.to(adapter_dtype)).to(a.dtype)
    if not of_x:
        return None, grad_a, grad_b
    grad_x = grad.to(base_dtype) @ weight.to(base_dtype)
    if adapter_dtype == base_dtype:
        grad_x.addmm_(grad_inner, a.to(adapter_dtype))
    else:
        grad_x = torch.addmm(grad_x.to(adapter_dtype), grad_inner, a)
    return grad_x, grad_a, grad_b
