"""How many tokens a run's policies sampled, counted where the agents' work is done, and a bound on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

COUNTS_ENV = "LEARNING_TOKEN_COUNTS"
"""Names the file the counts are kept in."""
BUDGET_ENV = "LEARNING_TOKEN_BUDGET"
"""Sampled tokens after which no execution begins. Not set: no bound."""

REWARD_DELAY_ENV = "LEARNING_REWARD_DELAY_S"
"""How long a reward is held back, like one that a slow judge gives: meanwhile the policy moves on and the
execution's tokens age. Not set: not at all."""


class TokenCounts:
    """Sampled tokens by agent. On disk, so that a rollout that is started again goes on counting."""

    def __init__(self, path: Path, budget: int | None) -> None:
        self._path = path
        self._budget = budget
        self._num_spent = sum(read_counts(path).values())

    @property
    def is_spent(self) -> bool:
        return self._budget is not None and self._num_spent >= self._budget

    def add(self, agent_id: str, num_tokens: int) -> None:
        self._num_spent += num_tokens
        with self._path.open("a") as file:
            file.write(f"{agent_id} {num_tokens}\n")


def read_counts(path: Path) -> Counter[str]:
    """Agent → sampled tokens; a line that was cut short by a kill is passed over."""
    counts: Counter[str] = Counter()
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            agent_id, _, num_tokens = line.partition(" ")
            if line.endswith("\n"):
                counts[agent_id] += int(num_tokens)
    return counts
