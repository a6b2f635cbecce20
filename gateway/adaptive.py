"""How many groups of each model are in flight, moved by what its trainer and its servers say.

A model's *window* bounds the groups that may train it and are open, or settled and not read yet:

    hungry      its trainer waits for data and the window is used up: + `increase`
    full        more than `queue_high_batches` wait to be trained, or its budget is used up: × `decrease`
    congested   a server preempts, its KV cache is nearly full, or calls queue up for it: × `decrease`
    steady      otherwise: it stays

Additive increase, multiplicative decrease, at most one move per `interval_s`. A workflow calls several
models, so no window grows while any server is congested, and those of hungry models shrink with it. Windows
only ever hold groups back: budgets and staleness bounds stand as they are. Moves happen when a runtime
renews its lease, never on the path of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from model_runtime.config import ModelConfig, RunConfig
from model_runtime.gateway_config import AdaptiveConcurrencyConfig

Pressure = Literal["hungry", "steady", "full", "congested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What is known of one model at one renewal."""

    at: float  # seconds of a clock that only rises
    untrained_groups: int
    trainer_waits: bool
    has_room: bool  # in its budget
    num_in_flight: int  # groups that count against the window
    waiting_calls: int = 0  # at the gateway, for the model to be ready or have room, and at its servers
    running_calls: int = 0
    kv_cache_use: float | None = None  # of the fullest server, 0 to 1
    num_preemptions: int = 0  # by all servers since they started


@dataclass(slots=True)
class ConcurrencyWindow:
    """The window of one model: a state machine that is told what happens and says what may."""

    config: AdaptiveConcurrencyConfig
    batch_groups: int  # usable groups one training step takes
    max_groups: int
    groups: int = 0
    pressure: Pressure = "steady"
    is_congested: bool = False
    moves: Counter[Pressure] = field(default_factory=Counter)  # why it moved, and how often
    _moved_at: float = float("-inf")
    _num_preemptions: int | None = None

    def __post_init__(self) -> None:
        self.max_groups = max(self.max_groups, self.min_groups)
        self.groups = self.groups or self.min_groups

    @property
    def min_groups(self) -> int:
        """One batch: fewer would make every step wait for groups that were not begun."""
        return self.config.min_groups or self.batch_groups

    def update(self, signals: Signals, *, others_congested: bool = False) -> Pressure:
        """Take one renewal in, and move the window if its time has come."""
        self.is_congested = self._sees_congestion(signals)
        self.pressure = self._pressure(signals, others_congested)
        if self.pressure == "steady" or signals.at - self._moved_at < self.config.interval_s:
            return self.pressure
        if self.pressure != "hungry":
            target = max(self.min_groups, int(self.groups * self.config.decrease))
        elif signals.num_in_flight >= self.groups:
            target = min(self.max_groups, self.groups + self.config.increase)
        else:
            return self.pressure  # what it lacks is not room in the window
        if target != self.groups:
            self.groups, self._moved_at = target, signals.at
            self.moves[self.pressure] += 1
        return self.pressure

    def _pressure(self, signals: Signals, others_congested: bool) -> Pressure:
        is_hungry = signals.trainer_waits and signals.untrained_groups < self.batch_groups
        if self.is_congested or (others_congested and is_hungry):
            return "congested"
        too_many = self.config.queue_high_batches * self.batch_groups
        if not signals.has_room or signals.untrained_groups > too_many:
            return "full"
        return "hungry" if is_hungry else "steady"

    def _sees_congestion(self, signals: Signals) -> bool:
        before, self._num_preemptions = self._num_preemptions, signals.num_preemptions
        # A server that was restarted counts from nothing again.
        preempted = before is not None and signals.num_preemptions > before
        crowded = signals.waiting_calls > self.config.waiting_high * max(1, signals.running_calls)
        full = signals.kv_cache_use is not None and signals.kv_cache_use >= self.config.kv_cache_high
        return preempted or crowded or full


class AdaptiveConcurrency:
    """The windows of all trainable models. Empty when the config leaves it off: then nothing is held back."""

    def __init__(self, config: RunConfig, models: Iterable[ModelConfig]) -> None:
        adaptive, workflow = config.gateway.adaptive_concurrency, config.workflow
        at_once = max(1, workflow.max_concurrent_executions // workflow.group_size)
        self.windows: Mapping[str, ConcurrencyWindow] = {}
        if adaptive.enable:
            self.windows = {
                model.model_id: ConcurrencyWindow(
                    adaptive,
                    batch_groups=model.batch_size * model.async_training.require_batches,
                    max_groups=adaptive.max_groups or at_once,
                )
                for model in models
            }

    def observe(self, model_id: str, signals: Signals) -> None:
        window = self.windows.get(model_id)
        if window is not None:
            others = any(w.is_congested for name, w in self.windows.items() if name != model_id)
            window.update(signals, others_congested=others)

    def has_room(self, model_id: str, num_in_flight: int) -> bool:
        """May one more group train the model?"""
        window = self.windows.get(model_id)
        return window is None or num_in_flight < window.groups

    def is_hungry(self, model_id: str) -> bool:
        """Does the model lack data that servers could make?"""
        window = self.windows.get(model_id)
        return window is not None and window.pressure == "hungry"
