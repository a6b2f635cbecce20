"""The objective of a training step, as pure functions of flat tensors.

Every tensor holds the trained tokens of a (micro-)batch one after the other (`_T`): prompts, context and
padding never get here, so what stands at their places can't matter. Where verl and TRL differ these
follow verl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runtime.config import ObjectiveConfig

# Beyond this a log ratio is clamped, and its gradient is zero: e^20 is already no usable weight.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token losses, and which of them were clipped."""

    losses_T: Tensor
    clipped_T: Tensor  # bool: the clipped ratio was the larger loss
    clipped_lower_T: Tensor  # bool: the dual clip bounded a negative advantage
    log_ratio_T: Tensor  # detached, clamped


def token_logprobs(logits_TV: Tensor, target_T: Tensor, temperature_T: Tensor) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of each distribution) at the sampler's temperature, in float32.

    The entropy carries no gradient.
    """
    logits_TV = logits_TV.float() / temperature_T[:, None]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    chosen_T = logprobs_TV.gather(-1, target_T[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return chosen_T, entropy_T


def policy_loss(
    logprobs_T: Tensor, behavior_logprobs_T: Tensor, advantages_T: Tensor, objective: ObjectiveConfig
) -> PolicyLoss:
    """The configured objective per token.

    One optimizer step is made per batch, so the policy at the start of the update is the policy itself:
    its logprobs, detached, are the recomputed old ones. With the sampler's as old ones the ratio corrects
    for it already, and weights are not applied on top.
    """
    recomputed = objective.old_logprobs == "recomputed"
    old_logprobs_T = logprobs_T.detach() if recomputed else behavior_logprobs_T
    loss = ppo_clip(
        logprobs_T,
        old_logprobs_T,
        advantages_T,
        clip_ratio_low=objective.clip_ratio_low,
        clip_ratio_high=objective.clip_ratio_high,
        clip_ratio_c=objective.clip_ratio_c,
    )
    cap = objective.importance_weight_cap
    if not recomputed or cap is None:
        return loss
    weights_T = token_importance_weights(old_logprobs_T, behavior_logprobs_T, cap=cap)
    return replace(loss, losses_T=loss.losses_T * weights_T)


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """Clipped surrogate (arXiv 1707.06347) with dual clip for negative advantages (arXiv 1912.09729)."""
    log_ratio_T = torch.clamp(logprobs_T - old_logprobs_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * clip_ratio_c
    negative_T = advantages_T < 0
    return PolicyLoss(
        losses_T=torch.where(negative_T, torch.minimum(bound_T, pessimistic_T), pessimistic_T),
        clipped_T=clipped_T > plain_T,
        clipped_lower_T=(pessimistic_T > bound_T) & negative_T,
        log_ratio_T=log_ratio_T.detach(),
    )


def token_importance_weights(old_logprobs_T: Tensor, behavior_logprobs_T: Tensor, *, cap: float) -> Tensor:
    """Truncated weights min(exp(old − behavior), cap) of the sampler's tokens; no gradient."""
    log_ratio_T = torch.clamp(old_logprobs_T - behavior_logprobs_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_T.exp().clamp(max=cap).detach()


def token_mean(losses_T: Tensor, *, num_tokens: int) -> Tensor:
    """Sum over these tokens / number of tokens of the whole batch: the parts of a batch add up to it,
    however it was split."""
    return losses_T.sum() / num_tokens


def policy_metrics(loss: PolicyLoss) -> dict[str, float]:
    """verl's `actor/` metrics over the tokens of a whole batch."""
    return {
        "actor/pg_clipfrac": loss.clipped_T.float().mean().item(),
        "actor/pg_clipfrac_lower": loss.clipped_lower_T.float().mean().item(),
        "actor/ppo_kl": -loss.log_ratio_T.mean().item(),
    }


def correction_metrics(
    logprobs_T: Tensor, behavior_logprobs_T: Tensor, *, cap: float | None
) -> dict[str, float]:
    """How far the trainer is from the sampler on a whole batch, by verl's names.

    `rollout_corr/kl` and `k3_kl` estimate KL(sampler ‖ trainer); the weights' figures need a cap.
    """
    log_ratio_T = logprobs_T - behavior_logprobs_T
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    probs_diff_T = (logprobs_T.exp() - behavior_logprobs_T.exp()).abs()
    metrics = {
        "rollout_corr/kl": -log_ratio_T.mean().item(),
        "rollout_corr/k3_kl": (log_ratio_T.exp() - log_ratio_T - 1).mean().item(),
        "training/rollout_probs_diff_mean": probs_diff_T.mean().item(),
        "training/rollout_probs_diff_max": probs_diff_T.max().item(),
        "training/rollout_logprobs_diff_max": log_ratio_T.abs().max().item(),
    }
    if cap is None:
        return metrics
    weights_T = ratio_T.clamp(max=cap)
    mean = weights_T.mean()
    return metrics | {
        "rollout_corr/rollout_is_mean": mean.item(),
        "rollout_corr/rollout_is_max": weights_T.max().item(),
        "rollout_corr/rollout_is_min": weights_T.min().item(),
        "rollout_corr/rollout_is_eff_sample_size": (1 / (weights_T / mean).square().mean()).item(),
        "rollout_corr/rollout_is_ratio_fraction_high": (ratio_T > cap).float().mean().item(),
        "rollout_corr/rollout_is_ratio_fraction_low": (ratio_T < 1 / cap).float().mean().item(),
    }
