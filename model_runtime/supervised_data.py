"""Conversations in a JSONL file → rows whose trained tokens are those of the assistant.

A line is `{"messages": [{"role": …, "content": …}, …], "tools": […]}`. Prompts are rendered by the model's
own chat template as they are when it is asked, and answers end with the token that ends a turn: what is
taught is what will be sampled. Where the template writes earlier turns in other words once the conversation
goes on, the rest is a row of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from model_runtime.batch_rows import TrainingRow
from model_runtime.config import ModelConfig
from model_runtime.errors import ConfigError
from model_runtime.tokenizer_bundle import build_tokenizer_document
from model_runtime.types import MemberKey, Trajectory, Turn

logger = logging.getLogger(__name__)


def read_conversations(model: ModelConfig) -> list[TrainingRow]:
    """The rows of the model's `sft.data`. Raises ConfigError naming file and line of what can't be used;
    rows longer than `sft.max_tokens` are left out and logged."""
    assert model.sft is not None
    path = Path(model.sft.data)
    renderer = _Renderer(model)
    rows: list[TrainingRow] = []
    num_long = 0
    for number, conversation in _lines(model, path):
        where = f"{model.model_id}.sft.data: {path}, line {number}"
        for chain in renderer.chains(conversation, where=where):
            if len(chain.prompt_ids) + len(chain.response_ids) > model.sft.max_tokens:
                num_long += 1
            else:
                rows.append(_row(model, chain, number, len(rows)))
    if num_long:
        logger.warning("%s: %d conversations are longer than %d tokens: left out", path, num_long,
                       model.sft.max_tokens)  # fmt: skip
    if not rows:
        raise ConfigError(
            f"{model.model_id}.sft.data: {path} has no conversation of up to {model.sft.max_tokens} tokens"
        )
    return rows


def _lines(model: ModelConfig, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{model.model_id}.sft.data: {path} can't be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{model.model_id}.sft.data: {path}, line {number}"
        try:
            conversation = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        messages = conversation.get("messages") if isinstance(conversation, dict) else None
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ConfigError(f"{where}: must be an object with `messages`, a list of messages with a role")
        if not any(message["role"] == "assistant" for message in messages[1:]):
            raise ConfigError(f"{where}: no message of the assistant after another's: nothing to learn")
        yield number, conversation


@dataclass(slots=True)
class _Chain:
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)


class _Renderer:
    def __init__(self, model: ModelConfig) -> None:
        document = build_tokenizer_document(model)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model.model_path, local_files_only=True)
        self._template = document.chat_template
        self._ends = set(document.eos_token_ids)

    def chains(self, conversation: dict[str, Any], *, where: str) -> list[_Chain]:
        messages, tools = conversation["messages"], conversation.get("tools")
        chains: list[_Chain] = []
        for index in range(1, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], tools, asks=True, where=where)
            whole = self._render(messages[: index + 1], tools, asks=False, where=where)
            if not whole.startswith(prompt):
                raise ConfigError(
                    f"{where}: the chat template doesn't write message {index} right after its prompt"
                )
            prompt_ids = self._encode(prompt)
            answer_ids = self._answer(whole[len(prompt) :], where=f"{where}: message {index}")
            last = chains[-1] if chains else None
            so_far = [*last.prompt_ids, *last.response_ids] if last else []
            if last is None or prompt_ids[: len(so_far)] != so_far:
                last, so_far = _Chain(prompt_ids), prompt_ids
                chains.append(last)
            last.response_ids += prompt_ids[len(so_far) :]
            start = len(last.response_ids)
            last.response_ids += answer_ids
            last.turns.append((start, start + len(answer_ids)))
        return chains

    def _render(self, messages: Sequence[Any], tools: Any, *, asks: bool, where: str) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self._template, tokenize=False,
                add_generation_prompt=asks,
            )  # fmt: skip
        except Exception as error:  # a template raises whatever it likes
            raise ConfigError(f"{where}: the chat template refuses it: {error}") from error

    def _answer(self, text: str, *, where: str) -> list[int]:
        """Up to the token that ends the turn: what the template writes after it, nobody samples."""
        ids = self._encode(text)
        ends = [i for i, token in enumerate(ids) if token in self._ends]
        if not ends:
            raise ConfigError(f"{where}: the chat template doesn't end it with a token that ends a turn")
        return ids[: ends[-1] + 1]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _row(model: ModelConfig, chain: _Chain, number: int, index: int) -> TrainingRow:
    mask_R = np.zeros(len(chain.response_ids), dtype=np.int8)
    for start, end in chain.turns:
        mask_R[start:end] = 1
    name = f"line-{number}"
    trajectory = Trajectory(
        trajectory_id=f"sft-{index}",
        run_id="sft",
        member=MemberKey(group_id=name, group_size=1, member_index=0, attempt=0),
        session_id=name,
        agent_id="assistant",
        model_id=model.model_id,
        chain_index=0,
        parent_trajectory_id=None,
        request_id=name,
        policy_version=0,
        policy_version_max=0,
        partner_versions={},
        prompt_ids=np.asarray(chain.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(chain.response_ids, dtype=np.int32),
        response_mask=mask_R,
        behavior_logprobs=np.zeros(len(mask_R), dtype=np.float32),
        token_versions=np.where(mask_R == 1, 0, -1).astype(np.int32),
        turns=tuple(_turn(i, start, end) for i, (start, end) in enumerate(chain.turns)),
        workflow_rewards={},
        agent_rewards={},
        train=True,
        created_at=0.0,
    )
    return TrainingRow(trajectory, 0.0, 1.0, mask_R)


def _turn(index: int, start: int, end: int) -> Turn:
    return Turn(
        turn_index=index, start=start, end=end, request_id="", version_min=0, version_max=0,
        finish_reason="stop", temperature=1.0, top_p=1.0, top_k=-1, logprobs_mode="", rewards={},
        started_at=0.0, ended_at=0.0,
    )  # fmt: skip
