"""The same run with everything durable in a real S3 store."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_runtime.config import StoreConfig
from model_runtime.config_file import load_config
from model_runtime.store import open_store
from tests.e2e.quickstart import export, run_up, summary_of, write_config
from tests.exactness import check_exactness

pytestmark = [pytest.mark.e2e, pytest.mark.real_s3, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_a_run_on_s3_is_exact_and_its_adapter_is_exported(
    tmp_path: Path, real_s3_store_config: StoreConfig
) -> None:
    config_path = write_config(
        tmp_path,
        model={"max_steps": 4, "batch_size": 4, "save_every": 2},
        workflow={"group_size": 4, "max_concurrent_executions": 32},
        store={"url": f"{real_s3_store_config.url}/{tmp_path.name}"},
    )
    summary = summary_of(run_up(tmp_path, config_path, "--run-id", "on-s3"))
    config = load_config(config_path)

    assert summary.summary_uri.startswith("s3://")
    assert all(model.balanced and model.versions_published >= 3 for model in summary.models)
    for model in config.models:
        report = check_exactness(open_store(config.store), "on-s3", model)
        assert report.max_error <= 1e-4

    exported = tmp_path / "adapter"
    export(tmp_path, config.store.url, "on-s3", "solver_model", exported)
    base = AutoModelForCausalLM.from_pretrained(config.model("solver_model").model_path)
    tuned = PeftModel.from_pretrained(base, str(exported))
    assert any(p.abs().max() > 0 for name, p in tuned.named_parameters() if "lora_B" in name)
