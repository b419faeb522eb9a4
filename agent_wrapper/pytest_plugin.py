"""Load the pytest fixtures only where the training side is installed.

pytest imports this module in every environment with the package. An agent's image has only `agent_wrapper`, so the
entry point cannot be a module of `rollout_backend`: pytest would fail there before collecting a test.
"""

from importlib.util import find_spec

# The parent comes first, because find_spec raises for a submodule without it.
_NEEDED = ("rollout_backend", "rollout_backend.workbench.local")
pytest_plugins = ("rollout_backend.workbench.local.pytest_plugin",) if all(map(find_spec, _NEEDED)) else ()
