"""The trainer's part of the traces: the step an execution was trained in, and the version it went into."""

from __future__ import annotations

import time

from model_runtime.tracing import Traces
from model_runtime.training_queue import Batch


class TrainingTrace:
    """Spans of one trainer; nothing at all without `traces`."""

    def __init__(self, traces: Traces | None, *, model_id: str) -> None:
        self._traces = traces
        self._named = {"repertory.model_id": model_id}
        self._model_id = model_id
        self._not_in_a_version: dict[str, None] = {}  # executions, in order

    def step(self, batch: Batch, *, seconds: float) -> None:
        """Note a step that has just ended, in every execution it trained."""
        if self._traces is None:
            return
        ended_at = time.time()
        executions = dict.fromkeys(row.trajectory.member.workflow_id for row in batch.rows)
        for workflow_id in executions:
            self._traces.span(
                f"train step {batch.step}",
                workflow_id,
                started_at=ended_at - seconds,
                ended_at=ended_at,
                attributes=self._named | {"repertory.step": batch.step},
            )
        self._not_in_a_version |= executions

    def version(self, version: int, *, seconds: float) -> None:
        """Note a commit, in every execution that was trained since the one before."""
        if self._traces is None:
            return
        ended_at, executions = time.time(), self._not_in_a_version
        self._not_in_a_version = {}
        for workflow_id in executions:
            self._traces.span(
                f"version v{version}",
                workflow_id,
                started_at=ended_at - seconds,
                ended_at=ended_at,
                attributes=self._named | {"repertory.version": version},
                published=(self._model_id, version),
            )

    def close(self) -> None:
        if self._traces is not None:
            self._traces.close()
