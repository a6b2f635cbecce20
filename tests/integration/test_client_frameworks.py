"""Unmodified agent frameworks on a live gateway before real vLLM, with a model that calls tools; and the
programs of examples/agents, run by the rollout driver. What each leaves is exact."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import agents
import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.workflow import DriverReport, RolloutDriver
from model_runtime.workflow_tasks import read_tasks, training_groups
from tests import speaker
from tests.clerk import PRICES, Shop, ask, openai_url, shop_config
from tests.gateway_harness import ADMIN_KEY, RUN_ID

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"

# ------------------------------------------------------------------ openai-agents


@agents.function_tool
def price(item: str) -> str:
    """What an item costs."""
    return PRICES[item]


UNTRACED = agents.RunConfig(tracing_disabled=True)


@pytest.mark.parametrize("api", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_use_tools(shop: Shop, api: Any, stream: bool) -> None:
    session = shop.open()
    async with openai.AsyncOpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        clerk = agents.Agent(
            name="clerk",
            instructions="Be brief.",
            model=api(model="clerk", openai_client=client),
            model_settings=agents.ModelSettings(
                temperature=0.2, parallel_tool_calls=True, store=False, metadata={"shop": "1"}
            ),
            tools=[price],
        )
        question = "How much are the desk and the sofa?"
        if stream:
            result: Any = agents.Runner.run_streamed(clerk, question, run_config=UNTRACED)
            assert len([event async for event in result.stream_events()]) > 5
        else:
            result = await agents.Runner.run(clerk, question, run_config=UNTRACED)
    [row] = await asyncio.to_thread(shop.finish, session)
    shop.check_tool_use(row, "desk", "sofa")
    assert shop.said(row)[1] == f"{result.final_output}<|im_end|>"
    assert row.turns[0].temperature == pytest.approx(0.2)


async def test_openai_agents_hand_over_to_one_another(shop: Shop) -> None:
    session = shop.open()

    def model(agent: str) -> agents.OpenAIChatCompletionsModel:
        client = openai.AsyncOpenAI(
            base_url=openai_url(session, agent), api_key=session.api_key, http_client=http
        )
        return agents.OpenAIChatCompletionsModel(model=agent, openai_client=client)

    cold = agents.ModelSettings(temperature=0.02)  # handed over to, the clerk is of two minds
    async with httpx.AsyncClient() as http:
        clerk = agents.Agent(
            name="clerk", instructions="Be brief.", model=model("clerk"), model_settings=cold, tools=[price]
        )
        triage = agents.Agent(
            name="triage",
            instructions="Send on.",
            model=model("triage"),
            model_settings=cold,
            handoffs=[clerk],
        )
        result = await agents.Runner.run(triage, "What does the lamp cost?", run_config=UNTRACED)
    assert result.last_agent is clerk
    rows = {row.agent_id: row for row in await asyncio.to_thread(shop.finish, session)}
    assert set(rows) == {"triage", "clerk"}
    [handing_on] = shop.said(rows["triage"])
    assert speaker.HANDOFF in handing_on
    # The clerk was shown what the other said, and is not credited with it.
    assert f'"{speaker.HANDOFF}"' in shop.shown(rows["clerk"])
    shop.check_tool_use(rows["clerk"], "lamp")


async def test_what_a_framework_asks_that_can_not_be_honoured_is_its_error(shop: Shop) -> None:
    session = shop.open()
    async with openai.AsyncOpenAI(base_url=openai_url(session), api_key=session.api_key) as client:
        clerk = agents.Agent(
            name="clerk",
            model=agents.OpenAIChatCompletionsModel(model="clerk", openai_client=client),
            model_settings=agents.ModelSettings(tool_choice="required"),
            tools=[price],
        )
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await agents.Runner.run(clerk, "What does the lamp cost?", run_config=UNTRACED)
    assert await asyncio.to_thread(shop.finish, session) == []


# ------------------------------------------------------------------ LangGraph


@pytest.mark.parametrize("responses_api", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_langgraph_agents_use_tools(shop: Shop, responses_api: bool, stream: bool) -> None:
    def price(item: str) -> str:
        """What an item costs."""
        return PRICES[item]

    session = shop.open()
    async with httpx.AsyncClient() as http:
        model = ChatOpenAI(
            model="clerk",
            base_url=openai_url(session),
            api_key=session.api_key,  # type: ignore[arg-type]
            http_async_client=http,
            use_responses_api=responses_api,
            stream_usage=True,
        )
        clerk = create_agent(model, tools=[price], system_prompt="Be brief.")
        asked: Any = {"messages": ask("How much are the rug and the lamp?")}
        if stream:
            pieces = [piece async for piece, _ in clerk.astream(asked, stream_mode="messages")]
            assert len(pieces) > 5
        else:
            state = await clerk.ainvoke(asked)
            assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "tool", "ai"]
    [row] = await asyncio.to_thread(shop.finish, session)
    shop.check_tool_use(row, "rug", "lamp")


# ------------------------------------------------------------------ the examples of docs/agents.md, driven


def drive(shop: Shop, example: str, folder: Path) -> DriverReport:
    task = {"question": "How much is the lamp?", "prices": PRICES, "wanted": "42", "example": example}
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps(task) + "\n", encoding="utf-8")
    config = shop_config()
    config = config.model_copy(
        update={"workflow": config.workflow.model_copy(update={"tasks": str(tasks), "max_attempts": 1})}
    )
    read = read_tasks(str(tasks), setting="tasks")
    [group] = training_groups(read, epochs=1, shuffle=True, seed=config.seed)
    shop.harness.group_id = group.group_id
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    driver = RolloutDriver(
        config, run_id=RUN_ID, gateway_url=shop.harness.url, store=shop.harness.store, workflow=module.run
    )
    return asyncio.run(driver.run())


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("with_*.py")))
def test_each_example_is_a_workflow_whose_records_are_exact(
    live_shop: Shop, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, ADMIN_KEY)
    report = drive(live_shop, example, tmp_path)
    assert (report.executions, report.errors) == ({"finalized": 2}, {})
    assert report.mean_reward == 1.0
    rows = live_shop.exact_rows()
    assert len(rows) == 2
    for row in rows:
        live_shop.check_tool_use(row, "lamp")
        assert row.train
