"""Load the pytest fixtures where the training side is installed, and nothing where it is not.

pytest imports this module in every environment with the package. An agent's image holds `agent_wrapper` alone, so the
entry point cannot be a module of `rollout_backend`: pytest would fail there before it collects a test.
"""

from importlib.util import find_spec


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


pytest_plugins = ("rollout_backend.local.pytest_plugin",) if _is_installed("rollout_backend.local") else ()
