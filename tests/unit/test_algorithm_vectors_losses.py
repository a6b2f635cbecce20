"""Losses and weights against numbers computed with verl's own functions (tests/data/loss_vectors.json).

The vectors are [B, T] with a mask; the product works on the masked-in tokens only. Values at masked
places are absurd on purpose, and each case brings its own tolerance.
"""

import json
from pathlib import Path

import pytest
import torch

from model_runtime.losses import (
    correction_metrics,
    policy_metrics,
    ppo_clip,
    token_importance_weights,
    token_mean,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "loss_vectors.json").read_text())


def cases(kind):
    return [pytest.param(case, id=case["name"]) for case in VECTORS[kind]]


def tensor(values, batch):
    return torch.tensor(values, dtype=getattr(torch, batch.get("dtype", "float64")))


def assert_close(got, want, tolerance):
    got, want = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64)
    assert ((got - want).abs() <= tolerance * want.abs().clamp(min=1)).all(), (got, want)


@pytest.mark.parametrize("case", cases("policy_losses"))
def test_ppo_dual_clip_is_verls(case):
    batch, params = VECTORS["batches"][case["batch"]], case["params"]
    mask = torch.tensor(batch["response_mask"], dtype=torch.bool)
    logprobs = tensor(batch["logprobs"], batch).requires_grad_()
    advantages = tensor(batch["advantages"], batch)[:, None].expand_as(logprobs)
    loss = ppo_clip(
        logprobs[mask],
        tensor(batch["old_logprobs"], batch)[mask],
        advantages[mask],
        clip_ratio_low=params["clip_ratio_low"],
        clip_ratio_high=params["clip_ratio_high"],
        clip_ratio_c=params["clip_ratio_c"],
    )
    losses = loss.losses_T
    if params.get("use_rollout_is_weights"):
        losses = losses * tensor(batch["rollout_is_weights"], batch)[mask]
    total = token_mean(losses, num_tokens=params.get("batch_num_tokens", int(mask.sum())))
    total.backward()
    assert_close(total.detach(), case["expected"]["loss"], case["tolerance"])
    assert_close(logprobs.grad, case["expected"]["grad_logprobs"], case["tolerance"])
    for name, want in case["expected"]["metrics"].items():
        assert_close(policy_metrics(loss)[f"actor/{name}"], want, max(case["tolerance"], 1e-6))


@pytest.mark.parametrize("case", cases("aggregation"))
def test_token_mean_is_verls(case):
    losses = torch.tensor(case["inputs"]["loss"], dtype=torch.float64).requires_grad_()
    mask = torch.tensor(case["inputs"]["response_mask"], dtype=torch.bool)
    params = case["params"]
    total = token_mean(losses[mask], num_tokens=params.get("batch_num_tokens", int(mask.sum())))
    (total * params.get("dp_size", 1)).backward()
    assert_close(total.detach() * params.get("dp_size", 1), case["expected"]["loss"], case["tolerance"])
    assert_close(losses.grad, case["expected"]["grad_loss"], case["tolerance"])


@pytest.mark.parametrize("case", cases("correction"))
def test_truncated_token_weights_are_verls(case):
    batch = VECTORS["correction_batches"][case["batch"]]
    mask = torch.tensor(batch["response_mask"], dtype=torch.bool)
    old, behavior = tensor(batch["old_logprobs"], batch), tensor(batch["behavior_logprobs"], batch)
    cap = case["params"]["rollout_is_threshold"]
    weights = torch.zeros_like(old)
    weights[mask] = token_importance_weights(old[mask], behavior[mask], cap=cap)
    assert_close(weights, case["expected"]["rollout_is_weights"], case["tolerance"])
    metrics = correction_metrics(old[mask], behavior[mask], cap=cap)
    for name in ("kl", "k3_kl", *(f"rollout_is_{n}" for n in ("mean", "max", "min", "eff_sample_size"))):
        assert_close(metrics[f"rollout_corr/{name}"], case["expected"]["metrics"][name], case["tolerance"])
    for name in ("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low"):
        assert_close(metrics[f"rollout_corr/{name}"], case["expected"]["metrics"][name], 1e-6)
