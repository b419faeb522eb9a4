"""Load the pytest fixtures only where the training side is installed.

pytest imports this module in every environment with the package. An agent's image has only `agent_wrapper`, so the
entry point cannot be a module of `rollout_backend`: pytest would fail there before collecting a test.
"""

from importlib.util import find_spec


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing too
        return False


pytest_plugins = ("rollout_backend.local.pytest_plugin",) if _is_installed("rollout_backend.local") else ()
