"""Processes of an agent: their home directories and exit codes."""

import signal
from pathlib import Path

_IN_HOME = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_CACHE_HOME": ".cache",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}


def home_variables(folder: Path) -> dict[str, str]:
    """Return environment variables for a home in this folder, and create the folders that they name.

    Programs keep settings there, including the model's endpoint and key, which belong to a single rollout.
    """
    home = folder / "home"
    named = {"HOME": home, "TMPDIR": folder / "tmp", "XDG_RUNTIME_DIR": folder / "run"}
    named |= {name: home / path for name, path in _IN_HOME.items()}
    for path in named.values():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {name: str(path) for name, path in named.items()}


def describe_exit(exit_code: int) -> str:
    """Return `exited with code 3` or `was killed by SIGSEGV`. Real-time signals have no names."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
