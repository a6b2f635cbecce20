"""A model's training log and mailbox as the gateway and its runtime would leave them, for trainer tests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model_runtime.adapters import version_document
from model_runtime.checkpoints import load_latest_checkpoint
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.documents import CheckpointDocument
from model_runtime.layout import ModelLayout, RunLayout, writer_id
from model_runtime.metrics import read_metrics
from model_runtime.protocol import CONTROL_FILE, STATUS_FILE, TrainerControl, TrainerSpec, TrainerStatus
from model_runtime.store import Store, open_store
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import MemberKey, Settlement, Shard, Trajectory, Turn, trajectory_id

MODEL_ID = "planner"
AGENT_ID = "planner_agent"
GROUP_SIZE = 4
WALL_CLOCK = ("timing_s/", "perf/", "trainer/idle_ratio", "time", "epoch")


@dataclass
class TrainingFolder:
    """One run of one model in a folder: its config, its log, and the mailbox of its trainer."""

    root: Path
    model_path: Path
    model: dict[str, Any] = field(default_factory=dict)  # overrides of the model's section
    run: dict[str, Any] = field(default_factory=dict)  # further sections of the run
    seed: int = 0
    epoch: int = 1
    incarnation: int = 1
    gpu_ids: list[int] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        section = {
            "model_id": MODEL_ID,
            "model_path": str(self.model_path),
            "lora": {"rank": 8, "alpha": 16},
            "trainer": {"learning_rate": 5e-3, "micro_batch_tokens": 256},
            "async_training": {"trigger_parameter_sync_step": 2, "max_staleness": 1000},
            "batch_size": 2,
            "save_every": 3,
        }
        return parse_config(
            {
                "multi_model": {"models": [_merged(section, self.model)]},
                "agent_model_mapping": {AGENT_ID: MODEL_ID},
                "store": {"url": str(self.root / "store")},
                "seed": self.seed,
            }
            | self.run
        )

    @property
    def spec(self) -> TrainerSpec:
        return TrainerSpec(
            run_id="run",
            model_id=MODEL_ID,
            epoch=self.epoch,
            incarnation=self.incarnation,
            config=self.config.model_dump(mode="json"),
            mailbox=str(self.mailbox),
            gpu_ids=self.gpu_ids,
        )

    @property
    def mailbox(self) -> Path:
        path = self.root / "mailbox"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def store(self) -> Store:
        return open_store(self.config.store)

    @property
    def layout(self) -> ModelLayout:
        return RunLayout("run").model(MODEL_ID)

    def write_spec(self) -> Path:
        path = self.root / "spec.json"
        path.write_text(self.spec.model_dump_json())
        return path

    def tell(self, **control: Any) -> None:
        temporary = self.mailbox / ".control"
        temporary.write_text(TrainerControl(**control).model_dump_json())
        os.replace(temporary, self.mailbox / CONTROL_FILE)

    def status(self) -> TrainerStatus | None:
        try:
            return TrainerStatus.model_validate_json((self.mailbox / STATUS_FILE).read_bytes())
        except FileNotFoundError:
            return None

    def write_groups(self, groups: Sequence[Sequence[Trajectory]], *, seq: int = 0) -> None:
        """One shard; each group's rows are its members in order."""
        rows = [row for group in groups for row in group]
        settlements = [
            Settlement(member=row.member, status="finalized", num_rows={AGENT_ID: 1}, train=row.train)
            for row in rows
        ]
        shard = Shard(tuple(rows), tuple(settlements))
        self.store.put_if_absent(self.layout.log_shard(writer_id(1, 1), seq), encode_shard(shard))

    def batches(self) -> list[dict[str, Any]]:
        keys = self.store.list(self.layout.batches())
        return [json.loads(self.store.get(key)) for key in keys]


def outcome(folder: TrainingFolder) -> dict[str, Any]:
    """Everything a run leaves that must not depend on crashes."""
    store, layout = folder.store, folder.layout
    checkpoint = load_latest_checkpoint(store, layout)
    assert checkpoint is not None
    numbers = [int(name[1:]) for name in store.children(layout.versions())]
    versions = {n: version_document(store, layout, n) for n in numbers}
    rows = read_metrics(store, layout, "steps")
    return {
        "versions": {n: (v.sha256, v.config_sha256, v.step, v.canary) for n, v in versions.items()},
        "batches": [
            {k: v for k, v in batch.items() if k not in ("created_at", "epoch")} for batch in folder.batches()
        ],
        "checkpoint": {
            name: getattr(checkpoint.document, name)
            for name in CheckpointDocument.model_fields
            if name not in ("created_at", "epoch")
        },
        "metrics": [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows],
    }


def save_manifest(store: Store, layout: ModelLayout, step: int, *, version: int) -> None:
    """The marker of a checkpoint without its files, as who only looks for checkpoints reads it."""
    document = CheckpointDocument(
        step=step,
        epoch=1,
        version=version,
        files={},
        low_water={},
        consumed=[],
        closed_groups=[],
        totals={},
        seed=0,
        created_at=0.0,
    )
    store.put(layout.checkpoint_marker(step), document.to_bytes())


def make_groups(
    count: int, *, first: int = 0, seed: int = 0, version: int = 0, flat: bool = False
) -> list[list[Trajectory]]:
    """Groups whose members differ in reward (unless `flat`), in length, and in what the policy said."""
    rng = np.random.default_rng([seed, first])
    return [
        [
            sampled_row(
                rng,
                group_id=f"g{number}",
                member_index=member,
                version=version,
                reward=0.0 if flat else float(member % 2),
            )
            for member in range(GROUP_SIZE)
        ]
        for number in range(first, first + count)
    ]


def sampled_row(
    rng: np.random.Generator,
    *,
    group_id: str = "g0",
    member_index: int = 0,
    version: int = 0,
    reward: float = 1.0,
    temperature: float = 1.0,
    num_turns: int | None = None,
) -> Trajectory:
    """A trajectory of random tokens: one to three turns with context between them."""
    turns, mask = [], []
    for index in range(num_turns or int(rng.integers(1, 4))):
        mask += [0] * (3 if index else 0)
        start, length = len(mask), int(rng.integers(1, 8))
        mask += [1] * length
        turns.append(_turn(index, start, len(mask), version=version, temperature=temperature))
    mask_R = np.asarray(mask, dtype=np.int8)
    member = MemberKey(group_id=group_id, group_size=GROUP_SIZE, member_index=member_index, attempt=0)
    logprobs_R = (-rng.exponential(1.5, size=len(mask)) * mask_R).astype(np.float32)
    return Trajectory(
        trajectory_id=trajectory_id("run", member, AGENT_ID, 0),
        run_id="run",
        member=member,
        session_id=f"s-{group_id}-{member_index}",
        agent_id=AGENT_ID,
        model_id=MODEL_ID,
        chain_index=0,
        parent_trajectory_id=None,
        request_id=turns[-1].request_id,
        policy_version=version,
        policy_version_max=version,
        partner_versions={},
        prompt_ids=rng.integers(3, 384, size=int(rng.integers(4, 20))).astype(np.int32),
        response_ids=rng.integers(3, 384, size=len(mask)).astype(np.int32),
        response_mask=mask_R,
        behavior_logprobs=np.where(mask_R == 1, logprobs_R, np.float32(0)),
        token_versions=np.where(mask_R == 1, version, -1).astype(np.int32),
        turns=tuple(turns),
        workflow_rewards={"reward": reward},
        agent_rewards={},
        train=True,
        created_at=1000.0,
    )


def _turn(index: int, start: int, end: int, *, version: int, temperature: float) -> Turn:
    return Turn(
        turn_index=index,
        start=start,
        end=end,
        request_id=f"req-{index}",
        version_min=version,
        version_max=version,
        finish_reason="stop",
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        logprobs_mode="processed_logprobs",
        rewards={},
        started_at=1.0,
        ended_at=2.0,
    )


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merged(merged[key], value) if isinstance(value, dict) and key in merged else value
    return merged
