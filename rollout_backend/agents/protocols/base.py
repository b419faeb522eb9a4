"""Define the interfaces of agent protocols: how to invoke a framework's agents and find their results. Pure.

Invariants:

- Tokens come from the gateway, never from an agent's report. An agent's result has a reward or an error.
- A result belongs to the session whose id is in its key, or that was polled. Only that container knows the id. A
  report belongs to the session whose key it carries.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import RolloutRequest, agents_prefix
from agent_wrapper.outcome import AgentResult


def results_prefix(request: RolloutRequest) -> str:
    """Return the prefix under which the agents of the request's step write."""
    return agents_prefix(request.result.prefix, request.run_id, request.step)


class AgentProtocol(ABC):
    """Base class of protocols. Subclass `WrittenResults`, `PolledResults` or `ReportedResults`."""

    @abstractmethod
    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        """Return the payload of the invoke for a task's payload and the contract's request."""

    @abstractmethod
    def check_accepted(self, answer: bytes, request: RolloutRequest) -> None:
        """Check the container's answer to the invoke.

        Raises:
            InvokeRejected: the agent does not speak this protocol, or did not start.
        """

    @abstractmethod
    def read_result(self, data: bytes, max_bytes: int) -> AgentResult:
        """Parse an agent's result.

        Raises:
            ContractError: this is not a result of this protocol.
        """


class WrittenResults(AgentProtocol):
    """Agents write each result to S3."""

    @abstractmethod
    def result_key(self, request: RolloutRequest) -> str:
        """Return the key under which this session's agent writes its result, below `results_prefix`."""


class PolledResults(AgentProtocol):
    """Agents return their result in the answer to a later invoke of the same session."""

    @abstractmethod
    def poll(self, request: RolloutRequest) -> dict[str, Any]:
        """Return the payload of the invoke that asks for the result."""

    @abstractmethod
    def has_ended(self, answer: bytes, request: RolloutRequest) -> bool:
        """Return whether the answer to a poll contains the result, for `read_result`."""


class ReportedResults(AgentProtocol):
    """Agents report their result to the gateway, and answer their invoke when they have finished. A result is JSON
    with the `status` and `rewards` of the report, and the `answer` to the invoke."""
