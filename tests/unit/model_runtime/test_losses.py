"""The configured objective, beyond the formulas that tests/unit/test_algorithm_vectors_losses.py holds."""

import torch

from model_runtime.config import ObjectiveConfig
from model_runtime.losses import correction_metrics, policy_loss, policy_metrics, token_logprobs, token_mean


def tokens(count=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=generator) * 3
    behavior = logprobs + torch.randn(count, generator=generator) * 0.5
    advantages = torch.randn(count, generator=generator)
    return logprobs.requires_grad_(), behavior, advantages


def test_the_ratio_is_exactly_1_against_equal_behavior_logprobs():
    logprobs, _, advantages = tokens()
    loss = policy_loss(logprobs, logprobs.detach().clone(), advantages, ObjectiveConfig())
    assert torch.equal(loss.log_ratio_T, torch.zeros_like(advantages))
    assert torch.equal(loss.losses_T, -advantages)
    assert not loss.clipped_T.any()


def test_recomputed_old_logprobs_give_ratio_1_and_move_the_correction_into_weights():
    logprobs, behavior, advantages = tokens()
    objective = ObjectiveConfig(old_logprobs="recomputed", importance_weight_cap=1.5)
    loss = policy_loss(logprobs, behavior, advantages, objective)
    weights = (logprobs.detach() - behavior).exp().clamp(max=1.5)
    assert torch.equal(loss.log_ratio_T, torch.zeros_like(advantages))
    torch.testing.assert_close(loss.losses_T, -advantages * weights)
    loss.losses_T.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages * weights)


def test_without_a_cap_there_are_no_weights():
    logprobs, behavior, advantages = tokens()
    objective = ObjectiveConfig(old_logprobs="recomputed", importance_weight_cap=None)
    assert torch.equal(policy_loss(logprobs, behavior, advantages, objective).losses_T, -advantages)
    assert "rollout_corr/rollout_is_mean" not in correction_metrics(logprobs, behavior, cap=None)


def test_sampler_logprobs_as_old_ones_are_not_weighted_twice():
    logprobs, behavior, advantages = tokens()
    wide = ObjectiveConfig(clip_ratio_low=0.999, clip_ratio_high=1e6, clip_ratio_c=1e9)
    loss = policy_loss(logprobs, behavior, advantages, wide)
    torch.testing.assert_close(loss.losses_T, -advantages * (logprobs.detach() - behavior).exp())


def test_a_log_ratio_beyond_20_is_clamped_and_has_no_gradient():
    logprobs = torch.tensor([-0.5], requires_grad=True)
    loss = policy_loss(logprobs, torch.tensor([-60.0]), torch.tensor([-1.0]), ObjectiveConfig())
    token_mean(loss.losses_T, num_tokens=1).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0
    assert policy_metrics(loss)["actor/ppo_kl"] == -20


def test_parts_of_a_batch_add_up_to_it():
    logprobs, behavior, advantages = tokens(30)
    losses = policy_loss(logprobs, behavior, advantages, ObjectiveConfig()).losses_T
    whole = token_mean(losses, num_tokens=30)
    parts = sum(token_mean(part, num_tokens=30) for part in losses.split([7, 1, 22]))
    torch.testing.assert_close(whole, parts)


def test_logprobs_are_those_of_the_sampling_temperature_in_float32():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    target, temperature = torch.arange(5), torch.tensor([0.6, 1.0, 0.7, 2.0, 1.3])
    logprobs, entropy = token_logprobs(logits, target, temperature)
    want = torch.log_softmax(logits.float() / temperature[:, None], -1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, want[torch.arange(5), target])
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=want).entropy())
