"""One training step on a tiny real model: exact logprobs, the same gradient however split, state that
comes back bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_runtime.adapters import check_adapter
from model_runtime.batching import micro_batches
from model_runtime.config import ModelConfig
from model_runtime.errors import ConfigError, TrainerError
from model_runtime.learner import Learner, prepare_torch
from model_runtime.policy import Policy, canary_prompts, make_canary
from tests.fakes import make_trajectory
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, make_adapter, make_model, reference_logprobs
from tests.training_log import sampled_row


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("base") / "model")


def config(base, **overrides):
    trainer = {"learning_rate": 5e-3} | overrides.pop("trainer", {})
    section = {"model_id": "planner", "model_path": str(base), "lora": {"rank": 8, "alpha": 16}}
    return ModelConfig.model_validate(section | {"trainer": trainer} | overrides)


def learner(base, *, seed=0, **overrides):
    return Learner(config(base, **overrides), seed=seed)


def rows(count=12, seed=0, **row):
    rng = np.random.default_rng(seed)
    made = [sampled_row(rng, group_id=f"g{i}", **row) for i in range(count)]
    return [
        SimpleNamespace(
            trajectory=t, advantage=float((-1) ** i), loss_mask=t.response_mask, turn_advantages=None
        )
        for i, t in enumerate(made)
    ]


def own_logprobs(policy, batch):
    """Logprobs of the trained tokens, per row."""
    found = []
    for row in batch:
        (micro_batch,) = micro_batches([row], micro_batch_tokens=4096)
        logprobs, _ = policy.logprobs(micro_batch.tensors("cpu"), micro_batch.segments)
        found.append(logprobs.detach().numpy())
    return found


def on_policy(policy, batch):
    """The batch as if this policy had sampled it."""
    for row, logprobs in zip(batch, own_logprobs(policy, batch), strict=True):
        row.trajectory.behavior_logprobs[row.loss_mask == 1] = logprobs
    return batch


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_transformers_and_pefts(base, tmp_path, temperature):
    adapter = make_adapter(tmp_path / "adapter", base=base, seed=3)
    policy = Policy(config(base, adapter_path=str(adapter)), seed=0)
    batch = rows(6, temperature=temperature)
    for row, got in zip(batch, own_logprobs(policy, batch), strict=True):
        t = row.trajectory
        ids = [*t.prompt_ids.tolist(), *t.response_ids.tolist()]
        want = np.asarray(reference_logprobs(base, adapter, ids, temperature=temperature))
        want = want[len(t.prompt_ids) - 1 :][t.response_mask == 1]
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_fresh_adapter_is_the_base(base):
    policy = Policy(config(base), seed=0)
    prompt = [5, 9, 33, 120, 7]
    want = reference_logprobs(base, None, [*prompt, 42])[-1]
    assert policy.next_token_logprobs(prompt)[42] == pytest.approx(want, abs=1e-5)


def test_the_adapter_written_is_what_peft_loads(base, tmp_path):
    trained = learner(base)
    trained.update(rows(), step=1)
    files = trained.policy.adapter_files()
    (tmp_path / "adapter_model.safetensors").write_bytes(files.weights)
    (tmp_path / "adapter_config.json").write_bytes(files.config)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(tmp_path)).eval()
    prompt = [5, 9, 33, 120, 7]
    with torch.no_grad():
        want = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1).numpy()
    np.testing.assert_allclose(trained.policy.next_token_logprobs(prompt), want, atol=1e-6)
    assert np.abs(want - Policy(config(base), seed=0).next_token_logprobs(prompt)).max() > 1e-3


def test_adapters_are_seeded_by_run_and_model(base):
    def sha(seed, model_id):
        return Policy(config(base, model_id=model_id), seed=seed).adapter_files().sha256

    assert sha(0, "planner") == sha(0, "planner")
    assert len({sha(0, "planner"), sha(1, "planner"), sha(0, "solver")}) == 3


def test_every_module_learns(base):
    trained = learner(base)
    metrics = trained.update(rows(), step=1)
    lora_b = {name: t for name, t in trained.policy.tensors().items() if "lora_B" in name}
    assert len(lora_b) == 14
    assert all(np.abs(t).max() > 0 for t in lora_b.values())
    assert metrics["actor/grad_norm"] > 0


def test_a_learning_rate_of_0_changes_nothing(base):
    trained = learner(base, trainer={"learning_rate": 0.0})
    before = trained.policy.adapter_files()
    trained.update(rows(), step=1)
    assert trained.policy.adapter_files() == before


def gradient(base, batch, micro_batch_tokens, **settings):
    trainer = {"micro_batch_tokens": micro_batch_tokens, "max_grad_norm": 1e9}
    trained = learner(base, trainer=trainer, **settings)
    trained.policy.load({n: t + np.float32(0.01) for n, t in trained.policy.tensors().items()})
    trained.update(batch, step=1)
    return torch.cat([p.grad.flatten() for p in trained.policy.parameters.values() if p.grad is not None])


@pytest.mark.parametrize("micro_batch_tokens", [16, 64, 300])
def test_the_gradient_does_not_depend_on_the_split(base, micro_batch_tokens):
    whole = gradient(base, rows(), 100_000)
    split = gradient(base, rows(), micro_batch_tokens)
    assert ((split - whole).norm() / whole.norm()).item() < 1e-5


@pytest.mark.parametrize(
    "objective",
    [
        {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
        {"loss": "cispo", "aggregation": "session-balanced", "entropy_coef": 0.01},
        {"loss": "reinforce", "rejection": [{"statistic": "token_k1", "high": 3.0}]},
        {
            "kl_coef": 0.1,
            "kl_penalty": "k3+",
            "importance_weight_normalize": True,
            "old_logprobs": "recomputed",
        },
    ],
    ids=lambda objective: "-".join(map(str, objective.values()))[:30],
)
def test_no_objectives_gradient_depends_on_the_split(base, objective):
    whole = gradient(base, rows(), 100_000, objective=objective)
    split = gradient(base, rows(), 64, objective=objective)
    assert whole.norm() > 0
    assert ((split - whole).norm() / whole.norm()).item() < 1e-5


def row_of_mask(mask, **fields):
    ids = (np.arange(len(mask)) % 381 + 3).astype(np.int32)
    trajectory = make_trajectory(mask=mask, response_ids=ids, **fields)
    return SimpleNamespace(
        trajectory=trajectory, advantage=1.0, loss_mask=trajectory.response_mask, turn_advantages=None
    )


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo"])
def test_nor_does_it_with_the_longest_row_a_single_token_and_one_that_has_aged_out(base, loss):
    longest = row_of_mask([1] * (2048 - 3))  # with its prompt: all positions the model has
    aged = row_of_mask([1] * 5, member_index=1)
    aged.loss_mask = np.zeros_like(aged.loss_mask)
    batch = [longest, row_of_mask([1], member_index=2), aged, *rows(3)]
    batch[1].advantage = -1.0
    objective = {"loss": loss, "aggregation": "seq-mean-token-mean"}
    whole = gradient(base, batch, 100_000, objective=objective)
    split = gradient(base, batch, 64, objective=objective)
    assert whole.norm() > 0
    assert ((split - whole).norm() / whole.norm()).item() < 1e-5


def start_adapter(tmp_path, base):
    return str(make_adapter(tmp_path / "adapter", base=base, seed=3))


def test_the_kl_is_0_at_the_start_of_a_run_and_not_afterwards(base, tmp_path):
    trained = learner(base, adapter_path=start_adapter(tmp_path, base), objective={"kl_coef": 0.1})
    assert trained.update(rows(), step=1)["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert trained.update(rows(), step=2)["actor/kl_loss"] > 1e-6


def test_the_base_as_reference_is_the_model_without_its_adapter(base, tmp_path):
    adapter = start_adapter(tmp_path, base)
    policy = Policy(config(base, adapter_path=adapter), seed=0)
    before, prompt = policy.adapter_files(), [5, 9, 33, 120, 7]
    with policy.holding(policy.reference("base")):
        got = policy.next_token_logprobs(prompt)[42]
    assert got == pytest.approx(reference_logprobs(base, None, [*prompt, 42])[-1], abs=1e-5)
    assert policy.adapter_files() == before
    objective = {"kl_coef": 0.1, "kl_reference": "base"}
    trained = learner(base, adapter_path=adapter, objective=objective)
    assert trained.update(rows(), step=1)["actor/kl_loss"] > 1e-4


def test_the_proximal_policy_stays_while_the_policy_moves(base):
    trained = learner(base, objective={"old_logprobs": "proximal", "importance_weight_cap": None})
    window, batch = trained.policy.tensors(), rows()
    first = trained.update(batch, step=1, proximal=window)
    assert first["actor/ppo_kl"] == pytest.approx(0, abs=1e-7)
    second = trained.update(batch, step=2, proximal=window)
    assert abs(second["actor/ppo_kl"]) > 1e-5
    # What is compared with the sampler is the proximal policy, which has not moved.
    assert second["rollout_corr/kl"] == pytest.approx(first["rollout_corr/kl"], abs=1e-6)
    with pytest.raises(TrainerError, match="no longer in the store"):
        trained.update(batch, step=3)


def test_an_entropy_bonus_keeps_the_policy_wider(base):
    def entropy(coefficient):
        trained = learner(base, objective={"entropy_coef": coefficient})
        return [trained.update(rows(), step=s)["actor/entropy"] for s in range(1, 5)][-1]

    assert entropy(1.0) > entropy(0.0)


def test_a_batch_that_is_rejected_whole_changes_nothing(base):
    rules = [{"statistic": "token_k1", "high": 1.0001}]
    trained = learner(base, objective={"rejection": rules})
    before = trained.policy.adapter_files()
    batch = on_policy(trained.policy, rows())
    for row in batch:
        row.trajectory.behavior_logprobs[row.loss_mask == 1] -= 1.0
    metrics = trained.update(batch, step=1)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert trained.policy.adapter_files() == before


def test_on_policy_the_ratio_is_1_and_nothing_is_clipped(base):
    trained = learner(base)
    metrics = trained.update(on_policy(trained.policy, rows(temperature=0.7)), step=1)
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["training/rollout_logprobs_diff_max"] < 1e-5
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)


def test_rewarded_tokens_become_likelier(base):
    trained = learner(base)
    batch = on_policy(trained.policy, rows())
    for step in range(1, 4):
        trained.update(on_policy(trained.policy, batch), step=step)
    before = own_logprobs(Policy(config(base), seed=0), batch)
    gains = [a.mean() - b.mean() for a, b in zip(own_logprobs(trained.policy, batch), before, strict=True)]
    assert np.mean([g * row.advantage for g, row in zip(gains, batch, strict=True)]) > 0.1


def test_a_loss_that_is_not_finite_is_not_applied(base):
    trained = learner(base)
    trained.update(rows(), step=1)
    before = (trained.policy.adapter_files(), trained.optimizer_state())
    bad = rows()
    bad[3].advantage = float("nan")
    with pytest.raises(TrainerError, match="planner: the loss of step 2 is nan"):
        trained.update(bad, step=2)
    assert trained.policy.adapter_files() == before[0]
    for name, array in trained.optimizer_state().items():
        np.testing.assert_array_equal(array, before[1][name])


@pytest.mark.parametrize("part", ["prompt_ids", "response_ids"])
def test_a_token_the_model_does_not_have_is_refused_by_name(base, part):
    trained, bad = learner(base), rows()
    getattr(bad[2].trajectory, part)[0] = VOCAB_SIZE
    who = f"planner: row {bad[2].trajectory.trajectory_id} of agent 'planner_agent' has token id {VOCAB_SIZE}"
    with pytest.raises(TrainerError, match=f"{who}, the model in .* has {VOCAB_SIZE}: model_path must be"):
        trained.update(bad, step=1)


def test_a_row_longer_than_the_positions_a_model_has_embeddings_for_is_refused_by_name(base, monkeypatch):
    trained, bad = learner(base), rows(3)
    assert trained.policy.max_positions is None, "rotary positions are computed"
    longest = max(row.trajectory.num_tokens for row in bad)
    monkeypatch.setattr(Policy, "max_positions", longest)
    trained.update(bad, step=1)
    monkeypatch.setattr(Policy, "max_positions", longest - 1)
    with pytest.raises(
        TrainerError, match=rf"has {longest} tokens.* {longest - 1} positions: set rollout\.max"
    ):
        trained.update(bad, step=2)


def test_an_abandoned_step_leaves_nothing_behind(base):
    class Enough(Exception):
        pass

    passes = []

    def stop_at_third():
        passes.append(1)
        if len(passes) == 3:
            raise Enough

    abandoned, undisturbed = (
        learner(base, trainer={"micro_batch_tokens": 64}),
        learner(base, trainer={"micro_batch_tokens": 64}),
    )
    with pytest.raises(Enough):
        abandoned.update(rows(), step=1, between_passes=stop_at_third)
    for one in (abandoned, undisturbed):
        one.update(rows(seed=1), step=1)
    assert abandoned.policy.adapter_files() == undisturbed.policy.adapter_files()


def test_state_comes_back_bit_for_bit(base):
    straight, first, second = learner(base), learner(base), learner(base, seed=9)
    for step in range(1, 5):
        straight.update(rows(seed=step), step=step)
    for step in (1, 2):
        first.update(rows(seed=step), step=step)
    second.policy.load(first.policy.tensors())
    second.load_optimizer_state(first.optimizer_state())
    for step in (3, 4):
        second.update(rows(seed=step), step=step)
    assert second.policy.adapter_files() == straight.policy.adapter_files()


def test_random_generators_come_back(base):
    import random

    one = learner(base)
    state = one.generator_state()
    drawn = (random.random(), np.random.normal(), torch.rand(2).tolist())
    one.load_generator_state(*state)
    assert (random.random(), np.random.normal(), torch.rand(2).tolist()) == drawn


def test_the_learning_rate_warms_up_and_stays(base):
    rates = [learner(base, trainer={"warmup_steps": 4}).learning_rate(step) for step in range(1, 7)]
    np.testing.assert_allclose(rates, np.asarray([0.25, 0.5, 0.75, 1, 1, 1]) * 5e-3)
    assert learner(base).learning_rate(1) == 5e-3


@pytest.mark.parametrize(
    ("schedule", "halfway"), [("constant", 1.0), ("linear", 0.6), ("cosine", 0.2 + 0.8 / 2)]
)
def test_the_learning_rate_follows_its_schedule_to_the_last_step(base, schedule, halfway):
    trainer = {"warmup_steps": 2, "learning_rate_schedule": schedule, "final_learning_rate_ratio": 0.2}
    trained = learner(base, max_steps=12, trainer=trainer)
    share = [trained.learning_rate(step) / 5e-3 for step in (1, 2, 7, 12, 15)]
    last = 1.0 if schedule == "constant" else 0.2
    assert share == pytest.approx([0.5, 1.0, halfway, last, last])


def test_a_batch_without_a_trained_token_changes_nothing(base):
    trained = learner(base)
    trained.update(rows(), step=1)
    before = trained.policy.adapter_files()
    aged = rows(2)
    for row in aged:
        row.loss_mask = np.zeros_like(row.loss_mask)
    assert trained.update(aged, step=2) == {}
    assert trained.policy.adapter_files() == before


def test_canary_tells_two_versions_apart(base):
    trained = learner(base)
    start = trained.policy.tensors()
    prompts = canary_prompts(str(base), vocab_size=VOCAB_SIZE)
    trained.update(rows(), step=1)
    now = trained.policy.adapter_files()
    (first, _) = make_canary(trained.policy, prompts, previous=start)
    assert trained.policy.adapter_files() == now
    assert len(first.token_ids) == len(set(first.token_ids)) == 16
    before = Policy(config(base), seed=0).next_token_logprobs(first.prompt_ids)
    np.testing.assert_allclose(first.previous_logprobs, before[first.token_ids], atol=1e-6)
    np.testing.assert_allclose(
        first.logprobs, trained.policy.next_token_logprobs(first.prompt_ids)[first.token_ids], atol=1e-6
    )
    assert np.abs(np.subtract(first.logprobs, first.previous_logprobs)).max() > 1e-3


def test_canary_prompts_are_fixed_and_hold_no_special_token(base):
    prompts = canary_prompts(str(base), vocab_size=VOCAB_SIZE)
    assert prompts == canary_prompts(str(base), vocab_size=VOCAB_SIZE)
    assert all(len(SPECIAL_TOKENS) <= token < VOCAB_SIZE for prompt in prompts for token in prompt)


def test_chosen_modules_only(base):
    section = {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "mlp.up_proj"]}
    files = Policy(config(base, lora=section), seed=0).adapter_files()
    modules = {name.split(".")[-3] for name in check_adapter(files, source="here")}
    assert modules == {"q_proj", "up_proj"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "nowhere"}, r"planner\.model_path: .*config\.json is missing"),
        ({"lora": {"rank": 8, "target_modules": ["q_proj", "qkv"]}}, "no linear module 'qkv'"),
        ({"lora": {"rank": 8, "target_modules": ["nope"]}}, r"planner\.lora\.target_modules"),
        ({"adapter_path": "nowhere"}, "adapter nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_named(base, changes, message):
    with pytest.raises(ConfigError, match=message):
        Policy(config(base, **changes), seed=0)


def test_a_starting_adapter_of_another_rank_is_refused(base, tmp_path):
    adapter = make_adapter(tmp_path, base=base, seed=0, rank=16)
    with pytest.raises(ConfigError, match=r"lora\.rank is 8, but the adapter .* has rank 16"):
        Policy(config(base, adapter_path=str(adapter)), seed=0)


@pytest.mark.parametrize("other", [{"hidden_size": 128}, {"num_layers": 3}], ids=["wider", "deeper"])
def test_a_starting_adapter_of_another_base_is_refused_with_both_places(base, tmp_path, other):
    adapter = make_adapter(tmp_path / "adapter", base=make_model(tmp_path / "other", **other), seed=0)
    with pytest.raises(
        ConfigError, match=r"planner\.adapter_path: the adapter in .*adapter is not one of .*"
    ):
        Policy(config(base, adapter_path=str(adapter)), seed=0)


def test_an_adapter_of_other_shapes_is_not_loaded(base):
    policy = Policy(config(base), seed=0)
    wrong = {name: t[:4] if "lora_A" in name else t for name, t in policy.tensors().items()}
    with pytest.raises(ConfigError, match="can't change within a run"):
        policy.load(wrong)


def test_the_settings_file_is_the_same_for_every_version(base):
    one, other = Policy(config(base), seed=0).adapter_files(), Policy(config(base), seed=1).adapter_files()
    assert one.config == other.config
    assert one.weights != other.weights


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named(base):
    with pytest.raises(ConfigError, match="sees no GPU"):
        prepare_torch(config(base, trainer={"n_gpus": 1}).trainer, model_id="planner", gpu_ids=[])
