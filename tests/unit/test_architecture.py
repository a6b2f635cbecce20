"""Who may import whom. The rules keep each process small and each part replaceable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("deployments", "flows", "tasks", "gateway", "model_runtime")
MAY_USE = {
    "deployments": {"flows", "tasks", "model_runtime"},
    "flows": {"tasks", "model_runtime"},
    "tasks": {"model_runtime"},
    "gateway": {"model_runtime"},
    "model_runtime": set(),
}
GATEWAY_MAY_USE = {"types", "config", "errors", "store", "layout", "documents", "protocol", "trajectory_log"}
GATEWAY_MAY_USE |= {"llm_client", "workspace", "gateway_config", "patient_store", "tracing", "removed_log"}
# The trainer process's own modules, and what runs inside vLLM.
_TRAINER = (
    "trainer",
    "learner",
    "objective",
    "policy",
    "losses",
    "correction",
    "segments",
    "adapters",
    "batching",
    "forward",
    "gated_mlp",
    "lora_linear",
    "packed_attention",
    "token_head",
    "data_parallel",
    "trainer_rank",
    "supervised",
    "supervised_data",
)
TRAINER = {f"model_runtime.{m}" for m in _TRAINER}
PLUGIN = {"model_runtime.vllm_plugin"}
# third party → the packages or modules that may import it
ONLY_IN = {
    "prefect": {"flows", "tasks", "deployments"},
    "torch": TRAINER | PLUGIN,
    "transformers": TRAINER,
    "peft": TRAINER,
    "vllm": PLUGIN,
    "opentelemetry": {"model_runtime.tracing"},
}


def imports() -> Iterator[tuple[str, str]]:
    """(importing module, imported module) of every import in our packages, lazy ones too."""
    for path in (p for package in OURS for p in (ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: write absolute imports"
                yield module, node.module or ""
                # `from model_runtime import store` names the module in its aliases.
                if node.module in OURS:
                    yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


IMPORTS = sorted(set(imports()))


def broken(importer: str, imported: str) -> bool:
    package, target = importer.split(".")[0], imported.split(".")[0]
    if target in OURS and target != package:
        if target not in MAY_USE[package]:
            return True
        return package == "gateway" and "." in imported and imported.split(".")[1] not in GATEWAY_MAY_USE
    allowed = ONLY_IN.get(target)
    return allowed is not None and not {package, importer} & allowed


def test_the_import_rules_hold() -> None:
    assert [f"{a} imports {b}" for a, b in IMPORTS if broken(a, b)] == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("tasks.publish", "flows.rollout"),
        ("model_runtime.store", "gateway.app"),
        ("gateway.router", "model_runtime.trainer"),
        ("gateway.router", "prefect"),
        ("model_runtime.groups", "torch.nn"),
        ("model_runtime.rollout_server", "vllm"),
        ("gateway.router", "opentelemetry.trace"),
    ],
)
def test_the_rules_find_what_breaks_them(importer: str, imported: str) -> None:
    assert broken(importer, imported)


@pytest.mark.parametrize("module", ["gateway.app", "model_runtime.config", "flows.multi_model_training"])
def test_what_need_not_compute_loads_no_torch_and_no_vllm(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'vllm', 'transformers', 'peft'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_nothing_waits_with_a_function_that_loses_cancels() -> None:
    """asyncio.wait_for of Python 3.11 drops a cancel that comes with the answer; asyncio.timeout does not."""
    users = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in OURS
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert users == []
