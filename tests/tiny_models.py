"""Tiny but complete models for tests: a Qwen3-architecture folder as vLLM, transformers and the gateway
read it, and PEFT adapters whose effect is large enough to tell versions apart."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 384
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_TEXT = (
    "You are a planner. Split the question into steps and answer with one word. "
    "The search agent calls a tool and reads what it found. The answer agent adds the numbers: "
    "0 1 2 3 4 5 6 7 8 9 10 11 12. plan: search, then answer. tool result: found nothing. "
    "What is the sum of seven and five? twelve. system user assistant tool\n"
)


def make_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer in ChatML, made from a fixed text, written as transformers expects it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make_model(
    path: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write a Qwen3 model with seeded random weights (0.2 M parameters by default) and its tokenizer.
    Returns `path`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tokenizer(path)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(path)
    return path


def make_adapter(
    path: Path,
    *,
    base: Path,
    seed: int,
    rank: int = 8,
    alpha: float = 16.0,
    scale: float = 0.1,
    target_modules: list[str] | None = None,
) -> Path:
    """Write a PEFT LoRA adapter for the model in `base` with seeded random A and B of standard deviation
    `scale`. With the default scale two seeds differ by more than 0.1 in typical logprobs; scale 0 is a
    zero adapter. Needs no torch. Returns `path`."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((base / "config.json").read_text())
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size_in, size_out) in _linear_shapes(config).items():
            if target_modules is not None and name not in target_modules:
                continue
            block = "self_attn" if name in ALL_LINEAR[:4] else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            lora_a = rng.normal(0.0, scale, (rank, size_in))
            lora_b = rng.normal(0.0, scale, (size_out, rank))
            tensors[f"{key}.lora_A.weight"] = lora_a.astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = lora_b.astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(target_modules or ALL_LINEAR),
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter_config, indent=1))
    return path


def _linear_shapes(config: dict) -> dict[str, tuple[int, int]]:
    """Linear module → (inputs, outputs)."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return dict(zip(ALL_LINEAR, shapes, strict=True))


def reference_logprobs(
    base: Path, adapter: Path | None, token_ids: list[int], *, temperature: float = 1.0
) -> list[float]:
    """Logprob of each token after the first, by transformers (+ PEFT) in float32: what servers and
    trainers are compared with."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    targets = torch.tensor(token_ids[1:])[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, targets)[:, 0].tolist()
