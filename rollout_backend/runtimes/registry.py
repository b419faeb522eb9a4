"""Find and open the implementation of a `runtime` section.

To add a runtime, see `rollout_backend.runtimes`.
"""

from collections.abc import Callable

from rollout_backend.config import RuntimeConfig
from rollout_backend.config.section import import_path
from rollout_backend.runtimes.base import AgentRuntime


def runtime_class(config: RuntimeConfig) -> type[AgentRuntime]:
    """Import the class named by the settings' `implementation`."""
    found = import_path(config.implementation)
    assert isinstance(found, type)
    assert issubclass(found, AgentRuntime), f"{config.implementation} must be an AgentRuntime"
    return found


async def open_runtime(config: RuntimeConfig, on_status: Callable[[str], object] = lambda text: None) -> AgentRuntime:
    """Open the runtime of these settings. See `AgentRuntime.open`."""
    return await runtime_class(config).open(config, on_status)
