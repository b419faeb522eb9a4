"""Headless Chromium, driven by its command line."""

import shutil
import subprocess
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


def find_chromium() -> str | None:
    """Return the program; None if this machine has none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def run_chromium(profile: Path, *arguments: str) -> str:
    """Run Chromium with an empty profile until it exits, and return what it prints."""
    program = find_chromium()
    assert program is not None, "no chromium, chromium-browser or google-chrome in PATH: apt-get install chromium"
    return subprocess.run(
        [program, *FLAGS, f"--user-data-dir={profile}", *arguments],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
