"""What becomes of a run when a model has failed for good."""

from __future__ import annotations

import time

from model_runtime.config import MultiModelConfig
from tasks.gateway_admin import GatewayAdmin

LOOK_EVERY_S = 5.0


class IdleWatch:
    """How long no model of a run has trained a step.

    Time in which the gateway could not be asked, or this process stood still, does not count.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._steps: dict[str, int] = {}
        self._idle_s = 0.0

    async def idle_s(self, admin: GatewayAdmin) -> float:
        """Called again and again; looks every few seconds."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, 2 * LOOK_EVERY_S)
        if now - self._looked_at < LOOK_EVERY_S:
            return self._idle_s
        self._looked_at = now
        status = await admin.status()
        if status is None:
            return self._idle_s
        steps = {
            model_id: model.renewal.step
            for model_id, model in status.models.items()
            if model.renewal is not None
        }
        self._idle_s = self._idle_s + passed_s if steps == self._steps else 0.0
        self._steps = steps
        return self._idle_s


async def reason_to_end(
    settings: MultiModelConfig, watch: IdleWatch, admin: GatewayAdmin, *, driven: bool
) -> str | None:
    """Why the run ends now that a model has failed; None: the others go on. `driven`: the run brings its own
    work, so who trains nothing will go on training nothing."""
    if settings.on_model_failure == "stop":
        return "multi_model.on_model_failure is stop"
    limit_s = settings.idle_limit_s
    if driven and limit_s is not None and await watch.idle_s(admin) > limit_s:
        return f"no other trained a step for {limit_s:g} s (multi_model.idle_limit_s)"
    return None
