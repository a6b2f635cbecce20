"""Advantages that need the whole batch: computed over what is trained, the same when it is replayed."""

from __future__ import annotations

import numpy as np
import pytest

from model_runtime.advantages import reinforce_plus_plus, whiten
from model_runtime.batch_rows import TrainingRow, with_batch_advantages
from model_runtime.config import ModelConfig
from model_runtime.documents import BatchDocument
from model_runtime.layout import RunLayout
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.training_queue import TrainingQueue
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Shard
from tests.fakes import make_settlement, make_trajectory
from tests.memory_store import MemoryStore

LAYOUT = RunLayout("run").model("planner_model")


def row(agent_id="a", *, group="g0", member=0, chain=0, reward=0.0, mask=(1, 1, 1), first=None):
    trajectory = make_trajectory(
        agent_id=agent_id, group_id=group, member_index=member, chain_index=chain, mask=mask, reward=reward
    )
    return TrainingRow(trajectory, reward, reward if first is None else first, trajectory.response_mask)


def advantages(rows, **objective):
    return [r.advantage for r in with_batch_advantages(rows, ObjectiveConfig(**objective))]


def test_each_agent_is_whitened_on_its_own():
    rows = [row("a", reward=1.0), row("b", reward=100.0), row("a", member=1), row("b", member=1)]
    got = advantages(rows, advantage="reinforce_plus_plus")
    np.testing.assert_allclose(got[0], got[1])
    np.testing.assert_allclose(got[::2], reinforce_plus_plus([1.0, 0.0], [3, 3]))


def test_agents_that_share_a_baseline_are_whitened_together():
    rows = [row("a", reward=1.0), row("b", reward=100.0), row("a", member=1), row("b", member=1)]
    got = advantages(rows, advantage="reinforce_plus_plus", baseline_key="group")
    np.testing.assert_allclose(got, whiten([1.0, 100.0, 0.0, 0.0], [3] * 4))


def test_long_responses_weigh_more_and_the_scale_of_negatives_comes_last():
    rows = [row(reward=1.0, mask=(1,) * 9), row(member=1)]
    plain = advantages(rows, advantage="reinforce_plus_plus_baseline")
    np.testing.assert_allclose(9 * plain[0] + 3 * plain[1], 0, atol=1e-12)
    damped = advantages(rows, advantage="reinforce_plus_plus_baseline", negative_advantage_scale=0.5)
    np.testing.assert_allclose(damped, [plain[0], plain[1] * 0.5])


def test_a_member_counts_once_in_gpgs_share_however_many_chains_it_has():
    rows = [row(reward=1.0, first=0.5), row(member=1, first=-0.5), row(member=1, chain=1, first=-0.5)]
    assert advantages(rows, advantage="gpg") == [1.0, -1.0, -1.0]


def test_estimators_of_a_group_alone_are_left_as_they_are():
    assert advantages([row(reward=3.0)], advantage="rloo") == [3.0]


@pytest.mark.parametrize(
    "estimator",
    [
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "grpo_passk",
        "opo",
        "gpg",
        "gdpo",
    ],
)
def test_every_estimator_trains_from_the_log_and_replays_the_same(estimator):
    store = MemoryStore()
    model = ModelConfig.model_validate(
        {
            "model_id": "planner_model",
            "model_path": "/m",
            "batch_size": 2,
            "objective": {"advantage": estimator},
        }
    )
    for seq, (group, rewards) in enumerate([("a", (0, 0, 1, 2)), ("b", (1, 0, 0, 0))]):
        rows = [make_trajectory(group_id=group, member_index=i, reward=r) for i, r in enumerate(rewards)]
        ends = [make_settlement(group_id=group, member_index=i) for i in range(4)]
        shard = Shard(trajectories=tuple(rows), settlements=tuple(ends))
        store.put(LAYOUT.log_shard("e00001-00001", seq), encode_shard(shard))

    def queue():
        made = TrainingQueue(store, LAYOUT, model, epoch=1, resume=None)
        made.poll()
        return made

    batch = queue().next_batch(
        1, published_version=0, training_version=0, oldest_open_version=None, final=False
    )
    assert batch is not None
    again = queue().replay(BatchDocument.parse(batch.document.to_bytes(), source="batch"))
    assert again is not None
    assert [r.advantage for r in again.rows] == [r.advantage for r in batch.rows]
    assert {r.trajectory.member.group_id for r in batch.rows} == {"a", "b"}
    assert max(r.advantage for r in batch.rows) > 0
    assert batch.metrics["agent/planner_agent/calls"] == 1
    assert batch.metrics["agent/planner_agent/advantage/std"] > 0
    assert batch.metrics["agent/planner_agent/too_few_values"] == 0
