"""What the gateway renders and decodes a model with, gathered from the model's folder.

No torch, no transformers: only the files a Hugging Face model folder holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model_runtime.config import ModelConfig
from model_runtime.documents import TokenizerDocument
from model_runtime.errors import ConfigError
from model_runtime.layout import ModelLayout
from model_runtime.store import Store

# Where architectures write their longest sequence, in the order vLLM prefers them.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def publish_tokenizer(store: Store, layout: ModelLayout, model: ModelConfig) -> str:
    """Put the model's TokenizerDocument in the store under the hash of its contents; returns its key."""
    data = build_tokenizer_document(model).to_bytes()
    key = layout.tokenizer(hashlib.sha256(data).hexdigest())
    store.put_if_absent(key, data)
    return key


def build_tokenizer_document(model: ModelConfig) -> TokenizerDocument:
    """Raises ConfigError naming the model, the file that is missing or wrong, and what to do."""
    folder = Path(model.model_path)
    if not folder.is_dir():
        raise ConfigError(
            f"{model.model_id}.model_path: {folder} is not a folder; give a local model in "
            "Hugging Face's format"
        )
    tokenizer_json, tokenizer = _read_tokenizer(model.model_id, folder)
    config = _read_json(model.model_id, folder / "config.json", required=True)
    text_config = config.get("text_config") or config
    special = _special_tokens(model.model_id, folder)
    return TokenizerDocument(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(model.model_id, folder),
        special_tokens=special,
        eos_token_ids=_eos_token_ids(
            model.model_id, folder, text_config, tokenizer, special.get("eos_token")
        ),
        vocab_size=int(text_config.get("vocab_size") or tokenizer.get_vocab_size()),
        max_model_len=_max_model_len(model, folder, text_config),
    )


def _read_tokenizer(model_id: str, folder: Path) -> tuple[str, Tokenizer]:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{model_id}.model_path: {path} is missing; save the fast tokenizer into the folder "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        ) from None
    try:
        return text, Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file it can't read
        raise ConfigError(f"{model_id}.model_path: {path} is not a tokenizer: {error}") from None


def _chat_template(model_id: str, folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(model_id, folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not template:
        raise ConfigError(
            f"{model_id}.model_path: no chat template: {path} is missing and tokenizer_config.json has no "
            "chat_template. Base models ship without one: write the template the policy shall be trained with"
        )
    return template


def _special_tokens(model_id: str, folder: Path) -> dict[str, str]:
    """bos_token, eos_token, … by name; tokenizer_config.json counts before special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_json(model_id, folder / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                found[key] = content
    return found


def _eos_token_ids(
    model_id: str, folder: Path, config: dict[str, Any], tokenizer: Tokenizer, eos_token: str | None
) -> list[int]:
    """Every token that ends a turn: the generation config's, or the model config's where that names none,
    and the tokenizer's own. These are the ones vLLM stops at."""
    generation = _read_json(model_id, folder / "generation_config.json")
    ids = _as_ids(generation.get("eos_token_id")) or _as_ids(config.get("eos_token_id"))
    if eos_token is not None:
        own = tokenizer.token_to_id(eos_token)
        if own is None:
            raise ConfigError(
                f"{model_id}.model_path: eos_token {eos_token!r} of {folder / 'tokenizer_config.json'} "
                "is not in tokenizer.json"
            )
        ids = [*ids, own]
    if not ids:
        path = folder / "generation_config.json"
        raise ConfigError(f"{model_id}.model_path: no token ends a turn: set eos_token_id in {path}")
    return sorted(set(ids))


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, Iterable) else [int(value)]


def _max_model_len(model: ModelConfig, folder: Path, config: dict[str, Any]) -> int:
    own = next((int(config[key]) for key in _LENGTH_KEYS if config.get(key)), None)
    wanted = model.rollout.max_model_len
    if wanted is None:
        if own is None:
            raise ConfigError(
                f"{model.model_id}.rollout.max_model_len must be set: {folder / 'config.json'} has none of "
                + ", ".join(_LENGTH_KEYS)
            )
        return own
    if own is not None and wanted > own:
        raise ConfigError(
            f"{model.model_id}.rollout.max_model_len: {wanted} is more than the model's own {own}"
        )
    return wanted


def _read_json(model_id: str, path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{model_id}.model_path: {path} is missing") from None
        return {}
    except ValueError as error:
        raise ConfigError(f"{model_id}.model_path: {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{model_id}.model_path: {path} must hold a JSON object")
    return content
