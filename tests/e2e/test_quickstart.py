"""The main job, end to end, on real vLLM and a real Prefect server."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_runtime.config import load_config
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.store import open_store
from tests.e2e.quickstart import below_the_bar, run_up, summary_of, write_config
from tests.exactness import check_exactness

pytestmark = pytest.mark.e2e

LEARNING_LIMIT_S = 1200


@pytest.mark.timeout(900)
def test_a_short_run_is_exact_balanced_and_its_adapters_load(tmp_path: Path) -> None:
    config_path = write_config(
        tmp_path,
        model={"max_steps": 4, "batch_size": 4, "save_every": 2},
        workflow={"group_size": 4, "max_concurrent_executions": 32},
    )
    summary = summary_of(run_up(tmp_path, config_path, "--run-id", "short"))
    config = load_config(config_path)
    store = open_store(config.store)

    assert summary.state == "completed"
    assert summary.held_out is not None
    assert summary.held_out.reward is not None
    for model in summary.models:
        assert model.balanced
        assert model.finalized == model.trained + sum(model.dropped.values()) + model.in_log
        assert model.trained > 0
        assert model.versions_published >= 3
    for model in config.models:
        report = check_exactness(store, "short", model)
        assert report.num_trajectories > 0
        assert len(report.versions) >= 3
        assert report.max_error <= 1e-4
        syncs = read_metrics(store, RunLayout("short").model(model.model_id), "syncs")
        assert max(row["canary_max_diff"] for row in syncs) <= 1e-4
    # search_agent's tool results stand in its trajectories, masked, between two sampled turns
    solver = check_exactness(store, "short", config.model("solver_model"))
    assert solver.max_turns >= 2
    assert solver.num_masked_context > 0

    exported = tmp_path / "adapter"
    _export(tmp_path, config_path, exported)
    base = AutoModelForCausalLM.from_pretrained(config.model("planner_model").model_path)
    tuned = PeftModel.from_pretrained(base, str(exported))
    assert any(p.abs().max() > 0 for name, p in tuned.named_parameters() if "lora_B" in name)


def _export(folder: Path, config_path: Path, into: Path) -> None:
    import os
    import subprocess
    import sys

    store = load_config(config_path).store.url
    command = [sys.executable, "-m", "deployments.cli", "export", "short", "planner_model", "--to", str(into)]
    environment = os.environ | {"REPERTORY_HOME": str(folder / "home")}
    result = subprocess.run([*command, "--store", store], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(LEARNING_LIMIT_S)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_policies_learn(tmp_path: Path, seed: int) -> None:
    summary = summary_of(run_up(tmp_path, write_config(tmp_path, seed=seed), limit_s=LEARNING_LIMIT_S))
    assert below_the_bar(summary) == []


@pytest.mark.slow
@pytest.mark.timeout(LEARNING_LIMIT_S)
def test_nothing_is_learned_at_learning_rate_zero(tmp_path: Path) -> None:
    config = write_config(tmp_path, model={"trainer": {"learning_rate": 0.0}})
    summary = summary_of(run_up(tmp_path, config, limit_s=LEARNING_LIMIT_S))
    missing = " ".join(below_the_bar(summary))
    assert "workflow reward" in missing
    assert "held-out" in missing
