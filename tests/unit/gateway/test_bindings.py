"""Leases, order of renewals, readiness and placement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gateway.bindings import FAILURE_COOLDOWN_S, GatewayBindingRegistry
from gateway.route_table import AgentModelRouteTable
from model_runtime.errors import ModelNotReadyError, UnknownAgentError, UnknownModelError
from model_runtime.protocol import ModelRenewal
from model_runtime.store import Store
from tests.fakes import make_tokenizer_document

TOKENIZER = "run/models/m/tokenizer/t.json"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def registry(local_store: Store, clock: Clock) -> AsyncIterator[GatewayBindingRegistry]:
    local_store.put(TOKENIZER, make_tokenizer_document().to_bytes())
    async with aiohttp.ClientSession() as http:
        registry = GatewayBindingRegistry(
            ["m", "other"], store=local_store, lease_s=10, http=http, clock=clock
        )
        yield registry
        await registry.close()


def renewal(seq: int = 1, *, replicas: tuple[str, ...] = ("r0",), **overrides: Any) -> ModelRenewal:
    fields: dict[str, Any] = {
        "model_id": "m",
        "epoch": 1,
        "incarnation": 1,
        "seq": seq,
        "kind": "trainable",
        "status": "ready",
        "replicas": [{"replica_id": r, "url": f"http://{r}", "api_key": "k"} for r in replicas],
        "published_version": 0,
        "tokenizer_uri": TOKENIZER,
    }
    return ModelRenewal.model_validate(fields | overrides)


async def ready(registry: GatewayBindingRegistry, **overrides: Any) -> None:
    registry.renew(renewal(**overrides))
    await registry.wait_until_ready("m", registry._clock() + 5)


async def test_a_model_is_ready_once_it_has_a_replica_a_version_a_tokenizer_and_a_lease(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    binding = registry.get("m")
    assert "not registered" in (registry.why_not_ready(binding) or "")
    registry.renew(renewal(1, status="starting"))
    assert "is starting" in (registry.why_not_ready(binding) or "")
    registry.renew(renewal(2, published_version=None))
    assert "no published version" in (registry.why_not_ready(binding) or "")
    registry.renew(renewal(3, replicas=()))
    assert "none of its rollout servers" in (registry.why_not_ready(binding) or "")
    await ready(registry, seq=4)
    registry.renew(renewal(5, status="syncing"))
    assert registry.is_ready("m")
    registry.renew(renewal(6, status="failed", reason="out of memory"))
    assert "is failed: out of memory" in (registry.why_not_ready(binding) or "")
    registry.renew(renewal(7))
    clock.now += 10.1
    assert "last heard of 10.1 s ago" in (registry.why_not_ready(binding) or "")


async def test_a_lost_lease_is_reported_once_and_again_after_a_renewal(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    await ready(registry)
    assert registry.newly_lost() == []
    clock.now += 11
    assert registry.newly_lost() == ["m"]
    assert registry.newly_lost() == []
    registry.renew(renewal(2))
    assert registry.is_ready("m")
    clock.now += 11
    assert registry.newly_lost() == ["m"]


async def test_an_earlier_life_is_superseded_and_a_late_packet_changes_nothing(
    registry: GatewayBindingRegistry,
) -> None:
    assert registry.renew(renewal(5, incarnation=2, published_version=3))
    assert not registry.renew(renewal(9, incarnation=1, published_version=1))
    assert not registry.renew(renewal(9, epoch=0, incarnation=7, published_version=1))
    assert registry.renew(renewal(4, incarnation=2, published_version=2))
    assert registry.get("m").published_version == 3
    assert registry.renew(renewal(1, incarnation=3, published_version=4))
    assert registry.get("m").published_version == 4


async def test_waiting_ends_with_readiness_or_names_the_reason_at_the_deadline(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    waiting = asyncio.ensure_future(registry.wait_until_ready("m", clock.now + 5))
    await asyncio.sleep(0)
    assert registry.get("m").waiting == 1
    registry.renew(renewal())
    assert (await asyncio.wait_for(waiting, 5)).published_version == 0
    assert registry.get("m").waiting == 0
    late = asyncio.ensure_future(registry.wait_until_ready("other", clock.now + 0.05))
    await asyncio.sleep(0)
    clock.now += 1
    with pytest.raises(ModelNotReadyError, match=r"'other'.*not registered"):
        await asyncio.wait_for(late, 5)


async def test_a_tokenizer_that_can_not_be_read_is_the_reason_and_is_tried_again(
    registry: GatewayBindingRegistry, local_store: Store
) -> None:
    uri = "run/models/m/tokenizer/missing.json"
    registry.renew(renewal(1, tokenizer_uri=uri))
    binding = registry.get("m")
    await asyncio.wait_for(binding.changed.wait(), 5)
    assert "can't be loaded" in (registry.why_not_ready(binding) or "")
    local_store.put(uri, make_tokenizer_document().to_bytes())
    await ready(registry, seq=2, tokenizer_uri=uri)


async def test_unknown_models_and_agents_are_refused_by_name(registry: GatewayBindingRegistry) -> None:
    with pytest.raises(UnknownModelError, match=r"no model 'x'.*\['m', 'other'\]"):
        registry.get("x")
    with pytest.raises(UnknownAgentError, match=r"no agent 'x'.*\['a', 'b'\]"):
        AgentModelRouteTable({"b": "m", "a": "m"}).model_of("x")


async def test_requests_go_to_the_least_loaded_replica_and_sessions_stay_where_they_were(
    registry: GatewayBindingRegistry,
) -> None:
    await ready(registry, replicas=("r0", "r1"))
    binding = registry.get("m")
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    with registry.place(binding, first) as a, registry.place(binding, second) as b:
        assert {a.replica_id, b.replica_id} == {"r0", "r1"}
        with registry.place(binding, first) as again:
            assert again.replica_id == a.replica_id
    registry.renew(renewal(2, replicas=(b.replica_id,)))
    with registry.place(binding, first) as elsewhere:
        assert elsewhere.replica_id == b.replica_id
    assert binding.running == 0


async def test_a_replica_that_failed_is_passed_over_for_a_moment(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    await ready(registry, replicas=("r0", "r1"))
    binding = registry.get("m")
    session = {"m": "r0"}
    registry.note_failure(binding, "r0")
    with registry.place(binding, session) as place:
        assert place.replica_id == "r1"
    registry.note_failure(binding, "r1")
    with registry.place(binding, {}) as place:  # none is healthy: any is better than none
        assert place.replica_id in ("r0", "r1")
    clock.now += FAILURE_COOLDOWN_S
    with registry.place(binding, {"m": "r0"}) as place:
        assert place.replica_id == "r0"


async def test_requests_in_flight_are_counted_under_the_version_they_began_with(
    registry: GatewayBindingRegistry,
) -> None:
    await ready(registry)
    binding = registry.get("m")
    with registry.place(binding, {}) as old:
        registry.renew(renewal(2, published_version=1))
        with registry.place(binding, {}) as new:
            assert (old.version, new.version) == (0, 1)
            assert dict(binding.inflight_versions) == {0: 1, 1: 1}
    assert dict(binding.inflight_versions) == {}


async def test_a_replica_restarted_under_its_name_gets_a_new_client(registry: GatewayBindingRegistry) -> None:
    await ready(registry)
    handle = registry.get("m").replicas["r0"]
    registry.renew(renewal(2))
    assert registry.get("m").replicas["r0"] is handle
    moved = {"replica_id": "r0", "url": "http://elsewhere", "api_key": "k"}
    registry.renew(ModelRenewal.model_validate(renewal(4).model_dump(mode="json") | {"replicas": [moved]}))
    assert registry.get("m").replicas["r0"].client.url == "http://elsewhere"


async def test_a_replica_that_keeps_failing_rests_longer_until_it_answers(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    await ready(registry, replicas=("r0", "r1"))
    binding = registry.get("m")

    def rest_s() -> float:
        return binding.replicas["r0"].rests_until - clock.now

    rests = []
    for _ in range(8):
        registry.note_failure(binding, "r0")
        rests.append(rest_s())
        clock.now += rest_s()
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60]
    registry.note_answer(binding, "r0")
    registry.note_failure(binding, "r0")
    assert rest_s() == FAILURE_COOLDOWN_S


async def test_calls_that_one_failure_ends_rest_their_replica_once(
    registry: GatewayBindingRegistry, clock: Clock
) -> None:
    await ready(registry, replicas=("r0", "r1"))
    binding = registry.get("m")
    for _ in range(10):
        registry.note_failure(binding, "r0")
        clock.now += 0.125
    clock.now += FAILURE_COOLDOWN_S - 10 * 0.125
    with registry.place(binding, {"m": "r0"}) as place:
        assert place.replica_id == "r0"
    registry.note_failure(binding, "r0")
    assert binding.replicas["r0"].rests_until - clock.now == 2 * FAILURE_COOLDOWN_S


# ------------------------------------------------------------------ room


@pytest.fixture
async def narrow(local_store: Store) -> AsyncIterator[GatewayBindingRegistry]:
    """Model `m` takes one generation a replica, `other` as many as come."""
    local_store.put(TOKENIZER, make_tokenizer_document().to_bytes())
    async with aiohttp.ClientSession() as http:
        registry = GatewayBindingRegistry(
            ["m", "other"], store=local_store, lease_s=100, http=http, max_concurrent={"m": 1}
        )
        yield registry
        await registry.close()


class Caller:
    """Waits for room on `m` and runs until it is told to end."""

    def __init__(self, registry: GatewayBindingRegistry, *, ahead: bool = False, wait_s: float = 5.0) -> None:
        self.replica_id = ""
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._run(registry, ahead, registry._clock() + wait_s))

    async def _run(self, registry: GatewayBindingRegistry, ahead: bool, deadline: float) -> None:
        binding = await registry.wait_for_room("m", deadline, ahead=ahead)
        with registry.place(binding, {}) as place:
            self.replica_id = place.replica_id
            await self.done.wait()

    async def end(self) -> None:
        self.done.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_wait_for_room_in_their_order_and_are_counted(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow, replicas=("r0", "r1"))
    callers = []
    for _ in range(5):
        callers.append(Caller(narrow))
        await settle()
    binding = narrow.get("m")
    assert {c.replica_id for c in callers[:2]} == {"r0", "r1"}
    assert [c.replica_id for c in callers[2:]] == ["", "", ""]
    assert (binding.running, binding.waiting) == (2, 3)
    for index in range(2, 5):
        await callers[index - 2].end()
        await settle()
        assert callers[index].replica_id in ("r0", "r1")
        assert all(c.replica_id == "" for c in callers[index + 1 :])
    for caller in callers[3:]:
        await caller.end()
    assert (binding.running, binding.waiting, len(binding.line)) == (0, 0, 0)
    assert max(h.inflight for h in binding.replicas.values()) == 0
    assert binding.waited_s > 0


async def test_a_replica_that_joins_serves_those_who_wait(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow)
    first, second = Caller(narrow), Caller(narrow)
    await settle()
    assert second.replica_id == ""
    narrow.renew(renewal(2, replicas=("r0", "r1")))
    await settle()
    assert second.replica_id == "r1"
    await first.end()
    await second.end()


async def test_a_call_that_stops_waiting_holds_nobody_up(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow)
    running, impatient, patient = Caller(narrow), Caller(narrow), Caller(narrow)
    await settle()
    impatient.task.cancel()
    await asyncio.gather(impatient.task, return_exceptions=True)
    await running.end()
    await settle()
    assert patient.replica_id == "r0"
    await patient.end()


async def test_a_call_in_line_waits_once_though_its_model_is_not_ready_meanwhile(
    narrow: GatewayBindingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "_clock", clock := Clock())
    await ready(narrow)
    running, waiting = Caller(narrow), Caller(narrow, wait_s=50)
    await settle()
    narrow.renew(renewal(2, status="starting"))
    await settle()
    binding = narrow.get("m")
    assert binding.waiting == 1
    clock.now += 8
    narrow.renew(renewal(3))
    await running.end()
    await settle()
    assert (waiting.replica_id, binding.waiting, binding.waited_s) == ("r0", 0, 8)
    await waiting.end()


async def test_a_generation_that_had_a_place_goes_ahead_of_the_line(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow)
    running, waiting = Caller(narrow), Caller(narrow)
    await settle()
    interrupted = Caller(narrow, ahead=True)
    await settle()
    await running.end()
    await settle()
    assert (interrupted.replica_id, waiting.replica_id) == ("r0", "")
    await interrupted.end()
    await waiting.end()


async def test_no_room_by_the_deadline_names_the_limit(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow)
    running, late = Caller(narrow), Caller(narrow, wait_s=0.05)
    with pytest.raises(ModelNotReadyError, match="max_concurrent_requests"):
        await late.task
    await running.end()


async def test_a_full_model_never_holds_another_up(narrow: GatewayBindingRegistry) -> None:
    await ready(narrow)
    running, waiting = Caller(narrow), Caller(narrow)
    await settle()
    narrow.renew(renewal(model_id="other"))
    await narrow.wait_until_ready("other", narrow._clock() + 5)
    for _ in range(50):
        binding = await narrow.wait_for_room("other", narrow._clock())
        with narrow.place(binding, {}):
            assert binding.running == 1
    await running.end()
    await waiting.end()
