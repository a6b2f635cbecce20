"""Strict on-policy training on a real vLLM: what is trained was sampled by the very policy that is updated,
so the ratio of new to old probabilities is 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_runtime.adapters import AdapterFiles
from model_runtime.config import ModelConfig
from model_runtime.layout import RunLayout, writer_id
from model_runtime.learner import Learner
from model_runtime.llm_client import Generation, LLMServerClient
from model_runtime.objective import BatchObjective
from model_runtime.training_queue import TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Int8Array, Shard, Trajectory
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore
from tests.served import PROMPT, sample

LAYOUT = RunLayout("run").model("tiny")
TEMPERATURES = (1.0, 0.7, 1.0, 1.3)  # one for each member


def model(base: Path, old_logprobs: str) -> ModelConfig:
    strict = {"strict_on_policy": True, "trigger_parameter_sync_step": 1, "staleness_threshold": 0}
    return ModelConfig.model_validate(
        {
            "model_id": "tiny",
            "model_path": str(base),
            "lora": {"rank": 8, "alpha": 16},
            "batch_size": 1,
            "trainer": {"learning_rate": 2e-2, "micro_batch_tokens": 128},
            "async_training": strict,
            "objective": {"old_logprobs": old_logprobs},
        }
    )


def row(answer: Generation, *, member: int, version: int) -> Trajectory:
    mask: Int8Array = np.ones(len(answer.token_ids), dtype=np.int8)
    trajectory = make_trajectory(
        group_id=f"g{version}",
        member_index=member,
        mask=mask.tolist(),
        version=version,
        reward=float(member % 2),
        prompt_ids=np.asarray(PROMPT, dtype=np.int32),
        response_ids=np.asarray(answer.token_ids, dtype=np.int32),
        behavior_logprobs=np.asarray(answer.logprobs, dtype=np.float32),
    )
    (turn,) = trajectory.turns
    return replace(trajectory, turns=(replace(turn, temperature=TEMPERATURES[member]),))


def write_adapter(folder: Path, files: AdapterFiles) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(files.weights)
    (folder / "adapter_config.json").write_bytes(files.config)
    return folder


def ratios_of(learner: Learner, batch: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Train the batch; ratio of every trained token, as the loss took it."""
    seen = []
    with monkeypatch.context() as patch:
        pg_loss = BatchObjective.pg_loss
        patch.setattr(
            BatchObjective,
            "pg_loss",
            lambda objective: (seen.append(objective.seen()), pg_loss(objective))[1],
        )
        learner.update(batch.rows, step=batch.step)
    (found,) = seen
    return torch.cat([loss.log_ratio_T for loss in found.losses]).exp()


@pytest.mark.integration
@pytest.mark.parametrize("old_logprobs", ["behavior", "recomputed"])
async def test_the_ratio_is_1_at_every_version(
    vllm_server: Any,
    vllm_client: LLMServerClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old_logprobs: str,
) -> None:
    config = model(vllm_server.base, old_logprobs)
    learner, store = Learner(config, seed=0), MemoryStore()
    queue = TrainingQueue(store, LAYOUT, config, epoch=1, resume=None)
    before = learner.policy.tensors()
    for version in range(3):
        name = f"{old_logprobs}@v{version}"
        folder = write_adapter(tmp_path / f"v{version}", learner.policy.adapter_files())
        await vllm_client.load_adapter(name, str(folder), timeout_s=30)
        answers = [await sample(vllm_client, name, temperature=t) for t in TEMPERATURES]
        await vllm_client.unload_adapter(name)
        rows = [row(answer, member=i, version=version) for i, answer in enumerate(answers)]
        settlements = tuple(make_settlement(group_id=f"g{version}", member_index=i) for i in range(4))
        store.put(LAYOUT.log_shard(writer_id(1, 1), version), encode_shard(Shard(tuple(rows), settlements)))
        queue.poll()
        batch = queue.next_batch(
            version + 1, published_version=version, training_version=version, oldest_open_version=None,
            final=False,
        )  # fmt: skip
        assert batch is not None
        ratio_T = ratios_of(learner, batch, monkeypatch)
        queue.consume(batch)
        assert len(ratio_T) == 4 * 64
        if old_logprobs == "recomputed":
            assert torch.equal(ratio_T, torch.ones_like(ratio_T))
        else:
            assert (ratio_T - 1).abs().max() <= 1e-4
    moved = max(float(np.abs(before[name] - t).max()) for name, t in learner.policy.tensors().items())
    assert moved > 1e-3, "three different policies were compared"
