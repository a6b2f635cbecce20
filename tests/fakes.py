"""Stand-ins and builders shared by the tests."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_runtime.types import MemberKey, Settlement, Trajectory, Turn, trajectory_id


def make_turn(**overrides: Any) -> Turn:
    fields: dict[str, Any] = {
        "turn_index": 0,
        "start": 0,
        "end": 3,
        "request_id": "req-0",
        "version_min": 0,
        "version_max": 0,
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs_mode": "processed_logprobs",
        "rewards": {},
        "started_at": 1.0,
        "ended_at": 2.0,
    }
    return Turn(**fields | overrides)


def make_member(**overrides: Any) -> MemberKey:
    fields: dict[str, Any] = {"group_id": "g0", "group_size": 4, "member_index": 0, "attempt": 0}
    return MemberKey(**fields | overrides)


def make_trajectory(
    *,
    group_id: str = "g0",
    group_size: int = 4,
    member_index: int = 0,
    attempt: int = 0,
    mask: Sequence[int] = (1, 1, 1),
    version: int = 0,
    reward: float | None = None,
    **overrides: Any,
) -> Trajectory:
    """A valid trajectory with one turn per run of ones in `mask`, all sampled by `version`.

    `reward` is the workflow's. Anything else of Trajectory can be overridden by name; arrays that are not
    given follow from `mask` and `version`.
    """
    member = overrides.pop("member", None) or MemberKey(
        group_id=group_id, group_size=group_size, member_index=member_index, attempt=attempt
    )
    sampled = np.asarray(mask, dtype=np.int8)
    ids = np.arange(10, 10 + len(sampled), dtype=np.int32)
    run_id, agent_id = overrides.get("run_id", "run"), overrides.get("agent_id", "planner_agent")
    chain_index = overrides.get("chain_index", 0)
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id(run_id, member, agent_id, chain_index),
        "run_id": run_id,
        "member": member,
        "session_id": f"session-{member.workflow_id}",
        "agent_id": agent_id,
        "model_id": "planner_model",
        "chain_index": chain_index,
        "parent_trajectory_id": None,
        "request_id": "req-0",
        "policy_version": version,
        "policy_version_max": version,
        "partner_versions": {},
        "prompt_ids": np.asarray([1, 2, 3], dtype=np.int32),
        "response_ids": ids,
        "response_mask": sampled,
        "behavior_logprobs": np.where(sampled == 1, np.float32(-0.5), np.float32(0)).astype(np.float32),
        "token_versions": np.where(sampled == 1, version, -1).astype(np.int32),
        "turns": _turns_of(sampled, version),
        "workflow_rewards": {} if reward is None else {"reward": reward},
        "agent_rewards": {},
        "train": True,
        "created_at": 1000.0,
    }
    return Trajectory(**fields | overrides)


def _turns_of(mask: np.ndarray, version: int) -> tuple[Turn, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    spans = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(
        make_turn(
            turn_index=i, start=a, end=b, request_id=f"req-{i}", version_min=version, version_max=version
        )
        for i, (a, b) in enumerate(spans)
    )


def make_settlement(
    *,
    group_id: str = "g0",
    group_size: int = 4,
    member_index: int = 0,
    attempt: int = 0,
    **overrides: Any,
) -> Settlement:
    """A finalized execution with one row of planner_agent."""
    fields: dict[str, Any] = {
        "member": MemberKey(
            group_id=group_id, group_size=group_size, member_index=member_index, attempt=attempt
        ),
        "status": "finalized",
        "num_rows": {"planner_agent": 1},
        "train": True,
    }
    return Settlement(**fields | overrides)


# ------------------------------------------------------------------ S3


def use_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, key: str = "test-key") -> None:
    """Point this process's S3 settings at the endpoint, and away from any profile of the machine."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def create_bucket(endpoint: str, bucket: str) -> None:
    """On a server that checks no signatures."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def read_env_file(path: Path) -> dict[str, str]:
    """`export NAME=value` lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.removeprefix("export ").partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
