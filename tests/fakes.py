"""Stand-ins and builders shared by the tests."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from model_runtime.documents import TokenizerDocument
from model_runtime.errors import ObjectExistsError
from model_runtime.protocol import GatewayStatus
from model_runtime.store import Store
from model_runtime.types import MemberKey, Settlement, Trajectory, Turn, trajectory_id
from tests.fake_generation import (
    derender,
    derender_piece,
    stream_answer,
    top_logprobs,
    until_stop,
    whole_answer,
)


def make_turn(**overrides: Any) -> Turn:
    fields: dict[str, Any] = {
        "turn_index": 0,
        "start": 0,
        "end": 3,
        "request_id": "req-0",
        "version_min": 0,
        "version_max": 0,
        "finish_reason": "stop",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs_mode": "processed_logprobs",
        "rewards": {},
        "started_at": 1.0,
        "ended_at": 2.0,
    }
    return Turn(**fields | overrides)


def make_member(**overrides: Any) -> MemberKey:
    fields: dict[str, Any] = {"group_id": "g0", "group_size": 4, "member_index": 0, "attempt": 0}
    return MemberKey(**fields | overrides)


def make_trajectory(
    *,
    group_id: str = "g0",
    group_size: int = 4,
    member_index: int = 0,
    attempt: int = 0,
    mask: Sequence[int] = (1, 1, 1),
    version: int = 0,
    reward: float | None = None,
    **overrides: Any,
) -> Trajectory:
    """A valid trajectory with one turn per run of ones in `mask`, all sampled by `version`.

    `reward` is the workflow's. Anything else of Trajectory can be overridden by name; arrays that are not
    given follow from `mask` and `version`.
    """
    member = overrides.pop("member", None) or MemberKey(
        group_id=group_id, group_size=group_size, member_index=member_index, attempt=attempt
    )
    sampled = np.asarray(mask, dtype=np.int8)
    ids = np.arange(10, 10 + len(sampled), dtype=np.int32)
    run_id, agent_id = overrides.get("run_id", "run"), overrides.get("agent_id", "planner_agent")
    chain_index = overrides.get("chain_index", 0)
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id(run_id, member, agent_id, chain_index),
        "run_id": run_id,
        "member": member,
        "session_id": f"session-{member.workflow_id}",
        "agent_id": agent_id,
        "model_id": "planner_model",
        "chain_index": chain_index,
        "parent_trajectory_id": None,
        "request_id": "req-0",
        "policy_version": version,
        "policy_version_max": version,
        "partner_versions": {},
        "prompt_ids": np.asarray([1, 2, 3], dtype=np.int32),
        "response_ids": ids,
        "response_mask": sampled,
        "behavior_logprobs": np.where(sampled == 1, np.float32(-0.5), np.float32(0)).astype(np.float32),
        "token_versions": np.where(sampled == 1, version, -1).astype(np.int32),
        "turns": _turns_of(sampled, version),
        "workflow_rewards": {} if reward is None else {"reward": reward},
        "agent_rewards": {},
        "train": True,
        "created_at": 1000.0,
    }
    return Trajectory(**fields | overrides)


def _turns_of(mask: np.ndarray, version: int) -> tuple[Turn, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    spans = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(
        make_turn(
            turn_index=i, start=a, end=b, request_id=f"req-{i}", version_min=version, version_max=version
        )
        for i, (a, b) in enumerate(spans)
    )


def make_gateway_status(**overrides: Any) -> GatewayStatus:
    """Of a gateway at rest."""
    idle: dict[str, Any] = {
        "run_id": "run-1",
        "epoch": 1,
        "desired": "run",
        "models": {},
        "open_groups": 0,
        "waiting_groups": 0,
        "open_sessions": 0,
        "settlements": {},
    }
    return GatewayStatus(**idle | overrides)


def make_settlement(
    *,
    group_id: str = "g0",
    group_size: int = 4,
    member_index: int = 0,
    attempt: int = 0,
    **overrides: Any,
) -> Settlement:
    """A finalized execution with one row of planner_agent."""
    fields: dict[str, Any] = {
        "member": MemberKey(
            group_id=group_id, group_size=group_size, member_index=member_index, attempt=attempt
        ),
        "status": "finalized",
        "num_rows": {"planner_agent": 1},
        "train": True,
    }
    return Settlement(**fields | overrides)


# ------------------------------------------------------------------ S3


def use_s3(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, key: str = "test-key") -> None:
    """Point this process's S3 settings at the endpoint, and away from any profile of the machine."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def create_bucket(endpoint: str, bucket: str) -> None:
    """On a server that checks no signatures."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def read_env_file(path: Path) -> dict[str, str]:
    """`export NAME=value` lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.removeprefix("export ").partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


class FakeS3(ThreadingHTTPServer):
    """Just enough of S3 over HTTP to misbehave on demand. It knows one bucket and checks no signature."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, *, conditions: Literal["honoured", "ignored", "unknown"] = "honoured") -> None:
        super().__init__(("127.0.0.1", 0), _FakeS3Handler)
        self.conditions = conditions
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.requests: list[str] = []
        self.refuse_next: list[int] = []  # HTTP statuses to answer instead of doing the work
        self.lose_next_answers = 0  # do the work, then break the connection
        self.cut_next_bodies = 0  # announce the whole body, send half
        self.hang_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is what these tests are about."""


@contextmanager
def serve(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _FakeS3Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeS3  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_PUT(self) -> None:
        body = self._body()
        if self._misbehaves():
            return
        conditional = self.headers.get("If-None-Match") == "*"
        if conditional and self.server.conditions == "unknown":
            return self._answer(501, _xml_error("NotImplemented"))
        with self.server.lock:
            if conditional and self.server.conditions == "honoured" and self.path in self.server.objects:
                return self._answer(412, _xml_error("PreconditionFailed"))
            self.server.objects[self._key()] = body
        self._answer(200)

    def do_GET(self) -> None:
        if self._misbehaves():
            return
        if "list-type" in self.path:
            return self._answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        data = self.server.objects.get(self._key())
        self._answer(404, _xml_error("NoSuchKey")) if data is None else self._answer(200, data)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        if self._misbehaves():
            return
        self.server.objects.pop(self._key(), None)
        self._answer(204)

    def _key(self) -> str:
        return self.path.partition("?")[0]

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "") + self.headers.get(
            "Content-Encoding", ""
        ):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # checksum trailers
            continue
        return data

    def _misbehaves(self) -> bool:
        self.server.requests.append(f"{self.command} {self._key()}")
        time.sleep(self.server.hang_s)
        if self.server.refuse_next:
            self._answer(self.server.refuse_next.pop(0), _xml_error("Refused"))
            return True
        return False

    def _answer(self, status: int, body: bytes = b"") -> None:
        if self.server.lose_next_answers:
            self.server.lose_next_answers -= 1
            self.close_connection = True
            return
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut_next_bodies and status == 200 and len(body) > 1:
            self.server.cut_next_bodies -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)


def _xml_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>from the fake</Message></Error>".encode()


class FullDisk:
    """While `full`, no text is written to a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.num_refused = 0
        write = Path.write_text

        def write_text(path: Path, *args: Any, **options: Any) -> int:
            if self.full:
                self.num_refused += 1
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write(path, *args, **options)

        monkeypatch.setattr(Path, "write_text", write_text)


def race_to_create(store: Store, key: str, *, num_threads: int = 8) -> list[int]:
    """Numbers of the threads that created the object; all start at once, with bytes of their own."""
    start = threading.Barrier(num_threads)

    def create(i: int) -> bool:
        start.wait()
        try:
            return store.put_if_absent(key, b"%d" % i * 1000)
        except ObjectExistsError:
            return False

    with ThreadPoolExecutor(num_threads) as pool:
        return [i for i, won in enumerate(pool.map(create, range(num_threads))) if won]


# ------------------------------------------------------------------ a rollout server and its tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>")


def make_tokenizer() -> Any:
    """A byte-level BPE with a few merges; the special tokens have ids 0, 1, 2, …"""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_tokenizer_json())


@cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CHATML_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["hello world, what is the capital of France? the answer is user assistant system tool"] * 3
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def make_tokenizer_document(*, chat_template: str = CHATML, **overrides: Any) -> TokenizerDocument:
    tokenizer = make_tokenizer()
    fields: dict[str, Any] = {
        "tokenizer_json": tokenizer.to_str(),
        "chat_template": chat_template,
        "special_tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "eos_token_ids": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_model_len": 2048,
    }
    return TokenizerDocument(**fields | overrides)


class FakeRolloutServer:
    """vLLM's token-level endpoint on a real port, in a thread of its own.

    It answers `answers` in turn (the last one again and again) with made-up logprobs that depend on the
    token's place, and keeps every request body. What it does wrong is set by its attributes.
    """

    def __init__(self, *, served: Sequence[str] | None = None) -> None:
        self.tokenizer = make_tokenizer()
        self.served = None if served is None else set(served)  # None: any name
        self.api_key = "fake-server-key"
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """Forget what was asked, and behave."""
        self.answers: list[str] = ["hello"]
        self.requests: list[dict[str, Any]] = []
        self.gave: dict[str, list[int]] = {}  # by request id, what was sampled for it
        self.aborted: list[str] = []  # request ids whose connection was closed by the client
        self.fail_next: list[int | str] = []  # an HTTP status, "drop", "abort" or "short" (a logprob missing)
        self.delay_s = 0.0
        self.finish_reason = "stop"
        self.token_delay_s = 0.0
        self.break_after, self.break_by = -1, "drop"  # of the next stream that is so long
        self.fail_after_break: Sequence[int | str] = ()  # what follows it in `fail_next`
        self.ignore_aborts = False
        self.hold_after = -1  # tokens of the next answer, after which it waits to be told to end
        self.answer_of: Callable[[dict[str, Any]], list[int]] | None = None  # ids, in place of `answers`
        self.told_to_end: dict[str, asyncio.Event] = {}  # by request id, of what runs
        self.derendered: list[dict[str, Any]] = []
        self.rendered: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []  # asked of the parser while an answer was sampled
        self.fail_derender, self.fail_pieces = 0, 0
        self.num_sampled = 0
        self._num_answers = 0

    def logprobs(self, count: int) -> list[float]:
        return [-0.125 * (i % 7 + 1) for i in range(count)]

    def answer_ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.tokenizer.token_to_id("<|im_end|>")] if self.finish_reason == "stop" else ids

    @contextmanager
    def running(self) -> Iterator[FakeRolloutServer]:
        with aiohttp_server(self._app) as url:
            self.url = url
            yield self

    def _app(self) -> Any:
        from aiohttp import web

        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/v1/chat/completions/render", self._render)
        return app

    async def _render(self, request: Any) -> Any:
        """Asked only for the grammar of a forced call."""
        from aiohttp import web

        body = await request.json()
        self.rendered.append(body)
        grammar = None if body["tool_choice"] == "auto" else {"structural_tag": "a grammar", "json": None}
        return web.json_response({"token_ids": [], "sampling_params": {"structured_outputs": grammar}})

    async def _derender(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        if body.get("stream"):
            self.pieces.append(body)
            if self.fail_pieces:
                return web.json_response({"error": {"message": "can't parse"}}, status=self.fail_pieces)
            return web.json_response(derender_piece(self, body))
        self.derendered.append(body)
        if self.fail_derender:
            return web.json_response({"error": {"message": "can't parse"}}, status=self.fail_derender)
        return web.json_response(derender(self, self.derendered[-1]))

    async def _abort(self, request: Any) -> Any:
        from aiohttp import web

        for name in (await request.json())["request_ids"]:
            ended = self.told_to_end.get(name.removeprefix("generate-tokens-"))
            if ended is not None and not self.ignore_aborts:
                ended.set()
        return web.Response()

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        if request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        self.requests.append(body)
        self.told_to_end[body["request_id"]] = asyncio.Event()
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted.append(body["request_id"])
            raise
        failure = self.fail_next.pop(0) if self.fail_next else None
        if failure == "drop":
            request.transport.abort()
            return web.Response()
        if isinstance(failure, int):
            return web.json_response({"error": {"message": f"refused with {failure}"}}, status=failure)
        if self.served is not None and body["model"] not in self.served:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        answer = self._answer(body, aborted=failure == "abort")
        if failure == "short":
            del answer["choices"][0]["logprobs"]["content"][-1]
        if body.get("stream"):
            return await stream_answer(self, request, answer)
        try:
            return web.json_response(await whole_answer(self, answer))
        except asyncio.CancelledError:
            self.aborted.append(body["request_id"])
            raise

    def _answer(self, body: dict[str, Any], *, aborted: bool) -> dict[str, Any]:
        text = self.answers[min(self._num_answers, len(self.answers) - 1)]
        self._num_answers += 1
        limit = body["sampling_params"]["max_tokens"]
        whole = self.answer_ids(text) if self.answer_of is None else self.answer_of(body)
        whole, stopped_by = until_stop(self, whole, body["sampling_params"].get("stop", ()))
        ids = whole[: min(limit, len(whole) - 1) if aborted else limit]
        self.num_sampled += len(ids)
        self.gave[body["request_id"]] = ids
        num_top = body["sampling_params"]["logprobs"]
        content = [
            {"token_id": id_, "logprob": lp, "rank": 1, "top_logprobs": top_logprobs(id_, lp, num_top)}
            for id_, lp in zip(ids, self.logprobs(len(ids)), strict=True)
        ]
        reason = "abort" if aborted else "length" if len(whole) > limit else self.finish_reason
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": content}}
        choice["stop_reason"] = stopped_by if reason == "stop" else None
        prompt, completion = len(body["token_ids"]), len(ids)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        return {
            "request_id": f"generate-tokens-{body['request_id']}",
            "model": body["model"],
            "created": 0,
            "choices": [choice],
            "usage": usage,
        }


@contextmanager
def aiohttp_server(make_app: Callable[[], Any]) -> Iterator[str]:
    """An aiohttp application on a free loopback port, in a thread of its own; yields its URL. Handlers are
    cancelled when their client hangs up."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    address: dict[str, Any] = {}
    up, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        runner = web.AppRunner(make_app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address["port"] = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        up.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert up.wait(10), "the fake server did not start"
    try:
        yield f"http://127.0.0.1:{address['port']}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
