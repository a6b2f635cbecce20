from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import ModelConfig
from model_runtime.documents import TokenizerDocument
from model_runtime.errors import ConfigError
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from model_runtime.tokenizer_bundle import build_tokenizer_document, publish_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, make_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_tokenizer(path)
    write(path / "config.json", {"vocab_size": 400, "max_position_embeddings": 512, "eos_token_id": 2})
    return path


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    write(path, {key: value for key, value in content.items() if value is not None})


def build(folder: Path, **rollout: Any) -> TokenizerDocument:
    config = {"model_id": "m", "model_path": str(folder), "rollout": rollout}
    return build_tokenizer_document(ModelConfig.model_validate(config))


def test_the_document_holds_what_the_folder_says(folder: Path) -> None:
    document = build(folder)
    assert document.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert document.chat_template == CHAT_TEMPLATE
    assert document.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert document.eos_token_ids == [2]
    assert (document.vocab_size, document.max_model_len) == (400, 512)


def test_every_token_that_ends_a_turn_is_named(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": [0, 5]})
    assert build(folder).eos_token_ids == [0, 2, 5]  # and the tokenizer's own


def test_a_template_file_counts_before_the_tokenizer_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert build(folder).chat_template == "{{ messages }}"


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    assert build(folder).chat_template == "D"


def test_special_tokens_may_be_written_as_objects(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "lstrip": False})
    document = build(folder)
    assert document.special_tokens["eos_token"] == "<|endoftext|>"
    assert document.eos_token_ids == [0, 2]


def test_a_text_model_inside_a_larger_one_is_found(folder: Path) -> None:
    text = {"vocab_size": 390, "max_position_embeddings": 128, "eos_token_id": 1}
    write(folder / "config.json", {"text_config": text})
    document = build(folder)
    assert (document.vocab_size, document.max_model_len, document.eos_token_ids) == (390, 128, [1, 2])


def test_the_configured_length_counts_before_the_models_own(folder: Path) -> None:
    assert build(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(
        ConfigError, match=r"m\.rollout\.max_model_len: 1000 is more than the model's own 512"
    ):
        build(folder, max_model_len=1000)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.model_path: .*nowhere is not a folder"):
        build(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"m\.model_path: .*{name} is missing"):
        build(folder)


def test_a_missing_chat_template_is_named_with_the_file_to_write(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is missing"):
        build(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ConfigError, match=name):
        build(folder)


def test_a_model_without_an_end_of_turn_token_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "config.json", eos_token_id=None)
    with pytest.raises(ConfigError, match="no token ends a turn"):
        build(folder)


def test_an_unknown_longest_sequence_asks_for_the_setting(folder: Path) -> None:
    write(folder / "config.json", {"vocab_size": 400})
    with pytest.raises(ConfigError, match=r"m\.rollout\.max_model_len must be set"):
        build(folder)


def test_the_same_tokenizer_has_the_same_key(folder: Path, local_store: Store) -> None:
    model = ModelConfig(model_id="m", model_path=str(folder))
    layout = RunLayout("run").model("m")
    key = publish_tokenizer(local_store, layout, model)
    assert publish_tokenizer(local_store, layout, model) == key
    assert TokenizerDocument.parse(local_store.get(key), source=key) == build_tokenizer_document(model)


def test_building_it_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys, model_runtime.tokenizer_bundle, model_runtime.runtime\n"
        "assert not {'torch', 'transformers', 'peft', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
