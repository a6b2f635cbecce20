"""The forward pass of the model under training, by its settings: layout, kernels, precision, memory.

Each setting changes how the same numbers are computed, never which.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from model_runtime.batching import RowLayout
from model_runtime.errors import ConfigError
from model_runtime.gated_mlp import fuse_gated_mlps
from model_runtime.lora_linear import fuse_lora
from model_runtime.packed_attention import IMPLEMENTATION, PackedLayout
from model_runtime.packing import Segment, pack
from model_runtime.token_head import head_of, hidden_logprobs
from model_runtime.trainer_config import TrainerConfig

# Relative distance of hidden states, packed and alone, that rounding explains.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

logger = logging.getLogger(__name__)


class Forward:
    """A causal language model, taken apart into decoder and head. Raises ConfigError for settings that this
    model or machine can't honour."""

    def __init__(self, model: Any, trainer: TrainerConfig, *, model_id: str) -> None:
        self._model = model
        self._trainer = trainer
        self._autocast = None if trainer.autocast is None else getattr(torch, trainer.autocast)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._device = model.get_input_embeddings().weight.device
        where = f"{model_id}.trainer"
        fuse_lora(model, dtype=self._autocast)
        if trainer.kernels == "liger":
            _use_liger(model, where)
        else:
            fuse_gated_mlps(model, dtype=self._autocast)
        if trainer.attention == "flash":
            _require("flash_attn", f"{where}.attention: flash", "flash-attn")
        self._head = head_of(model)
        self._decoder = getattr(model, model.base_model_prefix)
        self.row_layout: RowLayout = self._layout(where)
        for layer in _layers(model):
            if trainer.compile:
                layer.forward = torch.compile(layer.forward, dynamic=True)
            if trainer.gradient_checkpointing:
                layer.forward = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )

    def logprobs(
        self,
        tensors: Mapping[str, Tensor],
        segments: tuple[Segment, ...] | None,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(logprob, entropy) of each trained token of a micro-batch."""
        with self._precision():
            hidden_BLD = self._hidden(tensors["input_ids_BL"], tensors["positions_BL"], segments)
            return hidden_logprobs(
                hidden_BLD.flatten(0, 1).index_select(0, tensors["place_T"]),
                self._head,
                tensors["target_T"],
                tensors["temperature_T"],
                vocab_size=self._vocab_size,
                entropy_gradient=entropy_gradient,
            )

    @torch.no_grad()
    def next_logits(self, input_ids_1L: Tensor) -> Tensor:
        """[V]: what follows a prompt."""
        positions = torch.arange(input_ids_1L.shape[1], device=input_ids_1L.device)[None]
        with self._precision():
            return self._head(self._hidden(input_ids_1L, positions, None)[0, -1:])[0]

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _hidden(self, ids_BL: Tensor, positions_BL: Tensor, segments: tuple[Segment, ...] | None) -> Tensor:
        extra = {}
        if segments is not None:
            flash = self._trainer.attention == "flash"
            extra["packed"] = PackedLayout(segments, ids_BL.device, flash=flash)
        return self._decoder(input_ids=ids_BL, position_ids=positions_BL, use_cache=False, **extra)[0]

    # ------------------------------------------------------------------ packing

    def _layout(self, where: str) -> RowLayout:
        """Whether rows can be packed: by what the config says of its layers, then by trying."""
        if self._trainer.packing == "off":
            return "padded"
        why_not = _windowed(self._model.config) or self._tried()
        if why_not is None:
            return "shared" if self._trainer.share_prefixes else "packed"
        if self._trainer.packing == "on" or self._trainer.attention == "flash":
            raise ConfigError(f"{where}.packing: this model can't be packed ({why_not}); set packing: off")
        logger.warning("%s: rows are padded: %s", where, why_not)
        return "padded"

    @torch.no_grad()
    def _tried(self) -> str | None:
        """Why packed rows fail here; None when a pair that shares its beginning comes out as each alone."""
        before = self._model.config._attn_implementation
        ids = (self._vocab_size // 2 + torch.arange(24)) % self._vocab_size  # no special ones
        pair = [ids[:20].numpy(), torch.cat([ids[:10], ids[14:]]).numpy()]
        (packed,) = pack(pair, max_tokens=64, share_prefixes=True)
        with self._precision():
            self._model.set_attn_implementation(IMPLEMENTATION)
            try:
                if self._model.config._attn_implementation != IMPLEMENTATION:
                    raise ValueError(f"{type(self._model).__name__} takes no attention function")
                alone = [self._alone(sequence) for sequence in pair]
                ids_N = torch.from_numpy(packed.ids_N)[None].to(self._device)
                positions_N = torch.from_numpy(packed.position_N)[None].to(self._device)
                together = self._hidden(ids_N, positions_N, packed.segments)[0].float()
            except (TypeError, ValueError, RuntimeError) as error:
                self._model.set_attn_implementation(before)
                return f"{type(error).__name__}: {error}"
        for i, want in enumerate(alone):
            got = together[torch.from_numpy(packed.places[i]).to(self._device)]
            distance = ((got - want).norm() / want.norm()).item()
            if not distance <= _PROBE_TOLERANCE[self._autocast or self._model.dtype]:
                self._model.set_attn_implementation(before)
                return f"hidden states of packed rows are off by {distance:.1e}"
        return None

    def _alone(self, sequence: Any) -> Tensor:
        ids = torch.from_numpy(sequence)[None].to(self._device)
        positions = torch.arange(len(sequence), device=self._device)[None]
        return self._hidden(ids, positions, (Segment(0, len(sequence)),))[0].float()


def _windowed(config: Any) -> str | None:
    """Layers that see less than everything before, or carry a state along the row."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"layers of type {sorted(kinds)}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return f"a sliding window of {window} tokens"
    return None


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def _require(module: str, setting: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{setting} needs the package {package}: pip install {package}, or leave it out")


def _use_liger(model: Any, where: str) -> None:
    _require("liger_kernel", f"{where}.kernels: liger", "liger-kernel")
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        _apply_liger_kernel_to_instance,
    )

    # Logits and loss are ours: only chunks of them ever exist.
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
