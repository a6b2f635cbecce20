"""The quickstart's cast on real weights, in plain English, with rewards that are graded: a small instruct
model that was never taught this work is seldom wholly right, but some answers are better than others."""

from __future__ import annotations

import re

from model_runtime.workflow import WorkflowSession

COLUMNS = ("price", "stock", "aisle", "weight")

PLANNER_SYSTEM = "You help in a furniture shop. Reply with one word: price, stock, aisle or weight."
SEARCH_SYSTEM = "You look things up in the book of a furniture shop."
ANSWER_SYSTEM = "You answer customers of a furniture shop in one short sentence."


async def run(task: dict, session: WorkflowSession) -> float:
    """Answer one customer. The reward is the mean of what the three agents earned for their own parts."""
    column, planned = await _plan(task, session)
    value, searched = await _search(task, column, session)
    answered = await _answer(task, value, session)
    earned = {"planner_agent": planned, "search_agent": searched, "answer_agent": answered}
    for agent_id, score in earned.items():
        await session.reward(score, agent_id=agent_id, component="success")
    return sum(earned.values()) / len(earned)


async def _plan(task: dict, session: WorkflowSession) -> tuple[str, float]:
    """The column to look in; the first one when the planner names none."""
    reply = await session.chat(
        "planner_agent",
        [{"role": "system", "content": PLANNER_SYSTEM}, {"role": "user", "content": task["question"]}],
        max_tokens=8,
    )
    words = re.findall(r"[a-z]+", reply.content.lower())
    named = [word for word in words if word in COLUMNS]
    right = named[:1] == [task["column"]]
    brief = len(words) <= 2
    return (named[0] if named else COLUMNS[0]), 0.7 * right + 0.3 * brief


async def _search(task: dict, column: str, session: WorkflowSession) -> tuple[int, float]:
    """Two turns: ask the book, then report the number it gave."""
    asked = f"{column} {task['item']}"
    messages = [
        {"role": "system", "content": SEARCH_SYSTEM},
        {"role": "user", "content": f"Find the {column} of the {task['item']}. Write only: lookup {asked}"},
    ]
    first = await session.chat("search_agent", messages, max_tokens=12)
    well_asked = first.content.strip().lower().startswith(f"lookup {asked}")
    value = task["book"][column]
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": f"The book says: {value}. Reply with the number only."},
    ]
    second = await session.chat("search_agent", messages, max_tokens=8)
    reported = str(value) in re.findall(r"\d+", second.content)
    return value, 0.3 * well_asked + 0.4 * reported + 0.3 * (second.finish_reason == "stop")


async def _answer(task: dict, value: int, session: WorkflowSession) -> float:
    reply = await session.chat(
        "answer_agent",
        [
            {"role": "system", "content": ANSWER_SYSTEM},
            {"role": "user", "content": f"{task['question']} (The book says: {value})"},
        ],
        max_tokens=24,
    )
    told = str(value) in re.findall(r"\d+", reply.content)
    return 0.6 * told + 0.4 * (reply.finish_reason == "stop")
