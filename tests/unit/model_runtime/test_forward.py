"""The forward pass by its settings: the numbers of the plain padded way (over random batches:
tests/integration/test_ways_of_a_step.py), what it keeps, and what a model or machine can't do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from model_runtime import forward, packed_attention, token_head
from model_runtime.batching import micro_batches
from model_runtime.errors import ConfigError
from model_runtime.learner import Learner
from model_runtime.losses import token_logprobs
from model_runtime.policy import Policy
from model_runtime.token_head import hidden_logprobs
from tests.plain_step import PlainStep, assert_same, computed_by, config
from tests.random_batches import LONGEST, batch_of
from tests.tiny_models import make_adapter, make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    return make_model(folder, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, base):
    return make_adapter(tmp_path_factory.mktemp("adapter") / "adapter", base=base, seed=3)


VARIANTS = {
    "padded": {"packing": "off"},
    "packed": {"packing": "on", "share_prefixes": False},
    "shared": {"packing": "on"},
    "checkpointed": {"packing": "on", "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def reference(base, adapter):
    return PlainStep(base, adapter)


@pytest.fixture(scope="module")
def learners(base, adapter):
    return {
        (name, budget): Learner(config(base, adapter, micro_batch_tokens=budget, **variant), seed=0)
        for name, variant in VARIANTS.items()
        for budget in (48, 4096)
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_longest_row_beside_its_siblings_gives_the_plain_loss_and_gradient(reference, learners, variant):
    rows = batch_of([30, 5], ["longest", [1], [1] * 40, [0, 0], [1, 1]], seed=1)
    for budget in (48, 4096):
        assert_same(computed_by(learners[variant, budget], rows), reference(rows))


def test_chunks_of_the_head_change_nothing(reference, learners, monkeypatch):
    monkeypatch.setitem(token_head._CHUNK_LOGITS, "cpu", 1)
    rows = batch_of([30, 5], [[1] * 50, [1], [1] * 40, [1, 1]], seed=2)
    assert_same(computed_by(learners["shared", 4096], rows), reference(rows))


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


def test_no_layer_has_functions_of_its_own(base, adapter):
    """torch.compile would compile each for itself, and give up after eight."""
    policy = Policy(config(base, adapter), seed=0)
    assert not [name for name, m in policy._forward._model.named_modules() if "forward" in vars(m)]


def test_a_block_that_only_looks_gated_stays_as_it_is(base, adapter, monkeypatch):
    plain = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: 2 * plain(self, x))
    policy = Policy(config(base, adapter), seed=0)
    blocks = [m for m in policy._forward._model.modules() if isinstance(m, Qwen3MLP)]
    assert blocks
    assert all(type(block) is Qwen3MLP for block in blocks)


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
    (loss, gradient), (wanted_loss, wanted) = computed_by(learner, rows), reference(rows)
    assert gradient.dtype == torch.float32
    assert loss == pytest.approx(wanted_loss, rel=0.1)
    assert torch.nn.functional.cosine_similarity(gradient, wanted, dim=0) > 0.95
