"""Micro-batches hold every trained token once, with its own temperature, whatever the split."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.batching import micro_batches, num_trained_tokens, temperatures
from tests.training_log import sampled_row


def row(trajectory, *, advantage=1.0, loss_mask=None):
    mask = trajectory.response_mask if loss_mask is None else np.asarray(loss_mask, dtype=np.int8)
    return SimpleNamespace(trajectory=trajectory, advantage=advantage, loss_mask=mask, turn_advantages=None)


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    return [row(sampled_row(rng, group_id=f"g{i}"), advantage=float(i)) for i in range(count)]


def trained_tokens(passes):
    """(advantage, context, token, temperature, logprob) of every trained token."""
    return sorted(
        (
            float(p.advantages_T[t]),
            tuple(p.input_ids_BL[p.row_T[t], : p.position_T[t] + 1].tolist()),
            int(p.target_T[t]),
            float(p.temperature_T[t]),
            float(p.behavior_logprobs_T[t]),
        )
        for p in passes
        for t in range(p.num_trained_tokens)
    )


def expected_tokens(batch):
    found = []
    for r in batch:
        ids = [*r.trajectory.prompt_ids.tolist(), *r.trajectory.response_ids.tolist()]
        start = len(r.trajectory.prompt_ids)
        for i in np.flatnonzero(r.loss_mask):
            logprob = float(r.trajectory.behavior_logprobs[i])
            found.append((r.advantage, tuple(ids[: start + i]), ids[start + i], 1.0, logprob))
    return sorted(found)


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 20), budget=st.integers(16, 400), seed=st.integers(0, 2**16))
def test_every_trained_token_stands_once_after_its_own_context(count, budget, seed):
    batch = rows(count, seed)
    passes = micro_batches(batch, micro_batch_tokens=budget)
    assert trained_tokens(passes) == expected_tokens(batch)
    assert sum(p.num_trained_tokens for p in passes) == num_trained_tokens(batch)
    assert all(p.input_ids_BL.size <= budget or len(p.input_ids_BL) == 1 for p in passes)


def test_the_longest_rows_come_first_and_little_is_padding():
    passes = micro_batches(rows(64), micro_batch_tokens=128)
    lengths = [p.input_ids_BL.shape[1] for p in passes]
    assert lengths == sorted(lengths, reverse=True)
    padded = sum(p.input_ids_BL.size for p in passes)
    alone = sum(p.input_ids_BL.size for p in micro_batches(rows(64), micro_batch_tokens=1))
    assert padded <= 1.2 * alone


def test_nothing_is_read_after_the_last_trained_token():
    trajectory = sampled_row(np.random.default_rng(1), num_turns=3)
    first_turn = trajectory.turns[0]
    mask = np.zeros(len(trajectory.response_ids))
    mask[first_turn.start : first_turn.end] = 1
    (only,) = micro_batches([row(trajectory, loss_mask=mask)], micro_batch_tokens=4096)
    assert only.input_ids_BL.shape[1] == len(trajectory.prompt_ids) + first_turn.end - 1


def test_rows_whose_tokens_all_aged_out_are_left_out():
    aged = row(sampled_row(np.random.default_rng(0)))
    aged.loss_mask = np.zeros_like(aged.loss_mask)
    assert micro_batches([aged], micro_batch_tokens=64) == []
    assert len(micro_batches([aged, *rows(1)], micro_batch_tokens=64)) == 1


@pytest.mark.parametrize(("sampled_at", "divides_by"), [(0.6, 0.6), (1.0, 1.0), (0.0, 1.0)])
def test_a_token_has_its_turns_temperature_and_greedy_ones_have_1(sampled_at, divides_by):
    trajectory = sampled_row(np.random.default_rng(0), num_turns=2, temperature=sampled_at)
    sampled = trajectory.response_mask == 1
    np.testing.assert_array_equal(temperatures(trajectory)[sampled], np.float32(divides_by))
    np.testing.assert_array_equal(temperatures(trajectory)[~sampled], 1)
    (only,) = micro_batches([row(trajectory)], micro_batch_tokens=4096)
    np.testing.assert_array_equal(only.temperature_T, np.float32(divides_by))
