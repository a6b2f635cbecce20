"""LLMServerClient: one vLLM server, spoken to in token ids.

Used by the gateway (requests) and by the model's runtime (adapters, probes). Every failure is one of two:
BackendRejectedError (the server's own 4xx: repeating it is pointless) or BackendUnavailableError (it could
not be reached, broke off, was too slow, answered 5xx or answered nonsense: another attempt may succeed).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
import numpy as np
import orjson

from model_runtime import llm_wire as wire
from model_runtime.errors import BackendRejectedError, BackendUnavailableError
from model_runtime.llm_parsers import AskedChat, ParsedAnswer, ParsedDelta, ParserCalls, decode, plain_ids
from model_runtime.post_connections import PostConnections
from model_runtime.protocol import ServerLoad
from model_runtime.types import Float32Array, Int32Array

CONNECT_TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0

TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens at one place and their logprobs, the likeliest first."""

__all__ = [
    "AskedChat",
    "Generation",
    "GenerationChunk",
    "LLMServerClient",
    "ParsedAnswer",
    "ParsedDelta",
    "join_chunks",
]

# vLLM writes this where it has no logprob for the sampled token, or where that logprob is NaN.
_MISSING_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One answer. `token_ids` holds the stop token that ended it, with its logprob, where one did."""

    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    top_logprobs: Sequence[TopLogprobs] = ()  # one for each token, where `sampling` asked for them


@dataclass(frozen=True, slots=True, eq=False)
class GenerationChunk:
    """What one event of a stream brought. The last one holds no ids but the counts."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_cached_tokens: int = 0
    top_logprobs: Sequence[TopLogprobs] = ()


class LLMServerClient(ParserCalls):
    """Client of one server. Opens a connection pool of its own unless it is given one.

    The key travels in the Authorization header alone; it appears in no message and no repr.
    """

    def __init__(self, url: str, api_key: str, *, http: aiohttp.ClientSession | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._posts: PostConnections | None = None
        if self.url.startswith("http://"):
            self._posts = PostConnections(
                self.url, headers=self._headers, connect_timeout_s=CONNECT_TIMEOUT_S
            )
        self._http = http
        self._owns_http = http is None

    def __repr__(self) -> str:
        return f"LLMServerClient({self.url!r})"

    async def __aenter__(self) -> LLMServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        *,
        model: str,
        token_ids: Sequence[int] | Int32Array,
        sampling: dict[str, Any],
        request_id: str,
        timeout_s: float,
        cache_salt: str | None = None,
    ) -> Generation:
        """Sample one answer. `sampling` holds vLLM SamplingParams fields; the sampled tokens' logprobs are
        always asked for, with `logprobs: k` those of the k likeliest tokens too. Cancelling this call closes
        its connection, on which the server aborts the request.
        """
        body = _generate_body(model, token_ids, sampling, request_id, cache_salt)
        data = await self._call("POST", "/inference/v1/generate", body, timeout_s=timeout_s)
        generation = _generation(decode(data, wire.GenerateAnswer, url=self.url), model=model, url=self.url)
        if not sampling.get("logprobs"):
            return generation
        [probed] = decode(data, wire.ProbeAnswer, url=self.url).choices
        return replace(generation, top_logprobs=_top_logprobs(probed))

    async def generate_stream(
        self,
        *,
        model: str,
        token_ids: Sequence[int] | Int32Array,
        sampling: dict[str, Any],
        request_id: str,
        timeout_s: float,
        stall_timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """As `generate`, token by token as they are sampled. `join_chunks` makes a Generation of them.

        `stall_timeout_s` is the limit for each event. A stream that ends early raises
        BackendUnavailableError; leaving it early aborts the request."""
        body = _generate_body(model, token_ids, sampling, request_id, cache_salt)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/inference/v1/generate"
        async with self._request(
            "POST", path, body, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        ) as response:
            if response.status >= 400:
                _check_status(response.status, await response.read(), "POST", self.url + path)
            async for event in _events(response):
                if event == b"[DONE]":
                    return
                chunk = _chunk(decode(event, wire.StreamAnswer, url=self.url), url=self.url)
                if chunk.token_ids and sampling.get("logprobs"):
                    [probed] = decode(event, wire.ProbeAnswer, url=self.url).choices
                    chunk = replace(chunk, top_logprobs=_top_logprobs(probed))
                yield chunk
        raise BackendUnavailableError(f"{self.url}: the stream of {request_id} broke off")

    async def abort(self, request_id: str, *, timeout_s: float) -> None:
        """End a generation that runs: its own call then answers what was sampled so far, with the
        finish_reason "abort". One that is not known (not yet, or no more) is no error."""
        body = {"request_ids": [f"generate-tokens-{request_id}"]}  # as vLLM names it inside
        await self._call("POST", "/inference/v1/abort_requests", body, timeout_s=timeout_s)

    async def next_token_logprobs(
        self,
        *,
        model: str,
        prompt_ids: Sequence[int] | Int32Array,
        token_ids: Sequence[int],
        cache_salt: str | None,
        timeout_s: float,
    ) -> list[float]:
        """Logprobs the model gives each of `token_ids` as the next token after `prompt_ids`, at
        temperature 1. Repeated ids are allowed."""
        # vLLM returns as many entries as were asked for and puts the sampled token first, which would push
        # the last one out. One repeated id makes room for it.
        wanted = [*map(int, token_ids), int(token_ids[0])]
        body: dict[str, Any] = {
            "model": model,
            "token_ids": plain_ids(prompt_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "logprobs": len(wanted),
                "logprob_token_ids": wanted,
                "ignore_eos": True,
            },
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        data = await self._call("POST", "/inference/v1/generate", body, timeout_s=timeout_s)
        return _requested_logprobs(decode(data, wire.ProbeAnswer, url=self.url), token_ids, url=self.url)

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        """Serve the PEFT adapter in `path` as model `name`. Returns when the engine holds its weights.
        The files must stay until no request uses them: an evicted adapter is read again from there."""
        body = {"lora_name": name, "lora_path": path}
        await self._call("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s)

    async def unload_adapter(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Take the name out of service; requests in flight finish with its weights. An unknown name is
        no error."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)
        except BackendRejectedError as error:
            if error.status_code != 404:
                raise

    async def list_models(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[str]:
        """Names the server answers to: its base model and every loaded adapter."""
        data = await self._call("GET", "/v1/models", timeout_s=timeout_s)
        return [card.id for card in decode(data, wire.ModelList, url=self.url).data]

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the API process answers and believes its engine alive. A hung engine still says yes."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except (BackendRejectedError, BackendUnavailableError):
            return False
        return True

    async def num_tokens_processed(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> float:
        """Prompt and generated tokens since the server started. It stands still when the engine does."""
        counts = await self._metrics(timeout_s)
        return sum(counts[name] for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"))

    async def load(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> ServerLoad:
        """How busy the server is."""
        found = await self._metrics(timeout_s)
        use = found.get("vllm:kv_cache_usage_perc")
        return ServerLoad(
            num_running=int(found["vllm:num_requests_running"]),
            num_waiting=int(found["vllm:num_requests_waiting"]),
            kv_cache_use=use,
            num_preemptions=int(found["vllm:num_preemptions_total"]),
        )

    async def _metrics(self, timeout_s: float) -> dict[str, float]:
        """The server's own metrics by name, summed over their labels."""
        text = (await self._call("GET", "/metrics", timeout_s=timeout_s)).decode("utf-8", "replace")
        found: defaultdict[str, float] = defaultdict(float)
        for line in text.splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] += float(value)
        return found

    def retire(self) -> None:
        """Nothing more will be asked: keep no connection. Calls under way go on."""
        if self._posts is not None:
            self._posts.close()

    async def close(self) -> None:
        """Close idle connections, and the pool if it is this client's own."""
        self.retire()
        if self._owns_http and self._http is not None:
            await self._http.close()
            self._http = None

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> bytes:
        if self._posts is not None and method == "POST":
            status, data = await self._posts.post(path, msgspec.json.encode(body), timeout_s=timeout_s)
        else:
            async with self._request(method, path, body, timeout_s=timeout_s) as response:
                status, data = response.status, await response.read()
        _check_status(status, data, method, self.url + path)
        return data

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float,
        stall_timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, while its body is read. What goes wrong meanwhile is BackendUnavailableError."""
        payload = None if body is None else msgspec.json.encode(body)
        headers = self._headers if payload is None else {**self._headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s), sock_read=stall_timeout_s
        )
        try:
            async with self._session().request(
                method, self.url + path, data=payload, headers=headers, timeout=timeout
            ) as response:
                yield response
        except aiohttp.ClientError as error:
            what = f"{type(error).__name__}: {error}"
            raise BackendUnavailableError(f"{method} {self.url}{path}: {what}") from error
        except TimeoutError as error:
            raise BackendUnavailableError(
                f"{method} {self.url}{path}: no answer within {timeout_s:g} s"
            ) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # No limit on connections: admission and max_num_seqs bound what is under way.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._http


# ------------------------------------------------------------------ reading answers


def _error_message(data: bytes) -> str:
    try:
        return msgspec.json.decode(data, type=wire.ErrorAnswer).error.message
    except msgspec.DecodeError:
        return data[:500].decode("utf-8", "replace") or "(empty answer)"


def _generation(answer: wire.GenerateAnswer, *, model: str, url: str) -> Generation:
    """Check that the answer is whole and of the model asked for; half an answer must not be recorded."""
    choice = _only_choice(answer, url=url)
    if answer.model is not None and answer.model != model:
        raise BackendUnavailableError(f"{url}: asked {model!r}, was answered by {answer.model!r}")
    details = answer.usage.prompt_tokens_details
    return _checked_generation(
        choice.token_ids,
        _logprobs_of(choice.token_ids, choice.logprobs, url=url),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        num_counted=answer.usage.completion_tokens,
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_cached_tokens=(details.cached_tokens or 0) if details else 0,
        top_logprobs=(),
        url=url,
    )


def join_chunks(chunks: Sequence[GenerationChunk], *, url: str) -> Generation:
    """The generation a whole stream amounts to, checked as one that came at once."""
    ids = [id_ for chunk in chunks for id_ in chunk.token_ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
    counts = [chunk for chunk in chunks if chunk.num_completion_tokens is not None]
    if len(ends) != 1 or len(counts) != 1:
        raise BackendUnavailableError(f"{url}: a stream with {len(ends)} ends and {len(counts)} usages")
    return _checked_generation(
        ids,
        logprobs,
        finish_reason=ends[0].finish_reason,
        stop_reason=ends[0].stop_reason,
        num_counted=counts[0].num_completion_tokens or 0,
        num_prompt_tokens=counts[0].num_prompt_tokens or 0,
        num_cached_tokens=counts[0].num_cached_tokens,
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
        url=url,
    )


def _checked_generation(
    ids: list[int],
    logprobs: list[float],
    *,
    finish_reason: str | None,
    stop_reason: int | str | None,
    num_counted: int,
    num_prompt_tokens: int,
    num_cached_tokens: int,
    top_logprobs: Sequence[TopLogprobs],
    url: str,
) -> Generation:
    if not len(ids) == len(logprobs) == num_counted:
        raise BackendUnavailableError(
            f"{url}: an answer of {len(ids)} token ids, {len(logprobs)} logprobs and a usage of {num_counted}"
        )
    try:  # a fraction of what numpy takes to look into a list
        packed_ids, packed = struct.pack(f"{len(ids)}i", *ids), struct.pack(f"{len(ids)}f", *logprobs)
    except (struct.error, OverflowError) as error:
        raise BackendUnavailableError(f"{url}: token ids or logprobs out of range: {error}") from error
    values = np.frombuffer(packed, dtype=np.float32)
    if not np.minimum.reduce(values, initial=0.0) > _MISSING_LOGPROB:  # nor is NaN
        raise BackendUnavailableError(f"{url}: no logprob for a sampled token")
    return Generation(
        token_ids=np.frombuffer(packed_ids, dtype=np.int32),
        logprobs=values,
        finish_reason=finish_reason or "stop",
        stop_reason=stop_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        top_logprobs=top_logprobs,
    )


def _logprobs_of(ids: list[int], logprobs: wire.Logprobs | None, *, url: str) -> list[float]:
    entries = (logprobs and logprobs.content) or []
    if len(entries) == len(ids) and [entry.token_id for entry in entries] != ids:
        raise BackendUnavailableError(f"{url}: the logprobs are not those of the token ids answered")
    return [entry.logprob for entry in entries]


def _top_logprobs(choice: wire.ProbedChoice) -> list[TopLogprobs]:
    entries = (choice.logprobs and choice.logprobs.content) or []
    found = [[(top.token_id, top.logprob) for top in entry.top_logprobs] for entry in entries]
    return [sorted(tops, key=lambda top: -top[1]) for tops in found]


def _chunk(answer: wire.StreamAnswer, *, url: str) -> GenerationChunk:
    if answer.error is not None:
        raise BackendUnavailableError(f"{url}: the stream failed: {answer.error.message}")
    if answer.choices:
        choice = answer.choices[0]
        ids = choice.token_ids or []
        return GenerationChunk(
            token_ids=ids,
            logprobs=_logprobs_of(ids, choice.logprobs, url=url),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
    if answer.usage is None:
        return GenerationChunk()
    details = answer.usage.prompt_tokens_details
    return GenerationChunk(
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_completion_tokens=answer.usage.completion_tokens,
        num_cached_tokens=(details.cached_tokens or 0) if details else 0,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[len(b"data: ") :]


def _check_status(status: int, data: bytes, method: str, url: str) -> None:
    if status < 400:
        return
    message = _error_message(data)
    if status >= 500:
        raise BackendUnavailableError(f"{method} {url}: {status} {message}")
    raise BackendRejectedError(message, status_code=status)


def _written(token_ids: Sequence[int] | Int32Array) -> Sequence[int] | msgspec.Raw:
    """An array of ids as JSON text, without a Python number for each."""
    if not isinstance(token_ids, np.ndarray):
        return token_ids
    return msgspec.Raw(orjson.dumps(token_ids, option=orjson.OPT_SERIALIZE_NUMPY))


def _generate_body(
    model: str,
    token_ids: Sequence[int] | Int32Array,
    sampling: dict[str, Any],
    request_id: str,
    cache_salt: str | None,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "token_ids": _written(token_ids),
        "sampling_params": {"logprobs": 0, **sampling},
        "request_id": request_id,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def _requested_logprobs(answer: wire.ProbeAnswer, token_ids: Sequence[int], *, url: str) -> list[float]:
    [choice] = answer.choices if len(answer.choices) == 1 else [wire.ProbedChoice()]
    entries = (choice.logprobs and choice.logprobs.content) or []
    if len(entries) != 1:
        raise BackendUnavailableError(f"{url}: asked for one token, got logprobs of {len(entries)}")
    found = {top.token_id: top.logprob for top in entries[0].top_logprobs}
    missing = [int(token) for token in token_ids if int(token) not in found]
    if missing:
        raise BackendUnavailableError(f"{url}: no logprob for token ids {missing}")
    return [found[int(token)] for token in token_ids]


def _only_choice(answer: wire.GenerateAnswer, *, url: str) -> wire.Choice:
    if len(answer.choices) != 1:
        raise BackendUnavailableError(f"{url}: expected one choice, got {len(answer.choices)}")
    return answer.choices[0]
