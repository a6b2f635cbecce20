"""What a thousand open sessions cost the gateway.

    python benchmarks/gateway_sessions.py [--sessions 1000] [--json]

Three parts, each over HTTP against a gateway process of its own with everything on (training sessions of
admitted groups, journal), a fake rollout server behind it, answers of 128 tokens:

- many:  1,000 sessions, 20 turns each, all open to the end. No error; at most 160 MiB above the idle gateway
         and 8 KiB for a kept turn; the CPU time of a turn at the end at most 1.3 × that at the start.
- long:  sessions that grow to 16,000 tokens in 20 turns. Turn 20 costs at most 2 × turn 2.
- large: sessions of 128,000 tokens, made by one prompt each. At most 16 bytes a token. Memory grows with the
         number of sessions, so a sample of them is enough (--large 1000 has them all).

CPU time is that of the process, memory its resident set. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rig.gateway import GatewayUnderTest
from benchmarks.rig.load import Conversation, new_client, text_of_tokens
from benchmarks.rig.processes import start_python, use_load_core, wait_until_up
from benchmarks.rig.upstream import NUM_TOKENS, serve_upstream
from model_runtime.processes import free_port

NUM_TURNS = 20
LONG_TOKENS = 16_000
LARGE_TOKENS = 128_000
CONCURRENCY = 16

LIMITS = {
    "many: MiB above idle": 160.0,
    "many: KiB a kept turn": 8.0,
    "many: CPU of turns 18-20 over turns 2-4": 1.3,
    "long: CPU of turn 20 over turn 2": 2.0,
    "large: bytes a token": 16.0,
}


async def take_turns(conversations: Sequence[Conversation], http: aiohttp.ClientSession) -> None:
    """One turn of each."""
    waiting = iter(conversations)

    async def worker() -> None:
        for conversation in waiting:
            await conversation.take_turn(http)

    async with asyncio.TaskGroup() as workers:
        for _ in range(CONCURRENCY):
            workers.create_task(worker())


async def cpu_of_turns(
    gateway: GatewayUnderTest, conversations: Sequence[Conversation], http: aiohttp.ClientSession
) -> list[float]:
    """CPU seconds of each turn, the mean over the conversations. Every error ends the benchmark."""
    costs = []
    for _ in range(NUM_TURNS):
        before = gateway.process.cpu_seconds()
        await take_turns(conversations, http)
        costs.append((gateway.process.cpu_seconds() - before) / len(conversations))
    return costs


async def converse(gateway: GatewayUnderTest, count: int, context: str) -> list[Conversation]:
    sessions = await gateway.open_sessions(count)
    return [Conversation(s.chat_url, s.headers, context=context) for s in sessions]


async def many(gateway: GatewayUnderTest, http: aiohttp.ClientSession, count: int) -> dict[str, float]:
    await take_turns(await converse(gateway, 20, ""), http)  # warm
    idle = gateway.process.memory_bytes()
    costs = await cpu_of_turns(gateway, await converse(gateway, count, ""), http)
    grown = gateway.process.memory_bytes() - idle
    return {
        "many: MiB above idle": grown / 2**20,
        "many: KiB a kept turn": grown / (count * NUM_TURNS) / 1024,
        "many: CPU of turns 18-20 over turns 2-4": statistics.mean(costs[-3:]) / statistics.mean(costs[1:4]),
        "many: ms of CPU a turn": 1000 * statistics.mean(costs),
    }


async def long(gateway: GatewayUnderTest, http: aiohttp.ClientSession, count: int) -> dict[str, float]:
    context = text_of_tokens(LONG_TOKENS // NUM_TURNS - NUM_TOKENS)
    costs = await cpu_of_turns(gateway, await converse(gateway, count, context), http)
    return {
        "long: CPU of turn 20 over turn 2": costs[-1] / costs[1],
        "long: ms of CPU for turn 2": 1000 * costs[1],
        "long: ms of CPU for turn 20": 1000 * costs[-1],
    }


async def large(gateway: GatewayUnderTest, http: aiohttp.ClientSession, count: int) -> dict[str, float]:
    context = text_of_tokens(LARGE_TOKENS)
    for conversation in await converse(gateway, 4, context):
        await conversation.take_turn(http)  # warm: what a request of this size needs while it lasts
    before = gateway.process.memory_bytes()
    for conversation in await converse(gateway, count, context):
        await conversation.take_turn(http)
    grown = gateway.process.memory_bytes() - before
    return {"large: bytes a token": grown / (count * (LARGE_TOKENS + NUM_TOKENS))}


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    results: dict[str, float] = {}
    parts = {"many": arguments.sessions, "long": arguments.long, "large": arguments.large}
    for name, count in parts.items():
        if not count:
            continue
        with ExitStack() as stack:
            port = free_port()
            upstream = f"http://127.0.0.1:{port}"
            start_python(stack, serve_upstream, port, measured=False)
            await wait_until_up(f"{upstream}/v1/models")
            (folder / name).mkdir()
            gateway = GatewayUnderTest(folder / name, upstream, stack)
            await gateway.start()
            async with new_client() as http:
                results |= await {"many": many, "long": long, "large": large}[name](gateway, http, count)
            gateway.stop_renewing()
    return results


def report(results: dict[str, Any]) -> None:
    table = Table("", "measured", "limit")
    for name, value in results.items():
        limit = LIMITS.get(name)
        table.add_row(name, f"{value:.2f}", "" if limit is None else f"{limit:g}")
    Console(width=100).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000, help="of the part `many`; 0: leave it out")
    parser.add_argument("--long", type=int, default=100, help="sessions of the part `long`")
    parser.add_argument("--large", type=int, default=40, help="sessions of the part `large`")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    use_load_core()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run(arguments, Path(folder)))
    exceeded = [name for name, limit in LIMITS.items() if results.get(name, 0.0) > limit]
    if arguments.json:
        print(json.dumps({**results, "exceeded": exceeded}, indent=1))
    else:
        report(results)
        for name in exceeded:
            print(f"exceeded: {name}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
