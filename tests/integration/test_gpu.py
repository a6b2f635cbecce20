"""What needs an NVIDIA GPU: half precision and the kernels of flash-attn and liger-kernel compute what the
CPU computes in float32, and the CUDA build of vLLM takes our flags. `make gpu-check` runs all of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments import gpu_check
from model_runtime.config import ModelConfig
from model_runtime.devices import visible_gpus
from model_runtime.learner import Learner, prepare_torch
from model_runtime.vllm_environment import find_vllm
from tests.random_batches import batch_of, flat_gradient
from tests.tiny_models import make_adapter, make_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
    pytest.mark.skipif(visible_gpus() == 0, reason="needs an NVIDIA GPU; none is visible here"),
]
HALF = {"dtype": "bfloat16", "autocast": "bfloat16"}
# What half precision leaves of the direction of a tiny model's gradient.
HALF_COSINE = 0.95


def needs(module: str, package: str) -> Any:
    lacks = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(lacks, reason=f"needs the package {package}: pip install {package}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", max_position_embeddings=512)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "adapter", base=base, seed=3)


def gradient(base: Path, adapter: Path, **trainer: Any) -> Tensor:
    section = {"model_id": "planner", "model_path": str(base), "adapter_path": str(adapter)}
    settings = {"learning_rate": 0.0, "max_grad_norm": 1e9} | trainer
    model = ModelConfig.model_validate(
        section | {"lora": {"rank": 8}, "objective": {"entropy_coef": 0.01}, "trainer": settings}
    )
    device = torch.device("cuda", 0) if trainer.get("n_gpus") else torch.device("cpu")
    learner = Learner(model, seed=0, device=device)
    learner.update(batch_of([30, 5], ["longest", [1] * 50, [1], [0, 0], [1, 0, 1]], seed=2), step=1)
    flat = flat_gradient(learner.policy.parameters)
    assert flat.dtype == torch.float32
    return flat.cpu()


@pytest.fixture(scope="module")
def on_the_cpu(base: Path, adapter: Path) -> Tensor:
    return gradient(base, adapter)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("packing", ["on", "off"])
def test_float32_on_a_gpu_gives_the_cpus_gradient(
    base: Path, adapter: Path, on_the_cpu: Tensor, packing: str
) -> None:
    found = gradient(base, adapter, n_gpus=1, packing=packing)
    assert ((found - on_the_cpu).norm() / on_the_cpu.norm()).item() <= 1e-4


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_bfloat16_is_near_and_the_adapter_stays_float32(
    base: Path, adapter: Path, on_the_cpu: Tensor, autocast: str | None
) -> None:
    found = gradient(base, adapter, n_gpus=1, dtype="bfloat16", autocast=autocast)
    assert cosine(found, on_the_cpu) > HALF_COSINE


@needs("flash_attn", "flash-attn")
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_flash_attention_over_packed_rows_is_as_near(
    base: Path, adapter: Path, on_the_cpu: Tensor, share_prefixes: bool
) -> None:
    settings = {"n_gpus": 1, "packing": "on", "share_prefixes": share_prefixes, **HALF}
    found = gradient(base, adapter, attention="flash", **settings)
    assert cosine(found, on_the_cpu) > HALF_COSINE
    assert cosine(found, gradient(base, adapter, **settings)) > HALF_COSINE


@needs("liger_kernel", "liger-kernel")
def test_ligers_kernels_give_torchs_gradient(base: Path, adapter: Path, on_the_cpu: Tensor) -> None:
    found = gradient(base, adapter, n_gpus=1, kernels="liger")
    assert ((found - on_the_cpu).norm() / on_the_cpu.norm()).item() <= 1e-3
    assert cosine(gradient(base, adapter, n_gpus=1, kernels="liger", **HALF), on_the_cpu) > HALF_COSINE


def test_state_comes_back_to_the_gpu(base: Path, adapter: Path) -> None:
    section = {"model_id": "planner", "model_path": str(base), "adapter_path": str(adapter)}
    model = ModelConfig.model_validate(section | {"lora": {"rank": 8}, "trainer": {"n_gpus": 1}})
    device = prepare_torch(model.trainer, model_id="planner", gpu_ids=[])
    first, second = (Learner(model, seed=seed, device=device) for seed in (0, 1))
    rows = batch_of([30, 5], [[1] * 50, [1], [1, 0, 1]], seed=2)
    first.update(rows, step=1)
    second.policy.load(first.policy.tensors())
    second.load_optimizer_state(first.optimizer_state())
    second.load_generator_state(*first.generator_state())
    assert all(p.device.type == "cuda" for p in second.policy.parameters.values())
    for name, state in first.optimizer_state().items():
        np.testing.assert_array_equal(second.optimizer_state()[name], state)


def test_the_cuda_build_of_vllm_serves_swaps_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    environment = find_vllm()
    if environment.build != "cuda":
        pytest.skip(f"vLLM's {environment.build} build is installed: REPERTORY_DEVICE=cuda make install")
    assert gpu_check.main([]) == 0, capsys.readouterr().out
