"""Install rivals from the package index, each in a separate environment in the cache folder, with pinned versions.

verl's loop runs in the environment of `make verl`.

Invariant: a folder with its marker is complete. The marker comes last, under a file lock.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from common import ROOT, Unmeasured
from filelock import FileLock

from rollout_backend.base.child_process import find_uv
from rollout_backend.model.serving.install import cache_dir

PACKAGES = {  # by program; the others run in this environment
    "toolkit": "agentcore-rl-toolkit",
    "toolkit_gateway": "agentcore-rl-toolkit",
    "lightning": "agentlightning",
    "skyrl_generator": "skyrl",
}
PYTHONS = {"agentlightning": "3.12", "skyrl": "3.12"}  # the other rivals run with this program's version
VERL = ROOT / ".venv-verl"
_HERE = Path(__file__).parent
_MARKER = "complete"


def version_of(program: str) -> str:
    """Return the version of the rival that a program uses, and "" for this project."""
    if program == "verl_loop":
        installed = [each.stem for each in VERL.glob("lib/python*/site-packages/verl-*.dist-info")]
        return installed[0].removeprefix("verl-") if installed else ""
    if program not in PACKAGES:
        return ""
    pins = dict(line.split("==") for line in _pins(PACKAGES[program]).read_text().split())
    return pins[PACKAGES[program]]


def python_of(name: str, pins: Path | None = None) -> Path:
    """Return the interpreter of an environment, and install it unless it is there.

    `pins` is a file of requirements with the versions of all packages. Default: those of the rival `name`.

    Raises:
        Unmeasured: uv failed.
    """
    pins = pins or _pins(name)
    folder = cache_dir() / "rivals" / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if (folder / _MARKER).is_file():
            return python
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        version = PYTHONS.get(name, sys.executable)
        install = [find_uv(), "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(pins)]
        for argv in ([find_uv(), "venv", "--quiet", "--python", version, str(folder)], install):
            done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unmeasured(f"{argv[1:]} ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
        (folder / _MARKER).touch()
    return python


def command(program: str) -> list[str]:
    """Return the command of a program of this folder, in its environment. Raises Unmeasured."""
    python = python_of(PACKAGES[program]) if program in PACKAGES else Path(sys.executable)
    if program == "verl_loop":
        python = VERL / "bin" / "python"
        if not python.exists():
            raise Unmeasured(f"{VERL} does not exist. Run: make verl")
    return [str(python), str(_HERE / f"{program}.py")]


def environment(program: str = "toolkit") -> dict[str, str]:
    """Return the environment variables of a program. Rivals find no module of this project."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if program not in PACKAGES and program != "verl_loop":
        env["PYTHONPATH"] = f"{_HERE.parents[1]}:{_HERE.parent}"
    return {
        **env,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _pins(name: str) -> Path:
    return _HERE / f"{name}.txt"
