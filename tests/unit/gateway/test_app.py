"""The HTTP surface: official SDKs, error shapes, the control API, and the process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.app import Gateway
from gateway.calls import CallIdentity
from model_runtime.documents import DesiredDocument, EpochClaim
from model_runtime.errors import ConflictError, StoreUnavailableError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV, GatewayStatus, SessionRequest
from model_runtime.store import Store
from tests.gateway_harness import ADMIN_KEY, RUN_ID, GatewayHarness, live_gateway, make_config

HELLO: Any = [{"role": "user", "content": "hello"}]


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return answer.status_code, error["code"], error["param"]


@pytest.fixture
def own_harness(local_store: Store) -> Iterator[GatewayHarness]:
    """For tests that leave the gateway in a state of their own."""
    with live_gateway(local_store) as harness:
        harness.start_afresh()
        yield harness


# ------------------------------------------------------------------ OpenAI's SDK, unchanged


def test_the_sync_openai_client_works_unchanged(harness: GatewayHarness) -> None:
    session = harness.open_session()
    with openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key) as client:
        first = client.chat.completions.create(model="anything", messages=HELLO, logprobs=True)
        assert first.choices[0].message.content == "hello"
        assert first.choices[0].finish_reason == "stop"
        assert first.usage is not None
        assert first.usage.completion_tokens == 2
        assert first.choices[0].logprobs is not None
        assert [t.logprob for t in first.choices[0].logprobs.content or []] == [-0.125, -0.25]
        extra = first.model_extra or {}
        assert {k: extra[k] for k in ("agent_id", "model_id", "policy_version", "workflow_id")} == {
            "agent_id": "planner",
            "model_id": "plan",
            "policy_version": 0,
            "workflow_id": session.workflow_id,
        }
        # The SDK's own message object, echoed back, continues the chain.
        echoed = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        client.chat.completions.create(model="anything", messages=echoed)
        assert [m.id for m in client.models.list()] == ["planner", "searcher", "answerer"]
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}


async def test_the_async_openai_client_names_the_agent_three_ways(harness: GatewayHarness) -> None:
    session = harness.open_session()
    async with openai.AsyncOpenAI(base_url=f"{session.base_url}/v1", api_key=session.api_key) as client:
        create = client.chat.completions.create
        by_model, by_header, by_metadata = await asyncio.gather(
            create(model="searcher", messages=HELLO),
            create(model="gpt-4o", messages=HELLO, extra_headers={"X-Agent-ID": "answerer"}),
            create(model="gpt-4o", messages=HELLO, metadata={"agent_id": "planner"}),
        )
        agents = [(a.model_extra or {})["agent_id"] for a in (by_model, by_header, by_metadata)]
        assert agents == ["searcher", "answerer", "planner"]
        with pytest.raises(openai.NotFoundError, match="gpt-4o"):
            await create(model="gpt-4o", messages=HELLO)


def test_two_equal_calls_of_the_sdk_are_two_samples(harness: GatewayHarness) -> None:
    session = harness.open_session()
    with openai.OpenAI(base_url=f"{session.base_url}/agents/planner/v1", api_key=session.api_key) as client:
        ids = {client.chat.completions.create(model="m", messages=HELLO).id for _ in range(2)}
    assert len(ids) == 2
    assert session.finalize()["num_rows"] == {"plan": 2}


# ------------------------------------------------------------------ what can't be honoured


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"made_up": True}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"verbosity": "low"}, "verbosity"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 10}, "top_k"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"made_up": 1}, "made_up"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(
    harness: GatewayHarness, fields: dict[str, Any], param: str
) -> None:
    session = harness.open_session()
    asked = len(harness.server.requests)
    answer = session.post("agents/planner/v1/chat/completions", {"messages": HELLO} | fields)
    assert refusal(answer) == (400, "invalid_request", param)
    assert len(harness.server.requests) == asked


def test_settings_that_ask_for_nothing_are_fine(harness: GatewayHarness) -> None:
    neutral = {
        "n": 1,
        "stream": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "verbosity": "medium",
        "top_p": 1.0,
        "top_k": -1,
        "presence_penalty": 0,
        "stop": None,
        "user": "someone",
        "top_logprobs": 0,
    }
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert harness.open_session().chat(parts, **neutral).status_code == 200
    assert "a\nb" in harness.server.tokenizer.decode(harness.server.requests[0]["token_ids"])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b"\xff"])
def test_malformed_bodies_are_400_in_the_error_shape(harness: GatewayHarness, body: bytes) -> None:
    session = harness.open_session()
    path = f"/sessions/{session.session_id}/agents/planner/v1/chat/completions"
    assert refusal(harness.http.post(path, content=body, headers=session.headers))[0] == 400


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": ' + DEEP + b"}]}",
        b'{"input": ' + DEEP + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": ["x"], "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [[]], "input": "x"}',
    ],
)
def test_hostile_bodies_are_the_callers_fault(harness: GatewayHarness, path: str, body: bytes) -> None:
    session = harness.open_session()
    url = f"/sessions/{session.session_id}/agents/planner/v1/{path}"
    assert harness.http.post(url, content=body, headers=session.headers).status_code == 400


def test_errors_of_every_route_have_one_shape(harness: GatewayHarness) -> None:
    assert refusal(harness.http.get("/nowhere")) == (404, "http_error", None)
    assert refusal(harness.http.get("/groups")) == (405, "http_error", None)
    missing = harness.http.post("/groups", json={}, headers=harness.admin)
    assert refusal(missing) == (422, "invalid_request", "group_id")


def test_an_unexpected_failure_is_a_500_without_details_logged_once(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret detail")

    session = harness.open_session()
    monkeypatch.setattr(harness.gateway.router, "chat_completion", broken)
    answer = session.chat("x")
    assert refusal(answer) == (500, "internal_error", None)
    assert "secret" not in answer.text
    assert len([r for r in caplog.records if r.exc_info and "secret detail" in str(r.exc_info[1])]) == 1
    assert session.finalize(1.0)["status"] == "infra"


# ------------------------------------------------------------------ the control API


def test_status_shows_every_model_and_no_key(local_store: Store) -> None:
    with live_gateway(local_store) as harness:
        harness.start_afresh()
        session = harness.open_session()
        session.chat("x")
        session.finalize(0.5)
        raw = harness.http.get("/admin/status", headers=harness.admin)
        evaluation = harness.open_session(mode="eval", group_id="e")
        evaluation.chat("x")
        evaluation.finalize(0.0)
    status = GatewayStatus.model_validate(raw.json())
    assert harness.server.api_key not in raw.text
    assert (status.run_id, status.epoch, status.desired) == (RUN_ID, 1, "run")
    assert (status.open_groups, status.open_sessions, status.settlements) == (1, 0, {"finalized": 1})
    assert status.agent_rewards == {"planner": {"count": 1.0, "mean": 0.5, "recent_mean": 0.5}}
    plan = status.models["plan"]
    assert (plan.ready, plan.finalized_rows, plan.sampled_tokens) == (True, 1, 2)
    assert plan.tokens_per_s > 0
    assert plan.renewal is not None
    assert plan.renewal.published_version == 0


def test_metrics_are_labelled_by_model(harness: GatewayHarness) -> None:
    harness.open_session().chat("x", agent="searcher")
    text = harness.http.get("/metrics").text
    assert 'repertory_gateway_turns_total{agent="searcher",model="solve"}' in text
    assert 'repertory_gateway_model_ready{model="plan"} 1.0' in text
    assert harness.http.get("/health").json() == {"status": "ok", "run_id": RUN_ID}


def test_a_superseded_runtime_is_told_to_stop(own_harness: GatewayHarness) -> None:
    harness = own_harness
    harness.renew("plan", incarnation=2)
    answer = harness.renew("plan", incarnation=1)
    assert (answer["superseded"], answer["desired"]) == (True, "stop")
    assert harness.renew("plan", epoch=0)["superseded"]
    assert not harness.renew("plan", incarnation=2)["superseded"]
    misplaced = harness.http.put("/admin/models/solve", json=harness.renewal("plan"), headers=harness.admin)
    assert refusal(misplaced) == (400, "invalid_request", "model_id")
    unknown = harness.http.put("/admin/models/x", json=harness.renewal("x"), headers=harness.admin)
    assert refusal(unknown) == (404, "unknown_model", None)


def test_a_drain_ends_the_supply_of_groups_and_stop_is_sticky(own_harness: GatewayHarness) -> None:
    harness = own_harness

    def desire(state: str) -> str:
        return harness.http.put("/admin/desired", json={"state": state}, headers=harness.admin).json()[
            "state"
        ]

    session = harness.open_session()
    assert desire("drain") == "drain"
    assert harness.open_group("late")["status"] == "ended"
    # The session's group is open: to a trainer that drains, its log would seem complete.
    assert harness.renew("plan")["desired"] == "run"
    assert session.chat("x").status_code == 200
    assert harness.open_session(1).finalize()["status"] == "finalized"
    assert desire("run") == "drain"
    assert desire("stop") == "stop"
    assert desire("drain") == "stop"


def test_the_gateway_says_how_long_ago_the_parent_and_the_driver_gave_a_sign_of_life(
    own_harness: GatewayHarness,
) -> None:
    def heard() -> dict[str, float]:
        return own_harness.http.get("/admin/status", headers=own_harness.admin).json()["heard_s"]

    def tell(role: str) -> int:
        return own_harness.http.post(
            "/admin/alive", json={"role": role}, headers=own_harness.admin
        ).status_code

    assert heard() == {}
    assert tell("rollout") == 200
    first = heard()["rollout"]
    assert heard()["rollout"] > first >= 0
    assert (tell("parent"), tell("somebody else")) == (200, 422)
    assert set(heard()) == {"rollout", "parent"}


def test_runtimes_hear_of_a_drain_once_no_group_is_open(
    own_harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_harness.http.put("/admin/desired", json={"state": "drain"}, headers=own_harness.admin)
    assert own_harness.renew("plan")["desired"] == "run"
    monkeypatch.setattr(type(own_harness.gateway.admission), "num_open", 0)
    assert own_harness.renew("plan")["desired"] == "drain"


def test_the_openapi_document_names_every_route(harness: GatewayHarness) -> None:
    document = harness.http.get("/openapi.json").json()
    assert {
        "/groups",
        "/sessions",
        "/sessions/{session_id}/reward",
        "/sessions/{session_id}/finalize",
        "/sessions/{session_id}/abort",
        "/sessions/{session_id}/v1/chat/completions",
        "/sessions/{session_id}/agents/{agent_id}/v1/chat/completions",
        "/sessions/{session_id}/agents/{agent_id}/v1/models",
        "/sessions/{session_id}/agents/{agent_id}/v1/responses",
        "/sessions/{session_id}/agents/{agent_id}/v1/messages",
        "/sessions/{session_id}/v1/messages/count_tokens",
        "/admin/models/{model_id}",
        "/admin/desired",
        "/admin/alive",
        "/admin/status",
        "/health",
        "/metrics",
    } <= set(document["paths"])
    body = document["paths"]["/sessions/{session_id}/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["required"] == ["messages"]


# ------------------------------------------------------------------ lives of the gateway


def make_gateway(store: Store, *, epoch: int = 1, journal: Path | None = None) -> Gateway:
    return Gateway(
        make_config(),
        run_id=RUN_ID,
        store=store,
        epoch=epoch,
        incarnation=2,
        admin_key=ADMIN_KEY,
        journal=journal,
    )


def claim(store: Store, epoch: int) -> None:
    store.put(RunLayout(RUN_ID).epoch(epoch), EpochClaim(epoch=epoch, claimed_at=0.0).to_bytes())


async def test_a_gateway_of_an_earlier_epoch_does_not_start(local_store: Store) -> None:
    claim(local_store, 1)
    await make_gateway(local_store).check_epoch()
    claim(local_store, 2)
    with pytest.raises(SupersededError, match=r"epoch 2.*is of 1"):
        await make_gateway(local_store).start()


async def test_a_restarted_gateway_remembers_what_the_run_is_to_do(local_store: Store) -> None:
    def desire(seq: int, epoch: int, state: Any) -> None:
        document = DesiredDocument(seq=seq, epoch=epoch, state=state, written_at=0.0)
        local_store.put(RunLayout(RUN_ID).desired(seq), document.to_bytes())

    desire(1, 1, "stop")  # an earlier epoch's wish is not this one's
    desire(2, 2, "drain")
    gateway = make_gateway(local_store, epoch=2)
    await gateway.start()
    try:
        assert gateway.desired == "drain"
    finally:
        await gateway.close()


async def test_a_gateway_closes_whole_though_a_session_ends_while_calls_are_stopped(
    local_store: Store, tmp_path: Path
) -> None:
    gateway = make_gateway(local_store, journal=tmp_path / "1.journal")
    await gateway.start()
    calling, ending = (
        gateway.sessions.open(SessionRequest(mode="eval", group_id="e", group_size=2, member_index=index))
        for index in range(2)
    )

    async def call(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await gateway.sessions.settle(ending, "aborted")

    running = asyncio.create_task(calling.calls.run(CallIdentity("a call", b""), call))
    await asyncio.sleep(0.01)
    await gateway.close()
    with pytest.raises(ConflictError):
        await running
    with pytest.raises(StoreUnavailableError, match="not running"):
        await gateway.sessions.settle(calling, "aborted")
    next_one = make_gateway(local_store, journal=tmp_path / "1.journal")
    await next_one.start()  # would be refused a journal that is still open
    try:
        assert [session.session_id for session in next_one.sessions] == [calling.session_id]
    finally:
        await next_one.close()


HALF_A_PAIR = b'"\\ud800"'


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("agents/planner/v1/chat/completions", 400, b'{"messages": [{"role": "user", "content": %s}]}'),
        ("agents/planner/v1/messages", 400, b'{"messages": [{"role": "user", "content": %s}]}'),
        ("agents/planner/v1/responses", 400, b'{"input": %s}'),
        ("reward", 422, b'{"reward": 1.0, "component": %s}'),
    ],
)
def test_half_a_surrogate_pair_is_refused_as_what_it_is(
    harness: GatewayHarness, path: str, status: int, body: bytes
) -> None:
    session = harness.open_session()
    answer = harness.http.post(
        f"/sessions/{session.session_id}/{path}",
        content=body % HALF_A_PAIR,
        headers=session.headers | {"Content-Type": "application/json"},
    )
    assert answer.status_code == status
    assert "surrogate" in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_names_no_field(harness: GatewayHarness) -> None:
    headers = harness.admin | {"Content-Type": "application/json"}
    answer = harness.http.post("/groups", content=b'{"group_id": }', headers=headers)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["message"].startswith("the body is not valid JSON: ")
    assert error["param"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", -1),
        ("seq", -1),
        ("published_version", -1),
        ("tokenizer_uri", "../../etc/passwd"),
        ("tokenizer_uri", "/etc/passwd"),
        ("replicas", [{"replica_id": "r", "url": "file:///etc/passwd", "api_key": "k"}]),
    ],
)
def test_a_renewal_that_no_runtime_would_send_is_refused(
    harness: GatewayHarness, field: str, value: object
) -> None:
    body = harness.renewal("plan", **{field: value})
    answer = harness.http.put("/admin/models/plan", json=body, headers=harness.admin)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith(field)


@pytest.fixture
def process(tmp_path: Path, local_store: Store) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    config = tmp_path / "config.json"
    raw = make_config().model_dump(mode="json")
    config.write_text(json.dumps(raw))
    port = free_port()
    arguments = ["--run-id", RUN_ID, "--config", str(config), "--store-url", local_store.url]
    arguments += ["--epoch", "1", "--incarnation", "1", "--port", str(port)]
    environment = os.environ | {ADMIN_KEY_ENV: ADMIN_KEY}
    with subprocess.Popen([sys.executable, "-m", "gateway", *arguments], env=environment) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, "the gateway exited"
        try:
            httpx.get(f"{url}/health", timeout=1)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the gateway did not start")


def test_sigterm_ends_the_process_cleanly_while_a_driver_waits_for_a_group(
    process: tuple[subprocess.Popen[bytes], str],
) -> None:
    server, url = process
    wait_until_up(url, server)
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as client:
        assert client.get("/admin/status").json()["models"]["plan"]["ready"] is False
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            body = {"group_id": "g", "group_size": 2, "wait_s": 50}
            waiting = pool.submit(lambda: client.post("/groups", json=body, timeout=60))
            time.sleep(0.5)
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert waiting.result(10).status_code == 503
        assert server.wait(10) == 0
        assert time.monotonic() - began < 10


def test_the_process_exits_when_a_newer_epoch_leads_the_run(
    process: tuple[subprocess.Popen[bytes], str], local_store: Store
) -> None:
    server, url = process
    wait_until_up(url, server)
    claim(local_store, 2)
    assert server.wait(15) == 4
