"""Does one model's weight sync slow another model's requests?

Two tiny models with a vLLM server each, behind one gateway. The requests of model `steady` are timed in
windows: in every second one, model `syncing` publishes a version whose sync is made slow by a delay that
uses no CPU. Windows with and without are interleaved, so that a busy machine hits both alike.

    python -m benchmarks.sync_isolation [--pairs 6] [--window-s 8] [--concurrency 4] [--json]

Prints the p95 latency of each window, the ratio of each pair, and their median and range. Fails when a
request of `steady` ever waited for its model, or when the median ratio exceeds MAX_MEDIAN_RATIO.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from model_runtime.adapters import read_folder, write_version
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from model_runtime.processes import ChildProcess, free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.runtime import ModelAsyncRuntime
from model_runtime.store import open_store
from model_runtime.workspace import HOME_ENV
from tests.tiny_models import make_adapter, make_model

RUN_ID = "sync-isolation"
STEADY, SYNCING = "steady", "syncing"
MAX_TOKENS = 16
MAX_MEDIAN_RATIO = 1.5  # beyond what a busy machine does to two equal windows
START_POLL_S = 0.05
REQUEST_TIMEOUT_S = 60.0
START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Window:
    """What the clients of `steady` saw in one window."""

    syncing: bool
    num_requests: int
    p50_ms: float
    p95_ms: float
    waited_s: float  # by all requests of `steady` together for their model to be ready
    sync_s: float | None  # how long the other model's publish took


def make_config(folder: Path, port: int) -> RunConfig:
    base = make_model(folder / "model")
    rollout = {"kv_cache_bytes": 64 * 2**20, "max_num_seqs": 16}
    models = [
        {"model_id": name, "model_path": str(base), "lora": {"rank": 8}, "rollout": rollout}
        for name in (STEADY, SYNCING)
    ]
    return parse_config(
        {
            "multi_model": {"models": models},
            "agent_model_mapping": {f"{name}_agent": name for name in (STEADY, SYNCING)},
            "store": {"url": str(folder / "store")},
            "gateway": {"port": port},
        }
    )


class Bench:
    """Gateway and runtimes of both models, and the clients of `steady`."""

    def __init__(self, config: RunConfig, folder: Path, *, delay_s: float, concurrency: int) -> None:
        self.url = f"http://127.0.0.1:{config.gateway.port}"
        self._config = config
        self._folder = folder
        self._delay_s = delay_s
        self._concurrency = concurrency
        self._versions: dict[str, int] = dict.fromkeys((STEADY, SYNCING), -1)
        self._runtimes = {name: self._runtime(name) for name in (STEADY, SYNCING)}
        self._admin = {"Authorization": f"Bearer {os.environ[ADMIN_KEY_ENV]}"}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        gateway = await self._start_gateway()
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            try:
                await asyncio.gather(*(r.start_rollout_servers() for r in self._runtimes.values()))
                await asyncio.gather(*(self.publish_next(name) for name in self._runtimes))
                await self._request_once()  # the tokenizer is loaded, the connections are open
                yield
            finally:
                await asyncio.gather(*(r.close() for r in self._runtimes.values()))
                await gateway.stop()

    async def publish_next(self, model_id: str) -> float:
        """Commit and publish another version; seconds the publish took."""
        self._versions[model_id] += 1
        version = self._versions[model_id]
        base = Path(self._config.model(model_id).model_path)
        path = make_adapter(self._folder / model_id / f"v{version}", base=base, seed=version)
        store, layout = open_store(self._config.store), RunLayout(RUN_ID).model(model_id)
        write_version(store, layout, read_folder(path), version=version, step=version, epoch=1)
        report = await self._runtimes[model_id].publish(version)
        return report.timings_s["total"]

    async def window(self, seconds: float, *, syncing: bool) -> Window:
        """Time the requests of `steady` for so long; with `syncing` the other model syncs meanwhile."""
        latencies: list[float] = []
        waited_before_s = await self._waited_s()
        sync = asyncio.create_task(self.publish_next(SYNCING)) if syncing else None
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._concurrency):
                clients.create_task(self._client(time.monotonic() + seconds, latencies))
        sync_s = await sync if sync is not None else None
        return Window(
            syncing=syncing,
            num_requests=len(latencies),
            p50_ms=1000 * statistics.median(latencies),
            p95_ms=1000 * statistics.quantiles(latencies, n=20)[-1],
            waited_s=await self._waited_s() - waited_before_s,
            sync_s=sync_s,
        )

    def _runtime(self, model_id: str) -> ModelAsyncRuntime:
        async def delay(version: int) -> None:
            await asyncio.sleep(self._delay_s if version else 0)

        return ModelAsyncRuntime(
            config=self._config,
            model_id=model_id,
            run_id=RUN_ID,
            epoch=1,
            incarnation=0,
            gateway_url=self.url,
            before_load=delay if model_id == SYNCING else None,
        )

    async def _start_gateway(self) -> ChildProcess:
        path = self._folder / "config.json"
        path.write_text(self._config.model_dump_json())
        argv = [sys.executable, "-m", "gateway", "--run-id", RUN_ID, "--config", str(path)]
        argv += ["--epoch", "1", "--incarnation", "0", "--port", str(self._config.gateway.port)]
        gateway = await ChildProcess.start(argv, log_path=self._folder / "gateway.log")
        async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as http:
            while gateway.returncode is None:
                try:
                    async with http.get(f"{self.url}/health"):
                        return gateway
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(START_POLL_S)
        raise RuntimeError(f"the gateway did not start:\n{gateway.log_tail()}")

    async def _client(self, until: float, latencies: list[float]) -> None:
        while time.monotonic() < until:
            latencies.append(await self._request_once())

    async def _request_once(self) -> float:
        """One call by `steady_agent` in a session of its own, which is left open: ending one waits for the
        store. Seconds of the call itself."""
        session = await self._post("/sessions", {"mode": "eval", "group_id": "bench"}, self._admin)
        key = {"Authorization": f"Bearer {session['api_key']}"}
        path = f"/sessions/{session['session_id']}"
        messages = [{"role": "user", "content": "What is the sum of seven and five?"}]
        began = time.perf_counter()
        chat = f"{path}/agents/{STEADY}_agent/v1/chat/completions"
        await self._post(chat, {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0}, key)
        return time.perf_counter() - began

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        async with self._http.post(self.url + path, json=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"POST {path}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def _waited_s(self) -> float:
        async with self._http.get(f"{self.url}/admin/status", headers=self._admin) as answer:
            status = await answer.json()
        return status["models"][STEADY]["waited_s"]


async def measure(folder: Path, *, pairs: int, window_s: float, concurrency: int) -> list[Window]:
    """Windows in the order they ran: without, with, without, with, …"""
    bench = Bench(make_config(folder, free_port()), folder, delay_s=0.8 * window_s, concurrency=concurrency)
    windows = []
    async with bench.running():
        await bench.window(min(3.0, window_s), syncing=False)  # warm
        for _ in range(pairs):
            windows.append(await bench.window(window_s, syncing=False))
            windows.append(await bench.window(window_s, syncing=True))
    return windows


def summarize(windows: list[Window]) -> dict[str, Any]:
    pairs = list(zip(windows[::2], windows[1::2], strict=True))
    ratios = [with_sync.p95_ms / without.p95_ms for without, with_sync in pairs]
    return {
        "benchmark": "sync_isolation",
        "windows": [asdict(window) for window in windows],
        "p95_ratios": ratios,
        "median_p95_ratio": statistics.median(ratios),
        "waited_s": sum(window.waited_s for window in windows),
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Requests of one model while another syncs")
    for name in ("window", "requests", "p50 ms", "p95 ms", "waited s", "sync s", "p95 ratio"):
        table.add_column(name, justify="right")
    for i, window in enumerate(result["windows"]):
        ratio = f"{result['p95_ratios'][i // 2]:.2f}" if window["syncing"] else ""
        sync_s = f"{window['sync_s']:.2f}" if window["syncing"] else "-"
        p50, p95 = f"{window['p50_ms']:.1f}", f"{window['p95_ms']:.1f}"
        kind = "other syncs" if window["syncing"] else "quiet"
        table.add_row(kind, str(window["num_requests"]), p50, p95, f"{window['waited_s']:.3f}", sync_s, ratio)
    console.print(table)
    low, high = min(result["p95_ratios"]), max(result["p95_ratios"])
    median = result["median_p95_ratio"]
    console.print(f"p95 ratio (syncing / quiet): median {median:.2f}, range {low:.2f} to {high:.2f}")
    console.print(f"seconds requests waited for their model, in all: {result['waited_s']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Does one model's weight sync slow another's requests?")
    parser.add_argument("--pairs", type=int, default=6, help="windows of each kind")
    parser.add_argument("--window-s", type=float, default=8.0, help="length of a window")
    parser.add_argument("--concurrency", type=int, default=4, help="clients of the steady model")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sync-isolation-") as folder:
        os.environ[HOME_ENV] = f"{folder}/home"
        os.environ[ADMIN_KEY_ENV] = secrets.token_urlsafe(24)
        windows = asyncio.run(
            measure(Path(folder), pairs=args.pairs, window_s=args.window_s, concurrency=args.concurrency)
        )
    result = summarize(windows)
    print(json.dumps(result, indent=1)) if args.json else show(result, Console())
    holds = result["waited_s"] == 0 and result["median_p95_ratio"] <= MAX_MEDIAN_RATIO
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
