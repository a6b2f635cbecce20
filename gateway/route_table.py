"""AgentModelRouteTable: which model answers for which agent."""

from __future__ import annotations

from collections.abc import Mapping

from model_runtime.errors import UnknownAgentError


class AgentModelRouteTable:
    """Fixed for a run. An agent without a route is refused: there is no default model."""

    def __init__(self, agent_to_model: Mapping[str, str]) -> None:
        self._agent_to_model = dict(agent_to_model)

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._agent_to_model)

    def model_of(self, agent_id: str) -> str:
        """Raises UnknownAgentError naming the agents there are."""
        try:
            return self._agent_to_model[agent_id]
        except KeyError:
            raise UnknownAgentError(
                f"no agent {agent_id!r}; agents are {sorted(self._agent_to_model)}"
            ) from None

    def __contains__(self, agent_id: object) -> bool:
        return agent_id in self._agent_to_model
