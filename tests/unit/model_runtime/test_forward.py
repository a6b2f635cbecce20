"""However a step is computed (packed, shared, split, checkpointed, compiled), loss and gradient are those of
the plain padded way: transformers and PEFT as they come, all logits, one pass."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from model_runtime import forward, packed_attention, token_head
from model_runtime.batching import micro_batches
from model_runtime.config import ModelConfig
from model_runtime.errors import ConfigError
from model_runtime.learner import Learner
from model_runtime.losses import token_logprobs
from model_runtime.objective import BatchObjective, Frozen
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.policy import Policy
from model_runtime.token_head import hidden_logprobs
from tests.random_batches import LONGEST, batch_of, flat_gradient, masks
from tests.tiny_models import make_adapter, make_model

OBJECTIVE = {"entropy_coef": 0.01, "importance_weight_cap": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    return make_model(folder, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base):
    return make_adapter(tmp_path_factory.mktemp("adapter") / "adapter", base=base, seed=3)


def config(base, adapter, **trainer):
    trainer = {"max_grad_norm": 1e9, "learning_rate": 0.0} | trainer
    return ModelConfig.model_validate(
        {
            "model_id": "planner",
            "model_path": str(base),
            "adapter_path": str(adapter),
            "lora": {"rank": 8},
            "objective": OBJECTIVE,
            "trainer": trainer,
        }
    )


class Reference:
    """Loss and gradient by the shortest way there is."""

    def __init__(self, base, adapter):
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        self.model = PeftModel.from_pretrained(plain, str(adapter), is_trainable=True).eval()

    def __call__(self, rows):
        rows = [r for r in rows if r.loss_mask.any()]
        (whole,) = micro_batches(rows, micro_batch_tokens=10**9)
        t = whole.tensors("cpu")
        lengths = torch.tensor([r.trajectory.num_tokens for r in rows])[t["batch_row_B"]]
        mask = torch.arange(t["input_ids_BL"].shape[1]) < lengths[:, None]
        self.model.zero_grad()
        logits = self.model(input_ids=t["input_ids_BL"], attention_mask=mask.long()).logits
        logprobs, entropy = token_logprobs(
            logits[t["row_T"], t["position_T"]], t["target_T"], t["temperature_T"], entropy_gradient=True
        )
        objective = BatchObjective(ObjectiveConfig(**OBJECTIVE), rows, [t], [Frozen()], scale_tokens=7)
        objective.add(0, logprobs, entropy).backward()
        return objective.pg_loss(), flat_gradient(
            {n.replace(".default", ""): p for n, p in self.model.named_parameters() if p.requires_grad}
        )


def ours(learner, rows):
    metrics = learner.update(rows, step=1)
    return metrics["actor/pg_loss"], flat_gradient(learner.policy.parameters)


def assert_same(got, want):
    (loss, gradient), (wanted_loss, wanted_gradient) = got, want
    assert abs(loss - wanted_loss) <= 1e-5 * max(abs(wanted_loss), 0.1)
    assert wanted_gradient.norm() > 0
    assert ((gradient - wanted_gradient).norm() / wanted_gradient.norm()).item() <= 1e-5


VARIANTS = {
    "padded": {"packing": "off"},
    "packed": {"packing": "on", "share_prefixes": False},
    "shared": {"packing": "on"},
    "checkpointed": {"packing": "on", "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def reference(base, adapter):
    return Reference(base, adapter)


@pytest.fixture(scope="module")
def learners(base, adapter):
    return {
        (name, budget): Learner(config(base, adapter, micro_batch_tokens=budget, **variant), seed=0)
        for name, variant in VARIANTS.items()
        for budget in (48, 4096)
    }


@pytest.mark.parametrize("budget", [48, 4096])
@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt_tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3), masks=masks, seed=st.integers(0, 99)
)
def test_loss_and_gradient_are_the_plain_ones(
    reference, learners, variant, budget, prompt_tokens, masks, seed
):
    rows = batch_of(prompt_tokens, [*masks, [1, 0, 1]], seed)
    assert_same(ours(learners[variant, budget], rows), reference(rows))


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_they_are_with_the_longest_row_beside_its_siblings(reference, learners, variant):
    rows = batch_of([30, 5], ["longest", [1], [1] * 40, [0, 0], [1, 1]], seed=1)
    for budget in (48, 4096):
        assert_same(ours(learners[variant, budget], rows), reference(rows))


def test_chunks_of_the_head_change_nothing(reference, learners, monkeypatch):
    monkeypatch.setitem(token_head._CHUNK_LOGITS, "cpu", 1)
    rows = batch_of([30, 5], [[1] * 50, [1], [1] * 40, [1, 1]], seed=2)
    assert_same(ours(learners["shared", 4096], rows), reference(rows))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # torch's tracer warns of what it does itself
def test_compiled_layers_give_the_same(base, adapter, reference):
    learner = Learner(config(base, adapter, compile=True), seed=0)
    for seed, long in enumerate(([1] * 20, [1] * 27, "longest")):  # compiled code must not be one shape's
        rows = batch_of([30, 5 + seed], [long, [1], [0, 0], [1, 0, 1, 1]], seed=seed)
        assert_same(ours(learner, rows), reference(rows))


def test_shared_tokens_are_not_computed_again(base, adapter):
    policy = Policy(config(base, adapter), seed=0)
    rows = batch_of([100], [[1] * 5] * 4, seed=0)
    (one,) = micro_batches(rows, micro_batch_tokens=4096, layout=policy.row_layout)
    assert one.input_ids_BL.shape == (1, 100 + 4 * 4)


def kept_bytes(policy, rows):
    """What a forward pass keeps for its backward pass."""
    found = {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    (one,) = micro_batches(rows, micro_batch_tokens=4096, layout=policy.row_layout)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(one.tensors("cpu"), one.segments)
    return sum(found.values())


def test_of_a_gated_block_gate_and_up_alone_are_kept(base, adapter, monkeypatch):
    rows = batch_of([100], [[1] * 30] * 4, seed=0)
    fused = kept_bytes(Policy(config(base, adapter), seed=0), rows)
    monkeypatch.setattr(forward, "fuse_gated_mlps", lambda *args, **settings: None)
    plain_policy = Policy(config(base, adapter), seed=0)
    settings = AutoModelForCausalLM.from_pretrained(base).config
    num_tokens = 100 + 4 * 29
    saved = 2 * num_tokens * settings.intermediate_size * settings.num_hidden_layers * 4
    assert kept_bytes(plain_policy, rows) - fused == pytest.approx(saved, rel=0.02)


def test_a_block_that_only_looks_gated_stays_as_it_is(base, adapter, monkeypatch):
    plain = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: 2 * plain(self, x))
    policy = Policy(config(base, adapter), seed=0)
    blocks = [m for m in policy._forward._model.modules() if isinstance(m, Qwen3MLP)]
    assert blocks
    assert not any("forward" in vars(block) for block in blocks)


# ------------------------------------------------------------------ the head


def test_logprobs_from_hidden_states_are_those_of_all_logits(monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False).requires_grad_(False)
    monkeypatch.setitem(token_head._CHUNK_LOGITS, "cpu", 16 * 50)  # three chunks
    target, temperature = torch.randint(0, 50, (40,)), torch.rand(40) + 0.5

    def soft_capped(hidden):
        return 5 * torch.tanh(head(hidden) / 5)

    found = []
    for way in ("chunks", "plain"):
        hidden = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if way == "chunks":
            logprobs, entropy = hidden_logprobs(
                hidden, soft_capped, target, temperature, vocab_size=50, entropy_gradient=True
            )
        else:
            logits = soft_capped(hidden)
            logprobs, entropy = token_logprobs(logits, target, temperature, entropy_gradient=True)
        (logprobs * torch.linspace(-1, 1, 40) + 0.3 * entropy).sum().backward()
        found.append((logprobs.detach(), entropy.detach(), hidden.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ what a model or machine can't do


def windowed_model(folder, base):
    settings = AutoModelForCausalLM.from_pretrained(base).config.to_dict()
    settings |= {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 0,
        "layer_types": None,
    }
    Qwen3ForCausalLM(Qwen3Config.from_dict(settings)).save_pretrained(folder)
    return folder


def test_a_model_with_a_sliding_window_is_padded_or_refused(tmp_path, base):
    folder = windowed_model(tmp_path / "windowed", base)
    adapter = make_adapter(tmp_path / "adapter", base=folder, seed=3)
    assert Policy(config(folder, adapter), seed=0).row_layout == "padded"
    with pytest.raises(ConfigError, match="can't be packed \\(layers of type \\['sliding_attention'\\]\\)"):
        Policy(config(folder, adapter, packing="on"), seed=0)


def test_a_model_whose_packed_rows_see_each_other_is_found_out(base, adapter, monkeypatch):
    def leaks(module, query, key, value, mask, packed=None, **settings):
        return packed_attention.attend(module, query, key, value, mask, **settings)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, "repertory_packed", leaks)
    assert Policy(config(base, adapter), seed=0).row_layout == "padded"
    with pytest.raises(ConfigError, match="hidden states of packed rows are off"):
        Policy(config(base, adapter, packing="on"), seed=0)


@pytest.mark.parametrize(
    ("setting", "package"),
    [({"kernels": "liger"}, "liger-kernel"), ({"attention": "flash", "dtype": "bfloat16"}, "flash-attn")],
)
def test_kernels_that_are_not_installed_are_named(base, adapter, setting, package):
    with pytest.raises(ConfigError, match=f"planner.trainer.*: pip install {package}"):
        Policy(config(base, adapter, n_gpus=1, **setting), seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_is_near_and_the_adapter_stays_float32(base, adapter, reference, dtype):
    learner = Learner(config(base, adapter, dtype=dtype, autocast="bfloat16"), seed=0)
    rows = batch_of([30, 5], [[1] * 50, [1], [1] * 40, [1, 1]], seed=2)
    (loss, gradient), (wanted_loss, wanted) = ours(learner, rows), reference(rows)
    assert gradient.dtype == torch.float32
    assert loss == pytest.approx(wanted_loss, rel=0.1)
    assert torch.nn.functional.cosine_similarity(gradient, wanted, dim=0) > 0.95
