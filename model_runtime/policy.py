"""The policy under training: a frozen causal language model and one LoRA adapter in float32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from model_runtime.adapters import (
    AdapterFiles,
    Tensors,
    check_adapter,
    pack,
    read_folder,
    refuse_other_than_plain_lora,
    refuse_unserved_modules,
)
from model_runtime.batching import RowLayout
from model_runtime.config import ModelConfig
from model_runtime.documents import CanaryProbe
from model_runtime.errors import ConfigError
from model_runtime.forward import Forward
from model_runtime.packing import Segment

_CANARY_PROMPTS = 2
_CANARY_PROMPT_TOKENS = 16
_CANARY_TOKENS = 16


class Policy:
    """Computes exact logprobs of trained tokens and knows its adapter as PEFT's files.

    Base dropout is off: the sampler has none either. Raises ConfigError for a model folder, a starting
    adapter, or target modules that can't be used.
    """

    def __init__(self, model: ModelConfig, *, seed: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        base = _load_base(model)
        torch.manual_seed(_adapter_seed(seed, model.model_id))
        config, start = _lora_config(model)
        try:
            peft_model = get_peft_model(base, config)
        except ValueError as error:
            raise ConfigError(f"{model.model_id}.lora.target_modules: {error}") from error
        lora_model: Any = peft_model.base_model
        modules = sorted(lora_model.targeted_module_names)
        _check_targets(model, modules)
        self._config = _adapter_config(config, modules)
        causal_lm: Any = lora_model.model.to(self.device).eval()
        self._forward = Forward(causal_lm, model.trainer, model_id=model.model_id)
        self._vocab_size = causal_lm.get_input_embeddings().num_embeddings
        self._max_positions = _learned_positions(causal_lm.config)
        self._parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in peft_model.named_parameters()
            if parameter.requires_grad
        }
        self._start = start
        if start is not None:
            self._begin_from_given(start, model)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by the names PEFT gives them on disk."""
        return self._parameters

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        """Longest row the model can read at all; None where positions are computed, and not looked up."""
        return self._max_positions

    @property
    def row_layout(self) -> RowLayout:
        """How rows are laid out for this model; see micro_batches."""
        return self._forward.row_layout

    def logprobs(
        self,
        tensors: Mapping[str, Tensor],
        segments: tuple[Segment, ...] | None,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(logprob, entropy) of each trained token of a micro-batch: its tensors and its segments."""
        return self._forward.logprobs(tensors, segments, entropy_gradient=entropy_gradient)

    def next_token_logprobs(self, prompt_ids: Sequence[int]) -> np.ndarray:
        """Logprobs of every token after the prompt, at temperature 1."""
        logits_V = self._forward.next_logits(torch.tensor([list(prompt_ids)], device=self.device))
        return torch.log_softmax(logits_V.float(), dim=-1).cpu().numpy()

    def tensors(self) -> dict[str, np.ndarray]:
        """A copy of the adapter in host memory."""
        return {name: p.detach().to("cpu", copy=True).numpy() for name, p in self._parameters.items()}

    def _begin_from_given(self, start: Tensors, model: ModelConfig) -> None:
        if (misfit := self._misfit(start)) is not None:
            name, ours, theirs = misfit
            raise ConfigError(
                f"{model.model_id}.adapter_path: the adapter in {model.adapter_path} is not one of "
                f"{model.model_path}: {name} has shape {theirs} there and {ours} here; give the base it was "
                "trained on, or another adapter"
            )
        self.load(start)

    def _misfit(self, tensors: Tensors) -> tuple[str, Any, Any] | None:
        """The first tensor that differs: its name, our shape, the other's (None: it is not there)."""
        want = {name: tuple(p.shape) for name, p in self._parameters.items()}
        got = {name: tuple(t.shape) for name, t in tensors.items()}
        if want == got:
            return None
        name = sorted(set(want.items()) ^ set(got.items()))[0][0]
        return name, want.get(name), got.get(name)

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Replace the adapter's values. Raises ConfigError when names or shapes are not this adapter's."""
        if (misfit := self._misfit(tensors)) is not None:
            name, ours, theirs = misfit
            raise ConfigError(
                f"{name}: this adapter has shape {ours}, the stored one {theirs}; "
                "lora.rank and lora.target_modules can't change within a run"
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(torch.from_numpy(np.asarray(tensors[name])))

    @contextmanager
    def holding(self, tensors: Tensors) -> Iterator[None]:
        """Another adapter for the time being. No forward pass from before may be waiting for its backward
        pass: the values change in place."""
        current = self.tensors()
        self.load(tensors)
        try:
            yield
        finally:
            self.load(current)

    def reference(self, kind: Literal["start", "base"]) -> Tensors:
        """The adapter this run started from, or one that changes nothing: the base without a second copy
        of it."""
        if kind == "start" and self._start is not None:
            return self._start
        return {name: np.zeros_like(t) if ".lora_B." in name else t for name, t in self.tensors().items()}

    def begin_from(self, tensors: Tensors) -> None:
        """Let the run start from this adapter, in place of the one it was made with."""
        self.load(tensors)
        self._start = dict(tensors)

    def adapter_files(self) -> AdapterFiles:
        """The adapter as PEFT and vLLM read it."""
        return self.packed(self.tensors())

    def packed(self, tensors: Tensors) -> AdapterFiles:
        """The same of a copy; touches nothing that training changes."""
        return pack(tensors, self._config)


def make_canary(
    policy: Policy, prompts: Sequence[Sequence[int]], *, previous: Tensors | None
) -> list[CanaryProbe]:
    """What the policy says after each prompt, for the tokens it and the version before find likeliest."""
    current = policy.tensors()
    now = [policy.next_token_logprobs(prompt) for prompt in prompts]
    before: list[np.ndarray | None] = [None] * len(prompts)
    if previous is not None:
        policy.load(previous)
        before = [policy.next_token_logprobs(prompt) for prompt in prompts]
        policy.load(current)
    return [_probe(*parts) for parts in zip(prompts, now, before, strict=True)]


def _probe(prompt: Sequence[int], now: np.ndarray, before: np.ndarray | None) -> CanaryProbe:
    ranked = _likeliest(now)
    if before is not None:
        half = _CANARY_TOKENS // 2
        ranked = [*ranked[:half], *_likeliest(before)[:half], *ranked[half:]]
    token_ids = list(dict.fromkeys(ranked))[:_CANARY_TOKENS]
    return CanaryProbe(
        prompt_ids=list(prompt),
        token_ids=token_ids,
        logprobs=now[token_ids].tolist(),
        previous_logprobs=None if before is None else before[token_ids].tolist(),
    )


def _likeliest(logprobs: np.ndarray) -> list[int]:
    return np.argsort(-logprobs, kind="stable")[:_CANARY_TOKENS].tolist()


def canary_prompts(model_path: str, *, vocab_size: int) -> list[list[int]]:
    """Fixed prompts of random tokens, the same for every version of a model; no special tokens."""
    special, known = _tokenizer_ids(Path(model_path) / "tokenizer.json")
    usable = np.setdiff1d(np.arange(min(vocab_size, known or vocab_size)), list(special))
    rng = np.random.default_rng(0)
    return rng.choice(usable, size=(_CANARY_PROMPTS, _CANARY_PROMPT_TOKENS)).tolist()


def _tokenizer_ids(path: Path) -> tuple[set[int], int | None]:
    """(ids of special and added tokens, size of the plain vocabulary). A model without the file has none."""
    try:
        tokenizer = json.loads(path.read_bytes())
    except FileNotFoundError:
        return set(), None
    return {t["id"] for t in tokenizer.get("added_tokens", [])}, len(tokenizer["model"]["vocab"])


def _load_base(model: ModelConfig) -> nn.Module:
    path = Path(model.model_path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{model.model_id}.model_path: {path} holds no model (config.json is missing)")
    disable_progress_bar()  # a log file is no terminal
    try:
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, model.trainer.dtype), attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model.model_id}.model_path: {path} can't be loaded: {error}") from error
    return base.requires_grad_(False)


def _learned_positions(config: Any) -> int | None:
    """How many positions a model has an embedding for; None for rotary ones and the like."""
    if getattr(config, "rope_parameters", None) or getattr(config, "position_embedding_type", "") == "rotary":
        return None
    if getattr(config, "alibi", False):
        return None
    return getattr(config, "max_position_embeddings", None)


def _lora_config(model: ModelConfig) -> tuple[LoraConfig, Tensors | None]:
    """The adapter's settings, and its values when the run starts from a given one."""
    if model.adapter_path is None:
        targets = model.lora.target_modules
        alpha = int(model.lora.alpha) if model.lora.alpha.is_integer() else model.lora.alpha
        config = LoraConfig(
            r=model.lora.rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # PEFT takes any number
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        return config, None
    start = check_adapter(read_folder(model.adapter_path), source=model.adapter_path)
    config = LoraConfig.from_pretrained(model.adapter_path)
    assert isinstance(config, LoraConfig)
    if config.r != model.lora.rank:
        raise ConfigError(
            f"{model.model_id}.lora.rank is {model.lora.rank}, but the adapter in {model.adapter_path} "
            f"has rank {config.r}: set lora.rank to that"
        )
    config.inference_mode, config.lora_dropout, config.task_type = False, 0.0, "CAUSAL_LM"
    config.base_model_name_or_path = model.model_path  # PEFT warns where the adapter names another folder
    return config, start


def _check_targets(model: ModelConfig, modules: Sequence[str]) -> None:
    where = f"{model.model_id}.lora.target_modules"
    refuse_unserved_modules(modules, source=where)
    targets = model.lora.target_modules
    if model.adapter_path is None and not isinstance(targets, str):
        for target in targets:
            if not any(module == target or module.endswith("." + target) for module in modules):
                raise ConfigError(f"{where}: the model has no linear module {target!r}")


def _adapter_config(config: LoraConfig, modules: Sequence[str]) -> dict[str, Any]:
    """adapter_config.json with the targets spelled out: the same for every version and every process."""
    settings = config.to_dict() | {
        "target_modules": list(modules),
        "inference_mode": True,
        "peft_type": "LORA",
    }
    settings = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
    refuse_other_than_plain_lora(settings, source="lora")
    return settings


def _adapter_seed(seed: int, model_id: str) -> int:
    """Each model draws its own adapter from the run's one seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{model_id}".encode()).digest()[:7], "big")
