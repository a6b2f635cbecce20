"""What the gateway adds to a model call: a fake rollout server with 128-token answers behind it, measured
next to the rollout server alone and a bare Starlette + aiohttp pass-through.

    python benchmarks/gateway_overhead.py [--requests 2000] [--concurrency 16]

Cost is CPU time of the process in question per request, so a busy machine changes it little; the added
latency at concurrency 1 is wall time, taken in turns with the direct calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from tests.fakes import make_tokenizer_document

NUM_TOKENS = 128
RUN_ID = "benchmark"
KEY = "benchmark-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}

Call = Callable[[aiohttp.ClientSession, int], Awaitable[None]]


# ------------------------------------------------------------------ the processes under test


def serve_upstream(port: int) -> None:
    """vLLM's /inference/v1/generate with one prepared answer."""
    from aiohttp import web

    content = [
        {"token_id": 70 + i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in range(NUM_TOKENS)
    ]
    ids = [entry["token_id"] for entry in content]
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
    usage = {"prompt_tokens": 0, "completion_tokens": NUM_TOKENS, "total_tokens": NUM_TOKENS}
    answer = json.dumps({"choices": [choice], "usage": usage}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/inference/v1/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def serve_pass_through(port: int, upstream: str) -> None:
    """The least a Python gateway can do: Starlette in front, aiohttp behind."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    clients: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> Response:
        if not clients:
            clients.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        async with clients[0].post(f"{upstream}{request.url.path}", data=await request.body()) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def start_gateway(port: int, folder: Path, stack: ExitStack) -> int:
    """The real process with everything on; returns its pid."""
    config = gateway_config(folder)
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    arguments = ["--run-id", RUN_ID, "--config", str(path), "--epoch", "1", "--incarnation", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments, "--port", str(port)],
        env=os.environ | {ADMIN_KEY_ENV: KEY},
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait, 15)
    stack.callback(process.terminate)
    return process.pid


def gateway_config(folder: Path) -> Any:
    return parse_config(
        {
            "multi_model": {"models": [{"model_id": "m", "model_path": "unused"}]},
            "agent_model_mapping": {"agent": "m"},
            "store": {"url": str(folder / "store")},
        }
    )


# ------------------------------------------------------------------ the calls


async def open_session(http: aiohttp.ClientSession, url: str, upstream: str, folder: Path) -> dict[str, Any]:
    """Register the fake server and open one evaluation session."""
    store = open_store(gateway_config(folder).store)
    key = RunLayout(RUN_ID).model("m").tokenizer("t")
    store.put(key, make_tokenizer_document(max_model_len=10**6).to_bytes())
    renewal = {
        **{"model_id": "m", "epoch": 1, "incarnation": 1, "seq": 1, "kind": "trainable", "status": "ready"},
        "replicas": [{"replica_id": "r", "url": upstream, "api_key": "k"}],
        "published_version": 0,
        "tokenizer_uri": key,
    }
    asyncio.get_running_loop().create_task(keep_renewing(url, renewal))
    async with http.post(f"{url}/sessions", json={"mode": "eval", "group_id": "g"}, headers=ADMIN) as answer:
        answer.raise_for_status()
        return await answer.json()


async def keep_renewing(url: str, renewal: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(headers=ADMIN) as http:
        while True:
            renewal["seq"] += 1
            async with http.put(f"{url}/admin/models/m", json=renewal) as answer:
                answer.raise_for_status()
            await asyncio.sleep(2)


def call_of(url: str, headers: dict[str, str], make_body: Callable[[int], Any]) -> Call:
    async def call(http: aiohttp.ClientSession, number: int) -> None:
        async with http.post(url, json=make_body(number), headers=headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}: {data[:200]!r}")

    return call


# ------------------------------------------------------------------ measuring


async def load(call: Call, *, requests: int, concurrency: int) -> None:
    numbers = iter(range(requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def worker() -> None:
            for number in numbers:
                await call(http, number)

        await asyncio.gather(*(worker() for _ in range(concurrency)))


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def latencies(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds at concurrency 1, the rows taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    async with aiohttp.ClientSession() as http:
        for number in range(rounds):
            for name, call in calls.items():
                began = time.perf_counter()
                await call(http, 10**6 + number)
                taken[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values[rounds // 10 :]) for name, values in taken.items()}


async def wait_until_up(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(600):
            try:
                async with http.post(url, json={}):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not come up")


async def measure(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    ports = [free_port() for _ in range(3)]
    upstream, bare, gateway = (f"http://127.0.0.1:{port}" for port in ports)
    context = multiprocessing.get_context("spawn")
    pids: dict[str, int] = {}
    for name, target, args in (
        ("rollout server alone", serve_upstream, (ports[0],)),
        ("Starlette + aiohttp pass-through", serve_pass_through, (ports[1], upstream)),
    ):
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        stack.callback(process.terminate)
        pids[name] = process.pid or 0
    pids["gateway, everything on"] = start_gateway(ports[2], folder, stack)
    for url in (upstream, bare, gateway):
        await wait_until_up(url)
    async with aiohttp.ClientSession() as http:
        session = await open_session(http, gateway, upstream, folder)
    await asyncio.sleep(1)

    path = "/inference/v1/generate"
    raw = {"model": "m", "token_ids": list(range(100, 148)), "sampling_params": {"max_tokens": NUM_TOKENS}}
    chat = f"{session['base_url']}/agents/agent/v1/chat/completions"
    key = {"Authorization": f"Bearer {session['api_key']}"}
    calls: dict[str, Call] = {
        "rollout server alone": call_of(upstream + path, {}, lambda _: raw),
        "Starlette + aiohttp pass-through": call_of(bare + path, {}, lambda _: raw),
        "gateway, everything on": call_of(
            chat,
            key,
            lambda i: {
                "model": "m",
                "messages": [{"role": "user", "content": f"question number {i} of many"}],
            },
        ),
    }
    cost: dict[str, float] = {}
    grown = 0
    for name, call in calls.items():
        await load(call, requests=arguments.requests // 10, concurrency=arguments.concurrency)
        before = cpu_seconds(pids[name])
        memory = psutil.Process(pids[name]).memory_info().rss
        await load(call_shifted(call), requests=arguments.requests, concurrency=arguments.concurrency)
        cost[name] = (cpu_seconds(pids[name]) - before) / arguments.requests
        grown = psutil.Process(pids[name]).memory_info().rss - memory
    report(cost, await latencies(calls, arguments.rounds), grown / arguments.requests)


def call_shifted(call: Call) -> Call:
    """The same calls with numbers that the warm-up has not used."""

    async def shifted(http: aiohttp.ClientSession, number: int) -> None:
        await call(http, 10**5 + number)

    return shifted


def report(cost: dict[str, float], median_ms: dict[str, float], bytes_per_turn: float) -> None:
    table = Table("", "requests per core-second", "× pass-through", "p50 ms, one at a time", "added ms")
    base = cost["Starlette + aiohttp pass-through"]
    direct = median_ms["rollout server alone"]
    for name, seconds in cost.items():
        table.add_row(
            name,
            f"{1 / seconds:,.0f}",
            f"{base / seconds:.2f}",
            f"{median_ms[name]:.2f}",
            f"{median_ms[name] - direct:.2f}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"gateway: {bytes_per_turn / 1024:.1f} KiB of memory for each kept turn of {NUM_TOKENS} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asyncio.run(measure(arguments, Path(folder), stack))


if __name__ == "__main__":
    main()
