"""Does a model that is rarely called learn sooner when the number of groups in flight adapts?

Two models share one workflow: `busy` is called by every execution, `rare` by those of one task in ten, so
their calls stand 10 to 1. The gateway's own admission runs here in simulated time, against trainers that
take batches, servers that slow down when more generations run than they have slots for, and a driver with a
fixed number of executions.

    python -m benchmarks.adaptive_concurrency [--seeds 10] [--hours 2] [--json]

Prints for each seed how long `rare`'s trainer waits for a batch with static admission and with adaptive,
and the largest lag of a trained token. Fails when the median ratio is below MIN_RATIO, a token lags more
than max_staleness versions, or `busy` trains less than MIN_BUSY of its static steps.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.admission import AdmissionState, OpenGroup
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.protocol import GroupRequest, ModelRenewal, QueueReport, ServerLoad

BUSY, RARE = "busy", "rare"
CALL_RATIO = 10
WRITER = "e00001-00001"
RENEW_S = 2.0
GROUP_SIZE, BATCH = 4, 4
MAX_EXECUTIONS = 160
SERVER_SLOTS = 64  # generations of `busy`'s servers that don't slow one another
EXECUTION_S = 20.0
STEP_S = 30.0
FEED_DECAY = 0.95
MIN_RATIO, MIN_BUSY = 2.0, 0.9


def run_config(*, adaptive: bool) -> RunConfig:
    models = [
        {
            "model_id": model_id,
            "model_path": "/models/simulated",
            "batch_size": BATCH,
            "async_training": {"trigger_parameter_sync_step": 2, "staleness_threshold": 0.5},
        }
        for model_id in (BUSY, RARE)
    ]
    return parse_config(
        {
            "multi_model": {"models": models},
            "agent_model_mapping": {f"{model_id}_agent": model_id for model_id in (BUSY, RARE)},
            "workflow": {"group_size": GROUP_SIZE, "max_concurrent_executions": MAX_EXECUTIONS},
            "gateway": {"adaptive_concurrency": {"enable": adaptive}},
        }
    )


@dataclass(slots=True)
class Trainer:
    """One model's trainer and its queue: versions of the groups in it, the oldest first."""

    model_id: str
    queued: deque[int] = field(default_factory=deque)
    version: int = 0
    steps: int = 0
    trained_since_publish: int = 0
    feed_share: float = 1.0
    num_read: int = 0
    busy_until: float = 0.0
    waits_since: float | None = 0.0
    waited_s: float = 0.0
    lags: list[int] = field(default_factory=list)

    def take(self, opened_version: int | None) -> None:
        """A group that might have trained it has settled; None: it holds nothing of this model."""
        fed = opened_version is not None
        self.feed_share = FEED_DECAY * self.feed_share + (1 - FEED_DECAY) * fed
        if opened_version is not None:
            self.queued.append(opened_version)

    def advance(self, now: float, rng: random.Random) -> None:
        if now < self.busy_until or len(self.queued) < BATCH:
            if now >= self.busy_until and self.waits_since is None:
                self.waits_since = self.busy_until
            return
        begin = now
        if self.waits_since is not None:
            self.waited_s += begin - self.waits_since
            self.waits_since = None
        self.lags += [self.version - self.queued.popleft() for _ in range(BATCH)]
        self.busy_until = begin + STEP_S * rng.uniform(0.8, 1.2)
        self.steps += 1
        self.trained_since_publish += BATCH
        if self.steps % 2 == 0:
            self.version, self.trained_since_publish = self.version + 1, 0

    def renewal(self, now: float, seq: int, load: ServerLoad) -> ModelRenewal:
        return ModelRenewal(
            model_id=self.model_id,
            epoch=1,
            incarnation=1,
            seq=seq,
            kind="trainable",
            status="ready",
            trainer_state="running" if now < self.busy_until else "waiting",
            load=load,
            queue=QueueReport(
                untrained_groups=len(self.queued),
                trained_since_publish=self.trained_since_publish,
                feed_share=self.feed_share,
                read_positions={WRITER: self.num_read},
            ),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulated run came to."""

    wait_per_step_s: dict[str, float]
    steps: dict[str, int]
    max_lag: int
    mean_lag: dict[str, float]
    peak_executions: int
    moves: dict[str, dict[str, int]]


class Simulation:
    """Seconds pass in renewals' steps; groups settle when their executions are done."""

    def __init__(self, *, seed: int, adaptive: bool) -> None:
        self._rng = random.Random(seed)
        self._now = 0.0
        config = run_config(adaptive=adaptive)
        self._admission = AdmissionState(config, writer=WRITER, clock=lambda: self._now)
        self.max_staleness = config.models[0].async_training.max_staleness
        self._trainers = {model_id: Trainer(model_id) for model_id in (BUSY, RARE)}
        self._running: list[tuple[float, int, OpenGroup, dict[str, int]]] = []
        self._num_groups = self._num_opened = self._seq = 0
        self._peak = 0

    def run(self, hours: float) -> Outcome:
        while self._now < hours * 3600:
            self._settle_done()
            for trainer in self._trainers.values():
                trainer.advance(self._now, self._rng)
            self._renew()
            self._open()
            self._now += RENEW_S
        trainers = self._trainers.values()
        for trainer in trainers:  # a wait that has not ended is a wait too
            if trainer.waits_since is not None:
                trainer.waited_s += self._now - trainer.waits_since
        windows = self._admission.concurrency.windows
        return Outcome(
            wait_per_step_s={t.model_id: t.waited_s / max(1, t.steps) for t in trainers},
            steps={t.model_id: t.steps for t in trainers},
            max_lag=max(lag for t in trainers for lag in t.lags),
            mean_lag={t.model_id: statistics.fmean(t.lags) for t in trainers},
            peak_executions=self._peak,
            moves={name: dict(Counter(window.moves)) for name, window in windows.items()},
        )

    @property
    def _num_executions(self) -> int:
        return GROUP_SIZE * len(self._running)

    def _open(self) -> None:
        """What the driver does: one more group whenever it has slots for it."""
        while self._num_executions + GROUP_SIZE <= MAX_EXECUTIONS:
            if not self._admission.waiting:
                self._num_groups += 1
                request = GroupRequest(group_id=f"g{self._num_groups}", group_size=GROUP_SIZE)
                self._admission.join(request)
            opened = self._admission.admit(lambda _: True)
            if not opened:
                return
            for group in opened:
                crowd = max(1.0, self._num_executions / SERVER_SLOTS)
                lasts = EXECUTION_S * crowd * self._rng.uniform(0.5, 2.0)
                versions = {name: trainer.version for name, trainer in self._trainers.items()}
                self._num_opened += 1
                heapq.heappush(self._running, (self._now + lasts, self._num_opened, group, versions))
            self._peak = max(self._peak, self._num_executions)

    def _settle_done(self) -> None:
        while self._running and self._running[0][0] <= self._now:
            _, _, group, versions = heapq.heappop(self._running)
            calls_rare = self._rng.random() < 1 / CALL_RATIO
            for index in range(GROUP_SIZE):
                self._admission.member_settled(group.group_id, index, status="finalized", seq=self._seq)
            self._seq += 1
            for name, trainer in self._trainers.items():
                trainer.num_read = self._seq
                if group.train[name]:
                    trainer.take(versions[name] if name == BUSY or calls_rare else None)

    def _renew(self) -> None:
        num_waiting = max(0, self._num_executions - SERVER_SLOTS)
        load = ServerLoad(
            num_running=min(self._num_executions, SERVER_SLOTS),
            num_waiting=num_waiting,
            kv_cache_use=min(1.0, 0.8 * self._num_executions / SERVER_SLOTS),
        )
        for name, trainer in self._trainers.items():
            seq = int(self._now / RENEW_S) + 1
            renewal = trainer.renewal(self._now, seq, load if name == BUSY else ServerLoad())
            self._admission.observe(renewal, running_calls=load.num_running)


def compare(seed: int, hours: float) -> dict[str, Any]:
    static = Simulation(seed=seed, adaptive=False)
    before, after = static.run(hours), Simulation(seed=seed, adaptive=True).run(hours)
    return {
        "seed": seed,
        "static": asdict(before),
        "adaptive": asdict(after),
        "wait_ratio": before.wait_per_step_s[RARE] / max(after.wait_per_step_s[RARE], 1e-9),
        "busy_steps_ratio": after.steps[BUSY] / before.steps[BUSY],
        "max_staleness": static.max_staleness,
    }


def problems(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    ratio = statistics.median(row["wait_ratio"] for row in rows)
    if ratio < MIN_RATIO:
        found.append(f"{RARE} waits only {ratio:.2f} times shorter, not {MIN_RATIO:g}")
    lag = max(row[kind]["max_lag"] for row in rows for kind in ("static", "adaptive"))
    if lag > rows[0]["max_staleness"]:
        found.append(f"a token lagged {lag} versions; max_staleness is {rows[0]['max_staleness']}")
    busy = statistics.median(row["busy_steps_ratio"] for row in rows)
    if busy < MIN_BUSY:
        found.append(f"{BUSY} takes {busy:.2f} of its static steps")
    return found


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"waits for a batch of {RARE}, static against adaptive")
    columns = (
        "seed",
        "static s/step",
        "adaptive s/step",
        "ratio",
        "rare steps",
        "busy steps",
        "max lag",
        "peak",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        static, adaptive = row["static"], row["adaptive"]
        table.add_row(
            str(row["seed"]),
            f"{static['wait_per_step_s'][RARE]:.0f}",
            f"{adaptive['wait_per_step_s'][RARE]:.0f}",
            f"{row['wait_ratio']:.2f}",
            f"{static['steps'][RARE]} → {adaptive['steps'][RARE]}",
            f"{static['steps'][BUSY]} → {adaptive['steps'][BUSY]}",
            f"{static['max_lag']} → {adaptive['max_lag']}",
            f"{static['peak_executions']} → {adaptive['peak_executions']}",
        )
    ratios = [row["wait_ratio"] for row in rows]
    table.caption = f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [compare(seed, arguments.hours) for seed in range(arguments.seeds)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    found = problems(rows)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
