"""What a user's workflow speaks through while it works on one task."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

from model_runtime.errors import InvalidRequestError
from model_runtime.gateway_client import GatewayClient, is_infrastructure
from model_runtime.protocol import AwaitedReward, SessionAnswer
from model_runtime.types import DEFAULT_COMPONENT, MemberKey


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One answer of an agent."""

    content: str
    finish_reason: str  # "stop" | "length"
    request_id: str  # names this turn, for a reward of its own
    policy_version: int  # of the model that answered
    num_tokens: int  # sampled for this answer, the one that ends it included


class WorkflowSession:
    """One execution of a workflow: the agents it may ask and the rewards it gives.

    `chat` is the short way to an agent. Any OpenAI-compatible client works too:

        client = AsyncOpenAI(base_url=session.openai_base_url("planner_agent"), api_key=session.api_key)

    A client's own retries are safe: a call is one generation, however often it was sent. A multi-turn agent
    sends back the messages it got, unchanged, with new ones behind them; then all its turns are one
    trajectory.
    """

    def __init__(
        self,
        answer: SessionAnswer,
        *,
        member: MemberKey,
        mode: Literal["train", "eval"],
        gateway: GatewayClient,
        call_timeout_s: float,
    ) -> None:
        self.session_id = answer.session_id
        self.api_key = answer.api_key
        self.base_url = answer.base_url
        self.workflow_id = answer.workflow_id
        self.member = member
        self.mode = mode
        self.num_calls = 0
        self.rewards: dict[tuple[str | None, str], float] = {}
        """(agent_id or None for the workflow, component) → the reward given so far."""
        self.awaits: list[AwaitedReward] = []
        self.reward_deadline_s: float | None = None
        self.infrastructure_error: BaseException | None = None
        """The first failure of a call that was the infrastructure's, whatever the workflow made of it."""
        self._gateway = gateway
        self._call_timeout_s = call_timeout_s
        self._call_numbers = itertools.count()

    def openai_base_url(self, agent_id: str) -> str:
        """`base_url` for an OpenAI client that speaks as this agent; its key is `api_key`."""
        return f"{self.base_url}/agents/{agent_id}/v1"

    def anthropic_base_url(self, agent_id: str) -> str:
        """`base_url` for an Anthropic client that speaks as this agent; its key is `api_key`."""
        return f"{self.base_url}/agents/{agent_id}"

    async def chat(self, agent_id: str, messages: list[dict[str, Any]], **sampling: Any) -> ChatReply:
        """Ask an agent. `sampling` takes the fields of a Chat Completions request: max_tokens, temperature,
        stop, seed, … A session may force some of them (evaluations do).

        Raises GatewayError: let it pass, the execution is tried again where that may help.
        """
        self.num_calls += 1
        try:
            reply = await self._gateway.call(
                f"{self.openai_base_url(agent_id)}/chat/completions",
                {"model": agent_id, "messages": messages, **sampling},
                api_key=self.api_key,
                timeout_s=self._call_timeout_s,
                idempotency_key=f"{self.session_id}-{next(self._call_numbers)}",
            )
        except Exception as error:
            if self.infrastructure_error is None and is_infrastructure(error):
                self.infrastructure_error = error
            raise
        choice = reply["choices"][0]
        return ChatReply(
            content=choice["message"]["content"] or "",
            finish_reason=choice["finish_reason"],
            request_id=reply["request_id"],
            policy_version=reply["policy_version"],
            num_tokens=reply["usage"]["completion_tokens"],
        )

    async def reward(
        self,
        value: float | None,
        *,
        agent_id: str | None = None,
        request_id: str | None = None,
        component: str = DEFAULT_COMPONENT,
    ) -> None:
        """Reward the execution, one agent of it, or one turn (by its reply's request_id); None withdraws.
        Replaceable until the workflow returns. Components other than `reward` are recorded and shown.

        Raises InvalidRequestError for a value that is not a finite number.
        """
        if value is not None and not is_finite_number(value):
            raise InvalidRequestError(
                f"a reward must be a finite number or None, got {value!r}", param="reward"
            )
        given = None if value is None else float(value)
        body = {"reward": given, "component": component, "agent_id": agent_id, "request_id": request_id}
        await self._gateway.call(
            f"{self.base_url}/reward", body, api_key=self.api_key, timeout_s=self._call_timeout_s
        )
        if request_id is None:
            self._note(agent_id, component, given)

    def await_reward(
        self,
        deadline_s: float,
        *,
        agent_id: str | None = None,
        request_id: str | None = None,
        component: str = DEFAULT_COMPONENT,
    ) -> None:
        """Say that this reward comes after the workflow returns: a judge posts it to `{base_url}/reward` with
        `api_key`, in the fields of `reward`. The execution counts as finished when the last such reward has
        come, or `deadline_s` after the workflow returned; of several the longest deadline holds. What has not
        come by then is missing, which is not 0."""
        self.reward_deadline_s = max(deadline_s, self.reward_deadline_s or 0.0)
        self.awaits.append(AwaitedReward(component=component, agent_id=agent_id, request_id=request_id))

    def _note(self, agent_id: str | None, component: str, value: float | None) -> None:
        if value is None:
            self.rewards.pop((agent_id, component), None)
        else:
            self.rewards[agent_id, component] = value


def is_finite_number(value: object) -> bool:
    """An int, float, bool or numpy scalar that is neither NaN nor infinite."""
    try:
        return math.isfinite(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return False
