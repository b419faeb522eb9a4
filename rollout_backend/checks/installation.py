"""Check what this machine offers to a run's processes: versions of packages, and open files."""

import platform
import resource
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from rollout_backend.child_process import run_child
from rollout_backend.config import RolloutConfig
from rollout_backend.core.check_result import CheckResult
from rollout_backend.errors import ConfigError
from rollout_backend.gateway.http_protocol import needed_files
from rollout_backend.serving.engine_commands import interpreter

_PACKAGE = "rollout-backend"
_SHOWN = ("renderers", "sglang-router", "smg", "verl")
_OTHER_FILES = 256  # logs, pipes of child processes, modules
_ASK_SGLANG = "import importlib.metadata as m; print(m.version('sglang'))"
_INSTALL = f"pip install -c constraints/trainer.txt '{_PACKAGE}[trainer]'"


# --- versions ---------------------------------------------------------------------------------------------


def check_packages() -> CheckResult:
    """Compare what is installed here with what this package requires."""
    wrong, shown = [], [f"Python {platform.python_version()}"]
    for needed, optional in _requirements():
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            if not optional:
                wrong.append(f"{needed.name} is not installed, and {needed.name}{needed.specifier} is needed")
            continue
        if needed.name in _SHOWN:
            shown.append(f"{needed.name} {version}")
        if not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version} is installed, and {needed.name}{needed.specifier} is needed")
    if wrong:
        return CheckResult("problem", "versions", f"{'; '.join(sorted(wrong))}: {_INSTALL}")
    return CheckResult("ok", "versions", ", ".join(shown))


def _requirements(*extras: str) -> Iterator[tuple[Requirement, bool]]:
    """Yield what this package requires for training, and whether a run works without it."""
    for text in metadata.requires(_PACKAGE) or ():
        needed = Requirement(text)
        for extra in extras or ("trainer", "smg", "verl"):
            applies = needed.marker is None or needed.marker.evaluate({"extra": extra})
            if applies and needed.name != _PACKAGE:
                yield needed, extra != "trainer"
                break


async def check_engine_version(config: RolloutConfig) -> list[CheckResult]:
    """Compare the SGLang of the engines' interpreter with those that this package, or verl, names."""
    if config.serving.kind != "process" or config.serving.engine != "sglang":
        return []
    try:
        asked = await run_child([str(interpreter(config.serving)), "-c", _ASK_SGLANG])
        version = asked.stdout.decode().strip()
    except (ConfigError, OSError):
        version = ""
    if not version:
        return []  # the check of serving.python has said so
    known = {str(needed.specifier) for needed, _ in _requirements("sglang") if needed.name == "sglang"}
    known |= {str(needed.specifier) for needed in _of_verl() if needed.name == "sglang"}
    if any(Requirement(f"sglang{each}").specifier.contains(version, prereleases=True) for each in known):
        return [CheckResult("ok", "serving.python", f"sglang {version}", "sglang-version")]
    text = f"sglang {version} has not been tried with this package: install sglang{' or sglang'.join(sorted(known))}"
    return [CheckResult("warning", "serving.python", text, "sglang-version")]


def _of_verl() -> list[Requirement]:
    try:
        return [Requirement(text) for text in metadata.requires("verl") or ()]
    except metadata.PackageNotFoundError:
        return []


# --- open files -------------------------------------------------------------------------------------------


def check_open_files(config: RolloutConfig) -> CheckResult:
    """Compare the limit of open files with the connections of this process and of a gateway."""
    soft, hard = (_unlimited(each) for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    calls = config.gateway.max_concurrent_calls
    if config.gateway.kind == "process" and hard < needed_files(calls):
        text = (
            f"gateway.max_concurrent_calls={calls} takes {needed_files(calls):,} open files, and this machine allows "
            f"a process {hard:,.0f}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )
        return CheckResult("problem", "gateway.max_concurrent_calls", text, "open-files")
    own = min(256, config.runtime.max_sessions) + config.collect.max_fetches + config.queue.receivers + _OTHER_FILES
    if soft < own:
        text = f"this process may open {soft:,.0f} files, and a run takes {own:,}: raise that (`ulimit -n {own}`)"
        return CheckResult("problem", "open files", text, "open-files")
    return CheckResult(
        "ok", "open files", f"this process may open {soft:,.0f}, and a run takes {own:,}", "open-files"
    )


def _unlimited(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
