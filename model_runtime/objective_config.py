"""What a training step minimises: the section `objective` of a model (docs/objectives.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from model_runtime.config_section import Section

ImportanceLevel = Literal["token", "sequence"]
AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "session-balanced",
]
"""See aggregation.py."""


class RejectionRule(Section):
    """One bound on how far a token or row may be from the sampler (verl's rollout_rs)."""

    statistic: Literal[
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ]
    """What is measured: an estimate of the KL per token, or its sum, mean or maximum over a row."""
    high: float = Field(gt=0)
    """Upper bound. For k1 a bound of the ratio sampler / trainer, else of the estimate itself."""
    low: float | None = Field(default=None, gt=0)
    """Lower bound of the ratio, for k1 only. None: 1 / high."""

    @model_validator(mode="after")
    def _bounds_match(self) -> RejectionRule:
        if self.low is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"low goes with k1 only; {self.statistic} has an upper bound")
        if self.statistic.endswith("k1") and (self.low or 1 / self.high) > self.high:
            raise ValueError(f"{self.statistic}: low is above high {self.high}")
        return self


class ObjectiveConfig(Section):
    """What a training step minimises."""

    advantage: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "grpo_passk",
        "opo",
        "gpg",
        "gdpo",
    ] = "grpo"
    """How a reward becomes an advantage; formulas and papers in `model_runtime/advantages.py`. grpo:
    A = (r − mean) / (std + 1e-6) over the members of a group. The last stage of reinforce_plus_plus,
    reinforce_plus_plus_baseline, gpg and gdpo is taken over the whole batch."""
    baseline_key: Literal["group_agent", "group", "group_agent_turn"] = "group_agent"
    """What is compared. group_agent: each agent with itself over a group's members. group: all agents of
    the model together, one value per member (the mean where its agents' rewards differ). group_agent_turn:
    each turn with the same turn of other members, if its prompt is the same token by token; a turn without
    such a peer is not trained, and counted."""
    reward_weights: dict[str, float] = Field(default={"reward": 1.0}, min_length=1)
    """Components of the reward and their weights; the reward is their weighted sum, without components
    that never came. gdpo normalises each on its own before it sums them. `workflow:<name>` and
    `agent:<name>` are that level's component alone; a plain name is looked up as reward_level says.
    `turn:<name>` is a single turn's, and counts for it and the turns before it."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """γ: a turn gets each later reward of its agent in this execution times γ^(turns in between). 1: every
    turn gets the execution's reward whole. The rewards of workflow and agent come with the last turn."""
    reward_level: Literal["workflow", "agent"] = "workflow"
    """workflow: the execution's reward, broadcast to every agent. agent: each agent's own, where it has
    one, else the execution's."""
    unfinished: Literal["drop", "baseline"] = "drop"
    """What becomes of executions that ran out of time or were aborted, through no fault of the
    infrastructure. drop: they teach nothing. baseline: their rewards count where their group is compared,
    their own tokens have no loss (verl's mask_unfinished_episode)."""
    unfinished_reward: float | None = Field(default=None, allow_inf_nan=False)
    """With unfinished: baseline, the reward of those that were given none. None: they are left out; what is
    missing is not 0."""
    normalize_by_std: bool | Literal["batch"] = True
    """For grpo, grpo_passk and gdpo. False: no division by the standard deviation (Dr. GRPO, arXiv
    2503.20783). batch: by that of all rewards in the batch, grpo only."""
    negative_advantage_scale: float = Field(default=1.0, ge=0)
    """Factor on negative advantages. Below 1 it damps collapse on tiny models."""
    loss: Literal["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce"] = "ppo_clip"
    """The loss of a token; formulas and papers in `model_runtime/losses.py`. ppo_clip: clipped surrogate
    with dual clip. gspo, gmpo and sapo are defined with aggregation seq-mean-token-mean. reinforce:
    −A·logprob, corrected by importance weights alone."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 − this. dppo: the divergence allowed to tokens with a negative
    advantage. gmpo: of the log ratio."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + this. dppo: the divergence allowed to tokens with a positive
    advantage. gmpo: of the log ratio."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """ppo_clip's dual clip: bound of the ratio for negative advantages."""
    dppo_ratio_cap: float = Field(default=20.0, gt=0)
    """dppo's bound of the ratio."""
    sapo_tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of sapo's gate for positive advantages."""
    sapo_tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of sapo's gate for the others."""
    old_logprobs: Literal["behavior", "recomputed", "proximal"] = "behavior"
    """behavior: the sampler's logprobs stand in for the old policy's (bypass). recomputed: the trainer's
    own at the start of the update, with importance weights against the sampler's (decoupled). proximal:
    decoupled too, but those of the last committed version, which stays the same for all steps of a sync
    window; costs one more forward pass."""
    importance_weight_cap: float | None = Field(default=2.0, gt=0)
    """Truncation of the weights exp(old − behavior). None: no weights. With old_logprobs: behavior the
    ratio corrects already, and reinforce alone is weighed, by exp(current − behavior)."""
    importance_weight_floor: float | None = Field(default=None, gt=0)
    """With a floor, weights outside [floor, cap] are 0 (IcePop). None: truncation at the cap alone."""
    importance_weight_level: ImportanceLevel = "token"
    """token: each token's own ratio. sequence: the product over the row, for each of its tokens."""
    importance_weight_normalize: bool = False
    """Divide the weights by their mean over the batch. Costs one more forward pass."""
    rejection: list[RejectionRule] = Field(default=[])
    """Tokens or rows too far from the sampler leave the batch and its denominators; every rule must keep
    them. Costs one more forward pass."""
    off_policy_mask_threshold: float | None = Field(default=None, gt=0)
    """Rows with a negative advantage whose mean KL from the sampler exceeds this have loss 0 (arXiv
    2512.02556). None: off."""
    aggregation: AggregationMode = "token-mean"
    """How token losses become one number, over the whole batch. token-mean: sum / trained tokens.
    token-sum. seq-mean-…: mean over rows of the sum, of the mean, or of the sum /
    aggregation_scale_tokens. session-balanced: each workflow execution weighs the same, however many
    chains it split into."""
    aggregation_scale_tokens: int | None = Field(default=None, ge=1)
    """What seq-mean-token-sum-norm divides by (Dr. GRPO). None: max_response_tokens."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL from the reference in the loss. Above 0 it costs one more forward pass."""
    kl_penalty: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"
    """Its estimator per token. `+`: that value with the gradient of k2, the unbiased one."""
    kl_reference: Literal["start", "base"] = "start"
    """start: the adapter this run started from. base: the model without adapter. They are the same unless
    adapter_path is set."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    @model_validator(mode="after")
    def _weights_are_bounded(self) -> ObjectiveConfig:
        cap, floor = self.importance_weight_cap, self.importance_weight_floor
        if floor is not None and (cap is None or floor > cap):
            raise ValueError(
                f"importance_weight_floor {floor} needs an importance_weight_cap above it, not {cap}"
            )
        return self

    @field_validator("reward_weights")
    @classmethod
    def _known_levels(cls, weights: dict[str, float]) -> dict[str, float]:
        for component in weights:
            scope, colon, name = component.rpartition(":")
            if not name or (colon and scope not in ("workflow", "agent", "turn")):
                raise ValueError(
                    f"{component!r} must read `name`, `workflow:name`, `agent:name` or `turn:name`"
                )
        return weights

    @model_validator(mode="after")
    def _advantage_settings_match(self) -> ObjectiveConfig:
        if self.normalize_by_std == "batch" and self.advantage != "grpo":
            raise ValueError(f"normalize_by_std: batch goes with advantage: grpo, not {self.advantage}")
        if not any(self.reward_weights.values()):
            raise ValueError("reward_weights: at least one component needs a weight other than 0")
        return self

    @model_validator(mode="after")
    def _unfinished_settings_match(self) -> ObjectiveConfig:
        if self.unfinished_reward is not None and self.unfinished != "baseline":
            raise ValueError(
                f"unfinished_reward {self.unfinished_reward:g} goes with unfinished: baseline, "
                f"not {self.unfinished}"
            )
        return self

    @property
    def outcome_weights(self) -> dict[str, float]:
        """Of the components of workflow and agent."""
        return {name: w for name, w in self.reward_weights.items() if not name.startswith("turn:")}

    @property
    def turn_reward_weights(self) -> dict[str, float]:
        """Of the components of single turns, by their plain names."""
        return {
            name.removeprefix("turn:"): w
            for name, w in self.reward_weights.items()
            if name.startswith("turn:")
        }

    @property
    def credits_turns(self) -> bool:
        """Whether the turns of a trajectory may have different advantages."""
        return bool(
            self.turn_reward_weights or self.turn_discount < 1 or self.baseline_key == "group_agent_turn"
        )

    @model_validator(mode="after")
    def _turns_can_be_credited(self) -> ObjectiveConfig:
        if not self.credits_turns:
            return self
        what = "turn rewards, turn_discount below 1 and baseline_key group_agent_turn"
        if self.advantage not in ("grpo", "rloo") or self.normalize_by_std == "batch":
            raise ValueError(
                f"{what} go with advantage grpo or rloo and normalize_by_std true or false, not with "
                f"{self.advantage} and {self.normalize_by_std}"
            )
        if self.baseline_key == "group":
            raise ValueError(f"{what} compare each agent with itself: baseline_key can't be group")
        return self

    @property
    def is_weighed(self) -> bool:
        """Whether losses are multiplied by importance weights. With the sampler's logprobs as old ones the
        ratio corrects for it already, and nothing comes on top; a loss without a ratio is corrected by
        weights alone."""
        by_ratio = self.old_logprobs == "behavior" and self.loss != "reinforce"
        return self.importance_weight_cap is not None and not by_ratio

    def _idle_weight_settings(self) -> list[str]:
        """Settings of weights that differ from the defaults and weigh nothing."""
        names = ("importance_weight_floor", "importance_weight_level", "importance_weight_normalize")
        fields = type(self).model_fields
        return [] if self.is_weighed else [n for n in names if getattr(self, n) != fields[n].default]

    def warnings(self) -> list[str]:
        """What is accepted and may surprise, one sentence each."""
        found = []
        if idle := self._idle_weight_settings():
            found.append(
                f"{' and '.join(idle)} change nothing with old_logprobs {self.old_logprobs}: the ratio "
                "corrects for the sampler; set old_logprobs to recomputed or proximal to correct by weights"
            )
        if self.old_logprobs != "behavior" and self.importance_weight_cap is None and not self.rejection:
            found.append(
                f"old_logprobs {self.old_logprobs} without importance_weight_cap and rejection: nothing "
                "corrects for the sampler's policy"
            )
        if self.loss == "gspo" and min(self.clip_ratio_low, self.clip_ratio_high) >= 0.1:
            found.append(
                f"loss gspo clips means over a row: clip_ratio_low {self.clip_ratio_low:g} and "
                f"clip_ratio_high {self.clip_ratio_high:g} hardly ever act; published are 3e-4 and 4e-4"
            )
        if self.aggregation_scale_tokens is not None and self.aggregation != "seq-mean-token-sum-norm":
            found.append(
                f"aggregation_scale_tokens {self.aggregation_scale_tokens} changes nothing with aggregation "
                f"{self.aggregation}; seq-mean-token-sum-norm divides by it"
            )
        cap = self.importance_weight_cap
        if self.loss == "reinforce":
            bound = "no importance weights" if cap is None else f"importance weights up to {cap}"
            found.append(f"loss reinforce clips nothing; only {bound} correct for stale samples")
        if self.loss in ("gspo", "gmpo", "sapo") and self.aggregation != "seq-mean-token-mean":
            found.append(
                f"loss {self.loss} is defined with aggregation seq-mean-token-mean, not {self.aggregation}"
            )
        return found
