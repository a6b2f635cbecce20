"""A training step by the shortest way there is: transformers and PEFT as they come, all logits, one padded
pass. What every other way is held to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runtime.batching import micro_batches
from model_runtime.config import ModelConfig
from model_runtime.learner import Learner
from model_runtime.losses import token_logprobs
from model_runtime.objective import BatchObjective, Frozen
from model_runtime.objective_config import ObjectiveConfig
from tests.random_batches import flat_gradient

# Few terms, so that none is what is left of two others.
OBJECTIVE = {"entropy_coef": 0.01, "importance_weight_cap": None}

LossAndGradient = tuple[float, Tensor]


def section(base: Path, adapter: Path, **trainer: Any) -> dict[str, Any]:
    """Of a model that computes gradients and does not move."""
    return {
        "model_id": "planner",
        "model_path": str(base),
        "adapter_path": str(adapter),
        "lora": {"rank": 8},
        "objective": OBJECTIVE,
        "trainer": {"max_grad_norm": 1e9, "learning_rate": 0.0} | trainer,
    }


def config(base: Path, adapter: Path, **trainer: Any) -> ModelConfig:
    return ModelConfig.model_validate(section(base, adapter, **trainer))


class PlainStep:
    """Loss and gradient of a batch by the shortest way."""

    def __init__(self, base: Path, adapter: Path) -> None:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        self.model = PeftModel.from_pretrained(plain, str(adapter), is_trainable=True).eval()

    def __call__(self, rows: Sequence[Any]) -> LossAndGradient:
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


def computed_by(learner: Learner, rows: Sequence[Any]) -> LossAndGradient:
    metrics = learner.update(rows, step=1)
    return metrics["actor/pg_loss"], flat_gradient(learner.policy.parameters)


def assert_same(got: LossAndGradient, want: LossAndGradient, *, way: str = "") -> None:
    """Within 1e-5, relative."""
    (loss, gradient), (wanted_loss, wanted_gradient) = got, want
    assert wanted_gradient.norm() > 0
    assert abs(loss - wanted_loss) <= 1e-5 * max(abs(wanted_loss), 0.1), way
    assert ((gradient - wanted_gradient).norm() / wanted_gradient.norm()).item() <= 1e-5, way
