"""Random batches for what must not depend on how a step is computed: groups that share prompts; responses
that are empty, rows of one token, without a trained one, and the longest there can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes import make_trajectory

LONGEST = 512  # positions the model has

masks = st.lists(
    st.one_of(
        st.lists(st.integers(0, 1), min_size=1, max_size=12),
        st.just([]),  # an empty response
        st.just([0, 0, 0]),  # fully masked
        st.just([1]),  # one token
        st.just([0] * 9 + [1]),  # a first turn of context only
    ),
    min_size=1,
    max_size=7,
)


def row(prompt: Sequence[int], mask: Sequence[int], rng: np.random.Generator) -> Any:
    if not len(mask):
        return _empty_row(prompt, rng)
    trained = np.asarray(mask, dtype=np.int8)
    sampled = trained if trained.any() else np.ones_like(trained)  # a trajectory samples something
    behavior = np.where(sampled, -rng.random(len(mask)) * 6, 0).astype(np.float32)
    trajectory = make_trajectory(
        mask=sampled,
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        response_ids=rng.integers(3, 384, len(mask)).astype(np.int32),
        behavior_logprobs=behavior,
    )
    advantage = float(rng.normal())
    return SimpleNamespace(
        trajectory=trajectory, advantage=advantage, loss_mask=trained, turn_advantages=None
    )


def _empty_row(prompt: Sequence[int], rng: np.random.Generator) -> Any:
    """No log has one: a record without a sampled token is refused where it is read."""
    empty = row(prompt, [1], rng)
    for name in ("response_ids", "response_mask", "behavior_logprobs", "token_versions", "turns"):
        object.__setattr__(empty.trajectory, name, getattr(empty.trajectory, name)[:0])
    empty.loss_mask = empty.trajectory.response_mask
    return empty


def batch_of(prompt_tokens: Sequence[int], masks: Sequence[Any], seed: int) -> list[Any]:
    """A row for each mask; `longest` is one that fills the model's positions."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 384, n) for n in prompt_tokens]
    rows = []
    for i, mask in enumerate(masks):
        prompt = prompts[i % len(prompts)]
        rows.append(row(prompt, [1] * (LONGEST - len(prompt)) if mask == "longest" else mask, rng))
    return rows


def flat_gradient(parameters: Mapping[str, Any]) -> Tensor:
    return torch.cat([parameters[name].grad.flatten() for name in sorted(parameters)])
