"""How policies are evaluated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from model_runtime.config_section import Section


class EvaluationConfig(Section):
    """How the held-out tasks are worked on, at the end of a run and by the flow `evaluate`."""

    samples_per_task: int = Field(default=1, ge=1, le=256)
    """Executions of each task."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Forced on every agent. 0: greedy."""
    success_reward: float = 1.0
    """An execution whose workflow reward is at least this has solved its task; pass@k counts those."""
    cron: str | None = None
    """When the deployment `evaluate/<name>` runs by itself, as a cron expression: `*/10 * * * *`. It
    evaluates the newest versions of the newest run, each once, and ends at once when there are no newer
    ones. None: only when it is started."""

    interval_s: float | None = Field(default=None, ge=60)
    """The same by the interval in place of a cron expression. None: no interval."""
    every_checkpoints: int | None = Field(default=None, ge=1)
    """The deployment `evaluate/<name>` looks into the store each minute, and whenever a checkpoint is saved:
    of each model's checkpoints every so many are evaluated, each once. None: it does not look."""
    where: Literal["auto", "store"] = "auto"
    """auto: a run that trains now is asked itself for the versions it serves, which it keeps in service
    meanwhile; any other versions come from the store. store: always with servers of its own."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        if self.cron is not None and self.interval_s is not None:
            raise ValueError("cron and interval_s are both set: one of them says when")
        if self.samples_per_task > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_task is {self.samples_per_task} with temperature 0: greedy executions of one "
                "task are all the same; set a temperature, or samples_per_task: 1"
            )
        return self
