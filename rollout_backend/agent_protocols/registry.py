"""List the agent protocols by their names in `runtime.agent_protocol`."""

from collections.abc import Callable, Mapping

from rollout_backend.agent_protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, Verl4216
from rollout_backend.agent_protocols.agentcore_runtime_app import AgentCoreRuntimeApp
from rollout_backend.agent_protocols.base import AgentProtocol

_PROTOCOLS: Mapping[str, Callable[[], AgentProtocol]] = {
    "agentcore-rl-toolkit": AgentCoreRlToolkit,
    "agentcore-runtime-app": AgentCoreRuntimeApp,
    "verl-4216": Verl4216,
}


def agent_protocol(name: str) -> AgentProtocol | None:
    """Return the protocol of this name; None for `rollout`, which needs no translation."""
    return None if name == "rollout" else _PROTOCOLS[name]()
