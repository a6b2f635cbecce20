"""What the gateway adds to a model call, beside what other gateways add.

    python benchmarks/gateway_overhead.py [--litellm VENV] [--agent-lightning VENV] [--json]

Every row answers the same conversations of four turns from the same fake rollout server (vLLM's response
shape, answers of 128 tokens): the server alone, a bare Starlette + aiohttp pass-through, this gateway with
everything on (training sessions of admitted groups: render, sample, record, journal), and, where their
environments are given, LiteLLM's proxy and agent-lightning's server. The measured process has one core, load
and fake server share another. Windows of all rows are interleaved.

A row's cost is the CPU time of its process, in requests per core-second. The latency one adds at concurrency
1 is wall time: its calls in turns with those of the server alone, and no other row's between, which would
leave it a core with cold caches. Goals: 0.4 × the pass-through's requests
per core-second, 20 × LiteLLM's, 5 × agent-lightning's, 1 ms added at concurrency 1, 8 KiB of memory for a
kept turn. Exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rig import baselines
from benchmarks.rig.gateway import GatewayUnderTest
from benchmarks.rig.load import Conversation, converse, new_client
from benchmarks.rig.processes import Measured, start_python, use_load_core, wait_until_up
from benchmarks.rig.upstream import CHAT, NUM_TOKENS, serve_upstream
from model_runtime.processes import free_port

DIRECT = "rollout server alone"
PASS_THROUGH = "Starlette + aiohttp pass-through"
GATEWAY = "this gateway, everything on"
LITELLM = "LiteLLM proxy"
AGENT_LIGHTNING = "agent-lightning server"

NUM_TURNS = 4
NUM_SESSIONS = 200
MIN_RATIOS = {PASS_THROUGH: 0.4, LITELLM: 20.0, AGENT_LIGHTNING: 5.0}
MAX_ADDED_MS = 1.0
MAX_KIB_PER_TURN = 8.0

# The others are not ours: they are installed by whoever wants to see them in the table.
HOW_TO = """
environments for the other rows, each apart from this project's:
  python3 -m venv litellm-venv && litellm-venv/bin/pip install 'litellm[proxy]==1.106.12'
  python3.12 -m venv agl-venv && agl-venv/bin/pip install 'agentlightning==1.0.2'
  python benchmarks/gateway_overhead.py --litellm litellm-venv --agent-lightning agl-venv
(litellm 1.107.0 was a compromised release: do not install it)
"""


@dataclass(slots=True)
class Row:
    """One server under measurement, and what was measured of it."""

    name: str
    process: Measured
    endpoints: Sequence[tuple[str, dict[str, str]]]
    share: float = 1.0  # of the requests a window has: slow rows get fewer
    per_core_second: list[float] = field(default_factory=list)  # one a window
    latency_ms: list[float] = field(default_factory=list)
    direct_ms: list[float] = field(default_factory=list)  # of the server alone, in turns with these
    num_requests: int = 0
    bytes_before: int = 0

    @property
    def kib_per_turn(self) -> float:
        return (self.process.memory_bytes() - self.bytes_before) / self.num_requests / 1024


async def start_rows(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Row]:
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    server = start_python(stack, serve_upstream, port, measured=False)
    await wait_until_up(f"{upstream}/v1/models")
    bare, bare_url = await baselines.start_pass_through(stack, upstream)
    gateway = GatewayUnderTest(folder, upstream, stack)
    await gateway.start()
    sessions = await gateway.open_sessions(NUM_SESSIONS)
    rows = [
        Row(DIRECT, server, [(upstream + CHAT, {})]),
        Row(PASS_THROUGH, bare, [(bare_url, {})]),
        Row(GATEWAY, gateway.process, [(s.chat_url, s.headers) for s in sessions]),
    ]
    if arguments.litellm:
        process, url, key = await baselines.start_litellm(stack, upstream, arguments.litellm, folder)
        rows.append(Row(LITELLM, process, [(url, key)], share=0.1))
    if arguments.agent_lightning:
        process, url, key = await baselines.start_agent_lightning(
            stack, upstream, arguments.agent_lightning, folder
        )
        rows.append(Row(AGENT_LIGHTNING, process, [(url, key)], share=0.3))
    return rows


async def measure(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    async with new_client() as http:
        for window in range(arguments.windows + 1):
            for row in rows:
                requests = round(arguments.requests * row.share)
                if window == 1:
                    row.bytes_before = row.process.memory_bytes()
                before = row.process.cpu_seconds()
                await converse(
                    row.endpoints,
                    num_requests=requests,
                    num_turns=NUM_TURNS,
                    concurrency=arguments.concurrency,
                    http=http,
                )
                if window:  # the first one warms up
                    row.per_core_second.append(requests / (row.process.cpu_seconds() - before))
                    row.num_requests += requests
        direct, *gateways = rows
        for row in gateways:
            for _ in range(arguments.rounds):
                row.direct_ms.append(1000 * await Conversation(*direct.endpoints[0]).take_turn(http))
                row.latency_ms.append(1000 * await Conversation(*row.endpoints[0]).take_turn(http))
            direct.latency_ms += row.direct_ms
        direct.direct_ms = direct.latency_ms


# ------------------------------------------------------------------ results


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    by_name = {row.name: row for row in rows}
    gateway = by_name[GATEWAY]
    result: dict[str, Any] = {
        row.name: {
            "requests_per_core_second": statistics.median(row.per_core_second),
            "range": [min(row.per_core_second), max(row.per_core_second)],
            "gateway_ratio": ratio_of(gateway, row),
            "p50_ms": statistics.median(row.latency_ms),
            "added_p50_ms": statistics.median(row.latency_ms) - statistics.median(row.direct_ms),
            "memory_mib": row.process.memory_bytes() / 2**20,
        }
        for row in rows
    }
    result[GATEWAY]["kib_per_turn"] = gateway.kib_per_turn
    return result


def ratio_of(row: Row, other: Row) -> float:
    """Median over the windows: what slows the machine in one hits both rows."""
    pairs = zip(row.per_core_second, other.per_core_second, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def missed_goals(result: dict[str, Any]) -> list[str]:
    missed = [
        f"{result[name]['gateway_ratio']:.2f} × the requests per core-second of {name}, goal {goal:g} ×"
        for name, goal in MIN_RATIOS.items()
        if name in result and result[name]["gateway_ratio"] < goal
    ]
    gateway = result[GATEWAY]
    if gateway["added_p50_ms"] > MAX_ADDED_MS:
        missed.append(f"{gateway['added_p50_ms']:.2f} ms added, goal {MAX_ADDED_MS:g} ms")
    if gateway["kib_per_turn"] > MAX_KIB_PER_TURN:
        missed.append(f"{gateway['kib_per_turn']:.1f} KiB for a kept turn, goal {MAX_KIB_PER_TURN:g} KiB")
    return missed


def print_table(result: dict[str, Any]) -> None:
    table = Table("", "requests/core-s", "range", "gateway is", "p50 ms", "added ms", "memory MiB")
    for name, row in result.items():
        low, high = row["range"]
        table.add_row(
            name,
            f"{row['requests_per_core_second']:,.0f}",
            f"{low:,.0f}…{high:,.0f}",
            f"{row['gateway_ratio']:.2f} ×",
            f"{row['p50_ms']:.2f}",
            f"{row['added_p50_ms']:.2f}",
            f"{row['memory_mib']:,.0f}",
        )
    console = Console(width=120)
    console.print(table)
    kib = result[GATEWAY]["kib_per_turn"]
    console.print(f"gateway: {kib:.1f} KiB of memory for each kept turn of {NUM_TOKENS} tokens")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HOW_TO, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environ = os.environ.get
    parser.add_argument("--litellm", type=Path, default=environ("LITELLM_VENV"), metavar="VENV")
    parser.add_argument("--agent-lightning", type=Path, default=environ("AGL_VENV"), metavar="VENV")
    parser.add_argument("--requests", type=int, default=300, help="of a window")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300, help="calls of each row at concurrency 1")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


async def run(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    rows = await start_rows(arguments, folder, stack)
    await measure(rows, arguments)
    return summarise(rows)


def main() -> int:
    arguments = parse_arguments()
    use_load_core()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result = asyncio.run(run(arguments, Path(folder), stack))
    missed = missed_goals(result)
    if arguments.json:
        print(json.dumps({**result, "missed_goals": missed}, indent=1))
    else:
        print_table(result)
        for goal in missed:
            print(f"missed: {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
