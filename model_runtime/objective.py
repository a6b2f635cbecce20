"""The configured objective of one batch, built up pass by pass.

What concerns the whole batch (which tokens are rejected, by what weights are divided, the denominators) is
settled before the first pass, so that the result doesn't depend on how rows are split over passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_runtime.aggregation import aggregation
from model_runtime.batching import Row
from model_runtime.correction import (
    importance_metrics,
    importance_weights,
    mean_weight,
    mismatch_metrics,
    off_policy_sequences,
    rejection,
)
from model_runtime.losses import PolicyLoss, aggregated, kl_penalty, policy_loss, policy_metrics
from model_runtime.objective_config import ObjectiveConfig


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Logprobs of one pass's tokens that carry no gradient; None where the objective doesn't ask."""

    start_T: Tensor | None = None  # the trainer's own, which the sampler's are corrected to
    reference_T: Tensor | None = None  # what the KL is measured from


def needs_start(objective: ObjectiveConfig) -> bool:
    """Whether the trainer's logprobs must be known before the first token is trained: with `proximal`
    those of the version this sync window began with, else its current ones."""
    if objective.old_logprobs == "proximal" or objective.rejection:
        return True
    return objective.is_weighed and objective.importance_weight_normalize


@dataclass(slots=True, eq=False)
class Seen:
    """What is kept of the tokens of all passes; no gradients. `kept`: those that weren't rejected."""

    index: list[int] = field(default_factory=list)  # of the pass
    losses: list[PolicyLoss] = field(default_factory=list)  # kept
    weight: list[Tensor] = field(default_factory=list)  # kept
    entropy: list[Tensor] = field(default_factory=list)  # kept
    kl: list[Tensor] = field(default_factory=list)  # kept
    logprobs: list[Tensor] = field(default_factory=list)
    behavior: list[Tensor] = field(default_factory=list)
    row: list[Tensor] = field(default_factory=list)


class BatchObjective:
    """The loss of one batch. `passes` are the tensors of its micro-batches, `rows` all rows they came from,
    `scale_tokens` the constant of seq-mean-token-sum-norm. `add` is called once for each pass."""

    def __init__(
        self,
        objective: ObjectiveConfig,
        rows: Sequence[Row],
        passes: Sequence[Mapping[str, Tensor]],
        frozen: Sequence[Frozen],
        *,
        scale_tokens: int,
    ) -> None:
        self._objective = objective
        self._num_rows = len(rows)
        self._passes, self._frozen = passes, frozen
        self._rows = [t["batch_row_B"][t["row_T"]] for t in passes]
        self._metrics: dict[str, float] = {}
        self._keep: list[Tensor] | None = None
        self._weight_factor = 1.0
        if needs_start(objective):
            self._settle_correction()
        kept = [row if self._keep is None else row[k] for row, k in self._with_keep()]
        counts = torch.bincount(torch.cat(kept), minlength=self._num_rows)
        self._weighing = aggregation(
            objective.aggregation,
            counts.cpu().numpy(),
            scale_tokens=scale_tokens,
            sessions=[row.trajectory.session_id for row in rows],
        )
        self._weight_B = torch.from_numpy(self._weighing.weight_B).float().to(counts.device)
        self.num_kept_tokens = int(counts.sum())
        self._seen = Seen()

    def _with_keep(self) -> list[tuple[Tensor, Tensor]]:
        keep = self._keep if self._keep is not None else self._rows
        return list(zip(self._rows, keep, strict=True))

    def _settle_correction(self) -> None:
        start_T = torch.cat([f.start_T for f in self._frozen if f.start_T is not None])
        log_ratio_T = start_T - torch.cat([t["behavior_logprobs_T"] for t in self._passes])
        row_T = torch.cat(self._rows)
        objective = self._objective
        keep_T = torch.ones_like(row_T, dtype=torch.bool)
        if objective.rejection:
            keep_T, figures = rejection(log_ratio_T, row_T, self._num_rows, objective.rejection)
            self._metrics |= {f"rollout_corr/{name}": value for name, value in figures.items()}
            self._keep = list(keep_T.split([len(row) for row in self._rows]))
        if objective.is_weighed and objective.importance_weight_normalize:
            weights_T = self._weights(log_ratio_T, row_T)
            level = objective.importance_weight_level
            self._weight_factor = mean_weight(weights_T, row_T, self._num_rows, level=level)
            self._metrics["rollout_corr/rollout_is_batch_norm_factor"] = self._weight_factor

    def _weights(self, log_ratio_T: Tensor, row_T: Tensor) -> Tensor:
        cap = self._objective.importance_weight_cap
        assert cap is not None
        return importance_weights(
            log_ratio_T,
            row_T,
            self._num_rows,
            level=self._objective.importance_weight_level,
            cap=cap,
            floor=self._objective.importance_weight_floor,
        ).weights_T

    def is_rejected(self, index: int) -> bool:
        """Whether nothing of this pass is left to train."""
        return self._keep is not None and not bool(self._keep[index].any())

    def add(self, index: int, logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
        """This pass's share of the batch's loss, from what the policy says of its tokens now."""
        objective, t, row_T = self._objective, self._passes[index], self._rows[index]
        behavior_T, advantages_T = t["behavior_logprobs_T"], t["advantages_T"]
        reference_T = self._frozen[index].reference_T
        anchor_T = self._anchor(index, logprobs_T)
        self._seen.index.append(index)
        self._remember(anchor_T, behavior_T, row_T)
        weights_T = None
        if objective.is_weighed:
            weights_T = self._weights(anchor_T - behavior_T, row_T) / self._weight_factor
        old_T = behavior_T if objective.old_logprobs == "behavior" else anchor_T
        if self._keep is not None:
            keep_T = self._keep[index]
            logprobs_T, entropy_T, row_T = logprobs_T[keep_T], entropy_T[keep_T], row_T[keep_T]
            behavior_T, advantages_T, old_T = behavior_T[keep_T], advantages_T[keep_T], old_T[keep_T]
            weights_T = None if weights_T is None else weights_T[keep_T]
            reference_T = None if reference_T is None else reference_T[keep_T]
        loss = self._policy_loss(logprobs_T, old_T, behavior_T, advantages_T, row_T, weights_T)
        weight_T = self._weight_B[row_T]
        self._seen.losses.append(_detached(loss))
        self._seen.weight.append(weight_T)
        self._seen.entropy.append(entropy_T.detach())
        losses_T = loss.losses_T
        if objective.entropy_coef:
            losses_T = losses_T - objective.entropy_coef * entropy_T
        if reference_T is not None:
            kl_T = kl_penalty(logprobs_T, reference_T, objective.kl_penalty)
            self._seen.kl.append(kl_T.detach())
            losses_T = losses_T + objective.kl_coef * kl_T
        return aggregated(losses_T, weight_T, denominator=self._weighing.denominator)

    def _anchor(self, index: int, logprobs_T: Tensor) -> Tensor:
        """The trainer's logprobs that stand for the old policy. One optimizer step is made per batch, so
        unless they are the proximal policy's they are the current ones: their ratio is exactly 1."""
        if self._objective.old_logprobs != "proximal":
            return logprobs_T.detach()
        start_T = self._frozen[index].start_T
        assert start_T is not None
        return start_T

    def _policy_loss(
        self,
        logprobs_T: Tensor,
        old_T: Tensor,
        behavior_T: Tensor,
        advantages_T: Tensor,
        row_T: Tensor,
        weights_T: Tensor | None,
    ) -> PolicyLoss:
        objective = self._objective
        place = {"row_T": row_T, "num_rows": self._num_rows}
        loss = policy_loss(logprobs_T, old_T, advantages_T, objective, **place)
        losses_T = loss.losses_T
        if weights_T is not None:
            losses_T = losses_T * weights_T
        if objective.off_policy_mask_threshold is not None:
            left_out_T = off_policy_sequences(
                logprobs_T, behavior_T, advantages_T, **place, threshold=objective.off_policy_mask_threshold
            )
            losses_T = torch.where(left_out_T, torch.zeros_like(losses_T), losses_T)
        return PolicyLoss(losses_T, loss.clipped_T, loss.clipped_lower_T, loss.log_ratio_T)

    def _remember(self, logprobs_T: Tensor, behavior_T: Tensor, row_T: Tensor) -> None:
        self._seen.logprobs.append(logprobs_T.detach())
        self._seen.behavior.append(behavior_T)
        self._seen.row.append(row_T)

    # ------------------------------------------------------------------ several processes

    def seen(self) -> Seen:
        """What this process has added."""
        return self._seen

    def join(self, parts: Sequence[Seen]) -> None:
        """Go on with what all processes have added, in the order of the passes."""
        if len(parts) < 2:
            return
        device = self._weight_B.device
        places = [(index, part, i) for part in parts for i, index in enumerate(part.index)]
        joined = Seen()
        for index, part, i in sorted(places, key=lambda place: place[0]):
            joined.index.append(index)
            joined.losses.append(_moved(part.losses[i], device))
            for name in ("weight", "entropy", "logprobs", "behavior", "row"):
                getattr(joined, name).append(getattr(part, name)[i].to(device))
            if part.kl:
                joined.kl.append(part.kl[i].to(device))
        self._seen = joined

    # ------------------------------------------------------------------ figures

    def pg_loss(self) -> float:
        """The policy's part of the loss, of all passes so far."""
        return self._aggregated([loss.losses_T for loss in self._seen.losses])

    def _aggregated(self, parts: list[Tensor]) -> float:
        weight_T = torch.cat(self._seen.weight)
        return aggregated(torch.cat(parts), weight_T, denominator=self._weighing.denominator).item()

    def metrics(self) -> dict[str, float]:
        """Figures of the whole batch by verl's names, once every pass was added."""
        metrics = dict(self._metrics)
        if self._seen.losses:
            metrics["actor/entropy"] = torch.cat(self._seen.entropy).mean().item()
            metrics |= policy_metrics(_joined(self._seen.losses))
        if self._seen.kl:
            metrics["actor/kl_loss"] = self._aggregated(self._seen.kl)
            metrics["actor/kl_coef"] = self._objective.kl_coef
        if self._seen.logprobs:
            metrics |= correction_metrics(
                torch.cat(self._seen.logprobs),
                torch.cat(self._seen.behavior),
                torch.cat(self._seen.row),
                self._num_rows,
                self._objective,
            )
        return metrics


def correction_metrics(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    objective: ObjectiveConfig,
) -> dict[str, float]:
    """How far the trainer is from the sampler on a whole batch, by verl's names; the weights' figures
    need a cap."""
    log_ratio_T = logprobs_T - behavior_logprobs_T
    probs_T, behavior_probs_T = logprobs_T.exp(), behavior_logprobs_T.exp()
    diff_T = (probs_T - behavior_probs_T).abs()
    figures = mismatch_metrics(logprobs_T, behavior_logprobs_T, row_T, num_rows)
    cap = objective.importance_weight_cap
    if cap is not None:
        level, floor = objective.importance_weight_level, objective.importance_weight_floor
        weights = importance_weights(log_ratio_T, row_T, num_rows, level=level, cap=cap, floor=floor)
        figures |= importance_metrics(
            weights, log_ratio_T, row_T, num_rows, level=level, cap=cap, floor=floor
        )
    metrics = {f"rollout_corr/{name}": value for name, value in figures.items()} | {
        "training/rollout_probs_diff_mean": diff_T.mean().item(),
        "training/rollout_probs_diff_max": diff_T.max().item(),
        "training/rollout_probs_diff_std": diff_T.std().item() if len(diff_T) > 1 else 0.0,
        "training/rollout_logprobs_diff_max": log_ratio_T.abs().max().item(),
    }
    if len(probs_T) > 1:
        both = torch.corrcoef(torch.stack([probs_T, behavior_probs_T]))
        metrics["training/rollout_actor_probs_pearson_corr"] = both[0, 1].item()
    return metrics


def _detached(loss: PolicyLoss) -> PolicyLoss:
    return PolicyLoss(loss.losses_T.detach(), loss.clipped_T, loss.clipped_lower_T.detach(), loss.log_ratio_T)


def _moved(loss: PolicyLoss, device: torch.device) -> PolicyLoss:
    return PolicyLoss(
        losses_T=loss.losses_T.to(device),
        clipped_T=loss.clipped_T.to(device),
        clipped_lower_T=loss.clipped_lower_T.to(device),
        log_ratio_T=loss.log_ratio_T.to(device),
    )


def _joined(parts: Sequence[PolicyLoss]) -> PolicyLoss:
    return PolicyLoss(
        losses_T=torch.cat([p.losses_T for p in parts]),
        clipped_T=torch.cat([p.clipped_T for p in parts]),
        clipped_lower_T=torch.cat([p.clipped_lower_T for p in parts]),
        log_ratio_T=torch.cat([p.log_ratio_T for p in parts]),
    )
