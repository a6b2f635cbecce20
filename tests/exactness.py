"""The reference every recorded logprob is held against: transformers + PEFT in float32, on the exact ids,
under the adapter version that sampled each token, loaded from the store by PEFT's own loader."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_runtime.config import ModelConfig
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Trajectory


@dataclass
class ExactnessReport:
    num_trajectories: int = 0
    num_tokens: int = 0
    max_error: float = 0.0
    versions: set[int] = field(default_factory=set)
    max_turns: int = 0
    num_masked_context: int = 0


def read_log(store: Store, run_id: str, model_id: str) -> list[Trajectory]:
    """Every trajectory of a model's log, in log order."""
    layout = RunLayout(run_id).model(model_id)
    keys = [k for k in store.list(layout.log_writers()) if k.endswith(".parquet")]
    return [t for key in keys for t in decode_shard(store.get(key), source=key).trajectories]


def check_exactness(store: Store, run_id: str, model: ModelConfig) -> ExactnessReport:
    """Recompute every sampled token of a model's log and report the largest difference."""
    report = ExactnessReport()
    trajectories = read_log(store, run_id, model.model_id)
    by_version: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        for version in np.unique(trajectory.token_versions[trajectory.response_mask == 1]):
            by_version[int(version)].append(trajectory)
    for version, rows in sorted(by_version.items()):
        policy = _load(store, run_id, model, version)
        for row in rows:
            sampled = (row.response_mask == 1) & (row.token_versions == version)
            error = np.abs(recompute(policy, row)[sampled] - row.behavior_logprobs[sampled]).max()
            report.max_error = max(report.max_error, float(error))
            report.num_tokens += int(sampled.sum())
            report.max_turns = max(report.max_turns, len(row.turns))
            report.num_masked_context += int((row.response_mask == 0).sum())
        report.versions.add(version)
    report.num_trajectories = len(trajectories)
    return report


def recompute(policy: torch.nn.Module, row: Trajectory) -> np.ndarray:
    """Logprob of each response token at the temperature of its turn. [R]"""
    ids = np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
    temperature_R = np.ones(len(row.response_ids), dtype=np.float32)
    for turn in row.turns:
        temperature_R[turn.start : turn.end] = turn.temperature
    with torch.inference_mode():
        logits = policy(input_ids=torch.from_numpy(ids)[None]).logits[0, len(row.prompt_ids) - 1 : -1].float()
        logprobs = (logits / torch.from_numpy(temperature_R)[:, None]).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(row.response_ids.astype(np.int64))[:, None])[:, 0].numpy()


def _load(store: Store, run_id: str, model: ModelConfig, version: int) -> torch.nn.Module:
    folder = RunLayout(run_id).model(model.model_id).version(version)
    base = AutoModelForCausalLM.from_pretrained(model.model_path, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as local:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (Path(local) / name).write_bytes(store.get(f"{folder}/{name}"))
        return PeftModel.from_pretrained(base, local).eval()
