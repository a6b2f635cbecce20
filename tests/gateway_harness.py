"""A live gateway on a real port before fake rollout servers, as tests and benchmarks drive it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from gateway.app import Gateway, create_app
from gateway.connection import bounded_protocol
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Settlement, Trajectory
from tests.fakes import FakeRolloutServer, make_tokenizer_document
from tests.live_server import LiveServer

RUN_ID = "run"
ADMIN_KEY = "an-admin-key-for-tests"
AGENTS = {"planner": "plan", "searcher": "solve", "answerer": "solve"}


def make_config(**gateway: Any) -> RunConfig:
    """Two trainable models, three agents; groups of two; commits at once. `of_each_model` are fields of
    both models."""
    settings = {"commit_interval_s": 0.0, "request_timeout_s": 5.0, "lease_s": 30.0}
    workflow = {k: gateway.pop(k) for k in ("temperature", "execution_timeout_s") if k in gateway}
    of_each_model = gateway.pop("of_each_model", {})
    models = [
        {"model_id": m, "model_path": "unused", "batch_size": 64, "max_response_tokens": 64} | of_each_model
        for m in ("plan", "solve")
    ]
    return parse_config(
        {
            "multi_model": {"models": models},
            "agent_model_mapping": AGENTS,
            "gateway": settings | gateway,
            "workflow": {"group_size": 2, **workflow},
        }
    )


@dataclass
class GatewayHarness:
    """What a driver, a runtime and an agent do, over HTTP."""

    url: str
    gateway: Gateway
    store: Store
    server: FakeRolloutServer
    http: httpx.Client
    live: LiveServer
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)  # model_id → of its renewals
    group_id: str = "g0"
    _seq: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start_afresh(self) -> None:
        """For the next test: a group of its own, models ready at version 0, a well-behaved server."""
        self.server.reset()
        self.defaults.clear()
        for session in list(self.gateway.sessions):
            self.on_loop(self.gateway.sessions.settle(session, "aborted"))
        self.make_ready()
        self.group_id = f"g{next(self._seq)}"
        self.open_group()

    @property
    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {ADMIN_KEY}"}

    def renewal(self, model_id: str, **overrides: Any) -> dict[str, Any]:
        key = RunLayout(RUN_ID).model(model_id).tokenizer("t")
        fields: dict[str, Any] = {
            "model_id": model_id,
            "epoch": 1,
            "incarnation": 1,
            "seq": next(self._seq),
            "kind": "trainable",
            "status": "ready",
            "replicas": [{"replica_id": "r0", "url": self.server.url, "api_key": self.server.api_key}],
            "published_version": 0,
            "live_versions": [0],
            "tokenizer_uri": key,
            "trainer_state": "running",
            "limit": 64,
        }
        return fields | self.defaults.get(model_id, {}) | overrides

    def renew(self, model_id: str, **overrides: Any) -> dict[str, Any]:
        body = self.renewal(model_id, **overrides)
        answer = self.http.put(f"/admin/models/{model_id}", json=body, headers=self.admin)
        answer.raise_for_status()
        return answer.json()

    def make_ready(self, *model_ids: str) -> None:
        """Register the models and wait until their tokenizers are loaded."""
        for model_id in model_ids or ("plan", "solve"):
            document = make_tokenizer_document()
            self.store.put(RunLayout(RUN_ID).model(model_id).tokenizer("t"), document.to_bytes())
            self.renew(model_id)
            self.on_loop(self._until_ready(model_id))

    async def _until_ready(self, model_id: str) -> None:
        loop = asyncio.get_running_loop()
        await self.gateway.bindings.wait_until_ready(model_id, loop.time() + 10)

    def wait_for_tokenizer(self, model_id: str, uri: str) -> None:
        deadline = time.monotonic() + 10
        while self.gateway.bindings.get(model_id).codec_uri != uri:
            assert time.monotonic() < deadline, f"{uri} was not loaded"
            time.sleep(0.01)

    def on_loop(self, coroutine: Any) -> Any:
        """Run something on the gateway's own event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.live.loop).result(20)

    def open_group(self, group_id: str | None = None, size: int = 2, **overrides: Any) -> dict[str, Any]:
        body = {"group_id": group_id or self.group_id, "group_size": size, "wait_s": 5} | overrides
        answer = self.http.post("/groups", json=body, headers=self.admin)
        answer.raise_for_status()
        return answer.json()

    def open_session(self, member: int = 0, group_id: str | None = None, **overrides: Any) -> LiveSession:
        answer = self.ask_for_session(member, group_id, **overrides)
        answer.raise_for_status()
        return LiveSession(self, **answer.json())

    def ask_for_session(
        self, member: int = 0, group_id: str | None = None, **overrides: Any
    ) -> httpx.Response:
        body = {"group_id": self.group_id if group_id is None else group_id, "group_size": 2}
        body |= {"member_index": member} | overrides
        return self.http.post("/sessions", json=body, headers=self.admin)

    def rows(self, model_id: str, *, evaluation: bool = False) -> list[Trajectory]:
        """Of the current group, in log order."""
        shards = self._shards(model_id, evaluation)
        rows = [row for shard in shards for row in shard.trajectories]
        return [row for row in rows if evaluation or row.member.group_id == self.group_id]

    def settlements(self, model_id: str) -> list[Settlement]:
        """Of the current group, in log order."""
        found = [s for shard in self._shards(model_id, False) for s in shard.settlements]
        return [s for s in found if s.member.group_id == self.group_id]

    def _shards(self, model_id: str, evaluation: bool) -> list[Any]:
        layout = RunLayout(RUN_ID).model(model_id)
        keys = self.store.list(layout.eval_writers() if evaluation else layout.log_writers())
        return [decode_shard(self.store.get(key), source=key) for key in keys]


@dataclass
class LiveSession:
    """An agent's and a driver's view of one session."""

    harness: GatewayHarness
    session_id: str
    base_url: str
    api_key: str
    workflow_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        headers = self.headers | kwargs.pop("headers", {})
        return self.harness.http.post(
            f"/sessions/{self.session_id}/{path}", json=body, headers=headers, **kwargs
        )

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | str,
        *,
        agent: str = "planner",
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> httpx.Response:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        path = f"agents/{agent}/v1/chat/completions"
        return self.post(path, {"messages": messages, "model": "any"} | fields, headers=headers or {})

    def finalize(self, reward: float | None = None) -> dict[str, Any]:
        answer = self.post("finalize", {"reward": reward})
        answer.raise_for_status()
        return answer.json()


@contextmanager
def live_gateway(
    store: Store, *, config: RunConfig | None = None, journal: Path | None = None, incarnation: int = 1
) -> Iterator[GatewayHarness]:
    """A gateway of epoch 1 with one fake rollout server; nothing is registered yet."""
    with ExitStack() as stack:
        server = stack.enter_context(FakeRolloutServer().running())
        folder = Path(stack.enter_context(TemporaryDirectory()))
        gateway = Gateway(
            config or make_config(),
            run_id=RUN_ID,
            store=store,
            epoch=1,
            incarnation=incarnation,
            admin_key=ADMIN_KEY,
            journal=journal or folder / "1.journal",
        )
        protocol = bounded_protocol(gateway.config.gateway.max_header_bytes)
        live = LiveServer(create_app(gateway), http=protocol)
        url = stack.enter_context(live.running())
        http = stack.enter_context(httpx.Client(base_url=url, timeout=20))
        yield GatewayHarness(url, gateway, store, server, http, live)
