"""The losses of a training step, as pure functions of flat tensors.

Every tensor holds the trained tokens of a (micro-)batch one after the other (`_T`): prompts, context and
padding never get here, so what stands at their places can't matter. Sequence-level losses also take the row
of each token. Where verl and TRL differ the defaults are verl's; `max_log_ratio=None` and the other options
that no setting reaches are there to reproduce TRL's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.objective_config import ObjectiveConfig
from model_runtime.segments import row_means

# Beyond this a log ratio is clamped, and its gradient is zero: e^20 is already no usable weight.
MAX_LOG_RATIO = 20.0
# The same for the sequence ratios of gspo and gmpo, from above only.
MAX_SEQUENCE_LOG_RATIO = 10.0
MAX_KL = 10.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses, and which of them were clipped."""

    losses_T: Tensor
    clipped_T: Tensor  # bool: the clipped ratio was the larger loss, or the token was left out
    clipped_lower_T: Tensor  # bool: the dual clip (or the cap of the ratio) bounded this token
    log_ratio_T: Tensor  # detached


def token_logprobs(
    logits_TV: Tensor, target_T: Tensor, temperature_T: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of each distribution) at the sampler's temperature, in float32.

    The entropy carries a gradient only when asked to.
    """
    logits_TV = logits_TV.float() / temperature_T[:, None]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    chosen_T = logprobs_TV.gather(-1, target_T[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return chosen_T, entropy_T


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    objective: ObjectiveConfig,
    *,
    row_T: Tensor,
    num_rows: int,
) -> PolicyLoss:
    """The configured loss per token, before any weights."""
    tokens = (logprobs_T, old_logprobs_T, advantages_T)
    low, high, c = objective.clip_ratio_low, objective.clip_ratio_high, objective.clip_ratio_c
    match objective.loss:
        case "ppo_clip":
            return ppo_clip(*tokens, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
        case "gspo":
            return gspo(*tokens, row_T, num_rows, clip_ratio_low=low, clip_ratio_high=high)
        case "gmpo":
            return gmpo(*tokens, row_T, num_rows, clip_ratio_low=low, clip_ratio_high=high)
        case "cispo":
            return cispo(*tokens, clip_ratio_low=low, clip_ratio_high=high)
        case "sapo":
            return sapo(
                *tokens, tau_positive=objective.sapo_tau_positive, tau_negative=objective.sapo_tau_negative
            )
        case "dppo_tv" | "dppo_kl":
            divergence = binary_tv if objective.loss == "dppo_tv" else binary_kl
            return dppo(*tokens, divergence, low=low, high=high, ratio_cap=objective.dppo_ratio_cap)
        case "reinforce":
            return reinforce(*tokens)


def _log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, max_log_ratio: float | None) -> Tensor:
    log_ratio_T = logprobs_T - old_logprobs_T
    return log_ratio_T if max_log_ratio is None else log_ratio_T.clamp(-max_log_ratio, max_log_ratio)


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    ratio_cap: float | None = None,
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> PolicyLoss:
    """Clipped surrogate (arXiv 1707.06347) with dual clip for negative advantages (arXiv 1912.09729).

    `ratio_cap` is TRL's `delta`: it caps the unclipped ratio for both signs.
    """
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, max_log_ratio)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * (ratio_T if ratio_cap is None else ratio_T.clamp(max=ratio_cap))
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic_T = torch.maximum(plain_T, clipped_T)
    losses_T, bounded_T = pessimistic_T, torch.zeros_like(advantages_T, dtype=torch.bool)
    if clip_ratio_c is not None:
        bound_T = -advantages_T * clip_ratio_c
        negative_T = advantages_T < 0
        losses_T = torch.where(negative_T, torch.minimum(bound_T, pessimistic_T), pessimistic_T)
        bounded_T = (pessimistic_T > bound_T) & negative_T
    return PolicyLoss(losses_T, clipped_T > plain_T, bounded_T, log_ratio_T.detach())


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    max_log_ratio: float | None = MAX_SEQUENCE_LOG_RATIO,
) -> PolicyLoss:
    """The clipped surrogate of the row's geometric mean ratio (arXiv 2507.18071).

    Each token carries the row's ratio and its own share of the gradient, so that any aggregation can
    follow; with seq-mean-token-mean it is the paper's.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T).detach()
    sequence_T = row_means(log_ratio_T, row_T, num_rows)[row_T]
    sequence_T = logprobs_T - logprobs_T.detach() + sequence_T
    ratio_T = (sequence_T if max_log_ratio is None else sequence_T.clamp(max=max_log_ratio)).exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return PolicyLoss(torch.maximum(plain_T, clipped_T), clipped_T > plain_T, never_T, log_ratio_T)


def gmpo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """The row's geometric mean of ratios that were clipped token by token, in log space
    (arXiv 2507.20673; verl's `geo_mean`, which bounds no mean). With seq-mean-token-mean it is the
    paper's."""
    log_ratio_T = logprobs_T - old_logprobs_T
    bounded_T = log_ratio_T.clamp(-clip_ratio_low, clip_ratio_high)
    sign_T = advantages_T.sign()
    pessimistic_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * bounded_T)
    mean_B = row_means(pessimistic_T, row_T, num_rows).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    ratio_T = mean_B.exp()[row_T]
    clipped_T = log_ratio_T != bounded_T
    return PolicyLoss(
        losses_T=-advantages_T * ratio_T,
        clipped_T=clipped_T & (advantages_T > 0),
        clipped_lower_T=clipped_T & (advantages_T < 0),
        log_ratio_T=log_ratio_T.detach(),
    )


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> PolicyLoss:
    """Policy gradient weighed by the clipped ratio, which carries no gradient: no token loses its own
    (arXiv 2506.13585). TRL has no lower bound (`clip_ratio_low=1`) and counts the upper from 0."""
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, max_log_ratio).detach()
    ratio_T = log_ratio_T.exp()
    bounded_T = ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return PolicyLoss(-bounded_T * advantages_T * logprobs_T, ratio_T != bounded_T, never_T, log_ratio_T)


def sapo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> PolicyLoss:
    """A soft gate in place of the clip: 4/τ·σ(τ(ratio − 1)), τ by the sign of the advantage
    (arXiv 2511.20347)."""
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, max_log_ratio)
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative).to(advantages_T.dtype)
    gate_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1)) * (4 / tau_T)
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return PolicyLoss(-gate_T * advantages_T, never_T, never_T, log_ratio_T.detach())


def binary_tv(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Total variation between both policies' "this token or another"."""
    return (logprobs_T.exp() - old_logprobs_T.exp()).abs()


def binary_kl(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """KL(old ‖ current) of "this token or another"."""
    other_T, old_other_T = 1 - logprobs_T.exp() + 1e-8, 1 - old_logprobs_T.exp() + 1e-8
    old_T = old_logprobs_T.exp()
    return old_T * (old_logprobs_T - logprobs_T) + (1 - old_T) * (old_other_T / other_T).log()


def dppo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    low: float,
    high: float,
    ratio_cap: float,
) -> PolicyLoss:
    """Policy gradient weighed by the capped ratio, inside a trust region: tokens that moved further than
    `high` (advantage > 0) or `low` in the direction of their advantage are left out (arXiv 2602.04879)."""
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, MAX_LOG_RATIO).detach()
    ratio_T = log_ratio_T.exp()
    current_T = logprobs_T.detach()
    far_T = divergence(current_T, old_logprobs_T)
    rose_T, fell_T = current_T > old_logprobs_T, current_T < old_logprobs_T
    left_out_T = torch.where(advantages_T > 0, (far_T > high) & rose_T, (far_T > low) & fell_T)
    losses_T = -advantages_T * ratio_T.clamp(max=ratio_cap) * logprobs_T
    losses_T = torch.where(left_out_T, torch.zeros_like(losses_T), losses_T)
    return PolicyLoss(losses_T, left_out_T, (ratio_T > ratio_cap) & ~left_out_T, log_ratio_T)


def reinforce(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> PolicyLoss:
    """−A·logprob (GPG's loss too, arXiv 2504.02546). Nothing bounds the step: what corrects for the
    sampler are the weights alone."""
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return PolicyLoss(-advantages_T * logprobs_T, never_T, never_T, (logprobs_T - old_logprobs_T).detach())


def kl_penalty(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, kind: str, *, clamped: bool = True
) -> Tensor:
    """Estimates of KL(policy ‖ reference) per token: k1, abs, k2, k3 (http://joschu.net/blog/kl-approx.html).

    A trailing `+` keeps the value and takes the gradient of k2, the one whose expectation is the
    gradient of the KL. `clamped`: k3's log ratio within ±20 and its value at most 10, as in verl only.
    """
    base = kind.removesuffix("+")
    log_ratio_T = logprobs_T - reference_logprobs_T
    squared_T = 0.5 * log_ratio_T.square()
    if base == "k1":
        value_T = log_ratio_T
    elif base == "abs":
        value_T = log_ratio_T.abs()
    elif base == "k2":
        value_T = squared_T
    else:
        back_T = (-log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if clamped else -log_ratio_T
        value_T = back_T.exp() - back_T - 1
        value_T = value_T.clamp(-MAX_KL, MAX_KL) if clamped else value_T
    if base == kind or base == "k2":
        return value_T
    return squared_T - squared_T.detach() + value_T.detach()


def aggregated(losses_T: Tensor, weight_T: Tensor, *, denominator: float) -> Tensor:
    """One number of these tokens (see aggregation.py): the parts of a batch add up to it."""
    return (losses_T * weight_T).sum() / denominator


def policy_metrics(loss: PolicyLoss) -> dict[str, float]:
    """verl's `actor/` metrics over the tokens of a whole batch."""
    return {
        "actor/pg_clipfrac": loss.clipped_T.float().mean().item(),
        "actor/pg_clipfrac_lower": loss.clipped_lower_T.float().mean().item(),
        "actor/ppo_kl": -loss.log_ratio_T.mean().item(),
    }
