"""One agent learns to call tools: a small instruct model that has seen one example says little that a program
could read. Rewards are graded, so that the executions of a group differ long before one is wholly right.

    python tool_calls.py        # writes tasks/calls.jsonl and tasks/calls_held_out.jsonl again
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from model_runtime.workflow import WorkflowSession

SYSTEM = """You call tools. The tools are:
get_weather(city)
get_price(item)
set_timer(minutes)
translate(word, language)"""

EXAMPLE = ("Is it raining in Oslo?", '{"name": "get_weather", "arguments": {"city": "Oslo"}}')

CITIES = ("Paris", "Rome", "London", "Tokyo", "Berlin", "Madrid", "Lisbon", "Vienna", "Dublin", "Athens")
ITEMS = ("sofa", "lamp", "chair", "bike", "guitar", "camera", "watch", "jacket", "kettle", "tent")
WORDS = ("house", "bread", "water", "friend", "winter", "garden", "horse", "bridge", "letter", "music")
LANGUAGES = ("French", "Spanish", "German", "Italian")

WORDINGS = {
    "get_weather": (
        "What is the weather in {city}?",
        "Is it cold in {city} today?",
        "Do I need an umbrella in {city}?",
    ),
    "get_price": (
        "How much is a {item}?",
        "What does a {item} cost?",
        "Is a {item} expensive?",
    ),
    "set_timer": (
        "Wake me in {minutes} minutes.",
        "Set a timer for {minutes} minutes.",
        "Tell me when {minutes} minutes are over.",
    ),
    "translate": (
        "How do you say {word} in {language}?",
        "What is {word} in {language}?",
        "Translate {word} into {language}.",
    ),
}
"""What customers want, by the tool that does it."""

WELL_FORMED, RIGHT_KEYS, RIGHT_TOOL, RIGHT_ARGUMENTS = 0.2, 0.2, 0.3, 0.3
"""What each part of a call earns; nothing is earned without the parts before it, but the tool and its
arguments count on their own."""


async def run(task: dict, session: WorkflowSession) -> float:
    """Ask for one call. `success` is 1 for a call that is wholly right."""
    question, answer = EXAMPLE
    reply = await session.chat(
        "tool_agent",
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": task["question"]},
        ],
        max_tokens=40,
    )
    score = grade(reply.content, task["call"])
    await session.reward(float(score > 0.999), agent_id="tool_agent", component="success")
    return score


def grade(content: str, wanted: dict[str, Any]) -> float:
    """0 for what is no JSON object, 1 for the call that was wanted and nothing else."""
    try:
        call = json.loads(content)
    except ValueError:
        return 0.0
    if not isinstance(call, dict):
        return 0.0
    if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return WELL_FORMED
    score = WELL_FORMED + RIGHT_KEYS
    if call["name"] == wanted["name"]:
        score += RIGHT_TOOL
    given, expected = call["arguments"], wanted["arguments"]
    right = sum(str(given.get(name)) == value for name, value in expected.items())
    return score + RIGHT_ARGUMENTS * right / max(len(given), len(expected))


# ---------------------------------------------------------------- tasks


def all_tasks() -> list[dict[str, Any]]:
    """Every wording with every value, translations with one language each."""
    tasks = []
    for number in range(10):
        values = {
            "city": CITIES[number],
            "item": ITEMS[number],
            "minutes": str(5 * number + 15),
            "word": WORDS[number],
        }
        for tool, wordings in WORDINGS.items():
            for index, wording in enumerate(wordings):
                values["language"] = LANGUAGES[(number + index) % len(LANGUAGES)]
                arguments = {name: value for name, value in values.items() if f"{{{name}}}" in wording}
                question = wording.format(**arguments)
                tasks.append({"question": question, "call": {"name": tool, "arguments": arguments}})
    return tasks


def main() -> None:
    tasks = all_tasks()
    random.Random(0).shuffle(tasks)
    held_out = [t for t in tasks if set(t["call"]["arguments"].values()) & HELD_OUT_VALUES]
    train = [t for t in tasks if t not in held_out]
    for name, chosen in (("calls", train), ("calls_held_out", held_out)):
        lines = (json.dumps(task) + "\n" for task in chosen)
        (Path(__file__).parent / "tasks" / f"{name}.jsonl").write_text("".join(lines))


HELD_OUT_VALUES = {CITIES[-1], CITIES[-2], ITEMS[-1], ITEMS[-2], "60", "55", WORDS[-1], WORDS[-2]}
"""No training task speaks of these: they have to be copied from the question."""


if __name__ == "__main__":
    main()
