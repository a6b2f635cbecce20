"""The agents of the shop. Any async function of a task and a session can be trained like this one."""

from __future__ import annotations

import shop

from model_runtime.workflow import WorkflowSession


async def run(task: dict, session: WorkflowSession) -> float:
    """Answer one customer. The reward is 1 when every agent did its part and the answer is right, else 0.

    Each agent's own part is reported as its reward component `success`. It is told apart from the others'
    mistakes: search_agent is right when it reports what the plan asks for, whether or not the plan was.
    """
    asked, meant = task["question"], shop.Plan(task["table"], task["name"])

    plan = await _plan(session, asked)
    await session.reward(float(plan == meant), agent_id="planner_agent", component="success")
    if plan is None:
        return 0.0

    finding = await _search(session, plan)
    wanted = shop.Finding(plan.table, shop.book_value(plan.table, plan.name))
    await session.reward(float(finding == wanted), agent_id="search_agent", component="success")
    if finding is None or finding.value is None:
        return 0.0

    answer = await _answer(session, asked, finding.value)
    well_put = answer == shop.phrase(meant.table, finding.value)
    await session.reward(float(well_put), agent_id="answer_agent", component="success")
    return float(plan == meant and finding == wanted and well_put)


async def _plan(session: WorkflowSession, asked: str) -> shop.Plan | None:
    reply = await session.chat(
        "planner_agent",
        [{"role": "system", "content": shop.PLANNER_SYSTEM}, {"role": "user", "content": asked}],
        max_tokens=16,
    )
    return shop.parse_plan(reply.content)


async def _search(session: WorkflowSession, plan: shop.Plan) -> shop.Finding | None:
    """Several turns: the agent calls the tool until it reports. What the tool says comes back as a user
    message; it is context of the agent's trajectory, never trained on."""
    messages = [{"role": "system", "content": shop.SEARCH_SYSTEM}, {"role": "user", "content": str(plan)}]
    for _ in range(shop.MAX_SEARCH_TURNS):
        reply = await session.chat("search_agent", messages, max_tokens=16)
        call = shop.parse_lookup(reply.content)
        if call is None:
            return shop.parse_finding(reply.content)
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": shop.lookup(call)},
        ]
    return None


async def _answer(session: WorkflowSession, asked: str, value: int) -> str:
    reply = await session.chat(
        "answer_agent",
        [
            {"role": "system", "content": shop.ANSWER_SYSTEM},
            {"role": "user", "content": shop.answer_prompt(asked, value)},
        ],
        max_tokens=16,
    )
    return reply.content.strip()
