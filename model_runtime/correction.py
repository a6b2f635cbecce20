"""Correction for what separates the trainer's policy from the sampler's: weights, rejection, figures.

Everything is of a whole batch, flat: `log_ratio_T` = trainer's logprob − sampler's, `row_T` the row of each
token. Nothing here carries a gradient. Names and formulas are verl's (rollout_corr_helper); TRL's four modes
are the same weights, except that it gives masked tokens weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.objective_config import ImportanceLevel, RejectionRule
from model_runtime.segments import row_counts, row_maxima, row_means, row_sums

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """What the per-token losses are multiplied by, and the ratios before truncation."""

    weights_T: Tensor
    raw_T: Tensor


def importance_weights(
    log_ratio_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    *,
    level: ImportanceLevel,
    cap: float,
    floor: float | None = None,
) -> ImportanceWeights:
    """exp(trainer − sampler) of each token, or of the whole row for each of its tokens.

    Without a floor they are truncated at `cap` (TIS); with one, those outside [floor, cap] are 0 (IcePop).
    """
    if level == "sequence":
        log_ratio_T = row_sums(log_ratio_T, row_T, num_rows)[row_T]
    raw_T = log_ratio_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if floor is None:
        return ImportanceWeights(raw_T.clamp(max=cap), raw_T)
    inside_T = (raw_T >= floor) & (raw_T <= cap)
    return ImportanceWeights(torch.where(inside_T, raw_T, torch.zeros_like(raw_T)), raw_T)


def mean_weight(weights_T: Tensor, row_T: Tensor, num_rows: int, *, level: ImportanceLevel) -> float:
    """What weights are divided by to have mean 1 over the batch: over its tokens, or over its rows."""
    if level == "token":
        mean = weights_T.mean().item()
    else:
        trained_B = row_counts(row_T, num_rows) > 0
        mean = row_means(weights_T, row_T, num_rows)[trained_B].mean().item()
    return mean if mean > 1e-8 else 1.0


def importance_metrics(
    weights: ImportanceWeights,
    log_ratio_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    *,
    level: ImportanceLevel,
    cap: float,
    floor: float | None = None,
) -> dict[str, float]:
    """verl's `rollout_is_*`: of the weights before they are normalised."""
    weights_T, raw_T = weights.weights_T, weights.raw_T
    low = 1 / cap if floor is None else floor
    if level == "sequence":
        log_B = row_sums(log_ratio_T, row_T, num_rows)
        metrics = {
            "rollout_is_max": log_B.max().clamp(max=MAX_LOG_RATIO).exp().item(),
            "rollout_is_min": log_B.min().exp().item(),
            "rollout_is_ratio_fraction_high": _share(log_B > math.log(cap)),
            "rollout_is_ratio_fraction_low": _share(log_B < math.log(low)),
        }
    else:
        metrics = {
            "rollout_is_max": weights_T.max().item(),
            "rollout_is_min": weights_T.min().item(),
            "rollout_is_ratio_fraction_high": _share(raw_T > cap),
            "rollout_is_ratio_fraction_low": _share(raw_T < low),
        }
    bounded_T = weights_T.clamp(0, cap)
    mean = bounded_T.mean()
    variance = bounded_T.square().mean() - mean.square()
    by_row_B, raw_B = row_means(weights_T, row_T, num_rows), row_means(raw_T, row_T, num_rows)
    metrics |= {
        "rollout_is_mean": weights_T.mean().item(),
        "rollout_is_std": variance.clamp(min=0).sqrt().item(),
        "rollout_is_eff_sample_size": 1 / (bounded_T / (mean + 1e-8)).square().mean().item(),
        "rollout_is_seq_mean": by_row_B.mean().item(),
        "rollout_is_seq_std": _std(by_row_B),
        "rollout_is_seq_max": by_row_B.max().item(),
        "rollout_is_seq_min": by_row_B.min().item(),
        "rollout_is_seq_max_deviation": (by_row_B - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": _share(raw_B > cap),
        "rollout_is_seq_fraction_low": _share(raw_B < low),
    }
    if floor is not None:
        metrics["rollout_is_oob_ratio"] = _share((raw_T < floor) | (raw_T > cap))
    return metrics


# ---------------------------------------------------------------------- rejection


def rejection(
    log_ratio_T: Tensor, row_T: Tensor, num_rows: int, rules: Sequence[RejectionRule]
) -> tuple[Tensor, dict[str, float]]:
    """(which tokens every rule keeps, verl's `rollout_rs_*`). A rule of sequences keeps or rejects all
    tokens of a row."""
    keep_T = torch.ones_like(log_ratio_T, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for rule in rules:
        kept_T, figures = _judged(log_ratio_T, row_T, num_rows, rule)
        keep_T &= kept_T
        metrics |= {f"rollout_rs_{rule.statistic}_{name}": value for name, value in figures.items()}
    hurt_B = row_sums((~keep_T).float(), row_T, num_rows) > 0
    metrics["rollout_rs_masked_fraction"] = _share(~keep_T)
    metrics["rollout_rs_seq_masked_fraction"] = _share(hurt_B)
    return keep_T, metrics


def _judged(
    log_ratio_T: Tensor, row_T: Tensor, num_rows: int, rule: RejectionRule
) -> tuple[Tensor, dict[str, float]]:
    level, _, estimator = rule.statistic.rpartition("_")
    divergence_T = _divergence(log_ratio_T, estimator)
    over_row = {"seq_sum": row_sums, "seq_mean": row_means, "seq_max": row_maxima}.get(level, row_means)
    value_B = over_row(divergence_T, row_T, num_rows)
    value_T = divergence_T if level == "token" else value_B[row_T]
    low, high = _bounds(rule, estimator)
    keep_T = value_T <= high if low is None else (value_T >= low) & (value_T <= high)
    trained_B = row_counts(row_T, num_rows) > 0
    hurt_B = row_sums((~keep_T).float(), row_T, num_rows) > 0
    metrics = _statistic_metrics(value_T, value_B[trained_B], low, high, by_row=level != "token")
    metrics["masked_fraction"] = _share(~keep_T)
    metrics["seq_masked_fraction"] = _share(hurt_B[trained_B])
    return keep_T, metrics


def _divergence(log_ratio_T: Tensor, estimator: str) -> Tensor:
    log_ratio_T = log_ratio_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -log_ratio_T
    if estimator == "k2":
        return 0.5 * log_ratio_T.square()
    return log_ratio_T.exp() - 1 - log_ratio_T


def _bounds(rule: RejectionRule, estimator: str) -> tuple[float | None, float]:
    """k1 is compared with the logarithms of ratio bounds, the others with an upper bound."""
    if estimator != "k1":
        return None, rule.high
    return math.log(rule.low if rule.low is not None else 1 / rule.high), math.log(rule.high)


def _statistic_metrics(
    value_T: Tensor, value_B: Tensor, low: float | None, high: float, *, by_row: bool
) -> dict[str, float]:
    of = value_B if by_row else value_T
    bounded_T = value_T.clamp(0.0 if low is None else low, high)
    variance = bounded_T.square().mean() - bounded_T.mean().square()
    metrics = {
        "mean": value_T.mean().item(),
        "max": of.max().item(),
        "min": of.min().item(),
        "std": variance.clamp(min=0).sqrt().item(),
        "fraction_high": _share(of > high),
        "fraction_low": 0.0 if low is None else _share(of < low),
        "seq_mean": value_B.mean().item(),
        "seq_std": _std(value_B),
        "seq_max": value_B.max().item(),
        "seq_min": value_B.min().item(),
        "seq_max_deviation": value_B.abs().max().item(),
        "seq_fraction_high": _share(value_B > high),
    }
    return metrics if low is None else metrics | {"seq_fraction_low": _share(value_B < low)}


def off_policy_sequences(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    advantages_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    *,
    threshold: float,
) -> Tensor:
    """bool: tokens of rows with a negative advantage whose mean KL from the sampler exceeds `threshold`;
    their loss is 0 and they stay in the denominators (arXiv 2512.02556; TRL's off_policy_mask_threshold)."""
    kl_B = row_means((behavior_logprobs_T - logprobs_T).detach(), row_T, num_rows)
    return (advantages_T < 0) & (kl_B[row_T] > threshold)


# ---------------------------------------------------------------------- how far apart


def mismatch_metrics(
    logprobs_T: Tensor, behavior_logprobs_T: Tensor, row_T: Tensor, num_rows: int
) -> dict[str, float]:
    """verl's figures of the distance between both policies. `kl` and `k3_kl` estimate
    KL(sampler ‖ trainer); perplexities are means over rows."""
    log_ratio_T = logprobs_T - behavior_logprobs_T
    trainer_B = row_means(logprobs_T, row_T, num_rows)
    sampler_B = row_means(behavior_logprobs_T, row_T, num_rows)
    apart_B = sampler_B - trainer_B
    row_ratio_B = row_sums(log_ratio_T, row_T, num_rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "kl": -log_ratio_T.mean().item(),
        "k3_kl": (log_ratio_T.exp() - log_ratio_T - 1).mean().item(),
        "training_ppl": (-trainer_B).exp().mean().item(),
        "training_log_ppl": -trainer_B.mean().item(),
        "rollout_ppl": (-sampler_B).exp().mean().item(),
        "rollout_log_ppl": -sampler_B.mean().item(),
        "log_ppl_diff": apart_B.mean().item(),
        "log_ppl_abs_diff": apart_B.abs().mean().item(),
        "log_ppl_diff_max": apart_B.max().item(),
        "log_ppl_diff_min": apart_B.min().item(),
        "ppl_ratio": apart_B.exp().mean().item(),
        "chi2_token": token_ratio_T.square().mean().item() - 1,
        "chi2_seq": (2 * row_ratio_B).exp().mean().item() - 1,
    }


def _share(of: Tensor) -> float:
    return of.float().mean().item()


def _std(values: Tensor) -> float:
    return values.std().item() if values.numel() > 1 else 0.0
