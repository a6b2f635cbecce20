"""The records everything else speaks of: trajectories and settlements.

Vocabulary: a *rollout* is the act, a *trajectory* its record: one linear chain of one agent. A *turn*
is one model call inside it. *behavior_logprobs* come from the sampler, *old_logprobs* are the trainer's
own at the start of an update. Suffixes in array names elsewhere: `_P` prompt, `_R` response, `_B` row,
`_T` token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from model_runtime.errors import InvalidTrajectoryError

SCHEMA_VERSION = 1
DEFAULT_COMPONENT = "reward"

Rewards = Mapping[str, float | None]
"""Reward component → value. None means "never came"; it is not 0."""

SettlementStatus = Literal["finalized", "aborted", "expired", "infra", "retried"]
FINAL_STATUSES: frozenset[str] = frozenset({"finalized", "aborted", "expired", "infra"})
UNFINISHED_STATUSES: frozenset[str] = frozenset({"aborted", "expired"})
"""The execution's own doing, unlike `infra`: it ran out of time or room, or gave up."""

Int32Array = npt.NDArray[np.int32]
Int8Array = npt.NDArray[np.int8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call. `start:end` are offsets into the trajectory's `response_ids`."""

    turn_index: int
    start: int
    end: int
    request_id: str
    version_min: int
    version_max: int
    finish_reason: str  # "stop" | "length" | "abort"
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str
    rewards: Rewards
    started_at: float  # Unix seconds
    ended_at: float
    off_policy: Mapping[str, str] = field(default_factory=dict)
    """Settings by which tokens were drawn from another distribution than the model's own, as JSON values
    (`top_p`, penalties, a forced `tool_choice`); the run's config allowed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKey:
    """One execution of a workflow: the k-th attempt at one member of a group."""

    group_id: str
    group_size: int
    member_index: int
    attempt: int

    @property
    def workflow_id(self) -> str:
        return f"{self.group_id}/{self.member_index}/{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One linear chain of one agent, exactly as the sampler saw and produced it.

    Every R-array has the length of `response_ids`. `response_mask` is 1 where the policy sampled the
    token and 0 on context (tool results, later user messages). `behavior_logprobs` are those of the
    distribution the token was sampled from and 0 where the mask is 0; `token_versions` is −1 there.
    Construction checks every invariant and raises InvalidTrajectoryError.
    """

    trajectory_id: str
    run_id: str
    member: MemberKey
    session_id: str
    agent_id: str
    model_id: str
    chain_index: int
    parent_trajectory_id: str | None
    request_id: str  # last turn's
    policy_version: int  # the oldest version that sampled a token here
    policy_version_max: int
    partner_versions: Mapping[str, tuple[int, int]]  # other models of this execution: (min, max)
    prompt_ids: Int32Array
    response_ids: Int32Array
    response_mask: Int8Array
    behavior_logprobs: Float32Array
    token_versions: Int32Array
    turns: tuple[Turn, ...]
    workflow_rewards: Rewards
    agent_rewards: Rewards
    train: bool
    created_at: float
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_trajectory(self)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.response_mask.sum())

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def nbytes(self) -> int:
        arrays = (self.prompt_ids, self.response_ids, self.response_mask)
        return sum(a.nbytes for a in (*arrays, self.behavior_logprobs, self.token_versions))


def trajectory_id(run_id: str, member: MemberKey, agent_id: str, chain_index: int) -> str:
    """Stable id: the same execution writes the same ids, so a repeated write is seen as one."""
    parts = (run_id, member.group_id, member.member_index, member.attempt, agent_id, chain_index)
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def check_trajectory(t: Trajectory) -> None:
    """Raise InvalidTrajectoryError naming the first broken invariant."""

    def refuse(what: str) -> None:
        raise InvalidTrajectoryError(f"trajectory {t.trajectory_id} of agent {t.agent_id!r}: {what}")

    wanted = {
        "prompt_ids": np.int32,
        "response_ids": np.int32,
        "response_mask": np.int8,
        "behavior_logprobs": np.float32,
        "token_versions": np.int32,
    }
    for name, dtype in wanted.items():
        array = getattr(t, name)
        if array.dtype != dtype or array.ndim != 1:
            refuse(f"{name} must be a flat {np.dtype(dtype).name} array, got {array.dtype} {array.shape}")
    num_response = len(t.response_ids)
    for name in ("response_mask", "behavior_logprobs", "token_versions"):
        if len(getattr(t, name)) != num_response:
            refuse(f"{name} has {len(getattr(t, name))} entries, response_ids {num_response}")
    if len(t.prompt_ids) == 0:
        refuse("prompt_ids is empty")
    if t.prompt_ids.min(initial=0) < 0 or t.response_ids.min(initial=0) < 0:
        refuse("a token id is negative")
    sampled = t.response_mask == 1
    if not np.isin(t.response_mask, (0, 1)).all():
        refuse("response_mask holds values other than 0 and 1")
    if not sampled.any():
        refuse("no token was sampled by the policy")
    if not np.isfinite(t.behavior_logprobs).all():
        refuse("behavior_logprobs holds a value that is not finite")
    # float32 rounding in the sampler's log-softmax can leave a certain token a hair above 0.
    if (t.behavior_logprobs > 1e-4).any():
        refuse("behavior_logprobs holds a positive value")
    if (t.behavior_logprobs[~sampled] != 0).any():
        refuse("behavior_logprobs is not 0 where the mask is 0")
    if (t.token_versions[~sampled] != -1).any() or (t.token_versions[sampled] < 0).any():
        refuse("token_versions must be −1 where the mask is 0 and ≥ 0 elsewhere")
    if int(t.token_versions[sampled].min()) != t.policy_version:
        refuse(f"policy_version {t.policy_version} is not the oldest of token_versions")
    if int(t.token_versions[sampled].max()) != t.policy_version_max:
        refuse(f"policy_version_max {t.policy_version_max} is not the newest of token_versions")
    covered = np.zeros(num_response, dtype=bool)
    for turn in t.turns:
        if not 0 <= turn.start <= turn.end <= num_response:
            refuse(f"turn {turn.turn_index} spans {turn.start}:{turn.end} of {num_response} tokens")
        if covered[turn.start : turn.end].any():
            refuse(f"turn {turn.turn_index} overlaps another")
        covered[turn.start : turn.end] = True
    if (covered != sampled).any():
        refuse("the turns do not cover exactly the sampled tokens")
    for name, value in _all_rewards(t):
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"{name} is {value}: a reward is a finite number, or None when it never came")


def _all_rewards(t: Trajectory) -> Iterator[tuple[str, float | None]]:
    levels = {"workflow_rewards": t.workflow_rewards, "agent_rewards": t.agent_rewards}
    levels |= {f"turn {turn.turn_index}'s rewards": turn.rewards for turn in t.turns}
    for level, rewards in levels.items():
        for component, value in rewards.items():
            yield f"{level}[{component!r}]", value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How one execution ended, for one model's log. Zero rows are announced too: otherwise "never
    called this model" and "still running" would look alike."""

    member: MemberKey
    status: SettlementStatus
    num_rows: Mapping[str, int]  # agent_id → trajectories of this model in the same shard
    train: bool
    reason: str = ""
    settled_at: float = 0.0

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A record that was read and breaks an invariant: nobody trains it, its group must not wait for it."""

    trajectory_id: str
    member: MemberKey
    agent_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Contents of one object of a model's log."""

    trajectories: tuple[Trajectory, ...] = ()
    settlements: tuple[Settlement, ...] = field(default=())
    refused: tuple[RefusedRow, ...] = ()  # filled by the reader only
