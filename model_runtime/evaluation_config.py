"""How policies are evaluated."""

from __future__ import annotations

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

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationConfig:
        if self.samples_per_task > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_task is {self.samples_per_task} with temperature 0: greedy executions of one "
                "task are all the same; set a temperature, or samples_per_task: 1"
            )
        return self
