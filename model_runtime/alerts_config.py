"""What is reported to people, through automations of Prefect that `repertory deploy` makes."""

from __future__ import annotations

from pydantic import Field, field_validator

from model_runtime.config_section import Section

DEFAULT_BLOCK = "custom-webhook/repertory-alerts"


class AlertsConfig(Section):
    """Automations made by `repertory deploy`, each with a notification. None: that one is not wanted."""

    block: str = DEFAULT_BLOCK
    """Notification block of Prefect that tells people, as type/name. The default one is made for you,
    without an address: fill it in on the dashboard's page Blocks. Any other must exist."""
    zombie_after_s: float | None = Field(default=180.0, ge=60)
    """A flow run that gave no sign of life for this long is set to Crashed, so that its parent starts it
    again. Processes give one every 30 s."""
    model_failed: bool = True
    """A model's runtime ended with an error."""
    no_progress_minutes: float | None = Field(default=30.0, gt=0.5)
    """No training step of a model ended for this long, though its training is not over."""
    reward_drop: float | None = Field(default=0.5, gt=0)
    """The mean reward of the last ten steps is below the best ten's by this share of it; or a reward or a
    loss is not a number."""
    evaluation_drop: float | None = Field(default=0.1, gt=0)
    """An evaluation's mean reward is below the one before by this much, over the tasks both have one of."""

    @field_validator("block")
    @classmethod
    def _type_and_name(cls, block: str) -> str:
        kind, _, name = block.partition("/")
        if not kind or not name or "/" in name:
            raise ValueError("must read type/name, as in slack-webhook/our-channel")
        return block
