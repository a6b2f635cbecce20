"""Losses, KL, aggregation and correction against the references' numbers (tests/algorithm_vectors.py)."""

import numpy as np
import pytest
import torch

from model_runtime.aggregation import aggregation
from model_runtime.correction import (
    importance_metrics,
    importance_weights,
    mean_weight,
    mismatch_metrics,
    off_policy_sequences,
    rejection,
)
from model_runtime.losses import (
    aggregated,
    binary_kl,
    binary_tv,
    cispo,
    dppo,
    gmpo,
    gspo,
    kl_penalty,
    policy_metrics,
    ppo_clip,
    reinforce,
    sapo,
)
from model_runtime.objective_config import RejectionRule
from tests.algorithm_vectors import assert_close, batch, cases, numbers


class Flat:
    """A case's batch, the masked-in tokens one after the other."""

    def __init__(self, inputs):
        self.dtype = getattr(torch, inputs.get("dtype", "float64"))
        self.inputs = inputs
        self.mask = torch.tensor(inputs["response_mask"], dtype=torch.bool)
        self.num_rows, self.num_positions = self.mask.shape
        self.row = self.mask.nonzero()[:, 0]
        self.counts = self.mask.sum(1).tolist()

    def full(self, name):
        return torch.tensor(numbers(self.inputs[name]), dtype=self.dtype)

    def __getitem__(self, name):
        return self.full(name)[self.mask]

    @property
    def advantages(self):
        return self.full("advantages")[self.row]

    def spread(self, values):
        """[T] back to [B, T], 0 where the mask is."""
        full = torch.zeros(self.mask.shape, dtype=values.dtype)
        full[self.mask] = values
        return full


def check(flat, logprobs, losses, weighing, case):
    weight = torch.from_numpy(weighing.weight_B).to(flat.dtype)[flat.row]
    total = aggregated(losses, weight, denominator=weighing.denominator)
    total.backward()
    assert_close(total.item(), case["expected"]["loss"], case["tolerance"])
    assert_close(logprobs.grad, case["expected"]["grad_logprobs"], case["tolerance"])


def verl_loss(name, flat, logprobs, params):
    tokens = (logprobs[flat.mask], flat["old_logprobs"], flat.advantages)
    clip = {
        f"clip_ratio_{k}": params[f"clip_ratio_{k}"] for k in ("low", "high") if f"clip_ratio_{k}" in params
    }
    if name == "vanilla":
        return ppo_clip(*tokens, **clip, clip_ratio_c=params["clip_ratio_c"])
    if name in ("gspo", "geo_mean"):
        return {"gspo": gspo, "geo_mean": gmpo}[name](*tokens, flat.row, flat.num_rows, **clip)
    if name == "cispo":
        return cispo(*tokens, **clip)
    if name == "sapo":
        return sapo(*tokens, tau_positive=params["tau_pos"], tau_negative=params["tau_neg"])
    if name == "gpg":
        return reinforce(*tokens)
    divergence = {"dppo_tv": binary_tv, "dppo_kl": binary_kl}[name]
    low, high = params["clip_ratio_low"], params["clip_ratio_high"]
    return dppo(*tokens, divergence, low=low, high=high, ratio_cap=params["clip_ratio_c"])


@pytest.mark.parametrize("case", cases("policy_losses"))
def test_policy_losses_are_verls(case):
    flat, params = Flat(batch("policy_losses", case)), case["params"]
    logprobs = flat.full("logprobs").requires_grad_()
    loss = verl_loss(case["loss"], flat, logprobs, params)
    losses = loss.losses_T
    if params.get("use_rollout_is_weights"):
        losses = losses * flat["rollout_is_weights"]
    # verl's geo_mean is a mean over all rows, empty ones too, whatever the mode says.
    geo = case["loss"] == "geo_mean"
    weighing = aggregation(
        "seq-mean-token-mean" if geo else params["loss_agg_mode"],
        flat.counts,
        scale_tokens=params.get("loss_scale_factor", flat.num_positions),
        num_rows=flat.num_rows if geo else params.get("global_batch_size"),
        batch_num_tokens=params.get("batch_num_tokens"),
    )
    check(flat, logprobs, losses, weighing, case)
    for name, want in case["expected"]["metrics"].items():
        assert_close(policy_metrics(loss)[f"actor/{name}"], want, max(case["tolerance"], 1e-6))


def trl_loss(name, flat, logprobs, params):
    """The losses with what TRL has not: no clamp of the log ratio, no dual clip, no lower bound of cispo."""
    tokens = (logprobs[flat.mask], flat["old_logprobs"], flat.advantages)
    if name == "cispo":
        return cispo(
            *tokens, clip_ratio_low=1, clip_ratio_high=params["epsilon_high"] - 1, max_log_ratio=None
        )
    if name == "sapo":
        return sapo(*tokens, tau_positive=1.0, tau_negative=1.05, max_log_ratio=None)
    clip = {"clip_ratio_low": params["epsilon_low"], "clip_ratio_high": params["epsilon_high"]}
    if params.get("importance_sampling_level") == "sequence":
        return gspo(*tokens, flat.row, flat.num_rows, **clip, max_log_ratio=None)
    delta = params.get("delta")
    return ppo_clip(*tokens, **clip, clip_ratio_c=None, ratio_cap=delta, max_log_ratio=None)


def trl_aggregation(name, flat, params):
    """TRL's loss types by our modes; its row means count rows without a token."""
    modes = {
        "grpo": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "bnpo": "token-mean",
        "dapo": "token-mean",
        "cispo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "luspo": "seq-mean-token-sum",
    }
    scale = params.get("max_completion_length", flat.num_positions)
    return aggregation(modes[name], flat.counts, scale_tokens=scale, num_rows=flat.num_rows)


@pytest.mark.parametrize("case", cases("policy_losses_trl"))
def test_policy_losses_are_trls_without_verls_bounds(case):
    flat, params = Flat(batch("policy_losses_trl", case)), case["params"]
    logprobs = flat.full("logprobs").requires_grad_()
    losses = trl_loss(case["loss"], flat, logprobs, params).losses_T
    if "off_policy_mask_threshold" in params:
        left_out = off_policy_sequences(
            logprobs[flat.mask], flat["old_logprobs"], flat.advantages, flat.row, flat.num_rows,
            threshold=params["off_policy_mask_threshold"],
        )  # fmt: skip
        losses = torch.where(left_out, torch.zeros_like(losses), losses)
    if params.get("use_rollout_is_weights"):
        losses = losses * flat["rollout_is_weights"]
    if "beta" in params:
        kl = kl_penalty(logprobs[flat.mask], flat["ref_logprobs"], "k3", clamped=False)
        losses = losses + params["beta"] * kl
    check(flat, logprobs, losses, trl_aggregation(case["loss"], flat, params), case)


@pytest.mark.parametrize("case", cases("aggregation"))
def test_aggregation_is_verls(case):
    losses = torch.tensor(case["inputs"]["loss"], dtype=torch.float64).requires_grad_()
    mask = torch.tensor(case["inputs"]["response_mask"], dtype=torch.bool)
    params = case["params"]
    weighing = aggregation(
        params["loss_agg_mode"],
        mask.sum(1).tolist(),
        scale_tokens=params.get("loss_scale_factor", mask.shape[1]),
        num_rows=params.get("global_batch_size"),
        batch_num_tokens=params.get("batch_num_tokens"),
    )
    weight = torch.from_numpy(weighing.weight_B)[mask.nonzero()[:, 0]]
    total = aggregated(losses[mask], weight, denominator=weighing.denominator) * params.get("dp_size", 1)
    total.backward()
    assert_close(total.item(), case["expected"]["loss"], case["tolerance"])
    assert_close(losses.grad, case["expected"]["grad_loss"], case["tolerance"])


@pytest.mark.parametrize("case", cases("kl"))
def test_kl_estimators_are_verls(case):
    logprobs = torch.tensor(numbers(case["inputs"]["logprobs"])).requires_grad_()
    kl = kl_penalty(logprobs, torch.tensor(numbers(case["inputs"]["ref_logprobs"])), case["params"]["kl"])
    kl.sum().backward()
    assert_close(kl.detach(), case["expected"]["kl"], case["tolerance"])
    assert_close(logprobs.grad, case["expected"]["grad_logprobs"], case["tolerance"])


# ------------------------------------------------------------------ correction


def weight_bounds(threshold):
    """verl writes IcePop's band as "low_high"."""
    if isinstance(threshold, str):
        low, high = threshold.split("_")
        return {"cap": float(high), "floor": float(low)}
    return {"cap": threshold, "floor": None}


def rejection_rules(statistics, thresholds):
    rules = []
    for statistic, bounds in zip(statistics.split(","), str(thresholds).split(","), strict=True):
        *low, high = bounds.split("_")
        rules.append(RejectionRule(statistic=statistic, high=float(high), low=float(low[0]) if low else None))
    return rules


@pytest.mark.parametrize("case", cases("rollout_correction"))
def test_correction_is_verls(case):
    flat, params, want = Flat(batch("rollout_correction", case)), case["params"], case["expected"]
    place = (flat.row, flat.num_rows)
    log_ratio = flat["old_logprobs"] - flat["behavior_logprobs"]
    metrics = mismatch_metrics(flat["old_logprobs"], flat["behavior_logprobs"], *place)
    if "rollout_is" in params:
        level, bounds = params["rollout_is"], weight_bounds(params["rollout_is_threshold"])
        weights = importance_weights(log_ratio, *place, level=level, **bounds)
        metrics |= importance_metrics(weights, log_ratio, *place, level=level, **bounds)
        used = weights.weights_T
        if params.get("rollout_is_batch_normalize"):
            factor = mean_weight(used, *place, level=level)
            metrics["rollout_is_batch_norm_factor"] = factor
            used = used / factor
        assert_close(flat.spread(used), want["rollout_is_weights"], case["tolerance"])
    mask = flat.mask
    if "rollout_rs" in params:
        rules = rejection_rules(params["rollout_rs"], params["rollout_rs_threshold"])
        kept, figures = rejection(log_ratio, *place, rules)
        metrics |= figures
        mask = flat.spread(kept)
    assert_close(mask, want["response_mask"], 0)
    assert set(metrics) == set(want["metrics"])
    for name, value in want["metrics"].items():
        assert_close(metrics[name], value, case["tolerance"])


@pytest.mark.parametrize("case", cases("rollout_correction_trl"))
def test_correction_is_trls_on_trained_tokens(case):
    """Ours has no weight at masked places; TRL's is 1 there."""
    flat, params = Flat(batch("rollout_correction_trl", case)), case["params"]
    level, _, kind = params["mode"].partition("_")
    low = params["clip_min"] if params["clip_min"] is not None else 1e-300
    floor = low if kind == "mask" else None
    log_ratio = flat["old_logprobs"] - flat["behavior_logprobs"]
    weights = importance_weights(
        log_ratio, flat.row, flat.num_rows, level=level, cap=params["clip_max"], floor=floor
    )
    want = numbers(case["expected"]["ratio"])
    want = np.broadcast_to(want, flat.mask.shape)[flat.mask.numpy()]
    assert_close(weights.weights_T, want, case["tolerance"])
