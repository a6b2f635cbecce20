"""Replicas that hang or go, and models that do: over HTTP, before fake rollout servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import pytest

from model_runtime.store import Store
from tests.fakes import FakeRolloutServer
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.waiting import until

HELLO = [{"role": "user", "content": "hello"}]


@contextmanager
def two_replicas(store: Store, **settings: Any) -> Iterator[tuple[GatewayHarness, FakeRolloutServer]]:
    """Model `plan` on two servers: the harness's own, r0, and the one given back, r1."""
    with (
        live_gateway(store, config=make_config(**settings)) as harness,
        FakeRolloutServer().running() as other,
    ):
        servers = {"r0": harness.server, "r1": other}
        replicas = [{"replica_id": n, "url": s.url, "api_key": s.api_key} for n, s in servers.items()]
        harness.make_ready()
        harness.defaults["plan"] = {"replicas": replicas}
        harness.renew("plan")
        harness.open_group()
        yield harness, other


@pytest.mark.parametrize("streamed", [False, True])
def test_a_replica_that_hangs_is_left_for_another_within_the_call(local_store: Store, streamed: bool) -> None:
    with two_replicas(local_store, attempt_timeout_s=0.3, request_timeout_s=8.0) as (harness, other):
        session = harness.open_session()
        session.chat("first")
        hung, well = (harness.server, other) if harness.server.requests else (other, harness.server)
        hung.delay_s = 30.0
        answer = session.chat("second", stream=streamed)
        assert answer.status_code == 200
        assert "hello" in answer.text
        assert len(well.requests) == 1
        # The session stays where it was answered, and nobody tries the hung one for now.
        num_asked = len(hung.requests)
        for number in range(3):
            assert session.chat(f"third {number}").status_code == 200
            assert harness.open_session(1 - number % 2, mode="eval").chat("x").status_code == 200
        assert len(hung.requests) == num_asked
        assert session.finalize(1.0)["status"] == "finalized"


def test_half_the_time_is_kept_for_another_replica_without_a_limit_set(local_store: Store) -> None:
    with two_replicas(local_store, request_timeout_s=2.0) as (harness, other):
        harness.server.delay_s = other.delay_s = 0.0
        session = harness.open_session()
        session.chat("first")
        hung = harness.server if harness.server.requests else other
        hung.delay_s = 30.0
        assert session.chat("second").status_code == 200


def test_a_stream_that_stalls_after_its_first_tokens_goes_on_elsewhere(local_store: Store) -> None:
    with two_replicas(local_store, attempt_timeout_s=0.3) as (harness, other):
        session = harness.open_session()
        session.chat("first")
        stalled, well = (harness.server, other) if harness.server.requests else (other, harness.server)
        whole = well.answer_ids("one two three")
        stalled.answers, stalled.break_after, stalled.break_by = ["one two three"], 2, "stall"
        well.answer_of = lambda body: whole[len(body["token_ids"]) - len(stalled.requests[1]["token_ids"]) :]
        answer = session.chat("second", stream=True)
        assert "error" not in answer.text
        assert well.requests[0]["token_ids"] == [*stalled.requests[1]["token_ids"], *whole[:2]]
        assert session.finalize(1.0)["status"] == "finalized"
        row = harness.rows("plan")[1]
        assert row.response_ids.tolist() == whole


def test_a_stream_that_stalls_wherever_it_goes_on_fails_whole(local_store: Store) -> None:
    with two_replicas(local_store, attempt_timeout_s=0.3, request_timeout_s=1.5) as (harness, other):
        for server in (harness.server, other):
            server.token_delay_s = 20.0
        answer = harness.open_session().chat("x", stream=True)
        assert "error" in answer.text


def test_a_slow_stream_is_no_stalled_one(local_store: Store) -> None:
    with two_replicas(local_store, attempt_timeout_s=0.4) as (harness, other):
        for server in (harness.server, other):
            server.answers = ["one two three four five six seven eight nine ten"]
            server.token_delay_s = 0.05  # some forty tokens: longer than the limit as a whole
        answer = harness.open_session().chat("x", stream=True)
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert "error" not in answer.text


def test_a_session_stays_with_its_replica_until_that_is_gone(local_store: Store) -> None:
    with two_replicas(local_store) as (harness, other):
        servers = {"r0": harness.server, "r1": other}
        session = harness.open_session()
        messages: list[dict[str, str]] = list(HELLO)
        for _ in range(3):
            answer = session.chat(messages).json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]
        [home] = [name for name, server in servers.items() if server.requests]
        assert len(servers[home].requests) == 3
        harness.defaults["plan"]["replicas"] = [
            r for r in harness.defaults["plan"]["replicas"] if r["replica_id"] != home
        ]
        harness.renew("plan")
        assert session.chat(messages).status_code == 200
        assert len(servers[home].requests) == 3
        assert session.finalize(1.0)["num_rows"] == {"plan": 1}
        assert len(harness.rows("plan")[0].turns) == 4


def test_calls_beyond_a_replicas_limit_wait_in_the_gateway(local_store: Store) -> None:
    limited = {"rollout": {"max_concurrent_requests": 2}}
    with live_gateway(local_store, config=make_config(of_each_model=limited)) as harness:
        harness.start_afresh()
        harness.server.delay_s = 0.3
        session = harness.open_session()
        with ThreadPoolExecutor(5) as pool:
            answers = [pool.submit(session.chat, f"question {i}") for i in range(5)]
            time.sleep(0.2)
            assert len(harness.server.requests) == 2
            status = harness.http.get("/admin/status", headers=harness.admin).json()["models"]["plan"]
            assert (status["running_requests"], status["waiting_requests"]) == (2, 3)
            assert session.chat("x", agent="searcher").status_code == 200  # of another model
            assert [a.result(10).status_code for a in answers] == [200] * 5


def test_a_hanging_model_delays_neither_another_nor_a_control_call(local_store: Store) -> None:
    """A hundred calls with long prompts hang in one model's server all the while."""
    config = make_config(request_timeout_s=60.0)
    with live_gateway(local_store, config=config) as harness, FakeRolloutServer().running() as hanging:
        harness.make_ready()
        hanging.delay_s = 60.0
        replica = {"replica_id": "h", "url": hanging.url, "api_key": hanging.api_key}
        harness.defaults["solve"] = {"replicas": [replica]}
        harness.renew("solve")
        harness.open_group()
        session = harness.open_session()
        with hanging_calls(session, 100):
            until(lambda: len(hanging.requests) == 100, "the calls did not reach the server")
            for number in range(5):
                assert session.chat(f"quick {number}").status_code == 200
                harness.renew("plan")
                status = harness.http.get("/admin/status", headers=harness.admin).json()["models"]
                assert status["solve"]["running_requests"] == 100
                other = harness.open_session(1, mode="eval", group_id=f"e{number}", group_size=2)
                assert other.finalize()["status"] == "finalized"
        until(lambda: len(hanging.aborted) == 100, "calls nobody waits for were not ended")
        assert session.finalize(1.0)["num_rows"] == {"plan": 5}


# ------------------------------------------------------------------ callers that don't want to wait


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_prefers_not_to_wait_is_told_to_ask_again(local_store: Store, stream: bool) -> None:
    limited = {"rollout": {"max_concurrent_requests": 1}}
    with live_gateway(local_store, config=make_config(of_each_model=limited)) as harness:
        harness.start_afresh()
        session = harness.open_session()
        harness.server.delay_s = 1.0
        impatient = {"Prefer": "respond-async, wait=0"}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(session.chat, "x")
            until(lambda: harness.server.requests, "the first call did not begin")
            refused = session.chat("y", headers=impatient, stream=stream)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "x-should-retry" not in refused.headers  # the SDKs may ask again by themselves
            assert "max_concurrent_requests" in refused.json()["error"]["message"]
            assert running.result(10).status_code == 200
        harness.server.delay_s = 0.0
        assert session.chat("y", headers=impatient).status_code == 200
        harness.renew("plan", status="starting")
        refused = session.chat("z", headers={"Prefer": "wait=1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert "is starting" in refused.json()["error"]["message"]
        # It was the caller's own wish: nothing is held against the execution.
        assert session.finalize(1.0)["status"] == "finalized"


def test_a_driver_that_does_not_wait_gets_a_429_and_keeps_its_place(own_harness: GatewayHarness) -> None:
    harness = own_harness
    for model_id in ("plan", "solve"):
        harness.renew(model_id, limit=1)
    harness.open_group("first")

    def ask(name: str) -> httpx.Response:
        body = {"group_id": name, "group_size": 2, "wait_s": 0}
        return harness.http.post("/groups", json=body, headers=harness.admin)

    refused = ask("second")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert ask("third").status_code == 429
    for member in range(2):
        harness.open_session(member, "first").finalize(1.0)
    for model_id in ("plan", "solve"):
        harness.renew(model_id, limit=1, queue={"read_positions": {harness.gateway._writer: 99}})
    assert ask("second").json()["status"] == "open"
    assert ask("third").status_code == 429


def test_a_driver_that_hangs_up_is_not_given_a_group(own_harness: GatewayHarness) -> None:
    harness = own_harness
    for model_id in ("plan", "solve"):
        harness.renew(model_id, limit=1)
    harness.open_group("first")
    body = {"group_id": "left", "group_size": 2, "wait_s": 30}
    with pytest.raises(httpx.ReadTimeout):
        harness.http.post("/groups", json=body, headers=harness.admin, timeout=0.3)
    admission = harness.gateway.admission
    until(lambda: not admission._waiters, "the gateway still waits for a driver that is gone")
    for model_id in ("plan", "solve"):
        harness.renew(model_id, limit=8)
    assert harness.open_group("next")["status"] == "open"
    assert "left" not in admission._state.open_groups
    assert harness.open_group("left")["status"] == "open"  # when it comes back


@pytest.fixture
def own_harness(local_store: Store) -> Iterator[GatewayHarness]:
    with live_gateway(local_store, config=make_config(max_surplus_ratio=0.0)) as harness:
        harness.make_ready()
        yield harness


@contextmanager
def hanging_calls(session: LiveSession, count: int) -> Iterator[None]:
    """So many model calls under way; hung up at the end."""
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def hang() -> None:
        url = f"{session.base_url}/agents/searcher/v1/chat/completions"
        bodies = [{"messages": [{"role": "user", "content": f"{n} " + "word " * 400}]} for n in range(count)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            calls = [asyncio.create_task(ask(http, url, body)) for body in bodies]
            await done.wait()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def ask(http: aiohttp.ClientSession, url: str, body: Any) -> None:
        async with http.post(url, json=body, headers=session.headers) as response:
            await response.read()

    thread = threading.Thread(target=lambda: loop.run_until_complete(hang()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
        loop.close()
