"""The objective of a batch doesn't depend on its split; correction, KL and rejection do what they say."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.batching import micro_batches
from model_runtime.correction import importance_weights
from model_runtime.objective import BatchObjective, Frozen, correction_metrics, needs_start
from model_runtime.objective_config import ObjectiveConfig, RejectionRule
from tests.fakes import make_trajectory

LOSSES = ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce"]
AGGREGATIONS = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "session-balanced",
]
EXTRAS = {
    "plain": {},
    "weighed": {
        "old_logprobs": "recomputed",
        "importance_weight_level": "sequence",
        "importance_weight_normalize": True,
    },
    "rejecting": {
        "rejection": [
            {"statistic": "token_k1", "high": 1.5},
            {"statistic": "seq_mean_k3", "high": 0.2},
        ],
        "importance_weight_floor": 0.5,
    },
    "kl and entropy": {"kl_coef": 0.3, "kl_penalty": "k3+", "entropy_coef": 0.1},
    "proximal": {"old_logprobs": "proximal"},
    "masking": {"off_policy_mask_threshold": 0.05},
}


def make_rows(masks, *, seed=0):
    """Rows of three executions and more chains; logprobs, behavior and reference drawn for each token."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, mask in enumerate(masks):
        sampled = np.maximum(np.asarray(mask), [1] + [0] * (len(mask) - 1))  # a trajectory samples something
        behavior = np.where(sampled, -rng.random(len(mask)) * 2 - 0.05, 0).astype(np.float32)
        trajectory = make_trajectory(
            member_index=i % 3, chain_index=i // 3, group_size=9, mask=sampled, behavior_logprobs=behavior
        )
        loss_mask = np.asarray(mask, dtype=np.int8)  # all 0: everything of this row has aged out
        shape = SimpleNamespace(
            trajectory=trajectory, advantage=float(rng.normal()), loss_mask=loss_mask, turn_advantages=None
        )
        shape.now = (behavior + rng.normal(size=len(mask)) * 0.3).clip(max=-0.01)
        shape.reference = (behavior + rng.normal(size=len(mask)) * 0.3).clip(max=-0.01)
        rows.append(shape)
    return rows


def evaluate(rows, objective, *, micro_batch_tokens, backward=True):
    """(loss, gradient by row and position, metrics) as the learner computes them, in float32 as it does."""
    rows = [row for row in rows if row.loss_mask.any()]
    offset = np.cumsum([0, *(len(row.now) for row in rows)])
    table = torch.tensor(np.concatenate([r.now for r in rows]), dtype=torch.float32, requires_grad=True)
    reference = torch.tensor(np.concatenate([r.reference for r in rows]), dtype=torch.float32)
    start = torch.from_numpy(offset[:-1] - np.asarray([len(r.trajectory.prompt_ids) for r in rows]) + 1)
    passes = [m.tensors("cpu") for m in micro_batches(rows, micro_batch_tokens=micro_batch_tokens)]
    places = [start[t["batch_row_B"][t["row_T"]]] + t["position_T"] for t in passes]
    frozen = [
        Frozen(
            table.detach()[place] if needs_start(objective) else None,
            reference[place] if objective.kl_coef else None,
        )
        for place in places
    ]
    batch = BatchObjective(objective, rows, passes, frozen, scale_tokens=7)
    total = 0.0
    for i, place in enumerate(places):
        if batch.num_kept_tokens and not batch.is_rejected(i):
            logprobs = table[place]
            loss = batch.add(i, logprobs, -logprobs.exp() * logprobs)
            loss.backward()
            total += loss.item()
    gradient = np.zeros(offset[-1]) if table.grad is None else table.grad.numpy()
    return total, np.split(gradient, offset[1:-1]), batch.metrics()


rows_of_masks = st.lists(
    st.one_of(
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.just([0, 0, 0]),  # fully masked
        st.just([1]),  # one token
        st.just([1] * 24),  # longer than any micro-batch's share
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=12)
@given(
    masks=rows_of_masks,
    seed=st.integers(0, 99),
    budget=st.sampled_from([16, 24, 40]),
    extra=st.sampled_from(list(EXTRAS)),
)
def test_the_split_changes_neither_loss_nor_gradient(loss, aggregation, masks, seed, budget, extra):
    if not any(map(any, masks)):
        masks = [*masks, [1]]
    objective = ObjectiveConfig(loss=loss, aggregation=aggregation, **EXTRAS[extra])
    rows = make_rows(masks, seed=seed)
    whole, gradient, metrics = evaluate(rows, objective, micro_batch_tokens=100_000)
    parts, split_gradient, split_metrics = evaluate(rows, objective, micro_batch_tokens=budget)
    flat, split = np.concatenate(gradient), np.concatenate(split_gradient)
    assert abs(parts - whole) <= 1e-5 * max(1, abs(whole))
    assert np.linalg.norm(split - flat) <= 1e-5 * max(np.linalg.norm(flat), 1e-6)
    assert metrics.keys() == split_metrics.keys()


def test_token_mean_is_the_mean_over_all_trained_tokens():
    rows = make_rows([[1, 1, 0, 1], [1], [0, 0]])
    objective = ObjectiveConfig(loss="reinforce", importance_weight_cap=None)
    got, _, _ = evaluate(rows, objective, micro_batch_tokens=16)
    terms = [-r.advantage * r.now[r.loss_mask == 1] for r in rows]
    assert got == pytest.approx(np.concatenate(terms).mean(), rel=1e-5)


def test_session_balanced_gives_each_execution_the_same_weight():
    rows = make_rows([[1] * 2, [1] * 4, [1], [1] * 6])  # executions 0, 1, 2, and 0 again: a second chain
    assert rows[0].trajectory.session_id == rows[3].trajectory.session_id
    for row in rows:
        row.advantage = 1.0
    objective = ObjectiveConfig(loss="reinforce", importance_weight_cap=None, aggregation="session-balanced")
    _, gradient, _ = evaluate(rows, objective, micro_batch_tokens=16)
    sums = [-g.sum() for g in gradient]
    assert sums[0] + sums[3] == pytest.approx(1 / 3)
    assert sums[1:3] == pytest.approx([1 / 3, 1 / 3])


def weights(rows, **options):
    ratio = np.concatenate([r.now - r.trajectory.behavior_logprobs for r in rows])
    row = np.repeat(np.arange(len(rows)), [len(r.now) for r in rows])
    made = importance_weights(torch.tensor(ratio), torch.tensor(row), len(rows), **options)
    return made.weights_T.numpy()


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({}, {"level": "token", "cap": 2.0}),
        ({"importance_weight_cap": 1.1}, {"level": "token", "cap": 1.1}),
        ({"importance_weight_floor": 0.9}, {"level": "token", "cap": 2.0, "floor": 0.9}),
        ({"importance_weight_level": "sequence"}, {"level": "sequence", "cap": 2.0}),
    ],
)
@pytest.mark.parametrize(
    "mode", [{"old_logprobs": "recomputed"}, {"old_logprobs": "proximal"}, {"loss": "reinforce"}]
)
def test_decoupled_losses_and_reinforce_are_weighed(setting, options, mode):
    rows = make_rows([[1] * 5, [1] * 3])
    objective = ObjectiveConfig(**setting, **mode)
    _, gradient, _ = evaluate(rows, objective, micro_batch_tokens=16)
    advantages = np.repeat([r.advantage for r in rows], [5, 3])
    want = -advantages * weights(rows, **options) / 8
    np.testing.assert_allclose(np.concatenate(gradient), want, rtol=1e-4, atol=1e-8)


def test_sampler_logprobs_as_old_ones_are_not_weighted_twice():
    rows = make_rows([[1] * 5])
    wide = {"clip_ratio_low": 1, "clip_ratio_high": 1e6, "clip_ratio_c": 1e9}
    _, gradient, _ = evaluate(rows, ObjectiveConfig(**wide), micro_batch_tokens=16)
    ratio = np.exp(rows[0].now - rows[0].trajectory.behavior_logprobs)
    np.testing.assert_allclose(gradient[0], -rows[0].advantage * ratio / 5, rtol=1e-4)


def test_rejected_tokens_leave_the_denominator_and_rejected_rows_the_batch():
    rows = make_rows([[1] * 4, [1] * 4])
    for row in rows:
        row.advantage, row.now = 1.0, row.trajectory.behavior_logprobs.astype(np.float64)
    rows[0].now[0] -= 5  # one token far from the sampler
    token = ObjectiveConfig(loss="reinforce", rejection=[{"statistic": "token_k1", "high": 2.0}])
    _, gradient, metrics = evaluate(rows, token, micro_batch_tokens=16)
    np.testing.assert_allclose(np.concatenate(gradient), [0] + [-1 / 7] * 7, rtol=1e-5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 8)
    row = ObjectiveConfig(loss="reinforce", rejection=[{"statistic": "seq_max_k2", "high": 1.0}])
    _, gradient, _ = evaluate(rows, row, micro_batch_tokens=16)
    np.testing.assert_allclose(np.concatenate(gradient), [0] * 4 + [-1 / 4] * 4, rtol=1e-5)


def test_a_batch_that_is_rejected_whole_has_figures_and_no_loss():
    rows = make_rows([[1] * 4])
    rows[0].now -= 5
    objective = ObjectiveConfig(rejection=[RejectionRule(statistic="token_k1", high=1.1)])
    loss, gradient, metrics = evaluate(rows, objective, micro_batch_tokens=16)
    assert loss == 0
    assert not gradient[0].any()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


def test_the_kl_pulls_towards_the_reference():
    rows = make_rows([[1] * 4])
    rows[0].advantage = 0.0
    objective = ObjectiveConfig(kl_coef=0.5, kl_penalty="k2")
    _, gradient, metrics = evaluate(rows, objective, micro_batch_tokens=16)
    want = 0.5 * (rows[0].now - rows[0].reference) / 4
    np.testing.assert_allclose(gradient[0], want, rtol=1e-4, atol=1e-7)
    squared = 0.5 * (rows[0].now - rows[0].reference) ** 2
    assert metrics["actor/kl_loss"] == pytest.approx(squared.mean(), rel=1e-4)
    assert metrics["actor/kl_coef"] == 0.5


@pytest.mark.parametrize(
    ("kind", "slope"),
    [
        ("k1", lambda apart: np.ones_like(apart)),
        ("k3", lambda apart: 1 - np.exp(-apart)),
        ("k3+", lambda apart: apart),
    ],
)
def test_the_kl_is_that_of_the_policy_from_the_reference_and_not_the_other_way_round(kind, slope):
    rows = make_rows([[1] * 4])
    rows[0].advantage = 0.0
    objective = ObjectiveConfig(kl_coef=0.5, kl_penalty=kind)
    _, gradient, metrics = evaluate(rows, objective, micro_batch_tokens=16)
    apart = rows[0].now - rows[0].reference
    np.testing.assert_allclose(gradient[0], 0.5 * slope(apart) / 4, rtol=1e-4, atol=1e-7)
    value = apart if kind == "k1" else np.exp(-apart) - 1 + apart
    assert metrics["actor/kl_loss"] == pytest.approx(value.mean(), rel=1e-4)


def test_without_a_cap_there_are_no_weights_and_no_figures_of_them():
    logprobs, row = torch.full((3,), -1.0), torch.zeros(3, dtype=torch.long)
    objective = ObjectiveConfig(importance_weight_cap=None)
    metrics = correction_metrics(logprobs, logprobs - 0.1, row, 1, objective)
    assert not any("rollout_is" in name for name in metrics)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.1, abs=1e-6)
