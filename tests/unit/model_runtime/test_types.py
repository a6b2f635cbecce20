from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from model_runtime.errors import InvalidTrajectoryError
from model_runtime.types import FINAL_STATUSES, trajectory_id
from tests.fakes import make_member, make_settlement, make_trajectory, make_turn


def i32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def i8(*values: int) -> np.ndarray:
    return np.asarray(values, np.int8)


def test_a_sound_trajectory_is_accepted_and_counts_its_tokens() -> None:
    t = make_trajectory(mask=[1, 1, 0, 1], version=3)
    assert t.num_sampled_tokens == 3
    assert t.num_tokens == 3 + 4
    assert t.nbytes == 4 * 3 + 4 * 4 + 4 + 4 * 4 + 4 * 4
    assert [(turn.start, turn.end) for turn in t.turns] == [(0, 2), (3, 4)]


# Of a trajectory with prompt 1 2 3 and mask 1 1 0 1, sampled by version 2.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "prompt dtype": ({"prompt_ids": np.asarray([1, 2])}, r"prompt_ids must be a flat int32 array, got int64"),
    "ids dtype": ({"response_ids": f32(1, 2, 3, 4)}, "response_ids must be a flat int32 array, got float32"),
    "mask dtype": ({"response_mask": i32(1, 1, 0, 1)}, "response_mask must be a flat int8 array"),
    "logprobs dtype": ({"behavior_logprobs": np.zeros(4)}, "behavior_logprobs must be a flat float32 array"),
    "versions dtype": ({"token_versions": i8(2, 2, -1, 2)}, "token_versions must be a flat int32 array"),
    "not flat": ({"response_ids": i32(1, 2, 3, 4)[None]}, r"response_ids must be a flat .* \(1, 4\)"),
    "mask length": ({"response_mask": i8(1, 1, 0)}, "response_mask has 3 entries, response_ids 4"),
    "logprobs length": (
        {"behavior_logprobs": f32(-1, -1, 0, -1, -1)},
        "behavior_logprobs has 5 entries, response_ids 4",
    ),
    "versions length": ({"token_versions": i32()}, "token_versions has 0 entries, response_ids 4"),
    "no prompt": ({"prompt_ids": i32()}, "prompt_ids is empty"),
    "negative prompt id": ({"prompt_ids": i32(1, -2)}, "a token id is negative"),
    "negative response id": ({"response_ids": i32(1, 2, 3, -1)}, "a token id is negative"),
    "mask of 2": ({"response_mask": i8(1, 2, 0, 1)}, "response_mask holds values other than 0 and 1"),
    "nothing sampled": (
        {
            "response_mask": i8(0, 0, 0, 0),
            "behavior_logprobs": f32(0, 0, 0, 0),
            "token_versions": i32(-1, -1, -1, -1),
            "turns": (),
        },
        "no token was sampled by the policy",
    ),
    "NaN reward": ({"workflow_rewards": {"reward": float("nan")}}, r"workflow_rewards\['reward'\] is nan"),
    "infinite reward": (
        {"agent_rewards": {"style": float("-inf")}},
        r"agent_rewards\['style'\] is -inf: a reward is a finite number, or None",
    ),
    "NaN": ({"behavior_logprobs": f32(-1, np.nan, 0, -1)}, "holds a value that is not finite"),
    "infinite": ({"behavior_logprobs": f32(-1, -np.inf, 0, -1)}, "holds a value that is not finite"),
    "positive": ({"behavior_logprobs": f32(-1, 0.01, 0, -1)}, "holds a positive value"),
    "logprob of context": (
        {"behavior_logprobs": f32(-1, -1, -1, -1)},
        "behavior_logprobs is not 0 where the mask is 0",
    ),
    "version of context": ({"token_versions": i32(2, 2, 2, 2)}, "token_versions must be −1 where"),
    "sampled by nobody": ({"token_versions": i32(2, -1, -1, 2)}, "token_versions must be −1 where"),
    "oldest": ({"policy_version": 1}, "policy_version 1 is not the oldest of token_versions"),
    "newest": ({"policy_version_max": 3}, "policy_version_max 3 is not the newest of token_versions"),
    "turn outside": ({"turns": (make_turn(start=0, end=5),)}, "turn 0 spans 0:5 of 4 tokens"),
    "turn backwards": ({"turns": (make_turn(start=2, end=1),)}, "turn 0 spans 2:1 of 4 tokens"),
    "turn before": ({"turns": (make_turn(start=-1, end=2),)}, "turn 0 spans -1:2 of 4 tokens"),
    "turns overlap": (
        {"turns": (make_turn(end=2), make_turn(turn_index=1, start=1, end=2))},
        "turn 1 overlaps another",
    ),
    "turn over context": ({"turns": (make_turn(start=0, end=4),)}, "do not cover exactly the sampled tokens"),
    "turn missing": ({"turns": (make_turn(start=0, end=2),)}, "do not cover exactly the sampled tokens"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_invariant_is_refused_and_named(change: dict[str, Any], message: str) -> None:
    sound = make_trajectory(mask=[1, 1, 0, 1], version=2)
    with pytest.raises(InvalidTrajectoryError, match=message) as caught:
        dataclasses.replace(sound, **change)
    assert sound.trajectory_id in str(caught.value)
    assert "'planner_agent'" in str(caught.value)


def test_rounding_a_hair_above_zero_is_accepted() -> None:
    make_trajectory(behavior_logprobs=f32(5e-5, -1, -1))


def test_versions_may_differ_within_a_trajectory() -> None:
    t = make_trajectory(token_versions=i32(2, 4, 3), policy_version=2, policy_version_max=4)
    assert (t.policy_version, t.policy_version_max) == (2, 4)


def test_an_execution_names_its_trajectories_apart_and_always_alike() -> None:
    member = make_member()
    ids = {
        trajectory_id("run", member, "a", 0),
        trajectory_id("run", member, "a", 1),
        trajectory_id("run", member, "b", 0),
        trajectory_id("other", member, "a", 0),
        trajectory_id("run", make_member(attempt=1), "a", 0),
        trajectory_id("run", make_member(member_index=1), "a", 0),
        trajectory_id("run", make_member(group_id="g1"), "a", 0),
    }
    assert len(ids) == 7
    assert trajectory_id("run", make_member(), "a", 0) in ids


def test_a_retried_attempt_settles_nothing() -> None:
    assert not make_settlement(status="retried").is_final
    assert all(make_settlement(status=status).is_final for status in FINAL_STATUSES)


def test_an_execution_is_named_by_group_member_and_attempt() -> None:
    assert make_member(group_id="task-7", member_index=3, attempt=1).workflow_id == "task-7/3/1"
