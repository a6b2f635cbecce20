"""A LoRA layer's arithmetic as one step: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ with W frozen.

PEFT computes the same from separate modules, whose intermediate results each pass through memory once more,
and does the adapter's part in float32 whatever the base is. PEFT still owns the parameters and their names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

_ADAPTER = "default"


def fuse_lora(model: nn.Module, *, dtype: torch.dtype | None) -> None:
    """Give every plain LoRA layer over a plain linear module the fused forward pass.

    `dtype`: what its products are computed in (autocast); None: the base weight's, with the adapter's own
    part in float32.
    """
    for module in model.modules():
        if isinstance(module, PeftLinear) and type(module.base_layer) is nn.Linear:
            module.forward = partial(_forward, module, dtype)


def _forward(module: PeftLinear, dtype: torch.dtype | None, x: Tensor) -> Tensor:
    base: Any = module.base_layer
    a, b = (getattr(module, f"lora_{side}")[_ADAPTER].weight for side in "AB")
    function: Any = _LoRALinear
    return function.apply(x, base.weight, base.bias, a, b, module.scaling[_ADAPTER], dtype)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dtype: torch.dtype | None,
    ) -> Tensor:
        base_dtype, adapter_dtype = (weight.dtype, a.dtype) if dtype is None else (dtype, dtype)
        flat = x.reshape(-1, x.shape[-1])
        inner = flat.to(adapter_dtype) @ a.to(adapter_dtype).t()
        output = torch.nn.functional.linear(
            flat.to(base_dtype), weight.to(base_dtype), None if bias is None else bias.to(base_dtype)
        )
        if adapter_dtype == base_dtype:
            output.addmm_(inner, b.to(adapter_dtype).t(), alpha=scale)
        else:
            output = torch.addmm(output.to(adapter_dtype), inner, b.t(), alpha=scale).to(base_dtype)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale, ctx.dtypes = scale, (base_dtype, adapter_dtype)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, a, b, inner = ctx.saved_tensors
        base_dtype, adapter_dtype = ctx.dtypes
        grad = grad.reshape(-1, grad.shape[-1])
        adapter_grad = grad.to(adapter_dtype)
        grad_b = (adapter_grad.t() @ inner).to(b.dtype).mul_(ctx.scale)
        grad_inner = adapter_grad @ b.to(adapter_dtype)
        grad_inner *= ctx.scale
        grad_a = (grad_inner.t() @ x.reshape(-1, x.shape[-1]).to(adapter_dtype)).to(a.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.to(base_dtype) @ weight.to(base_dtype)
            if adapter_dtype == base_dtype:
                grad_x.addmm_(grad_inner, a.to(adapter_dtype))
            else:
                grad_x = torch.addmm(grad_x.to(adapter_dtype), grad_inner, a)
            grad_x = grad_x.to(x.dtype).view(x.shape)
        return grad_x, None, None, grad_a, grad_b, None, None
