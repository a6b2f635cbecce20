"""The gateway's part of the traces: model calls, the servers they were tried on, and how executions end."""

from __future__ import annotations

import time

from gateway.ingestor import FinishedExecution, Written
from gateway.sampler import Sampling
from gateway.session import Session
from model_runtime.tracing import Traces


def trace_call(traces: Traces, sampling: Sampling, *, num_sampled_tokens: int, error: str = "") -> None:
    """One choice of a model call, now over. The servers' calls are under it."""
    traces.span(
        f"chat {sampling.call.agent_id}",
        sampling.session.member.workflow_id,
        started_at=sampling.started_at,
        ended_at=time.time(),
        attributes={
            "repertory.agent_id": sampling.call.agent_id,
            "repertory.model_id": sampling.model_id,
            "repertory.request_id": sampling.request_id,
            "repertory.prompt_tokens": len(sampling.prompt_ids),
            "repertory.sampled_tokens": num_sampled_tokens,
        },
        key=sampling.request_id,
        error=error,
    )


def trace_settled(
    traces: Traces, session: Session, execution: FinishedExecution, written: Written, *, began: float
) -> None:
    """An execution that is durable now: from its opening, and the shards that hold it."""
    workflow_id, ended_at = execution.member.workflow_id, time.time()
    traces.execution(
        workflow_id,
        started_at=session.opened_at,
        ended_at=ended_at,
        attributes={"repertory.status": execution.status, "repertory.mode": execution.mode},
    )
    finalize = f"finalize {session.session_id}"
    traces.span(
        "finalize",
        workflow_id,
        started_at=began,
        ended_at=ended_at,
        attributes={"repertory.session_id": session.session_id},
        key=finalize,
    )
    for key in written.rows_in:
        named = {"repertory.shard": key, "repertory.seq": written.seq}
        traces.span(
            "shard", workflow_id, started_at=began, ended_at=ended_at, attributes=named, under=finalize
        )
