"""The shop and its workflow, without models: scripted agents in a gateway that speaks like them."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from model_runtime.config import RunConfig, StoreConfig
from model_runtime.config_file import load_config
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workflow import DriverReport, RolloutDriver
from tests.fake_gateway import FakeGateway, serving

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"
KEY = "admin-key-of-this-test"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("shop")
    for name in ("shop", "workflow"):
        sys.modules.pop(name, None)


@pytest.fixture
def config() -> RunConfig:
    return load_config(FOLDER / "config.yaml")


def read_jsonl(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "tasks" / name).read_text().splitlines()]


# ---------------------------------------------------------------- what is committed


def test_held_out_questions_are_never_asked_in_training(shop: ModuleType) -> None:
    train, held_out = ({t["question"] for t in read_jsonl(f"{n}.jsonl")} for n in ("train", "held_out"))
    assert (len(train), len(held_out)) == (200, 40)
    assert not train & held_out
    assert train | held_out == {t["question"] for t in shop.all_tasks()}


def test_every_name_and_every_wording_of_a_held_out_task_is_known_from_training(shop: ModuleType) -> None:
    def parts(task: dict[str, Any]) -> tuple[str, str]:
        return task["name"], task["question"].replace(task["name"], "{name}")

    train = [parts(t) for t in read_jsonl("train.jsonl")]
    for name, wording in map(parts, read_jsonl("held_out.jsonl")):
        assert name in {n for n, _ in train}
        assert wording in {w for _, w in train}


def test_the_committed_tasks_are_those_the_script_writes(shop: ModuleType) -> None:
    train, held_out = shop.split_tasks()
    assert train == read_jsonl("train.jsonl")
    assert held_out == read_jsonl("held_out.jsonl")


def test_the_models_are_small_and_complete(config: RunConfig) -> None:
    total = sum(p.stat().st_size for p in (FOLDER / "models").rglob("*") if p.is_file())
    assert total <= 5_000_000
    for model in config.models:
        folder = Path(model.model_path)
        names = {p.name for p in folder.iterdir()}
        assert {
            "model.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
            "generation_config.json",
        } <= names
        written = json.loads((folder / "config.json").read_text())
        assert written["architectures"] == ["Qwen3ForCausalLM"]
        assert written["vocab_size"] <= 1024
        eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        tokens = {
            t["content"]: t["id"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        }
        assert eos == tokens["<|im_end|>"]


def test_each_agent_s_longest_answer_fits_its_limit(shop: ModuleType, config: RunConfig) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(config.models[1].model_path) / "tokenizer.json"))
    said = [str(shop.Plan(t, n)) for t in shop.TABLES for n in shop.NAMES]
    said += [shop.lookup_text(shop.Plan(t, n)) for t in shop.TABLES for n in shop.NAMES]
    said += [str(shop.Finding(t, v)) for t in shop.TABLES for v in (None, *range(10, 100))]
    said += [shop.phrase(t, v) for t in shop.TABLES for v in range(10, 100)]
    longest = max(len(tokenizer.encode(text).ids) + 1 for text in said)
    assert longest <= min(m.max_response_tokens for m in config.models)
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in said)


# ---------------------------------------------------------------- the shop


def test_texts_parse_back_to_what_they_were_made_of(shop: ModuleType) -> None:
    plan = shop.Plan("price", "couch")
    assert shop.parse_plan(str(plan)) == plan
    assert shop.parse_lookup(shop.lookup_text(plan)) == plan
    for finding in (shop.Finding("stock", 47), shop.Finding("stock", None)):
        assert shop.parse_finding(str(finding)) == finding


@pytest.mark.parametrize(
    "text", ["", "price", "price couch", "cost, couch", "price, unicorn", "lookup(price, couch)"]
)
def test_what_is_no_plan_is_none(shop: ModuleType, text: str) -> None:
    assert shop.parse_plan(text) is None


@pytest.mark.parametrize("text", ["found(price, )", "found(price, much)", "value 47", "lookup(price, couch)"])
def test_what_is_no_finding_is_none(shop: ModuleType, text: str) -> None:
    assert shop.parse_finding(text) is None


def test_the_tool_points_from_an_alias_to_the_item_the_value_stands_at(shop: ModuleType) -> None:
    assert shop.lookup(shop.Plan("price", "couch")) == "see sofa"
    assert shop.lookup(shop.Plan("price", "sofa")) == f"value {shop.book_value('price', 'couch')}"


# ---------------------------------------------------------------- the workflow


class Clerk:
    """Speaks for all three agents, always right but for what a test changes."""

    def __init__(self, shop: ModuleType) -> None:
        self.shop = shop
        self.tasks = {t["question"]: t for t in shop.all_tasks()}
        self.overrides: dict[str, str] = {}

    def __call__(self, agent_id: str, messages: list[dict[str, Any]]) -> str:
        if agent_id in self.overrides:
            return self.overrides[agent_id]
        shop, last = self.shop, messages[-1]["content"]
        if agent_id == "planner_agent":
            task = self.tasks[last]
            return str(shop.Plan(task["table"], task["name"]))
        if agent_id == "answer_agent":
            question, _, value = last.partition(" our book says ")
            return shop.phrase(self.tasks[question]["table"], int(value))
        plan = shop.parse_plan(messages[1]["content"])
        if last.startswith("value "):
            return str(shop.Finding(plan.table, int(last.removeprefix("value "))))
        name = last.removeprefix("see ") if last.startswith("see ") else plan.name
        return shop.lookup_text(shop.Plan(plan.table, name))


async def evaluate(
    gateway: FakeGateway, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DriverReport:
    monkeypatch.setenv(ADMIN_KEY_ENV, KEY)
    store = open_store(StoreConfig(url=str(tmp_path)))
    async with serving(gateway, admin_key=KEY):
        driver = RolloutDriver(config, run_id="r", gateway_url=gateway.url, store=store, mode="eval")
        return await driver.run()


async def test_right_agents_earn_every_reward_on_tasks_never_trained_on(
    shop: ModuleType, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = await evaluate(FakeGateway(Clerk(shop)), config, tmp_path, monkeypatch)
    assert report.executions == {"finalized": 40}
    assert report.mean_reward == 1.0
    assert report.agent_success == {"planner_agent": 1.0, "search_agent": 1.0, "answer_agent": 1.0}


async def test_an_alias_takes_one_turn_more_and_turns_extend_the_conversation(
    shop: ModuleType, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = FakeGateway(Clerk(shop))
    await evaluate(gateway, config, tmp_path, monkeypatch)
    names = [t["name"] for t in read_jsonl("held_out.jsonl")]
    for session in gateway.history:
        searches = [c["messages"] for c in session.calls if c["model"] == "search_agent"]
        index = int(session.request["group_id"].split("-")[2].removeprefix("t"))
        assert len(searches) == (3 if names[index] in shop.ALIASES else 2)
        for before, after in itertools.pairwise(searches):
            assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("agent_id", "said", "success"),
    [
        ("planner_agent", "price, sofa", {"planner_agent": 0.0, "search_agent": 1.0, "answer_agent": 1.0}),
        ("planner_agent", "gibberish", {"planner_agent": 0.0}),
        ("search_agent", "found(price, nothing)", {"planner_agent": 1.0, "search_agent": 0.0}),
        ("search_agent", "gibberish", {"planner_agent": 1.0, "search_agent": 0.0}),
        ("answer_agent", "gibberish", {"planner_agent": 1.0, "search_agent": 1.0, "answer_agent": 0.0}),
    ],
)
async def test_one_agent_s_mistake_is_its_own_and_costs_the_workflow_its_reward(
    shop: ModuleType,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent_id: str,
    said: str,
    success: dict[str, float],
) -> None:
    clerk = Clerk(shop)
    clerk.overrides[agent_id] = said
    tasks = tmp_path / "one.jsonl"
    tasks.write_text(json.dumps({"question": "where is the lamp?", "table": "aisle", "name": "lamp"}) + "\n")
    one = config.model_copy(
        update={"workflow": config.workflow.model_copy(update={"held_out_tasks": str(tasks)})}
    )

    report = await evaluate(FakeGateway(clerk), one, tmp_path, monkeypatch)

    assert report.mean_reward == 0.0
    assert report.agent_success == success


async def test_an_agent_that_never_reports_is_stopped(
    shop: ModuleType, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk = Clerk(shop)
    clerk.overrides["search_agent"] = "lookup(price, couch)"
    gateway = FakeGateway(clerk)
    report = await evaluate(gateway, config, tmp_path, monkeypatch)
    assert report.mean_reward == 0.0
    assert {sum(c["model"] == "search_agent" for c in s.calls) for s in gateway.history} == {
        shop.MAX_SEARCH_TURNS
    }
