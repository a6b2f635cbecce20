"""How old a token may be when it is trained, and when training waits rather than let work age out.

lag = max(0, last published version − version that sampled the token).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from model_runtime.config import AsyncTrainingConfig
from model_runtime.groups import LogRow
from model_runtime.types import Int8Array, Trajectory

logger = logging.getLogger(__name__)


class StalenessBound:
    """The lag bound of one model. In strict mode only tokens of the version being trained pass."""

    def __init__(
        self, settings: AsyncTrainingConfig, *, max_wait_s: float, clock: Callable[[], float]
    ) -> None:
        self._strict = settings.strict_on_policy
        self._max_lag = 0 if settings.strict_on_policy else settings.max_staleness
        self._waits = settings.max_staleness_action == "wait"
        self._steps_per_version = settings.trigger_parameter_sync_step
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._waiting_since: float | None = None
        self._waited_out = -1  # work of this version or older was waited for long enough

    def is_aged(self, row: LogRow, *, published: int, training: int) -> bool:
        """Has the row no token left to train?"""
        if self._strict:
            return not row.policy_version == row.policy_version_max == training
        return published - row.policy_version_max > self._max_lag

    def loss_mask(self, trajectory: Trajectory, *, published: int, training: int) -> Int8Array:
        """The response mask without aged-out tokens."""
        sampled = trajectory.response_mask
        if self._strict:
            on_policy = trajectory.policy_version == trajectory.policy_version_max == training
            return sampled if on_policy else np.zeros_like(sampled)
        return sampled * (published - trajectory.token_versions <= self._max_lag).astype(np.int8)

    def would_age(self, oldest_version: int | None, *, step: int, training: int) -> bool:
        """Will publishing what this step leads to put work of that version past the bound? Only steps that
        end a version publish, and only `wait` looks ahead."""
        if oldest_version is None or not self._waits or step % self._steps_per_version != 0:
            return False
        return training + 1 - oldest_version > self._max_lag

    def must_wait(self, unfinished: Iterable[int | None], *, step: int, training: int) -> bool:
        """Should this step wait for unfinished work of these versions? No wait is longer than a group may
        live, and work once waited out is not waited for again: so training always goes on."""
        blockers = [
            version
            for version in unfinished
            if version is not None and version > self._waited_out
            if self.would_age(version, step=step, training=training)
        ]
        if not blockers:
            self._waiting_since = None
            return False
        now = self._clock()
        self._waiting_since = self._waiting_since if self._waiting_since is not None else now
        if now - self._waiting_since < self._max_wait_s:
            return True
        self._waited_out = max(blockers)
        self._waiting_since = None
        logger.warning(
            "step %d goes on after waiting %.0f s for work of version %d or older; it ages out",
            step,
            self._max_wait_s,
            self._waited_out,
        )
        return False
