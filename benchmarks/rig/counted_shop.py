"""The quickstart's workflow, its sampled tokens counted and bounded: what `benchmarks/learning.py` lets run.

Of every call of a training execution the tokens are added up, whichever model answered, frozen ones too. Once
a budget is spent, executions that begin end at once without asking anybody, so a run is over when its budget
is. The quickstart's folder must be on the module search path (`workflow.python_path`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import workflow as quickstart  # pyright: ignore[reportMissingImports]

from benchmarks.rig.token_counts import BUDGET_ENV, COUNTS_ENV, REWARD_DELAY_ENV, TokenCounts
from model_runtime.workflow import ChatReply, WorkflowSession


class CountedSession:
    """What the quickstart's workflow asks of a session."""

    def __init__(self, session: WorkflowSession, counts: TokenCounts) -> None:
        self._session = session
        self._counts = counts

    async def chat(self, agent_id: str, messages: list[dict[str, Any]], **sampling: Any) -> ChatReply:
        reply = await self._session.chat(agent_id, messages, **sampling)
        self._counts.add(agent_id, reply.num_tokens)
        return reply

    async def reward(self, value: float | None, **whose: Any) -> None:
        await self._session.reward(value, **whose)


_counts: dict[Path, TokenCounts] = {}


def _counts_of_this_run() -> TokenCounts:
    path = Path(os.environ[COUNTS_ENV])
    if path not in _counts:
        budget = os.environ.get(BUDGET_ENV)
        _counts[path] = TokenCounts(path, int(budget) if budget else None)
    return _counts[path]


async def run(task: dict, session: WorkflowSession) -> float | None:
    """The quickstart's reward; None, and nobody asked, once the budget is spent. Evaluations don't count."""
    if session.mode == "eval":
        return await quickstart.run(task, session)
    counts = _counts_of_this_run()
    if counts.is_spent:
        return None
    reward = await quickstart.run(task, CountedSession(session, counts))
    await asyncio.sleep(float(os.environ.get(REWARD_DELAY_ENV, "0")))
    return reward
