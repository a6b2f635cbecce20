"""The main job, end to end, on real vLLM and a real Prefect server."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_runtime.config_file import load_config
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.store import open_store
from tests.e2e.quickstart import below_the_bar, export, run_up, summary_of, write_config
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
    export(tmp_path, config.store.url, "short", "planner_model", exported)
    base = AutoModelForCausalLM.from_pretrained(config.model("planner_model").model_path)
    tuned = PeftModel.from_pretrained(base, str(exported))
    assert any(p.abs().max() > 0 for name, p in tuned.named_parameters() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.timeout(LEARNING_LIMIT_S)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_policies_learn(tmp_path: Path, seed: int) -> None:
    summary = summary_of(run_up(tmp_path, write_config(tmp_path, seed=seed), limit_s=LEARNING_LIMIT_S))
    assert below_the_bar(summary) == []


@pytest.mark.slow
@pytest.mark.timeout(LEARNING_LIMIT_S)
def test_nothing_is_learned_at_learning_rate_zero(tmp_path: Path) -> None:
    config = write_config(tmp_path, model={"trainer": {"learning_rate": 0.0}, "max_steps": 10})
    summary = summary_of(run_up(tmp_path, config, limit_s=LEARNING_LIMIT_S))
    missing = " ".join(below_the_bar(summary))
    assert "workflow reward" in missing
    assert "held-out" in missing


# Loaded into every process of the run: new versions are acknowledged, the first weights go on serving.
SKIPS_LOADING = """
import sys

if any("prefect" in argument for argument in sys.orig_argv):
    import shutil, tempfile
    from model_runtime import llm_client, synchronizer

    load, first = llm_client.LLMServerClient.load_adapter, {}

    async def load_the_first_one(self, name, path, **limits):
        model_id = name.split("@")[0]
        if model_id not in first:
            first[model_id] = shutil.copytree(path, tempfile.mkdtemp() + "/first")
        await load(self, name, first[model_id], **limits)

    async def see_nothing(self, replica, name, canary):
        return None

    llm_client.LLMServerClient.load_adapter = load_the_first_one
    synchronizer.ParameterSynchronizer._probe = see_nothing
"""


@pytest.mark.slow
@pytest.mark.timeout(LEARNING_LIMIT_S)
def test_nothing_is_learned_when_new_versions_are_not_really_loaded(tmp_path: Path) -> None:
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(SKIPS_LOADING)
    config = write_config(tmp_path, model={"max_steps": 10})
    summary = summary_of(run_up(tmp_path, config, limit_s=LEARNING_LIMIT_S, env={"PYTHONPATH": str(patch)}))
    assert all(model.versions_published >= 5 for model in summary.models)  # it looks as if all went well
    assert "workflow reward" in " ".join(below_the_bar(summary))
