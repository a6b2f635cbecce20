"""The sections of a model's config that concern its adapter and its trainer process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from model_runtime.config_section import Section

LoRARank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The ranks vLLM accepts (vllm.config.lora.MaxLoRARanks)."""

_NOT_LORA_TARGETS = ("lm_head", "embed_tokens", "wte", "embed_out")


class LoRAConfig(Section):
    """The adapter that is trained. Plain LoRA: no DoRA, no bias, no embeddings, no output head."""

    rank: LoRARank = 16
    """Rank r. One of 1, 8, 16, 32, 64, 128, 256, 320, 512: those vLLM serves."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is alpha / r × B·A."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Linear modules to adapt, by suffix, or `all-linear` for every one but the output head."""

    @field_validator("target_modules")
    @classmethod
    def _only_linear(cls, targets: list[str] | str) -> list[str] | str:
        bad = (
            [t for t in targets if t.split(".")[-1] in _NOT_LORA_TARGETS] if isinstance(targets, list) else []
        )
        if bad:
            raise ValueError(
                f"{bad[0]!r} can't be adapted: vLLM serves no embedding or output-head adapters here"
            )
        return targets


class TrainerConfig(Section):
    """The trainer process of one model."""

    n_gpus: int = Field(default=0, ge=0)
    """GPUs for training, with a process each. 0: the CPU."""
    n_processes: int = Field(default=1, ge=1, le=64)
    """Processes that share each step on the CPU. Results don't depend on it."""
    gpu_ids: list[int] | None = None
    """Devices to use. None: assigned in order, trainers and replicas apart."""
    gpu_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of each device's memory. Set it on everything that shares a device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the base weights. The adapter and its optimizer are float32."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""
    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak AdamW learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate grows linearly from 0."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up. linear and cosine need max_steps, at which they arrive
    at final_learning_rate_ratio of the peak."""
    final_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak learning rate at the last step of a schedule that falls."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Tokens per forward pass, padding included. Results don't depend on it, memory does."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows are laid end to end without padding. auto: where the model can (tried out at the start); on: a
    model that can't is refused; off: rows are padded."""
    share_prefixes: bool = True
    """Packed rows that begin alike (a group's prompt, a system prompt) are read once until they part."""
    attention: Literal["auto", "flash"] = "auto"
    """auto: torch's kernels; flash: the package flash-attn (CUDA, half precision, packed rows)."""
    kernels: Literal["torch", "liger"] = "torch"
    """liger: the package liger-kernel's norms, rotary embeddings and gated units (CUDA)."""
    autocast: Literal["bfloat16"] | None = None
    """Type that products are computed in, the adapter's own included. None: that of the weights."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass: less memory, a third
    more work."""
    compile: bool = False
    """Compile the layers with torch.compile. Costs a minute at the start and needs a C++ compiler."""

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self.n_gpus or self.n_processes

    @model_validator(mode="after")
    def _one_process_per_gpu(self) -> TrainerConfig:
        if self.n_gpus and self.n_processes > 1:
            raise ValueError(
                f"n_processes is {self.n_processes}, but n_gpus is {self.n_gpus}: leave n_processes at 1, "
                "there is one process for each GPU"
            )
        return self

    @model_validator(mode="after")
    def _kernels_have_a_device(self) -> TrainerConfig:
        if self.kernels == "liger" and not self.n_gpus:
            raise ValueError("kernels: liger needs a GPU; set n_gpus, or kernels: torch")
        if self.attention == "flash":
            half = "bfloat16" in (self.dtype, self.autocast)
            lacks = [
                what
                for what, there in (
                    ("a GPU (n_gpus)", self.n_gpus),
                    ("bfloat16 (dtype or autocast)", half),
                    ("packed rows (packing)", self.packing != "off"),
                )
                if not there
            ]
            if lacks:
                raise ValueError(
                    f"attention: flash needs {' and '.join(lacks)}; set that, or attention: auto"
                )
        return self
