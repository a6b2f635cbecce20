"""Does anything grow with the number of trajectories that went through?

    python benchmarks/soak.py [--trajectories 60000] [--concurrency 128] [--json]
    python benchmarks/soak.py --trajectories 1000 --concurrency 16 --context-tokens 128000

Trajectories of one turn with an answer of 128 tokens, half of them rewarded, through the gateway's process,
the log, and a training queue in a process of its own that deals out batches and trains nothing; a fake
rollout server behind it. Memory, descriptors and the p99 of a model call and of a `finalize` are sampled
twenty times on the way. Exits with 1 when what is held at the end exceeds what was held at a tenth (or once
the gateway remembers as many ended sessions as it ever will) by more than LIMITS say, or when a trajectory
is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rig.gateway import ADMIN, GROUP_SIZE, RUN_ID, GatewayUnderTest
from benchmarks.rig.load import Conversation, new_client, text_of_tokens
from benchmarks.rig.processes import Measured, start_python, use_load_core, wait_until_up
from benchmarks.rig.upstream import serve_upstream
from gateway.settled_sessions import MAX_REMEMBERED
from model_runtime.processes import free_port

NUM_SAMPLES = 20
LIMITS = {"gateway MiB": 1.15, "queue MiB": 1.15, "descriptors": 1.1, "p99 call": 1.5, "p99 finalize": 1.5}
"""At the end over a tenth. Latencies are ratios too: a busy machine moves both."""
DRAIN_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    trajectories: int
    gateway_mib: float
    queue_mib: float
    descriptors: int
    p99_call_ms: float
    p99_finalize_ms: float
    per_s: float


def deal_out(config: str, report: str) -> None:
    """The queue's process: reads the log, deals out batches, calls them trained."""
    from model_runtime.config_file import load_config
    from model_runtime.layout import RunLayout
    from model_runtime.store import open_store
    from model_runtime.training_queue import TrainingQueue

    settings = load_config(config)
    (model,) = settings.models
    store, layout = open_store(settings.store), RunLayout(RUN_ID).model(model.model_id)
    queue = TrainingQueue(store, layout, model, epoch=1, resume=None)
    step = 0
    while True:
        queue.poll()
        batch = queue.next_batch(
            step + 1, published_version=0, training_version=0, oldest_open_version=None, final=False
        )
        if batch is not None:
            step += 1
            queue.consume(batch)
            queue.published(step)
        written = {"queue": queue.report().model_dump(mode="json"), "totals": queue.totals()}
        Path(f"{report}.new").write_text(json.dumps(written))
        Path(f"{report}.new").replace(report)
        if batch is None:
            time.sleep(0.1)


class Soak:
    """Sessions of admitted groups, so many at a time, each finalized after its turn."""

    def __init__(
        self, gateway: GatewayUnderTest, queue: Measured, *, total: int, concurrency: int, context: str
    ) -> None:
        self._gateway, self._queue, self._context = gateway, queue, context
        self._total, self._concurrency = total, concurrency
        self._calls: list[float] = []
        self._finalizes: list[float] = []
        self._done = 0
        self.samples: list[Sample] = []

    async def run(self) -> None:
        every = max(GROUP_SIZE, self._total // NUM_SAMPLES)
        began, at = time.monotonic(), 0
        async with new_client() as http:
            while self._done < self._total:
                sessions = await self._gateway.open_sessions(min(GROUP_SIZE * 4, every))
                waiting = iter(enumerate(sessions))

                async def worker(waiting: Any = waiting) -> None:
                    for number, session in waiting:
                        await self._one(http, session, reward=float(number % 2))

                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._concurrency):
                        workers.create_task(worker())
                if self._done - at >= every:
                    self._sample((self._done - at) / (time.monotonic() - began))
                    began, at = time.monotonic(), self._done

    async def _one(self, http: aiohttp.ClientSession, session: Any, *, reward: float) -> None:
        conversation = Conversation(session.chat_url, session.headers, self._context)
        self._calls.append(await conversation.take_turn(http))
        began = time.perf_counter()
        url = f"{session.session_url}/finalize"
        async with http.post(url, json={"reward": reward}, headers=ADMIN) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}: {await answer.text()}")
        self._finalizes.append(time.perf_counter() - began)
        self._done += 1

    def _sample(self, per_s: float) -> None:
        self.samples.append(
            Sample(
                trajectories=self._done,
                gateway_mib=self._gateway.process.memory_bytes() / 2**20,
                queue_mib=self._queue.memory_bytes() / 2**20,
                descriptors=self._gateway.process.num_descriptors() + self._queue.num_descriptors(),
                p99_call_ms=1e3 * _p99(self._calls),
                p99_finalize_ms=1e3 * _p99(self._finalizes),
                per_s=per_s,
            )
        )
        print(json.dumps(asdict(self.samples[-1])), file=sys.stderr, flush=True)
        self._calls.clear()
        self._finalizes.clear()


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def growth(samples: list[Sample]) -> dict[str, float]:
    """The end over the first sample after a tenth at which everything that is bounded by a number is full,
    where the run got that far; latencies are medians of the samples around each. The queue fills and empties
    with each batch: of it the peak of the second half over that of the first."""
    half = len(samples) // 2
    total, full = samples[-1].trajectories, 1.05 * MAX_REMEMBERED
    least = max(total / 10, full) if total >= 2 * full else total / 10
    place = next(i for i, s in enumerate(samples) if s.trajectories >= least)
    early, late = samples[place], samples[-1]
    first, last = samples[max(0, place - 1) : place + 2], samples[-3:]

    def ratio(name: str) -> float:
        return statistics.median(getattr(s, name) for s in last) / statistics.median(
            getattr(s, name) for s in first
        )

    return {
        "gateway MiB": late.gateway_mib / early.gateway_mib,
        "queue MiB": max(s.queue_mib for s in samples[half:]) / max(s.queue_mib for s in samples[:half]),
        "descriptors": late.descriptors / early.descriptors,
        "p99 call": ratio("p99_call_ms"),
        "p99 finalize": ratio("p99_finalize_ms"),
    }


async def measure(total: int, concurrency: int, context_tokens: int) -> tuple[list[Sample], int, int]:
    """Samples, trajectories finalized, and rows that left the queue."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        use_load_core()
        port = free_port()
        start_python(stack, serve_upstream, port, measured=False)
        upstream = f"http://127.0.0.1:{port}"
        await wait_until_up(f"{upstream}/v1/models")
        report = folder / "queue.json"
        gateway = GatewayUnderTest(folder, upstream, stack, queue_report=report)
        await gateway.start()
        queue = start_python(stack, deal_out, str(folder / "config.json"), str(report), measured=False)
        context = text_of_tokens(context_tokens) if context_tokens else ""
        soak = Soak(gateway, queue, total=total, concurrency=concurrency, context=context)
        await soak.run()
        rows = await _drained(report, soak._done)
        gateway.stop_renewing()
        return soak.samples, soak._done, rows


async def _drained(report: Path, finalized: int) -> int:
    """Rows that the queue has seen, once it has seen all."""
    until = time.monotonic() + DRAIN_LIMIT_S
    while True:
        said = json.loads(await asyncio.to_thread(report.read_text))
        totals = said["totals"]
        rows = sum(n for name, n in totals.items() if name == "trained" or name.startswith("dropped."))
        waiting = said["queue"]["untrained_groups"] * GROUP_SIZE
        if rows + waiting >= finalized or time.monotonic() > until:
            return rows + waiting
        await asyncio.sleep(0.2)


def table(samples: list[Sample]) -> Table:
    shown = Table(
        "trajectories", "gateway MiB", "queue MiB", "descriptors", "p99 call", "p99 finalize", "a second"
    )
    for s in samples:
        shown.add_row(
            str(s.trajectories),
            f"{s.gateway_mib:.0f}",
            f"{s.queue_mib:.0f}",
            str(s.descriptors),
            f"{s.p99_call_ms:.0f} ms",
            f"{s.p99_finalize_ms:.0f} ms",
            f"{s.per_s:.0f}",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=60_000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--context-tokens", type=int, default=0, help="of each question")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    samples, finalized, rows = asyncio.run(measure(args.trajectories, args.concurrency, args.context_tokens))
    grown = growth(samples)
    result = {"samples": [asdict(s) for s in samples], "growth": grown, "finalized": finalized, "rows": rows}
    if args.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        console = Console()
        console.print(table(samples))
        for name, ratio in grown.items():
            console.print(f"{name}: × {ratio:.2f} at the end (at most {LIMITS[name]})")
        console.print(f"{finalized} finalized, {rows} in the queue's books")
    return 1 if rows < finalized or any(grown[name] > limit for name, limit in LIMITS.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
