"""The gateway as a run has it: its own process, everything on, one model behind it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rig.processes import Measured, start_command, wait_until_up
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workspace import HOME_ENV
from tests.fakes import make_tokenizer_document

RUN_ID = "benchmark"
KEY = "benchmark-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}
AGENT = "agent"
MAX_MODEL_LEN = 10**6
GROUP_SIZE = 50
LONG_S = 3600.0
START_POLLS = 600


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Where one session's agent sends its chats."""

    session_url: str
    api_key: str

    @property
    def chat_url(self) -> str:
        return f"{self.session_url}/agents/{AGENT}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


class GatewayUnderTest:
    """One gateway process and what its parent, a runtime and a driver tell it."""

    def __init__(
        self, folder: Path, upstream: str, stack: ExitStack, *, queue_report: Path | None = None
    ) -> None:
        """`queue_report`: a file in which a training queue says how far it has read."""
        self._queue_report = queue_report
        self._folder, self._upstream, self._stack = folder, upstream, stack
        self._config = _config(folder)
        self._num_groups = 0
        self.url = ""
        self.process: Measured

    async def start(self) -> None:
        """Returns when the model is ready."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = self._folder / "config.json"
        path.write_text(self._config.model_dump_json())
        arguments = ["--run-id", RUN_ID, "--config", path, "--epoch", "1", "--incarnation", "1"]
        self.process = start_command(
            self._stack,
            [sys.executable, "-m", "gateway", *arguments, "--port", str(port)],
            env={ADMIN_KEY_ENV: KEY, HOME_ENV: str(self._folder / "home")},
            log=self._folder / "gateway.log",
        )
        await wait_until_up(f"{self.url}/health")
        await self._register()

    def stop_renewing(self) -> None:
        self._renewing.cancel()

    async def open_sessions(self, count: int) -> list[AgentEndpoint]:
        """Training sessions in admitted groups."""
        async with aiohttp.ClientSession(headers=ADMIN) as http:
            return [await self._open(http, *place) for place in _places(count, self._name_groups())]

    async def _open(self, http: aiohttp.ClientSession, group: str, member: int) -> AgentEndpoint:
        body = {"group_id": group, "group_size": GROUP_SIZE}
        if member == 0:
            opened = await _ask(http, "POST", f"{self.url}/groups", body | {"wait_s": 30})
            if opened["status"] != "open":
                raise RuntimeError(f"group {group} was not admitted: {opened}")
        answer = await _ask(http, "POST", f"{self.url}/sessions", body | {"member_index": member})
        return AgentEndpoint(answer["base_url"], answer["api_key"])

    def _name_groups(self) -> Iterator[str]:
        while True:
            self._num_groups += 1
            yield f"g{self._num_groups}"

    async def _register(self) -> None:
        key = RunLayout(RUN_ID).model("m").tokenizer("t")
        document = make_tokenizer_document(max_model_len=MAX_MODEL_LEN)
        open_store(self._config.store).put(key, document.to_bytes())
        renewal = {
            **{"model_id": "m", "epoch": 1, "incarnation": 1, "seq": 1, "kind": "trainable"},
            **{"status": "ready", "trainer_state": "running", "limit": 10**6},
            "replicas": [{"replica_id": "r", "url": self._upstream, "api_key": "k"}],
            "published_version": 0,
            "tokenizer_uri": key,
        }
        self._renewing = asyncio.create_task(self._keep_renewing(renewal))
        async with aiohttp.ClientSession(headers=ADMIN) as http:
            status: dict[str, Any] = {}
            for _ in range(START_POLLS):
                status = await _ask(http, "GET", f"{self.url}/admin/status")
                if status["models"]["m"]["ready"]:
                    return
                await asyncio.sleep(0.05)
        raise RuntimeError(f"the model did not become ready: {status}")

    async def _keep_renewing(self, renewal: dict[str, Any]) -> None:
        async with aiohttp.ClientSession(headers=ADMIN) as http:
            while True:
                renewal["seq"] += 1
                if self._queue_report is not None and self._queue_report.exists():
                    renewal["queue"] = json.loads(self._queue_report.read_text())["queue"]
                await _ask(http, "PUT", f"{self.url}/admin/models/m", renewal)
                await asyncio.sleep(2)


def _config(folder: Path) -> RunConfig:
    return parse_config(
        {
            "multi_model": {"models": [{"model_id": "m", "model_path": "unused"}]},
            "agent_model_mapping": {AGENT: "m"},
            "workflow": {
                "group_size": GROUP_SIZE,
                "execution_timeout_s": LONG_S,
                "group_timeout_s": LONG_S,
            },
            "store": {"url": str(folder / "store")},
        }
    )


def _places(count: int, groups: Iterator[str]) -> Iterator[tuple[str, int]]:
    for first in range(0, count, GROUP_SIZE):
        group = next(groups)
        yield from ((group, member) for member in range(min(GROUP_SIZE, count - first)))


async def _ask(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> dict[str, Any]:
    async with http.request(method, url, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{method} {url} answered {answer.status}: {await answer.text()}")
        return await answer.json()
