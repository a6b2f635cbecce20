"""A gateway process that is killed amid its sessions: a real process, its real supervisor, SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model_runtime.config import RunConfig, StoreConfig
from model_runtime.gateway_client import GatewayClient, open_http
from model_runtime.layout import RunLayout
from model_runtime.protocol import (
    ADMIN_KEY_ENV,
    FinalizeAnswer,
    FinalizeRequest,
    GroupAnswer,
    GroupRequest,
    RewardRequest,
    SessionAnswer,
    SessionRequest,
)
from model_runtime.store import Store, open_store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Settlement, Trajectory
from model_runtime.workflow import RolloutDriver, WorkflowSession
from model_runtime.workspace import HOME_ENV, Workspace
from tasks.gateway import GatewayProcess
from tests.fake_servers import until
from tests.fakes import FakeRolloutServer, make_tokenizer, make_tokenizer_document
from tests.gateway_harness import ADMIN_KEY, RUN_ID, make_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

MODELS = ("plan", "solve")
PATIENCE_S = 100  # of control calls, which wait for the next process on a busy machine too
NUM_SESSIONS = 100
NUM_TURNS = 4  # of the planner; the answerer speaks once
WORDS = [f"{word} {i}" for i, word in enumerate(["the answer", "hello world", "what", "capital"] * 24)]


@pytest.fixture
def server() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer().running() as server:
        server.answers = WORDS
        server.delay_s = 0.15
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(StoreConfig(url=str(tmp_path / "store")))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv(ADMIN_KEY_ENV, ADMIN_KEY)
    monkeypatch.setenv(HOME_ENV, str(tmp_path / "home"))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(12)))
    config = make_config(request_timeout_s=60.0, execution_timeout_s=150.0, commit_interval_s=0.05)
    workflow = config.workflow.model_copy(update={"tasks": str(tasks)})
    return config.model_copy(update={"store": StoreConfig(url=str(tmp_path / "store")), "workflow": workflow})


@dataclass
class World:
    """A supervised gateway, its models' runtimes, and what clients were told."""

    gateway: GatewayProcess
    server: FakeRolloutServer
    store: Store
    answered: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    calls: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # session/agent → (request, text)

    def note(self, session_id: str, agent_id: str, request_id: str, text: str) -> None:
        self.calls.setdefault(f"{session_id}/{agent_id}", []).append((request_id, text))
        self.count()

    def count(self) -> None:
        self.answered += 1
        self.progress.set()

    async def until(self, answered: int) -> None:
        """Wait until so many calls were answered."""
        while self.answered < answered:
            self.progress.clear()
            await self.progress.wait()

    async def kill_gateway_when(self, answered: int) -> None:
        """SIGKILL once so many calls were answered, and wait for the next process."""
        await self.until(answered)
        incarnation = self.gateway.incarnation
        assert self.gateway._child is not None
        os.kill(self.gateway._child.pid, signal.SIGKILL)
        await until(lambda: self.gateway.incarnation > incarnation, timeout_s=60)
        async with asyncio.timeout(60):
            while not await self.gateway.admin.healthy():
                pass  # each question waits for the next process

    async def renew_forever(self) -> None:
        """What the models' runtimes do."""
        seq = 0
        async with httpx.AsyncClient(
            base_url=self.gateway.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=5
        ) as http:
            while True:
                for model_id in MODELS:
                    seq += 1
                    with suppress(httpx.HTTPError):
                        await http.put(f"/admin/models/{model_id}", json=self._renewal(model_id, seq))
                await asyncio.sleep(0.3)

    def _renewal(self, model_id: str, seq: int) -> dict[str, Any]:
        return {
            "model_id": model_id,
            "epoch": 1,
            "incarnation": 1,
            "seq": seq,
            "kind": "trainable",
            "status": "ready",
            "replicas": [{"replica_id": "r0", "url": self.server.url, "api_key": self.server.api_key}],
            "published_version": 0,
            "live_versions": [0],
            "tokenizer_uri": RunLayout(RUN_ID).model(model_id).tokenizer("t"),
            "trainer_state": "running",
            "limit": NUM_SESSIONS,
        }

    def log(self, model_id: str) -> tuple[list[Settlement], list[Trajectory]]:
        keys = self.store.list(RunLayout(RUN_ID).model(model_id).log_writers())
        shards = [decode_shard(self.store.get(key), source=key) for key in keys]
        return [s for x in shards for s in x.settlements], [t for x in shards for t in x.trajectories]


@pytest.fixture
async def world(config: RunConfig, store: Store, server: FakeRolloutServer) -> AsyncIterator[World]:
    for model_id in MODELS:
        key = RunLayout(RUN_ID).model(model_id).tokenizer("t")
        store.put(key, make_tokenizer_document(max_model_len=8192).to_bytes())
    gateway = GatewayProcess(config, run_id=RUN_ID, epoch=1, workspace=Workspace(RUN_ID))
    await gateway.start()
    world = World(gateway, server, store)
    background = [asyncio.create_task(gateway.supervise()), asyncio.create_task(world.renew_forever())]
    try:
        yield world
    finally:
        await gateway.stop()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


# ------------------------------------------------------------------ a hundred sessions of retrying clients


async def converse(world: World, session: SessionAnswer, agent_id: str, num_turns: int) -> None:
    """One agent's conversation, through the official client and nothing but its own retries."""
    messages: list[Any] = [{"role": "user", "content": f"I am {session.workflow_id}, as {agent_id}"}]
    url = f"{session.base_url}/agents/{agent_id}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=session.api_key, max_retries=6, timeout=60) as client:
        for turn in range(num_turns):
            reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=32)
            text = reply.choices[0].message.content or ""
            world.note(session.session_id, agent_id, (reply.model_extra or {})["request_id"], text)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"and then, {turn}?"},
            ]


async def execute(world: World, control: GatewayClient, group_id: str, member: int) -> float:
    """One session from its opening to its settlement."""
    request = SessionRequest(group_id=group_id, group_size=2, member_index=member)
    session = await control.control("/sessions", request, SessionAnswer, timeout_s=PATIENCE_S)
    await converse(world, session, "planner", NUM_TURNS)
    await converse(world, session, "answerer", 1)
    reward = float(member)
    body = RewardRequest(reward=reward, agent_id="planner", component="style").model_dump()
    await control.call(f"{session.base_url}/reward", body, api_key=session.api_key, timeout_s=PATIENCE_S)
    path, finalize = f"/sessions/{session.session_id}/finalize", FinalizeRequest(reward=reward)
    answer = await control.control(path, finalize, FinalizeAnswer, timeout_s=PATIENCE_S)
    again = await control.control(path, FinalizeRequest(), FinalizeAnswer, timeout_s=PATIENCE_S)
    assert answer == again
    assert (answer.status, answer.num_rows) == ("finalized", {"plan": 1, "solve": 1})
    return reward


async def run_group(world: World, control: GatewayClient, number: int) -> None:
    request = GroupRequest(group_id=f"g{number}", group_size=2)
    while True:
        answer = await control.control("/groups", request, GroupAnswer, timeout_s=60)
        if answer.status == "open":
            break
    await asyncio.gather(*(execute(world, control, request.group_id, member) for member in range(2)))


async def test_a_hundred_sessions_outlive_three_kills_without_a_trajectory_missing_or_double(
    world: World,
) -> None:
    total = NUM_SESSIONS * (NUM_TURNS + 1)
    moments = [random.randint(total * i // 8, total * (i + 1) // 8) for i in (1, 3, 5)]
    print(f"killed after {moments} of {total} answered calls")

    async def kill() -> None:
        for moment in moments:
            await world.kill_gateway_when(moment)

    async with open_http(max_connections=NUM_SESSIONS + 8) as http:
        control = GatewayClient(world.gateway.url, http, admin_key=ADMIN_KEY, patience_s=120)
        groups = [run_group(world, control, number) for number in range(NUM_SESSIONS // 2)]
        await asyncio.gather(kill(), *groups)
    assert world.gateway.incarnation == 4
    check_logs(world)


def check_logs(world: World) -> None:
    """Each session is settled once for each model, with exactly the calls its clients got answers to."""
    members = Counter((f"g{n}", m) for n in range(NUM_SESSIONS // 2) for m in range(2))
    tokenizer = make_tokenizer()
    for model_id, agent_id in (("plan", "planner"), ("solve", "answerer")):
        settlements, rows = world.log(model_id)
        assert {s.status for s in settlements} == {"finalized"}
        assert Counter((s.member.group_id, s.member.member_index) for s in settlements) == members
        assert Counter((r.member.group_id, r.member.member_index) for r in rows) == members
        for row in rows:
            told = world.calls[f"{row.session_id}/{agent_id}"]
            assert [turn.request_id for turn in row.turns] == [request_id for request_id, _ in told]
            spoken = [row.response_ids[turn.start : turn.end].tolist() for turn in row.turns]
            assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in spoken] == [t for _, t in told]
            assert row.workflow_rewards == {"reward": float(row.member.member_index)}
            style = {"style": float(row.member.member_index)} if agent_id == "planner" else {}
            assert row.agent_rewards == style


# ------------------------------------------------------------------ the rollout driver


async def test_the_rollout_driver_loses_no_session_to_a_kill(world: World, config: RunConfig) -> None:
    async def work(task: dict[str, Any], session: WorkflowSession) -> float:
        messages = [{"role": "user", "content": str(task["n"])}]
        for _ in range(3):
            reply = await session.chat("planner", messages, max_tokens=16)
            world.count()
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "on"}]
        await session.reward(1.0, agent_id="planner")
        return float(task["n"])

    driver = RolloutDriver(
        config, run_id=RUN_ID, gateway_url=world.gateway.url, store=world.store, workflow=work
    )
    report, _ = await asyncio.gather(driver.run(), world.kill_gateway_when(20))
    assert report.executions == {"finalized": 24}
    settlements, rows = world.log("plan")
    assert Counter(s.member.workflow_id for s in settlements) == Counter(r.member.workflow_id for r in rows)
    assert len(rows) == 24
    assert {len(row.turns) for row in rows} == {3}


async def test_without_its_journal_sessions_are_lost_and_the_driver_runs_them_again(
    world: World, config: RunConfig
) -> None:
    journal = Workspace(RUN_ID).session_journal(1)

    async def work(task: dict[str, Any], session: WorkflowSession) -> float:
        for _ in range(3):
            await session.chat("planner", [{"role": "user", "content": str(task["n"])}], max_tokens=16)
            world.count()
        return float(task["n"])

    async def spoil() -> None:
        await world.until(20)
        for file in journal.iterdir():
            file.write_bytes(b"no journal" * 1000)
        await world.kill_gateway_when(20)

    driver = RolloutDriver(
        config, run_id=RUN_ID, gateway_url=world.gateway.url, store=world.store, workflow=work
    )
    report, _ = await asyncio.gather(driver.run(), spoil())
    assert report.executions["finalized"] == 24
    assert report.executions["lost"] > 0
    log = (Workspace(RUN_ID).logs() / "gateway-1-2.log").read_text()
    assert "the sessions in it are lost" in log
