"""GatewayBindingRegistry: which servers answer for which model right now.

A model's runtime renews its binding every few seconds; a binding that is not renewed for a lease is not
ready. Bindings live in memory alone: a gateway that starts anew is filled by the next renewals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

from gateway.codec import ChatCodec
from model_runtime.documents import TokenizerDocument
from model_runtime.errors import ModelNotReadyError, RepertoryError, UnknownModelError
from model_runtime.llm_client import LLMServerClient
from model_runtime.protocol import ModelRenewal, Replica
from model_runtime.store import Store

logger = logging.getLogger(__name__)

Affinity = MutableMapping[str, str]
"""model_id → replica_id a session was served by last: its KV cache holds the conversation."""

# A replica that just failed is passed over for this long while another is ready; for twice as long each
# time it fails again, up to a minute: a hung one costs whoever tries it a whole attempt.
FAILURE_COOLDOWN_S = 2.0
MAX_COOLDOWN_S = 60.0


@dataclass(slots=True, eq=False)
class ReplicaHandle:
    """One ready rollout server."""

    replica: Replica
    client: LLMServerClient
    inflight: int = 0
    num_failures: int = 0  # since it last gave an answer; those of one rest are one
    rests_until: float = float("-inf")

    @property
    def replica_id(self) -> str:
        return self.replica.replica_id


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where one generation runs, and under which version."""

    client: LLMServerClient
    replica_id: str
    version: int
    has_alternative: bool = False  # the model has another replica to try


@dataclass(slots=True, eq=False)
class ModelBinding:
    """What is known of one model."""

    model_id: str
    renewal: ModelRenewal | None = None
    renewed_at: float = float("-inf")
    codec: ChatCodec | None = None
    codec_uri: str | None = None
    codec_error: str = ""
    replicas: dict[str, ReplicaHandle] = field(default_factory=dict)
    inflight_versions: Counter[int] = field(default_factory=Counter)
    kept_versions: Counter[int] = field(default_factory=Counter)  # of tokens kept by interrupted generations
    max_concurrent: int | None = None  # generations one replica is given at once
    line: deque[asyncio.Event] = field(default_factory=deque)  # calls that wait for a replica with room
    num_pinned: int = 0  # generations of evaluations, whose version is held
    waiting: int = 0
    waited_s: float = 0.0  # by all calls together; a call that found the model ready adds exactly nothing
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> int:
        return self.inflight_versions.total() + self.num_pinned

    @property
    def published_version(self) -> int | None:
        return self.renewal.published_version if self.renewal else None

    def has_lost(self, version: int) -> bool:
        """Its servers answer for others, and for this one no more. A runtime that starts anew may bring it
        back until it has published."""
        renewal = self.renewal
        if renewal is None or renewal.published_version in (None, version):
            return False
        return version not in renewal.live_versions

    def ready_codec(self) -> ChatCodec:
        """The codec of a ready binding."""
        assert self.codec is not None, "only a ready binding is asked for its codec"
        return self.codec

    def announce(self) -> None:
        """Wake everybody who waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()
        self.call_next()

    def call_next(self) -> None:
        """Let the first in the line look whether there is room now."""
        if self.line:
            self.line[0].set()


class GatewayBindingRegistry:
    """Bindings of the models the run's config names."""

    def __init__(
        self,
        model_ids: Iterable[str],
        *,
        store: Store,
        lease_s: float,
        http: aiohttp.ClientSession,
        max_concurrent: Mapping[str, int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = max_concurrent or {}
        self._bindings = {m: ModelBinding(m, max_concurrent=limits.get(m)) for m in model_ids}
        self._store = store
        self._lease_s = lease_s
        self._http = http
        self._clock = clock
        self._codecs: dict[str, ChatCodec] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._lost: set[str] = set()

    def __iter__(self) -> Iterator[ModelBinding]:
        return iter(self._bindings.values())

    def get(self, model_id: str) -> ModelBinding:
        """Raises UnknownModelError."""
        try:
            return self._bindings[model_id]
        except KeyError:
            known = sorted(self._bindings)
            raise UnknownModelError(f"no model {model_id!r} in this run; models are {known}") from None

    # -------------------------------------------------------------- renewals and leases

    def renew(self, renewal: ModelRenewal) -> bool:
        """Take a renewal in. False: a newer one was seen before, and its sender must stop."""
        binding = self.get(renewal.model_id)
        previous = binding.renewal
        if previous is not None and _order(renewal) < _order(previous):
            # A late packet of the same life is only late; an earlier life has no business here any more.
            return _order(renewal)[:2] == _order(previous)[:2]
        binding.renewal = renewal
        binding.renewed_at = self._clock()
        self._lost.discard(renewal.model_id)
        self._replace_replicas(binding, renewal.replicas)
        self._want_codec(binding, renewal.tokenizer_uri)
        binding.announce()
        return True

    def age_s(self, model_id: str) -> float | None:
        """Seconds since the last renewal."""
        binding = self.get(model_id)
        return None if binding.renewal is None else self._clock() - binding.renewed_at

    def newly_lost(self) -> list[str]:
        """Models whose lease ran out since the last call."""
        expired = {b.model_id for b in self if b.renewal is not None and not self._has_lease(b)}
        lost = sorted(expired - self._lost)
        self._lost |= expired
        return lost

    def why_not_ready(self, binding: ModelBinding) -> str | None:
        """None when the model can be asked."""
        renewal = binding.renewal
        if renewal is None:
            return "its runtime has not registered yet"
        if not self._has_lease(binding):
            return f"its runtime was last heard of {self._clock() - binding.renewed_at:.1f} s ago"
        if renewal.status not in ("ready", "syncing"):
            return f"its runtime is {renewal.status}" + (f": {renewal.reason}" if renewal.reason else "")
        if renewal.published_version is None:
            return "it has no published version yet"
        if not binding.replicas:
            return "none of its rollout servers is ready"
        if binding.codec is None:
            return binding.codec_error or "its tokenizer is being loaded"
        return None

    def is_ready(self, model_id: str) -> bool:
        return self.why_not_ready(self.get(model_id)) is None

    async def wait_until_ready(self, model_id: str, deadline: float) -> ModelBinding:
        """The binding, as soon as it is ready. `deadline` is in the clock's seconds.

        Raises UnknownModelError at once, ModelNotReadyError at the deadline."""
        binding = self.get(model_id)
        if self.why_not_ready(binding) is None:
            return binding
        binding.waiting += 1
        began = self._clock()
        try:
            await self._until_ready(binding, deadline)
            return binding
        finally:
            binding.waiting -= 1
            binding.waited_s += self._clock() - began

    # -------------------------------------------------------------- placement

    async def wait_for_room(self, model_id: str, deadline: float, *, ahead: bool = False) -> ModelBinding:
        """The binding, as soon as it is ready and one of its replicas takes one more generation; first come,
        first served, but `ahead` of the others who had a place before. `place` it before anything else is
        awaited.

        Raises as `wait_until_ready`."""
        binding = await self.wait_until_ready(model_id, deadline)
        if binding.max_concurrent is None or ((ahead or not binding.line) and self._has_room(binding)):
            return binding
        turn, began = asyncio.Event(), self._clock()
        binding.line.appendleft(turn) if ahead else binding.line.append(turn)
        binding.waiting += 1
        try:
            while not (binding.line[0] is turn and self._has_room(binding)):
                remaining = deadline - self._clock()
                if remaining <= 0:
                    raise ModelNotReadyError(
                        f"model {model_id!r} has no room: each of its rollout servers has "
                        f"{binding.max_concurrent} generations under way (rollout.max_concurrent_requests)"
                    )
                turn.clear()
                await _wait_at_most(turn, remaining)
                await self._until_ready(binding, deadline)
            return binding
        finally:
            binding.line.remove(turn)
            binding.waiting -= 1
            binding.waited_s += self._clock() - began
            binding.call_next()

    @contextmanager
    def place(
        self, binding: ModelBinding, affinity: Affinity, *, held: int | None = None
    ) -> Iterator[Placement]:
        """A replica for one generation, counted for as long as it runs. `held`: a version that is kept in
        service for it, in place of the published one; training does not wait for what it samples."""
        version = binding.published_version if held is None else held
        if version is None or not binding.replicas:
            raise ModelNotReadyError(
                f"model {binding.model_id!r} is not ready: {self.why_not_ready(binding)}"
            )
        handle = self._choose(binding, affinity.get(binding.model_id))
        affinity[binding.model_id] = handle.replica_id
        handle.inflight += 1
        if held is None:
            binding.inflight_versions[version] += 1
        else:
            binding.num_pinned += 1
        try:
            yield Placement(handle.client, handle.replica_id, version, len(binding.replicas) > 1)
        finally:
            handle.inflight -= 1
            if held is None:
                binding.inflight_versions[version] -= 1
                if not binding.inflight_versions[version]:
                    del binding.inflight_versions[version]
            else:
                binding.num_pinned -= 1
            binding.call_next()

    async def newer_version(self, binding: ModelBinding, version: int) -> None:
        """Returns once new requests are answered with another version than this one."""
        while binding.published_version == version or self.why_not_ready(binding) is not None:
            await binding.changed.wait()

    def note_failure(self, binding: ModelBinding, replica_id: str) -> None:
        """A replica broke off or answered 5xx: others are preferred for a moment. What else fails while it
        rests is the same failure."""
        handle, now = binding.replicas.get(replica_id), self._clock()
        if handle is not None and now >= handle.rests_until:
            cooldown_s = min(FAILURE_COOLDOWN_S * 2**handle.num_failures, MAX_COOLDOWN_S)
            handle.num_failures = min(handle.num_failures + 1, 10)
            handle.rests_until = now + cooldown_s

    def note_answer(self, binding: ModelBinding, replica_id: str) -> None:
        """A replica answered: it is well again."""
        handle = binding.replicas.get(replica_id)
        if handle is not None:
            handle.num_failures = 0

    async def close(self) -> None:
        """Stop what is being loaded, and keep no connection."""
        for binding in self:
            self._replace_replicas(binding, ())
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    # -------------------------------------------------------------- inside

    async def _until_ready(self, binding: ModelBinding, deadline: float) -> None:
        """For who is counted as waiting already. Raises ModelNotReadyError at the deadline."""
        while (reason := self.why_not_ready(binding)) is not None:
            remaining = deadline - self._clock()
            if remaining <= 0:
                raise ModelNotReadyError(f"model {binding.model_id!r} is not ready: {reason}")
            await _wait_at_most(binding.changed, remaining)

    def _has_lease(self, binding: ModelBinding) -> bool:
        return self._clock() - binding.renewed_at <= self._lease_s

    def _candidates(self, binding: ModelBinding) -> list[ReplicaHandle]:
        """The replicas that a generation may go to: those that did not just fail, while there are any."""
        now = self._clock()
        healthy = [h for h in binding.replicas.values() if now >= h.rests_until]
        return healthy or list(binding.replicas.values())

    def _has_room(self, binding: ModelBinding) -> bool:
        limit = binding.max_concurrent
        return limit is None or any(h.inflight < limit for h in self._candidates(binding))

    def _choose(self, binding: ModelBinding, preferred: str | None) -> ReplicaHandle:
        candidates, limit = self._candidates(binding), binding.max_concurrent
        if limit is not None:
            candidates = [h for h in candidates if h.inflight < limit] or candidates
        for handle in candidates:
            if handle.replica_id == preferred:
                return handle
        return min(candidates, key=lambda handle: handle.inflight)

    def _replace_replicas(self, binding: ModelBinding, replicas: Iterable[Replica]) -> None:
        kept: dict[str, ReplicaHandle] = {}
        for replica in replicas:
            handle = binding.replicas.get(replica.replica_id)
            if handle is None or handle.replica != replica:
                client = LLMServerClient(replica.url, replica.api_key.get_secret_value(), http=self._http)
                handle = ReplicaHandle(replica, client)
            kept[replica.replica_id] = handle
        for handle in binding.replicas.values():
            if handle is not kept.get(handle.replica_id):
                handle.client.retire()
        binding.replicas = kept

    def _want_codec(self, binding: ModelBinding, uri: str | None) -> None:
        if uri is None or uri == binding.codec_uri:
            return
        if uri in self._codecs:
            binding.codec, binding.codec_uri = self._codecs[uri], uri
        elif uri not in self._loading:
            task = asyncio.create_task(self._load_codec(uri), name=f"load {uri}")
            self._loading[uri] = task
            task.add_done_callback(lambda _: self._loading.pop(uri, None))

    async def _load_codec(self, uri: str) -> None:
        """A failure is kept as the reason the model isn't ready; the next renewal tries again."""
        try:
            codec = await asyncio.to_thread(_read_codec, self._store, uri)
        except RepertoryError as error:
            logger.error("the tokenizer %s can't be loaded: %s", uri, error)
            self._give_codec(uri, None, f"its tokenizer can't be loaded: {error}")
            return
        if codec.splice_problem:
            logger.warning(
                "chat template of %s: %s; such a turn starts a new chain", uri, codec.splice_problem
            )
        self._codecs[uri] = codec
        self._give_codec(uri, codec, "")

    def _give_codec(self, uri: str, codec: ChatCodec | None, error: str) -> None:
        for binding in self:
            if binding.renewal is not None and binding.renewal.tokenizer_uri == uri:
                binding.codec_error = error
                if codec is not None:
                    binding.codec, binding.codec_uri = codec, uri
                binding.announce()


def _read_codec(store: Store, uri: str) -> ChatCodec:
    return ChatCodec(TokenizerDocument.parse(store.get(uri), source=uri), source=uri)


def _order(renewal: ModelRenewal) -> tuple[int, int, int]:
    return renewal.epoch, renewal.incarnation, renewal.seq


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    # A lease that runs out wakes nobody, so look again now and then.
    try:
        async with asyncio.timeout(min(seconds, 1.0)):
            await event.wait()
    except TimeoutError:
        return
