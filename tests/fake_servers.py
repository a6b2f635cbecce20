"""Stand-ins for what a model's runtime talks to: rollout servers and the gateway."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from model_runtime.adapters import AdapterFiles, pack
from model_runtime.documents import CanaryProbe
from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.protocol import ModelRenewal, RenewalAnswer

CANARY_PROMPT = [1, 2, 3]
CANARY_TOKENS = [4, 5, 6]


def make_adapter_files(seed: int) -> AdapterFiles:
    """A valid adapter of one module; every seed gives other weights."""
    import numpy as np

    rng = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": rng.normal(size=(8, 4)).astype(np.float32),
        f"{module}.lora_B.weight": rng.normal(size=(4, 8)).astype(np.float32),
    }
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    return pack(tensors, config)


def logprobs_of(weights: bytes, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """What a fake server serving these adapter weights answers: any other weights give other numbers."""
    digest = hashlib.sha256(weights + bytes(prompt_ids)).digest()
    return [-0.01 - digest[token % len(digest)] / 16 for token in token_ids]


def make_canary(weights: bytes, previous: bytes | None = None) -> list[CanaryProbe]:
    before = None if previous is None else logprobs_of(previous, CANARY_PROMPT, CANARY_TOKENS)
    return [
        CanaryProbe(
            prompt_ids=CANARY_PROMPT,
            token_ids=CANARY_TOKENS,
            logprobs=logprobs_of(weights, CANARY_PROMPT, CANARY_TOKENS),
            previous_logprobs=before,
        )
    ]


class FakeServerClient:
    """A server with adapters, in memory. It can misbehave like the real ones did somewhere:

    skip_loading        says yes to a load and does nothing
    serve_stale         lists the new name but answers with the weights it had loaded before
    fail_next           so many calls are lost; the work of a load is done all the same
    down                every call fails
    """

    def __init__(self) -> None:
        self.adapters: dict[str, bytes] = {}
        self.skip_loading = False
        self.serve_stale = False
        self.down = False
        self.fail_next = 0
        self.load_s = 0.0
        self.log: list[str] = []
        self.salts: list[str | None] = []
        self.base: list[str] = []

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        self.log.append(f"load {name}")
        await asyncio.sleep(self.load_s)
        if self.down:
            raise BackendUnavailableError("connection refused")
        if name in self.adapters:
            raise BackendRejectedError(f"{name} has already been loaded", status_code=400)
        if not self.skip_loading:
            last = next(reversed(self.adapters.values()), b"")
            fresh = (Path(path) / "adapter_model.safetensors").read_bytes()
            self.adapters[name] = last if self.serve_stale else fresh
        self._maybe_lose()

    async def unload_adapter(self, name: str, *, timeout_s: float = 30) -> None:
        self.log.append(f"unload {name}")
        self._maybe_lose()
        self.adapters.pop(name, None)

    async def list_models(self, *, timeout_s: float = 30) -> list[str]:
        self._maybe_lose()
        return ["m@base", *self.base, *self.adapters]

    async def next_token_logprobs(
        self,
        *,
        model: str,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        cache_salt: str | None,
        timeout_s: float,
    ) -> list[float]:
        self._maybe_lose()
        self.salts.append(cache_salt)
        return logprobs_of(self.adapters[model], prompt_ids, token_ids)

    def _maybe_lose(self) -> None:
        if self.down:
            raise BackendUnavailableError("connection refused")
        if self.fail_next:
            self.fail_next -= 1
            raise BackendUnavailableError("connection reset")


class FakeReplica:
    def __init__(self, replica_id: str = "m-0", *, ready: bool = True) -> None:
        self.replica_id = replica_id
        self.url = f"http://127.0.0.1:1/{replica_id}"
        self.api_key = "key-of-" + replica_id
        self.attempt = 1
        self.ready = ready
        self.client = FakeServerClient()
        self.restart_reason: str | None = None

    def restart(self) -> None:
        """Die and come back, empty and not yet ready."""
        self.attempt += 1
        self.ready = False
        self.client = FakeServerClient()

    def request_restart(self, reason: str) -> None:
        self.ready = False
        self.restart_reason = reason


class FakeGateway:
    """Takes renewals as the gateway does, over HTTP, and records them. `answer` is what it says; with
    `silent` it takes the request and never answers, with `refuse` it answers that status."""

    def __init__(self) -> None:
        self.renewals: list[ModelRenewal] = []
        self.authorizations: list[str | None] = []
        self.answer: Callable[[ModelRenewal], RenewalAnswer] = lambda r: RenewalAnswer(
            desired="run", epoch=r.epoch
        )
        self.silent = False
        self.refuse: int | None = None
        self.url = ""

    @property
    def last(self) -> ModelRenewal:
        return self.renewals[-1]

    async def take(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(3600)
        if self.refuse is not None:
            return web.Response(status=self.refuse, text="no")
        renewal = ModelRenewal.model_validate_json(await request.read())
        self.renewals.append(renewal)
        self.authorizations.append(request.headers.get("Authorization"))
        return web.Response(text=self.answer(renewal).model_dump_json(), content_type="application/json")

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeGateway]:
        app = web.Application()
        app.router.add_put("/admin/models/{model_id}", self.take)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, bound = runner.addresses[0][:2]
        self.url = f"http://{host}:{bound}"
        try:
            yield self
        finally:
            await runner.cleanup()


async def until(condition: Callable[[], object], *, timeout_s: float = 15.0) -> None:
    """Wait until the condition holds; fail after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
