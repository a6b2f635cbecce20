"""Logprobs of trained tokens straight from hidden states: logits exist for a chunk of tokens at a time.

What a target's logprob passes back to its hidden state is one vector a token, whatever the loss will be. So
it is computed with the logits while they are there, and neither they nor their gradient outlive their chunk:
memory is chunk × vocabulary, and nothing is computed twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

Head = Callable[[Tensor], Tensor]
"""Hidden states [T, D] → logits [T, V], each token on its own."""

# Float32 logits of a chunk: 32 MiB on the CPU, where they should stay near the cache, 256 MiB on a GPU.
_CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**26}
_MIN_CHUNK_TOKENS = 16


class _GivenHidden(nn.Module):
    """Stands in for the decoder where its result is known."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)  # pyright: ignore


def head_of(model: Any) -> Head:
    """The part of a causal language model after its decoder, with whatever the architecture does to logits
    (scaling, soft caps)."""
    clone = copy.copy(model)
    clone._modules = dict(model._modules)
    clone._modules[model.base_model_prefix] = _GivenHidden()
    return lambda hidden_TD: clone(inputs_embeds=hidden_TD[None], use_cache=False).logits[0]


def hidden_logprobs(
    hidden_TD: Tensor,
    head: Head,
    target_T: Tensor,
    temperature_T: Tensor,
    *,
    vocab_size: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of each distribution), as losses.token_logprobs of the logits."""
    limit = _CHUNK_LOGITS.get(hidden_TD.device.type, 2**23)
    chunk_tokens = max(_MIN_CHUNK_TOKENS, limit // vocab_size)
    needs_gradient = torch.is_grad_enabled() and hidden_TD.requires_grad
    arguments = (target_T, temperature_T, head, chunk_tokens, needs_gradient, entropy_gradient)
    function: Any = _HeadLogprobs
    logprobs_T, entropy_T = function.apply(hidden_TD, *arguments)
    return logprobs_T, entropy_T if entropy_gradient else entropy_T.detach()


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        head: Head,
        chunk_tokens: int,
        needs_gradient: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        chunks = [
            _chunk(
                hidden_TD[start : start + chunk_tokens],
                target_T[start : start + chunk_tokens],
                temperature_T[start : start + chunk_tokens],
                head,
                needs_gradient,
                needs_gradient and entropy_gradient,
            )
            for start in range(0, len(target_T), chunk_tokens)
        ]
        logprobs, entropies, gradients, entropy_gradients = zip(*chunks, strict=True)
        ctx.save_for_backward(
            torch.cat(gradients) if needs_gradient else None,
            torch.cat(entropy_gradients) if needs_gradient and entropy_gradient else None,
        )
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad_logprobs_T, grad_entropy_T = gradients
        gradient_TD, entropy_gradient_TD = ctx.saved_tensors
        grad_TD = grad_logprobs_T[:, None] * gradient_TD
        if entropy_gradient_TD is not None:
            grad_TD = grad_TD + grad_entropy_T[:, None] * entropy_gradient_TD
        return grad_TD, None, None, None, None, None, None


def _chunk(
    hidden_TD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    head: Head,
    needs_gradient: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(logprobs, entropies, ∂logprob/∂hidden, ∂entropy/∂hidden) of a few tokens."""
    hidden_TD = hidden_TD.detach().requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        logits_TV = head(hidden_TD)
    per_temperature_T1 = temperature_T.reciprocal()[:, None]
    logprobs_TV = torch.log_softmax(logits_TV.detach().float() / temperature_T[:, None], dim=-1)
    chosen_T = logprobs_TV.gather(-1, target_T[:, None]).squeeze(-1)
    probs_TV = logprobs_TV.exp()
    entropy_T = -torch.bmm(probs_TV[:, None], logprobs_TV[:, :, None]).flatten()
    if not needs_gradient:
        return chosen_T, entropy_T, None, None

    def to_hidden(gradient_TV: Tensor, *, keep: bool) -> Tensor:
        given = gradient_TV.mul_(per_temperature_T1).to(logits_TV.dtype)
        (found,) = torch.autograd.grad(logits_TV, hidden_TD, given, retain_graph=keep)
        return found

    of_entropy_TD = None
    if entropy_gradient:  # ∂H/∂z = −p(log p + H)
        of_entropy_TD = to_hidden(-probs_TV * (logprobs_TV + entropy_T[:, None]), keep=True)
    gradient_TV = probs_TV.neg_()  # ∂logprob/∂z = 1[target] − p
    gradient_TV.scatter_add_(1, target_T[:, None], torch.ones_like(chosen_T)[:, None])
    return chosen_T, entropy_T, to_hidden(gradient_TV, keep=False), of_entropy_TD
