"""Sections of a model's training beside its trainer and objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from model_runtime.config_section import Section


class ReplayConfig(Section):
    """Groups that were trained and may fill up a batch that came too late (async_training.max_wait_s). The
    objective's correction weighs them like any stale sample."""

    max_groups: int = Field(default=0, ge=0)
    """Groups kept. 0: no replay."""
    max_bytes: int = Field(default=256 * 2**20, ge=1)
    """Bytes of arrays kept."""
    max_age: int = Field(default=8, ge=0)
    """Versions a token may lag behind the last published one when it is trained again; in place of
    async_training.max_staleness, which bounds its first time."""
    max_reuses: int = Field(default=1, ge=1)
    """Times one group is trained again."""


class RetentionConfig(Section):
    """What a run keeps in its store of each model's checkpoints, versions and log. What anything still needs
    (to resume, to serve, a snapshot) stays beyond that; the steps' documents and metrics always stay."""

    keep_last: int | None = Field(default=None, ge=2)
    """Newest checkpoints and versions kept, at least two: a damaged checkpoint is replaced by the one before
    it. None: everything is kept."""
    keep_every: int | None = Field(default=None, ge=1)
    """Beside them, checkpoints whose step, and versions whose number, is a multiple of this."""
    keep_best: int = Field(default=0, ge=0)
    """Beside them, this many versions of the highest mean reward: in evaluations where there are any, else in
    the steps that were trained from them."""
    min_age_s: float = Field(default=600.0, ge=0)
    """No version and no shard of a log younger than this is removed: somebody may just be fetching it."""
    max_log_bytes: int | None = Field(default=None, ge=0)
    """Bytes of each model's log kept. The oldest trajectories beyond that lose their tokens once no resume
    needs them, from any of the newest keep_last checkpoints (two when that is not set); their rewards and how
    their executions ended stay. Rows of evaluations go beyond as many bytes; what was found stays. None: no
    bound by size."""
    max_log_age_s: float | None = Field(default=None, ge=0)
    """The same by age: seconds since their executions ended. None: no bound by age."""

    @property
    def bounds_log(self) -> bool:
        return self.max_log_bytes is not None or self.max_log_age_s is not None

    @model_validator(mode="after")
    def _has_a_bound(self) -> RetentionConfig:
        if self.keep_last is None and (self.keep_every is not None or self.keep_best):
            raise ValueError("keep_every and keep_best keep more than keep_last does: set keep_last too")
        return self


class SupervisedConfig(Section):
    """Supervised warm-up before reinforcement learning: the answers of given conversations are learned, and
    the result is the run's version 0."""

    data: str
    """JSONL file; a line is {"messages": [{"role", "content"}, …]}, with "tools" if there are any. Trained
    are the assistant's tokens."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps, in place of epochs."""
    batch_size: int = Field(default=8, ge=1)
    """Conversations a step."""
    max_tokens: int = Field(default=4096, ge=2)
    """Longer conversations are left out."""
    learning_rate: float = Field(default=1e-4, ge=0)
    """Peak AdamW learning rate; everything else of the optimizer is the trainer's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate grows linearly from 0."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after that, towards the last step."""


class TrackingConfig(Section):
    """Where metrics are shown beside the run's store and Prefect, which have them always. One run for each
    model, named `<run_id>-<model_id>`; keys and addresses come from each tracker's own environment."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default=[])
    """Trackers, through accelerate. Their packages are not installed with this one."""
    project: str = Field(default="repertory", min_length=1)
    """Project (W&B, Trackio) or experiment (MLflow)."""
    folder: str = "./tracking"
    """Local folder of what trackers write: TensorBoard's event files, W&B's cache."""
