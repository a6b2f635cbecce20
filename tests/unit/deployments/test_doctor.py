"""Each check of `repertory doctor`, on a machine made to lack one thing."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from deployments.doctor import Check, run_checks
from model_runtime.config import RunConfig
from model_runtime.processes import free_port
from tests.fake_vllm import make_fake_vllm


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch) -> None:
    """A machine that lacks nothing."""
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(make_fake_vllm(tmp_path / "vllm")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("REPERTORY_ADMIN_KEY", raising=False)


@pytest.fixture
def raw(tmp_path) -> dict:
    """A config that asks for nothing this machine lacks, to be bent by each test."""
    base = tmp_path / "base"
    base.mkdir()
    Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a")).save(str(base / "tokenizer.json"))
    (base / "config.json").write_text(
        json.dumps({"vocab_size": 2, "eos_token_id": 0, "max_position_embeddings": 64})
    )
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": "x"}))
    (base / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "shop_for_doctor.py").write_text("async def run(task, session):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    return {
        "multi_model": {"models": [{"model_id": "m", "model_path": str(base)}]},
        "agent_model_mapping": {"agent": "m"},
        "workflow": {
            "function": "shop_for_doctor:run",
            "python_path": str(tmp_path),
            "tasks": str(tmp_path / "tasks.jsonl"),
        },
        "store": {"url": str(tmp_path / "runs")},
    }


def checks(raw: dict | None = None) -> dict[str, Check]:
    found = run_checks(None if raw is None else RunConfig.model_validate(raw))
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def refused(found: dict[str, Check]) -> list[str]:
    return [check.name for check in found.values() if not check.ok]


def test_a_machine_that_lacks_nothing_passes(raw):
    assert refused(checks(raw)) == []


def test_without_a_config_only_the_machine_is_looked_at():
    found = checks()
    assert refused(found) == []
    assert {"python", "application", "vLLM", "devices", "Prefect API"} <= set(found)
    assert "store" not in found


def test_the_store_probe_leaves_nothing_behind(raw, tmp_path):
    checks(raw)
    left = list((tmp_path / "runs").rglob("*")) if (tmp_path / "runs").exists() else []
    assert [path for path in left if path.is_file()] == []


def test_a_missing_vllm_environment_names_the_install(monkeypatch):
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", "/nowhere/python")
    check = checks()["vLLM"]
    assert not check.ok
    assert "make install" in check.detail + check.fix


@pytest.mark.parametrize(
    ("fields", "message"), [({"version": "0.31.0"}, "tested is 0.32.0"), ({"plugin": False}, "plugin is not")]
)
def test_an_untested_vllm_or_a_missing_plugin_is_found(monkeypatch, tmp_path, fields, message):
    monkeypatch.setenv("REPERTORY_VLLM_PYTHON", str(make_fake_vllm(tmp_path / "other", **fields)))
    check = checks()["vLLM"]
    assert not check.ok
    assert message in check.detail
    assert "make install" in check.fix


def test_an_admin_key_that_every_flow_would_refuse_is_named_before_a_run(monkeypatch):
    monkeypatch.setenv("REPERTORY_ADMIN_KEY", "a-key-long-enough")
    assert checks()["admin key"].ok
    monkeypatch.setenv("REPERTORY_ADMIN_KEY", "short")
    check = checks()["admin key"]
    assert not check.ok
    assert "REPERTORY_ADMIN_KEY must be set to a secret of at least 16 characters" in check.detail
    assert "short" not in check.detail


def test_a_prefect_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    check = checks()["Prefect API"]
    assert not check.ok
    assert "http://127.0.0.1:9/api" in check.detail
    assert "PREFECT_API_URL" in check.fix


def test_a_prefect_server_that_answers_passes(monkeypatch):
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        check = checks()["Prefect API"]
        server.shutdown()
        thread.join()
    assert check.ok, check


def test_a_gateway_port_in_use_is_named(raw):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        raw["gateway"] = {"port": port}
        check = checks(raw)["gateway port"]
    assert not check.ok
    assert str(port) in check.detail
    assert "gateway.port" in check.fix


def test_the_machines_own_address_is_looked_up_for_a_gateway_port(raw, monkeypatch):
    monkeypatch.setenv("REPERTORY_HOST", "127.0.0.1")
    raw["gateway"] = {"host": "auto", "port": free_port()}
    check = checks(raw)["gateway port"]
    assert check.ok, check
    assert "on 127.0.0.1 is free" in check.detail


def test_traces_without_their_packages_are_named_before_a_run(raw, monkeypatch):
    raw["tracing"] = {"endpoint": "http://127.0.0.1:4318"}
    assert checks(raw)["tracing"].ok
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check = checks(raw)["tracing"]
    assert not check.ok
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in check.detail


def test_gpus_this_machine_does_not_have_are_named(raw):
    raw["multi_model"]["models"][0] |= {"rollout": {"n_gpus": 1}}
    check = checks(raw)["m: devices"]
    assert not check.ok
    assert "n_gpus" in check.detail


def test_a_trainer_on_a_gpu_needs_cuda_torch(raw, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("deployments.doctor.version", lambda name: "2.13.0+cpu")
    raw["multi_model"]["models"][0] |= {"trainer": {"n_gpus": 1}}
    check = checks(raw)["m: devices"]
    assert not check.ok
    assert "CPU build" in check.detail


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_model_file_is_named(raw, tmp_path, file):
    (tmp_path / "base" / file).unlink()
    check = checks(raw)["m: files"]
    assert not check.ok
    assert file.split(".")[-1] in check.detail


def test_a_model_without_a_chat_template_is_found(raw, tmp_path):
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    check = checks(raw)["m: files"]
    assert not check.ok
    assert "chat" in check.detail


def test_too_little_memory_is_found(raw, monkeypatch):
    monkeypatch.setattr("deployments.doctor._available_memory", lambda: 2**30)
    check = checks(raw)["memory"]
    assert not check.ok
    assert "1.0 GiB are available" in check.detail


def test_a_workflow_that_can_not_be_imported_and_bad_tasks_are_found(raw, tmp_path):
    raw["workflow"]["function"] = "no_such_module:run"
    Path(raw["workflow"]["tasks"]).write_text("not json\n")
    found = checks(raw)
    assert refused(found) == ["workflow", "tasks"]
    assert found["tasks"].detail.startswith("workflow.tasks:")
    assert "no_such_module" in found["workflow"].detail


def test_an_unreachable_store_is_named(raw, tmp_path):
    (tmp_path / "a-file").write_text("")
    raw["store"] = {"url": str(tmp_path / "a-file")}
    assert refused(checks(raw)) == ["store"]


def test_lora_targets_the_model_does_not_have_are_named_with_those_it_has(raw, tmp_path):
    model = raw["multi_model"]["models"][0] | {"lora": {"target_modules": ["q_proj", "nosuch"]}}
    raw["multi_model"]["models"] = [model]
    names = ("q_proj", "v_proj")
    weights = {f"model.layers.0.self_attn.{name}.weight": np.zeros((2, 2), np.float32) for name in names}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    found = checks(raw)
    assert refused(found) == ["m: files"]
    assert "lora.target_modules names nosuch" in found["m: files"].detail
    assert "q_proj, v_proj" in found["m: files"].fix
    model["lora"] = {"target_modules": ["q_proj"]}
    assert refused(checks(raw)) == []


def test_a_damaged_weight_file_is_named(raw):
    raw["multi_model"]["models"][0]["lora"] = {"target_modules": ["q_proj"]}
    found = checks(raw)["m: files"]
    assert not found.ok
    assert "model.safetensors can't be read" in found.detail
