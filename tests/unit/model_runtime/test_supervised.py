"""Supervised warm-up: which tokens are taught, that they are learned, and that it goes on after a stop."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from model_runtime.adapters import check_adapter, fetch_version
from model_runtime.checkpoints import load_latest_checkpoint
from model_runtime.config import ModelConfig
from model_runtime.errors import ConfigError
from model_runtime.layout import ModelLayout
from model_runtime.learner import Learner
from model_runtime.mailbox import StopRequested
from model_runtime.metrics import read_metrics
from model_runtime.supervised import Orders, WarmUp
from model_runtime.supervised_data import read_conversations
from model_runtime.trainer import run_trainer
from tests.memory_store import MemoryStore
from tests.tiny_models import make_adapter, make_model
from tests.training_log import TrainingFolder, make_groups, outcome

LAYOUT = ModelLayout("run/models/planner")
CHAT = [
    {"role": "user", "content": "sum of 3 and 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "and 5?"},
    {"role": "assistant", "content": "twelve"},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


def write(path: Path, *conversations: Any) -> Path:
    path.write_text("\n".join(c if isinstance(c, str) else json.dumps(c) for c in conversations))
    return path


def config(base: Path, data: Path, **sft: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "model_id": "planner",
            "model_path": str(base),
            "lora": {"rank": 8, "alpha": 16},
            "save_every": 2,
            "sft": {"data": str(data), "learning_rate": 1e-2, "batch_size": 2} | sft,
        }
    )


def orders(stop_after: int | None = None) -> Orders:
    calls = [0]

    def obey() -> None:
        calls[0] += 1
        if calls[0] == stop_after:
            raise StopRequested

    return Orders(obey=obey, may_write=lambda: None, say=lambda what: None)


def warm_up(model: ModelConfig, store: MemoryStore, **options: Any) -> Learner:
    learner = Learner(model, seed=0)
    stage = WarmUp(model, store, LAYOUT, seed=0, epoch=1, incarnation=1)
    stage.run(learner, orders(**options))
    return learner


# ------------------------------------------------------------------ data


def test_only_the_assistants_tokens_are_taught_up_to_the_one_that_ends_the_turn(base, tmp_path):
    (row,) = read_conversations(config(base, write(tmp_path / "chat.jsonl", {"messages": CHAT})))
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    trajectory = row.trajectory
    spans = [trajectory.response_ids[t.start : t.end].tolist() for t in trajectory.turns]
    decoded = [tokenizer.decode(span, skip_special_tokens=False) for span in spans]
    assert decoded == ["7<|im_end|>", "twelve<|im_end|>"]
    whole = np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).tolist()
    assert tokenizer.decode(whole, skip_special_tokens=False) == (
        "<|im_start|>user\nsum of 3 and 4?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\nand 5?<|im_end|>\n<|im_start|>assistant\ntwelve<|im_end|>"
    )


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each(base, tmp_path):
    model = make_model(tmp_path / "forgetful")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{%- for m in messages %}{%- if m.role != 'assistant' or loop.last %}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    rows = read_conversations(config(model, write(tmp_path / "chat.jsonl", {"messages": CHAT})))
    assert [len(row.trajectory.turns) for row in rows] == [1, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"line 1: not JSON"),
        ([{"messages": CHAT}, {"prompt": "x"}], r"line 2: must be an object with `messages`"),
        ([{"messages": CHAT[:1]}], r"line 1: no message of the assistant"),
        ([{"messages": [{"role": "user", "content": 3}, CHAT[1]]}], r"line 1: the chat template refuses it"),
        ([""], r"has no conversation of up to 4096 tokens"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_line(base, tmp_path, lines, message):
    data = write(tmp_path / "chat.jsonl", *lines)
    with pytest.raises(ConfigError, match=rf"planner\.sft\.data: .*chat\.jsonl.*{message}"):
        read_conversations(config(base, data))


def test_conversations_that_are_too_long_are_left_out(base, tmp_path):
    data = write(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]})
    both = [row.trajectory.num_tokens for row in read_conversations(config(base, data))]
    (row,) = read_conversations(config(base, data, max_tokens=both[0] - 1))
    assert row.trajectory.num_tokens == both[1] < both[0]


# ------------------------------------------------------------------ learning


def conversations(count: int) -> list[dict[str, Any]]:
    def sum_of(i: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"sum of {i} and 1?"}
        return [question, {"role": "assistant", "content": f"{i + 1}"}]

    return [{"messages": sum_of(i)} for i in range(count)]


def test_the_first_loss_is_transformers_own_and_the_last_is_lower(base, tmp_path):
    data = write(tmp_path / "chat.jsonl", *conversations(4))
    model = config(base, data, batch_size=4, max_steps=8)
    store = MemoryStore()
    warm_up(model, store)
    rows = read_metrics(store, ModelLayout(f"{LAYOUT.root}/sft"), "steps")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["sft/loss"] < 0.5 * rows[0]["sft/loss"]
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    losses = []
    for row in read_conversations(model):
        t = row.trajectory
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        labels = torch.where(
            torch.from_numpy(np.concatenate([0 * t.prompt_ids, t.response_mask])) == 1, ids, -100
        )
        with torch.no_grad():
            loss = reference(input_ids=ids[None], labels=labels[None]).loss.item()
        losses += [loss] * int(t.response_mask.sum())
    assert math.isclose(rows[0]["sft/loss"], float(np.mean(losses)), rel_tol=1e-5)


def test_epochs_show_every_conversation_once_in_an_order_of_their_own(base, tmp_path):
    model = config(base, write(tmp_path / "chat.jsonl", *conversations(5)), epochs=2)
    stage = WarmUp(model, MemoryStore(), LAYOUT, seed=0, epoch=1, incarnation=1)
    rows = read_conversations(model)
    batches = [[r.trajectory.session_id for r in stage._batch(rows, step)] for step in range(6)]
    assert stage._num_steps(len(rows)) == 6
    assert [len(b) for b in batches] == [2, 2, 1] * 2
    first, second = ([name for b in epoch for name in b] for epoch in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("stop_after", [4, 7])
def test_a_warm_up_that_was_stopped_ends_with_the_same_bytes(base, tmp_path, stop_after):
    model = config(base, write(tmp_path / "chat.jsonl", *conversations(6)), epochs=2)
    calm, stormy = MemoryStore(), MemoryStore()
    want = warm_up(model, calm).policy.tensors()
    with pytest.raises(StopRequested):
        warm_up(model, stormy, stop_after=stop_after)
    got = warm_up(model, stormy).policy.tensors()
    assert all(np.array_equal(want[name], got[name]) for name in want)
    layout = ModelLayout(f"{LAYOUT.root}/sft")
    one, other = load_latest_checkpoint(calm, layout), load_latest_checkpoint(stormy, layout)
    assert one is not None
    assert other is not None
    assert one.document.files == other.document.files


def test_a_finished_warm_up_is_not_repeated_and_is_the_reference(base, tmp_path):
    data = write(tmp_path / "chat.jsonl", *conversations(4))
    store = MemoryStore()
    first = warm_up(config(base, data), store).policy
    data.unlink()
    second = warm_up(config(base, data), store).policy
    for name, value in first.tensors().items():
        assert np.array_equal(value, second.tensors()[name])
        assert np.array_equal(value, second.reference("start")[name])
    assert any(np.any(v) for name, v in second.reference("start").items() if "lora_B" in name)


# ------------------------------------------------------------------ in a run


@pytest.mark.parametrize("given", [False, True], ids=["base", "adapter"])
def test_the_run_starts_from_what_was_taught(base, tmp_path, given):
    data = write(tmp_path / "chat.jsonl", *conversations(4))
    changes: dict[str, Any] = {"sft": {"data": str(data), "learning_rate": 1e-2, "max_steps": 3}}
    if given:
        changes["adapter_path"] = str(make_adapter(tmp_path / "given", base=base, seed=5))
    folder = TrainingFolder(tmp_path, base, model=changes)
    folder.write_groups(make_groups(4))
    folder.tell(desired="drain", published_version=1000)
    assert run_trainer(folder.spec, stop=threading.Event()) == 0
    taught = load_latest_checkpoint(folder.store, ModelLayout(f"{folder.layout.root}/sft"))
    assert taught is not None
    assert (taught.document.step, taught.state.values["finished"]) == (3, True)
    _, files = fetch_version(folder.store, folder.layout, 0)
    v0 = check_adapter(files, source="v0")
    assert all(np.array_equal(v0[name], taught.state.adapter[name]) for name in v0)
    assert outcome(folder)["checkpoint"]["step"] == 2
