"""The shop: its book of numbers, the questions customers ask, and the one tool that reads the book.

Pure functions and constants: nothing here knows of models, servers or training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

TABLES = ("price", "stock", "aisle", "weight")

ITEMS = ("sofa", "lamp", "desk", "chair", "shelf", "rug", "mirror", "clock", "stove", "fridge", "bed", "vase")

ALIASES = {
    "couch": "sofa",
    "light": "lamp",
    "bureau": "desk",
    "stool": "chair",
    "rack": "shelf",
    "carpet": "rug",
    "timer": "clock",
    "oven": "stove",
}
"""Other names customers use. The book knows them only as a pointer to the item's own name."""

NAMES = (*ITEMS, *ALIASES)

WORDINGS = (
    ("price", "how much is the {name}?"),
    ("price", "what does the {name} cost?"),
    ("price", "is the {name} expensive?"),
    ("stock", "how many of the {name} are left?"),
    ("stock", "do you have the {name}?"),
    ("stock", "is the {name} in stock?"),
    ("aisle", "where is the {name}?"),
    ("aisle", "where do i find the {name}?"),
    ("aisle", "which way to the {name}?"),
    ("weight", "how heavy is the {name}?"),
    ("weight", "can i carry the {name}?"),
    ("weight", "what does the {name} weigh?"),
)
"""Which table a customer means, and how they put it."""

PHRASES = {
    "price": "costs {value} dollars",
    "stock": "has {value} left",
    "aisle": "stands in aisle {value}",
    "weight": "weighs {value} kilos",
}
"""How the shop answers, by table."""

PLANNER_SYSTEM = "plan the lookup"
SEARCH_SYSTEM = "look it up"
ANSWER_SYSTEM = "answer the customer"

MAX_SEARCH_TURNS = 4


def _book() -> dict[str, dict[str, int]]:
    rng = random.Random(7)
    return {table: {item: rng.randint(10, 99) for item in ITEMS} for table in TABLES}


BOOK = _book()
"""table → item → the number written there (two digits)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look up: one table, one name."""

    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table}, {self.name}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What search_agent reports: the number, or None when it gave up, and the table it says it is from."""

    table: str
    value: int | None

    def __str__(self) -> str:
        return f"found({self.table}, {'nothing' if self.value is None else self.value})"


def question(wording: int, name: str) -> str:
    """The question of one customer."""
    return WORDINGS[wording][1].format(name=name)


def meant_table(wording: int) -> str:
    """The table this wording asks for."""
    return WORDINGS[wording][0]


def book_value(table: str, name: str) -> int:
    """The number a name or alias stands for."""
    return BOOK[table][ALIASES.get(name, name)]


def parse_plan(text: str) -> Plan | None:
    """`price, couch`, or None for anything that is not a known table and name."""
    table, _, name = text.strip().partition(", ")
    return Plan(table, name) if table in TABLES and name in NAMES else None


def parse_lookup(text: str) -> Plan | None:
    """`lookup(price, couch)`, or None when the text is no lookup of a known table and name."""
    match = re.fullmatch(r"lookup\((.*)\)", text.strip())
    return parse_plan(match[1]) if match else None


def parse_finding(text: str) -> Finding | None:
    """`found(price, 47)` or `found(price, nothing)`, or None when the text is no report."""
    match = re.fullmatch(r"found\((\w+), (\d{1,3}|nothing)\)", text.strip())
    if match is None:
        return None
    return Finding(match[1], None if match[2] == "nothing" else int(match[2]))


def lookup_text(plan: Plan) -> str:
    """The call that asks the tool for `plan`."""
    return f"lookup({plan})"


def lookup(plan: Plan) -> str:
    """The tool: `see sofa` for an alias, `value 47` for an item's own name."""
    if plan.name in ALIASES:
        return f"see {ALIASES[plan.name]}"
    return f"value {BOOK[plan.table][plan.name]}"


def answer_prompt(asked: str, value: int) -> str:
    """What answer_agent reads."""
    return f"{asked} our book says {value}"


def phrase(table: str, value: int) -> str:
    """The answer to a question about `table`."""
    return PHRASES[table].format(value=value)


def all_tasks() -> list[dict[str, object]]:
    """Every wording with every name: 240 tasks."""
    return [
        {"question": question(wording, name), "table": meant_table(wording), "name": name}
        for wording in range(len(WORDINGS))
        for name in NAMES
    ]


def split_tasks(num_held_out: int = 40) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(train, held out), the same at every call. No question stands in both; every wording and every
    name stands in train, so a held-out task asks for a new combination of known parts."""
    tasks = all_tasks()
    random.Random(11).shuffle(tasks)
    return tasks[num_held_out:], tasks[:num_held_out]
