"""What a model's flow run is called, and the evaluations in its story."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client

from model_runtime.evaluation import EvaluationDocument
from model_runtime.summary import mean_reward
from tasks.reporting import tell

SHARE_OF_STEPS = 0.1
"""What counts as the start and as the end of a run: a tenth of its steps each, one at least."""

Row = Mapping[str, Any]


def run_title(
    *, run_id: str, model_id: str, versions: tuple[int, int] | None, rows: Sequence[Row], incarnation: int = 1
) -> str:
    """`run-1 · planner_model · v0→v12 · reward 0.41→0.83`, as much of it as is known."""
    parts = [run_id, model_id]
    if versions is not None:
        parts.append(f"v{versions[0]}→v{versions[1]}")
    rewards = [reward for row in rows if (reward := mean_reward(row)) is not None]
    if rewards:
        window = max(1, int(len(rewards) * SHARE_OF_STEPS))
        first, last = rewards[:window], rewards[-window:]
        parts.append(f"reward {sum(first) / window:.2f}→{sum(last) / window:.2f}")
    again = f" (start {incarnation})" if incarnation > 1 else ""
    return " · ".join(parts) + again


async def rename_run(flow_run_id: UUID, title: str) -> None:
    """Have Prefect call the flow run by this name from now on."""

    async def rename() -> None:
        async with get_client() as client:
            await client.update_flow_run(flow_run_id, name=title)

    await tell("the run's name", rename())


@task(name="evaluation", task_run_name="evaluate {title}", cache_policy=NO_CACHE, persist_result=False)
async def note_evaluation(title: str, evaluation_id: str) -> str:
    """An evaluation of this model that was found in the store; its id there."""
    return evaluation_id


def evaluation_title(document: EvaluationDocument, model_id: str) -> str:
    """`v7: 0.81`."""
    version = document.plan.versions[model_id]
    name = "base" if version is None else f"v{version}"
    return f"{name}: {'no reward' if document.reward is None else f'{document.reward.mean:.2f}'}"
