"""A live gateway before a real vLLM server whose model calls tools, and what its records are held against."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_runtime.config import ModelConfig, RunConfig
from model_runtime.config_file import parse_config
from model_runtime.types import Trajectory
from tests import speaker
from tests.exactness import recompute
from tests.gateway_harness import GatewayHarness, LiveSession

PRICES = {"lamp": "42", "desk": "17", "sofa": "93", "rug": "25"}


def shop_model() -> ModelConfig:
    rollout = {"kv_cache_bytes": 64 * 2**20, "max_num_seqs": 16, "tool_call_parser": "hermes"}
    fields = {"model_id": "shop", "model_path": str(speaker.FOLDER), "rollout": rollout}
    return ModelConfig.model_validate(fields | {"kind": "frozen"})


def shop_config() -> RunConfig:
    trained = shop_model().model_dump(mode="json") | {"kind": "trainable", "max_response_tokens": 128}
    return parse_config(
        {
            "multi_model": {"models": [trained]},
            "agent_model_mapping": {"clerk": "shop", "triage": "shop"},
            "gateway": {"commit_interval_s": 0.0, "request_timeout_s": 30.0, "lease_s": 600.0},
            # So cold that it makes no mistake; what a warm one leaves is tested on greetings.
            "workflow": {"group_size": 2, "temperature": 0.15},
        }
    )


@dataclass(slots=True)
class Shop:
    """A gateway before the clerk's model, and what holds its records against transformers."""

    harness: GatewayHarness
    policy: Any = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(speaker.FOLDER, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(speaker.FOLDER)

    def open(self) -> LiveSession:
        return self.harness.open_session()

    def finish(self, session: LiveSession) -> list[Trajectory]:
        """The session's trajectories, each proven exact."""
        session.finalize(1.0)
        return self.exact_rows()

    def exact_rows(self) -> list[Trajectory]:
        rows = self.harness.rows("shop")
        for row in rows:
            mine = row.response_mask.astype(bool)
            assert np.abs(recompute(self.policy, row) - row.behavior_logprobs)[mine].max() <= 1e-4
            sampled = np.zeros(len(mine), dtype=bool)
            for turn in row.turns:
                sampled[turn.start : turn.end] = True
            assert (mine == sampled).all()
        return rows

    def said(self, row: Trajectory) -> list[str]:
        """What the model said, turn by turn."""
        return [self._text(row.response_ids[turn.start : turn.end]) for turn in row.turns]

    def context(self, row: Trajectory) -> list[str]:
        """What stands between its turns."""
        pairs = zip(row.turns, row.turns[1:], strict=False)
        return [self._text(row.response_ids[before.end : after.start]) for before, after in pairs]

    def shown(self, row: Trajectory) -> str:
        return self._text(row.prompt_ids)

    def check_tool_use(self, row: Trajectory, *items: str) -> None:
        """One chain: the calls, what came back, the answer."""
        called, answered = self.said(row)
        for item in items:
            assert f'"{item}"' in called
            assert PRICES[item] in answered
        assert called.count("<tool_call>") == len(items)
        assert called.endswith("</tool_call><|im_end|>")
        assert answered.endswith("<|im_end|>")
        assert self.context(row) == [speaker.results_text([PRICES[item] for item in items])]

    def _text(self, ids: Any) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def openai_url(session: LiveSession, agent: str = "clerk") -> str:
    return f"{session.base_url}/agents/{agent}/v1"


def price_of(arguments: str) -> str:
    return PRICES[json.loads(arguments)["item"]]


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
