"""What the gateway counts, for Prometheus and for GET /admin/status."""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client as prometheus

from gateway.adaptive import AdaptiveConcurrency
from gateway.bindings import GatewayBindingRegistry, ModelBinding
from gateway.chains import Chain
from model_runtime.types import DEFAULT_COMPONENT, Trajectory

RATE_WINDOW_S = 30.0
REWARD_WINDOW = 64

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True)
class ModelTally:
    """Running numbers of one model."""

    sampled_tokens: int = 0
    finalized_rows: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (when, tokens)


@dataclass(slots=True)
class RewardTally:
    """Rewards of one agent's finalized executions."""

    count: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=REWARD_WINDOW))

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.recent.append(value)

    def summary(self) -> dict[str, float]:
        return {
            "count": float(self.count),
            "mean": self.total / self.count,
            "recent_mean": sum(self.recent) / len(self.recent),
        }


class GatewayMetrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self, model_ids: Iterable[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.models = {model_id: ModelTally() for model_id in model_ids}
        self.rewards: dict[str, RewardTally] = {}
        self.settlements: Counter[str] = Counter()
        self.registry = prometheus.CollectorRegistry()
        # The library validates labels anew each time they are named, which costs more than counting.
        self._child: Callable[..., Any] = functools.cache(lambda metric, *labels: metric.labels(*labels))
        prefix, registry = "repertory_gateway", self.registry

        def counter(name: str, text: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(f"{prefix}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> prometheus.Histogram:
            return prometheus.Histogram(f"{prefix}_{name}", text, labels, registry=registry, buckets=_SECONDS)

        def gauge(name: str, text: str, *labels: str) -> prometheus.Gauge:
            return prometheus.Gauge(f"{prefix}_{name}", text, ("model", *labels), registry=registry)

        self._requests = counter("requests", "Model calls answered", "agent", "status")
        self._turns = counter("turns", "Generations recorded", "model", "agent")
        self._prompt_tokens = counter("prompt_tokens", "Tokens the servers were given", "model", "agent")
        self._sampled_tokens = counter("sampled_tokens", "Tokens the policies sampled", "model", "agent")
        self._retries = counter("backend_retries", "Attempts repeated on another replica", "model")
        self._interrupted = counter(
            "interruptions", "Generations that went on under a newer version than they began with", "model"
        )
        self._kept_whole = counter(
            "kept_whole", "Generations a newer version could not take over, by the setting", "model", "reason"
        )
        self._breaks = counter("chain_breaks", "Conversations the template would not continue", "model")
        self._rollbacks = counter("rollbacks", "Last turns taken back: the agent rewrote them", "model")
        self._rolled_back = counter("rolled_back_tokens", "Sampled tokens of those turns", "model")
        self._ambiguous = counter("ambiguous_rewrites", "Rewritten answers of more than one chain", "model")
        self._discarded = counter(
            "discarded_tokens", "Sampled tokens in no trajectory, by what became of them", "model", "reason"
        )
        self._no_room = counter("out_of_room", "Answers cut to nothing: the context was full", "model")
        self._refused = counter("refused_requests", "Requests beyond a bound of the config", "bound")
        self._rows = counter("trajectories", "Trajectories by what became of them", "model", "outcome")
        self._settlements = counter("settlements", "Executions settled", "status")
        self._turn_seconds = histogram(
            "turn_seconds", "From a model call's arrival to its answer", "model", "agent"
        )
        self._wait_seconds = histogram("wait_seconds", "Time a model call waited for a ready model", "model")
        self._versions = gauge("version_requests", "Generations in flight under a version", "version")
        self._sessions = prometheus.Gauge(f"{prefix}_open_sessions", "Sessions open", registry=registry)
        self._journal = prometheus.Gauge(
            f"{prefix}_journal_kept",
            "1 while open sessions outlive the process; 0 once their journal is given up",
            registry=registry,
        )
        self._joined = counter("joined_requests", "Requests that joined another's call; at the session's end")
        self._running = gauge("running_requests", "Generations in flight")
        self._waiting = gauge("waiting_requests", "Model calls that wait for a ready model")
        self._ready = gauge("model_ready", "1 when the model can be asked")
        self._rewrites = gauge("template_rewrites", "1 when the chat template rewrites earlier answers")
        self._version = gauge("published_version", "Version new requests are answered with")
        self._step = gauge("training_step", "Steps the model's trainer has taken")
        self._untrained = gauge("untrained_groups", "Groups that wait to be trained")
        self._used = gauge("used_groups", "Groups that count against the model's budget")
        self._limit = gauge("limit_groups", "The model's budget of groups")
        self._server_waiting = gauge("server_waiting_requests", "Generations queued in the model's servers")
        self._kv_cache_use = gauge("kv_cache_use", "Share of the KV cache in use, of the fullest server")
        self._preemptions = gauge("preemptions", "Generations the model's servers preempted so far")
        self._window = gauge("window_groups", "Groups in flight the model may have (adaptive concurrency)")
        self._window_moves = gauge(
            "window_moves", "Moves of that window so far, by what moved it", "pressure"
        )

    def count_request(self, agent_id: str, status_code: int) -> None:
        self._child(self._requests, agent_id, str(status_code)).inc()

    def observe_turn(
        self, model_id: str, agent_id: str, *, num_prompt_tokens: int, num_sampled_tokens: int, seconds: float
    ) -> None:
        tally = self.models[model_id]
        tally.sampled_tokens += num_sampled_tokens
        tally.recent.append((self._clock(), num_sampled_tokens))
        self._forget_old(tally)
        self._child(self._turns, model_id, agent_id).inc()
        self._child(self._prompt_tokens, model_id, agent_id).inc(num_prompt_tokens)
        self._child(self._sampled_tokens, model_id, agent_id).inc(num_sampled_tokens)
        self._child(self._turn_seconds, model_id, agent_id).observe(seconds)

    def observe_wait(self, model_id: str, seconds: float) -> None:
        self._child(self._wait_seconds, model_id).observe(seconds)

    def count_retry(self, model_id: str) -> None:
        self._retries.labels(model_id).inc()

    def count_interruption(self, model_id: str) -> None:
        self._interrupted.labels(model_id).inc()

    def count_kept_whole(self, model_id: str, reason: str) -> None:
        """With partial_rollout, a generation finished under a version that was not the newest any more."""
        self._kept_whole.labels(model_id, reason).inc()

    def count_rollback(self, model_id: str, num_tokens: int) -> None:
        self._rollbacks.labels(model_id).inc()
        self._rolled_back.labels(model_id).inc(num_tokens)

    def count_discarded(self, model_id: str, reason: str, num_tokens: int) -> None:
        """Tokens that were sampled and are in no trajectory: `cancelled` (nobody waited any more), `broken`
        (the attempt broke off), `refused` (their record breaks an invariant), or the status of an execution
        that leaves no rows. Those of turns taken back are counted as rolled back."""
        if num_tokens:
            self._discarded.labels(model_id, reason).inc(num_tokens)

    def count_ambiguous(self, model_id: str) -> None:
        self._ambiguous.labels(model_id).inc()

    def count_chain_break(self, model_id: str) -> None:
        self._breaks.labels(model_id).inc()

    def count_out_of_room(self, model_id: str) -> None:
        self._no_room.labels(model_id).inc()

    def count_refusal(self, bound: str) -> None:
        self._refused.labels(bound).inc()

    def count_joined(self, count: int) -> None:
        self._joined.inc(count)

    def count_settlement(self, status: str) -> None:
        self.settlements[status] += 1
        self._settlements.labels(status).inc()

    def count_recorded(self, trajectories: Iterable[Trajectory]) -> None:
        """Trajectories of a finalized training execution."""
        rewards: dict[str, float] = {}
        for row in trajectories:
            self.models[row.model_id].finalized_rows += 1
            self._rows.labels(row.model_id, "recorded").inc()
            value = _reward_of(row.agent_rewards, row.workflow_rewards)
            if value is not None:
                rewards[row.agent_id] = value
        for agent_id, value in rewards.items():
            self.rewards.setdefault(agent_id, RewardTally()).add(value)

    def count_unrecorded(self, model_id: str, outcome: str, chains: Sequence[Chain]) -> None:
        """Chains that reach no log: `refused` (an invariant is broken) or the status they ended with."""
        self._rows.labels(model_id, outcome).inc(len(chains))
        num_tokens = sum(turn.end - turn.start for chain in chains for turn in chain.turns)
        self.count_discarded(model_id, outcome, num_tokens)

    def tokens_per_s(self, model_id: str) -> float:
        """Sampled tokens per second over the last half minute."""
        tally = self.models[model_id]
        self._forget_old(tally)
        return sum(count for _, count in tally.recent) / RATE_WINDOW_S

    def observe_sessions(self, num_open: int, *, are_kept: bool) -> None:
        """How many are open, and whether they outlive the process."""
        self._sessions.set(num_open)
        self._journal.set(are_kept)

    def exposition(
        self,
        bindings: GatewayBindingRegistry,
        *,
        used: Callable[[str], float] = lambda _: 0.0,
        concurrency: AdaptiveConcurrency | None = None,
    ) -> bytes:
        """Prometheus' text format."""
        self._versions.clear()
        for binding in bindings:
            self._running.labels(binding.model_id).set(binding.running)
            self._waiting.labels(binding.model_id).set(binding.waiting)
            self._ready.labels(binding.model_id).set(bindings.is_ready(binding.model_id))
            for version, count in binding.inflight_versions.items():
                self._versions.labels(binding.model_id, str(version)).set(count)
            if binding.codec is not None:
                self._rewrites.labels(binding.model_id).set(binding.codec.splice_problem is not None)
            if binding.published_version is not None:
                self._version.labels(binding.model_id).set(binding.published_version)
            self._show_runtime(binding, used(binding.model_id))
        for model_id, window in (concurrency.windows if concurrency else {}).items():
            self._window.labels(model_id).set(window.groups)
            for pressure, count in window.moves.items():
                self._window_moves.labels(model_id, pressure).set(count)
        return prometheus.generate_latest(self.registry)

    def _show_runtime(self, binding: ModelBinding, used: float) -> None:
        """What the model's runtime said with its last renewal."""
        model_id, renewal = binding.model_id, binding.renewal
        if renewal is None:
            return
        self._server_waiting.labels(model_id).set(renewal.load.num_waiting)
        self._preemptions.labels(model_id).set(renewal.load.num_preemptions)
        if renewal.load.kv_cache_use is not None:
            self._kv_cache_use.labels(model_id).set(renewal.load.kv_cache_use)
        if renewal.kind == "trainable":
            self._step.labels(model_id).set(renewal.step)
            self._untrained.labels(model_id).set(renewal.queue.untrained_groups)
            self._used.labels(model_id).set(used)
            self._limit.labels(model_id).set(renewal.limit)

    def _forget_old(self, tally: ModelTally) -> None:
        horizon = self._clock() - RATE_WINDOW_S
        while tally.recent and tally.recent[0][0] < horizon:
            tally.recent.popleft()


def _reward_of(*levels: Mapping[str, float | None]) -> float | None:
    """The default component of the first level that has it."""
    for rewards in levels:
        value = rewards.get(DEFAULT_COMPONENT)
        if value is not None:
            return value
    return None
