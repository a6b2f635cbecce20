"""Groups and sessions, for whoever drives the workflows."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter, Depends, Request
from starlette.responses import HTMLResponse, Response

from gateway import view
from gateway.routes.access import bearer_key, gateway_of, is_admin, require_admin, session_key
from gateway.routes.serving import (
    CLIENT_CLOSED_REQUEST,
    ClientDisconnected,
    bare_request_id,
    until_disconnect,
)
from model_runtime.protocol import (
    AbortRequest,
    AwaitedReward,
    ChainView,
    FinalizeAnswer,
    FinalizeRequest,
    GroupAnswer,
    GroupRequest,
    RewardRequest,
    SessionAnswer,
    SessionRequest,
    SessionView,
    TurnView,
)
from model_runtime.types import Trajectory

Named = TypeVar("Named", RewardRequest, AwaitedReward)

control = APIRouter(tags=["control"])
"""Opens groups and sessions; asks for the admin key."""
router = APIRouter(tags=["sessions"])
"""What a session's own key opens."""


@control.post("/groups", response_model=GroupAnswer, dependencies=[Depends(require_admin)])
async def open_group(request: Request, body: GroupRequest) -> GroupAnswer | Response:
    """Ask for a group to be opened; waits up to `wait_s` for room, then answers `waiting`. With `wait_s: 0`
    no room is a 429 with Retry-After. Either way the place in the line is kept for those who ask again
    within two minutes. A client that hangs up is not waited for."""
    try:
        return await until_disconnect(request, gateway_of(request).open_group(body))
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


@control.post("/sessions", dependencies=[Depends(require_admin)])
async def open_session(request: Request, body: SessionRequest) -> SessionAnswer:
    """Open a session for one execution."""
    gateway = gateway_of(request)
    session = await gateway.open_session(body)
    await session.journal.durable()
    agents_url = gateway.agents_url or str(request.base_url).rstrip("/")
    return SessionAnswer(
        session_id=session.session_id,
        base_url=f"{agents_url}/sessions/{session.session_id}",
        api_key=session.api_key,
        workflow_id=session.member.workflow_id,
    )


@router.get("/sessions/{session_id}")
async def show_session(request: Request, session_id: str) -> SessionView:
    """The conversations, versions and rewards of a session, open or ended."""
    return (await _shown(request, session_id, session_key(request)))[0]


@router.get("/sessions/{session_id}/view", response_class=HTMLResponse)
async def view_session(request: Request, session_id: str, key: str = "") -> HTMLResponse:
    """The same for people, token by token. A browser gives the session's key as `?key=`."""
    shown, trajectories = await _shown(request, session_id, session_key(request) or key)
    bindings = gateway_of(request).bindings
    rows = [(row, codec) for row in trajectories if (codec := bindings.get(row.model_id).codec) is not None]
    facts = [
        ("execution", shown.workflow_id),
        ("mode", shown.mode),
        ("status", f"{shown.status}: {shown.reason}" if shown.reason else shown.status),
        ("workflow's rewards", view.rewards_text(shown.rewards)),
    ]
    text = await asyncio.to_thread(view.page, f"Session {session_id}", facts, rows)
    return HTMLResponse(text, headers=view.HEADERS)


async def _shown(request: Request, session_id: str, key: str) -> tuple[SessionView, list[Trajectory]]:
    """A session and what it has so far, or what it left. Raises as `find` does."""
    gateway, trusted = gateway_of(request), is_admin(request)
    end = gateway.sessions.settled(session_id, key, trusted=trusted)
    if end is not None:
        rows = await gateway.settled_records.trajectories(end)
        shown = SessionView(
            session_id=session_id,
            workflow_id=end.workflow_id,
            mode="eval" if end.mode == "eval" else "train",
            status=end.status,
            reason=end.reason,
            running_calls=0,
            rewards=dict(rows[0].workflow_rewards) if rows else {},
            chains=[_chain_view(row) for row in rows],
        )
        return shown, rows
    session = gateway.sessions.find(session_id, key, trusted=trusted)
    rows = gateway.sessions.trajectories_so_far(session)
    shown = SessionView(
        session_id=session_id,
        workflow_id=session.member.workflow_id,
        mode="train" if session.is_training else "eval",
        running_calls=session.calls.num_running,
        rewards=session.rewards.workflow,
        chains=[_chain_view(row) for row in rows],
    )
    return shown, rows


@router.post("/sessions/{session_id}/reward")
async def reward(request: Request, session_id: str, body: RewardRequest) -> dict[str, bool]:
    """Set or withdraw a reward of the execution, an agent, or one model call."""
    sessions = gateway_of(request).sessions
    session = sessions.find(session_id, bearer_key(request), trusted=is_admin(request))
    sessions.reward(session, _with_bare_id(body))
    await session.journal.durable()
    return {"ok": True}


@router.post(
    "/sessions/{session_id}/finalize",
    responses={202: {"model": FinalizeAnswer, "description": "It awaits rewards until their deadline"}},
)
async def finalize(
    request: Request, response: Response, session_id: str, body: FinalizeRequest | None = None
) -> FinalizeAnswer:
    """End the execution; answers when its rows and settlements are durable, 202 while it awaits rewards."""
    given = body or FinalizeRequest()
    given = given.model_copy(update={"awaits": [_with_bare_id(reward) for reward in given.awaits]})
    answer = await gateway_of(request).sessions.finalize(
        session_id, bearer_key(request), given, trusted=is_admin(request)
    )
    if answer.status == "awaiting_reward":
        response.status_code = 202
    return answer


@router.post("/sessions/{session_id}/abort")
async def abort(request: Request, session_id: str, body: AbortRequest | None = None) -> FinalizeAnswer:
    """End the execution without its rows."""
    given = body or AbortRequest()
    return await gateway_of(request).sessions.abort(
        session_id,
        bearer_key(request),
        status=given.status,
        reason=given.reason,
        trusted=is_admin(request),
    )


def _with_bare_id(named: Named) -> Named:
    if named.request_id is None:
        return named
    return named.model_copy(update={"request_id": bare_request_id(named.request_id)})


def _chain_view(row: Trajectory) -> ChainView:
    turns = [
        TurnView(
            request_id=turn.request_id,
            version_min=turn.version_min,
            version_max=turn.version_max,
            num_tokens=turn.end - turn.start,
            finish_reason=turn.finish_reason,
            rewards=dict(turn.rewards),
            started_at=turn.started_at,
            ended_at=turn.ended_at,
        )
        for turn in row.turns
    ]
    return ChainView(
        agent_id=row.agent_id,
        model_id=row.model_id,
        chain_index=row.chain_index,
        train=row.train,
        num_prompt_tokens=len(row.prompt_ids),
        num_tokens=len(row.response_ids),
        num_sampled_tokens=row.num_sampled_tokens,
        rewards=dict(row.agent_rewards),
        turns=turns,
    )
