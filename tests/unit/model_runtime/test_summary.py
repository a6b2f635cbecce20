"""What a run came to, read from its store alone."""

from __future__ import annotations

from typing import Any

import pytest

from model_runtime.config import RunConfig
from model_runtime.coordinator import begin_run
from model_runtime.documents import VersionDocument
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.store import Store
from model_runtime.summary import (
    HeldOut,
    RunSummary,
    mean_reward,
    read_summary,
    serve_command,
    summarize,
    write_held_out,
    write_summary,
)
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Shard
from tests.fakes import make_settlement, make_trajectory

LAYOUT = RunLayout("run-1")
CONFIG = RunConfig.model_validate(
    {
        "multi_model": {
            "models": [
                {"model_id": "planner_model", "model_path": "/models/planner"},
                {"model_id": "judge_model", "model_path": "/models/a judge", "kind": "frozen"},
            ]
        },
        "agent_model_mapping": {"planner_agent": "planner_model", "judge_agent": "judge_model"},
    }
)


def write_execution(store: Store, seq: int, *, reward: float | None, chains: int = 1, **fields: Any) -> None:
    """One group with one member; `success` of its own is given for every chain."""
    success = fields.pop("success", None)
    rows = tuple(
        make_trajectory(
            group_id=f"g{seq}",
            group_size=1,
            reward=reward,
            chain_index=chain,
            created_at=float(seq),
            agent_rewards={} if success is None else {"success": success},
            attempt=fields.get("attempt", 0),
        )
        for chain in range(chains)
    )
    settlement = make_settlement(
        group_id=f"g{seq}", group_size=1, num_rows={"planner_agent": chains}, **fields
    )
    key = LAYOUT.model("planner_model").log_shard("e00001-00001", seq)
    store.put_if_absent(key, encode_shard(Shard(trajectories=rows, settlements=(settlement,))))


def summary_of(store: Store, **failures: str) -> RunSummary:
    begin_run(store, LAYOUT, CONFIG, epoch=1)
    return summarize(store, LAYOUT, CONFIG, started_at=0.0, failures=failures)


def test_rewards_are_those_of_the_first_tenth_and_the_last_quarter(local_store: Store) -> None:
    for seq in range(20):
        write_execution(local_store, seq, reward=1.0 if seq >= 15 else 0.0, success=1.0 if seq >= 1 else 0.0)
    summary = summary_of(local_store)
    assert (summary.workflow_reward.start, summary.workflow_reward.end) == (0.0, 1.0)
    assert summary.num_executions == 20
    agent = summary.agents[0]
    assert (agent.success.start, agent.success.end, agent.success.num_values) == (0.5, 1.0, 20)
    assert summary.agents[1].reward.num_values == 0


def test_an_execution_counts_once_however_many_chains_it_split_into(local_store: Store) -> None:
    write_execution(local_store, 0, reward=0.0, chains=9)
    write_execution(local_store, 1, reward=1.0)
    assert summary_of(local_store).models[0].reward.num_values == 2


def test_attempts_that_did_not_settle_for_good_do_not_count(local_store: Store) -> None:
    write_execution(local_store, 0, reward=0.0, status="retried")
    write_execution(local_store, 1, reward=1.0)
    summary = summary_of(local_store)
    assert (summary.num_executions, summary.workflow_reward.start) == (1, 1.0)


def test_missing_rewards_are_missing_and_not_zero(local_store: Store) -> None:
    write_execution(local_store, 0, reward=None)
    summary = summary_of(local_store)
    assert summary.workflow_reward.start is None
    assert summary.models[0].success.end is None


def test_the_books_stand_in_the_summary_and_balance(local_store: Store) -> None:
    for seq in range(3):
        write_execution(local_store, seq, reward=1.0)
    model = summary_of(local_store).models[0]
    assert model.finalized == 3
    assert model.trained + sum(model.dropped.values()) + model.in_log == 3
    assert model.balanced


def test_versions_count_when_a_sync_of_them_succeeded(local_store: Store) -> None:
    own = LAYOUT.model("planner_model")
    for version in range(3):
        document = VersionDocument(
            version=version,
            step=version,
            epoch=1,
            sha256="0",
            num_bytes=1,
            num_tensors=1,
            config_sha256="0",
            canary=[],
            created_at=0,
        )
        local_store.put(own.version_marker(version), document.to_bytes())
    local_store.put(f"{own.version(3)}/adapter_model.safetensors", b"half")
    syncs = MetricsWriter(local_store, own, "syncs", epoch=1, incarnation=1)
    for row in ({"version": 0}, {"version": 1}, {"version": 1}, {"version": 2, "error": "no replica"}):
        syncs.append(row)
    model = summary_of(local_store).models[0]
    assert (model.versions_published, model.latest_version) == (2, 2)
    assert model.adapter_uri == local_store.uri(own.version(2))


def test_held_out_tasks_are_those_of_this_epoch(local_store: Store) -> None:
    write_held_out(local_store, LAYOUT, 2, HeldOut(num_executions=4, reward=0.5))
    assert summary_of(local_store).held_out is None
    write_held_out(local_store, LAYOUT, 1, HeldOut(num_executions=4, reward=0.75))
    assert summary_of(local_store).held_out == HeldOut(num_executions=4, reward=0.75)


def test_a_failed_model_is_named_with_its_reason(local_store: Store) -> None:
    summary = summary_of(local_store, planner_model="Failed: out of memory")
    assert summary.state == "failed"
    assert summary.models[0].failure == "Failed: out of memory"
    assert summary.headline.startswith("run-1 failed: workflow reward – → –")


def test_a_summary_reads_back_as_it_was_written(local_store: Store) -> None:
    assert read_summary(local_store, LAYOUT) is None
    summary = summary_of(local_store)
    write_summary(local_store, LAYOUT, summary)
    assert read_summary(local_store, LAYOUT) == summary


def test_the_serve_command_serves_the_adapter_under_the_models_id() -> None:
    model, judge = CONFIG.models
    local = serve_command(model, "run-1", "file:///runs/v3", serve="vllm serve")
    assert local == (
        "vllm serve /models/planner --enable-lora --max-lora-rank 16 --lora-modules planner_model=/runs/v3"
    )
    remote = serve_command(model, "run-1", "s3://bucket/runs/v3", serve="vllm serve")
    assert remote.startswith(
        "repertory export run-1 planner_model --to ./planner_model-adapter && vllm serve"
    )
    assert (
        serve_command(judge, "run-1", None, serve="vllm serve")
        == "vllm serve '/models/a judge' --served-model-name judge_model"
    )


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"agent/a/reward/mean": 0.5, "agent/b/reward/mean": 1.0, "critic/score/mean": 0.1}, 0.75),
        ({"critic/score/mean": 0.1}, 0.1),
        ({"agent/a/reward/mean": None}, None),
        ({}, None),
    ],
)
def test_a_models_mean_reward_is_over_its_agents(metrics: dict[str, Any], expected: float | None) -> None:
    assert mean_reward(metrics) == expected
