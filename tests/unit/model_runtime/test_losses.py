"""Properties of the losses beyond the formulas that tests/unit/test_algorithm_vectors_losses.py holds."""

import math

import pytest
import torch

from model_runtime.losses import aggregated, kl_penalty, policy_loss, policy_metrics, token_logprobs
from model_runtime.objective_config import ObjectiveConfig

LOSSES = ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce"]


def tokens(count=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=generator) * 3
    behavior = logprobs + torch.randn(count, generator=generator) * 0.5
    advantages = torch.randn(count, generator=generator)
    return logprobs.requires_grad_(), behavior, advantages


def one_row(logprobs, old, advantages, **objective):
    row = torch.zeros(len(logprobs), dtype=torch.long)
    return policy_loss(logprobs, old, advantages, ObjectiveConfig(**objective), row_T=row, num_rows=1)


def test_the_ratio_is_exactly_1_against_equal_old_logprobs():
    logprobs, _, advantages = tokens()
    loss = one_row(logprobs, logprobs.detach().clone(), advantages)
    assert torch.equal(loss.log_ratio_T, torch.zeros_like(advantages))
    assert torch.equal(loss.losses_T, -advantages)
    assert not loss.clipped_T.any()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    """At ratio 1 nothing is clipped; sapo's gate has slope 1 there, and gmpo shares a row's gradient out."""
    logprobs, _, _ = tokens()
    advantages = torch.full((32,), 0.7)
    loss = one_row(logprobs, logprobs.detach().clone(), advantages, loss=name)
    loss.losses_T.mean().backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 32)


NARROW_BELOW = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}


@pytest.mark.parametrize(
    ("loss", "settings", "ratio", "advantage", "want"),
    [
        ("ppo_clip", NARROW_BELOW, 1.5, 1.0, -1.3),
        ("ppo_clip", NARROW_BELOW, 0.5, -1.0, 0.9),
        ("ppo_clip", {"clip_ratio_c": 2.5}, 5.0, -1.0, 2.5),
        ("gspo", NARROW_BELOW, 1.5, 1.0, -1.3),
        ("gspo", NARROW_BELOW, 0.5, -1.0, 0.9),
        ("gmpo", NARROW_BELOW, 1.5, 1.0, -math.exp(0.3)),
        ("gmpo", NARROW_BELOW, 0.5, -1.0, math.exp(-0.1)),
        ("cispo", NARROW_BELOW, 1.5, 1.0, 1.3),  # the logprob is −1
        ("cispo", NARROW_BELOW, 0.5, 1.0, 0.9),
        ("sapo", {"sapo_tau_positive": 2.0}, 1.0, 1.0, -1.0),
        ("sapo", {"sapo_tau_negative": 4.0}, 1.0, -1.0, 0.5),
        ("dppo_tv", NARROW_BELOW, 1.5, 1.0, 1.5),  # e⁻¹ came from 0.245, by 0.123
        ("dppo_tv", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.1}, 1.5, 1.0, 0.0),
        ("dppo_tv", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}, 0.5, -1.0, 0.0),  # from 0.736, by 0.368
        ("dppo_tv", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.3}, 0.5, -1.0, -0.5),
        ("dppo_kl", {"clip_ratio_high": 0.5, "dppo_ratio_cap": 1.2}, 1.5, 1.0, 1.2),
    ],
)
def test_each_loss_takes_its_own_settings_of_the_config(loss, settings, ratio, advantage, want):
    logprobs = torch.tensor([-1.0])
    old = logprobs - math.log(ratio)
    got = one_row(logprobs, old, torch.tensor([advantage]), loss=loss, **settings)
    assert got.losses_T.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "gspo", "gmpo"])
def test_a_log_ratio_no_float_can_hold_gives_finite_losses_and_gradients(name):
    logprobs = torch.tensor([-0.5, -200.0], requires_grad=True)
    loss = one_row(logprobs, torch.tensor([-300.0, -0.1]), torch.tensor([-1.0, 1.0]), loss=name)
    loss.losses_T.sum().backward()
    assert torch.isfinite(loss.losses_T).all()
    assert torch.isfinite(logprobs.grad).all()


def test_a_log_ratio_beyond_20_is_clamped_and_has_no_gradient():
    logprobs = torch.tensor([-0.5], requires_grad=True)
    loss = one_row(logprobs, torch.tensor([-60.0]), torch.tensor([-1.0]))
    aggregated(loss.losses_T, torch.ones(1), denominator=1).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0
    assert policy_metrics(loss)["actor/ppo_kl"] == -20


def test_dppo_leaves_out_only_what_moved_too_far_in_the_direction_of_its_advantage():
    old = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    now = torch.tensor([0.8, 0.2, 0.8, 0.55]).log().requires_grad_()
    loss = one_row(now, old, torch.tensor([1.0, 1.0, -1.0, 1.0]), loss="dppo_tv")
    assert loss.clipped_T.tolist() == [True, False, False, False]
    assert loss.losses_T[0] == 0


@pytest.mark.parametrize("kind", ["k1+", "abs+", "k3+"])
def test_a_straight_through_kl_has_the_gradient_of_k2(kind):
    logprobs, reference, _ = tokens()
    value = kl_penalty(logprobs, reference, kind)
    torch.testing.assert_close(value, kl_penalty(logprobs, reference, kind[:-1]))
    value.sum().backward()
    torch.testing.assert_close(logprobs.grad, logprobs.detach() - reference)


def test_entropy_carries_a_gradient_only_when_asked_to():
    logits = torch.randn(3, 5).requires_grad_()
    target, temperature = torch.zeros(3, dtype=torch.long), torch.ones(3)
    assert not token_logprobs(logits, target, temperature)[1].requires_grad
    asked = token_logprobs(logits, target, temperature, entropy_gradient=True)[1]
    asked.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 0


def test_logprobs_are_those_of_the_sampling_temperature_in_float32():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    target, temperature = torch.arange(5), torch.tensor([0.6, 1.0, 0.7, 2.0, 1.3])
    logprobs, entropy = token_logprobs(logits, target, temperature)
    want = torch.log_softmax(logits.float() / temperature[:, None], -1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, want[torch.arange(5), target])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=want).entropy())
