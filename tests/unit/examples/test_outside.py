"""The driver of agents outside of the run, before a gateway that remembers what it was asked."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from model_runtime.config_file import load_config
from model_runtime.processes import free_port
from tests.fake_gateway import FakeGateway, serving

OUTSIDE = Path(__file__).parents[3] / "examples" / "outside"
KEY = "admin-key-of-this-test"


@pytest.fixture
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drive_outside", OUTSIDE / "drive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def speak(agent_id: str, messages: list[dict[str, Any]]) -> str:
    """Right about the sofa's price alone."""
    asked = messages[-1]["content"]
    return asked if agent_id == "planner_agent" else f"lookup(price, {asked.split()[-1].rstrip('?')})"


async def test_its_groups_are_whole_its_rewards_are_its_own_and_it_ends_with_the_run(
    driver: ModuleType,
) -> None:
    gateway = FakeGateway(speak)
    gateway.ends_after_groups, gateway.waits_first = 3, 2
    async with serving(gateway, admin_key=KEY):
        ends = await asyncio.to_thread(driver.drive, gateway.url, KEY)
    assert ends == ["finalized"] * 3 * driver.GROUP_SIZE
    members = Counter(session.member for session in gateway.history)
    assert sorted(members) == [(f"g{g}", i, 0) for g in range(3) for i in range(driver.GROUP_SIZE)]
    assert set(members.values()) == {1}
    rewards = {s.request["group_id"]: s.rewards[None, "reward"] for s in gateway.history}
    assert rewards == {"g0": 1.0, "g1": 0.0, "g2": 0.0}, "price, aisle and weight of the sofa"
    assert {len(session.calls) for session in gateway.history} == {2}


async def test_an_execution_the_run_has_no_use_for_any_more_is_no_failure(driver: ModuleType) -> None:
    gateway = FakeGateway(speak)
    async with serving(gateway, admin_key=KEY):
        gateway.stopped = True
        with httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}) as control:
            end = await asyncio.to_thread(driver.execute, control, "g0", 0, driver.TASKS[0])
    assert end == "the run had ended"


def test_it_ends_when_the_gateway_is_gone(driver: ModuleType) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{free_port()}") as control:
        assert not driver.open_group(control, "g0")
        assert driver.execute(control, "g0", 0, driver.TASKS[0]) == "the gateway had gone"


def test_its_config_leaves_the_work_to_it() -> None:
    config = load_config(OUTSIDE / "config.yaml")
    assert config.warnings() == ["workflow.function is not set: an outside driver must open the groups"]
    assert all(Path(model.model_path, "config.json").is_file() for model in config.models)
