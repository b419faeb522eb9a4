"""The training side's environment with verl on GPUs: it resolves, and the image is built on what it resolves to."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
DOCKERFILE = (INFRA / "trainer.Dockerfile").read_text()
LOCK = INFRA / "trainer-requirements.txt"
NO_INDEX = ("Could not connect", "error sending request", "Connection refused", "dns error")


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), flags=re.M))


def resolve(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of `make constraints`; skips where there is no uv or no package index."""
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or ""]
    if not uv[0]:
        pytest.skip("uv is not installed")
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (recipe,) = re.findall(r"uv (pip compile pyproject\.toml infra/trainer-requirements\.in .*) > ", makefile)
    words = recipe.split()
    words = [word for word in words if word not in ("--upgrade", "--override", "infra/trainer-overrides.txt")]
    done = subprocess.run(
        [*uv, *words, *options, "--output-file", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if any(said in done.stderr for said in NO_INDEX):
        pytest.skip(f"no package index answers: {done.stderr[-300:]}")
    return done


@pytest.mark.slow
def test_the_lock_resolves_with_its_overrides_and_is_up_to_date(tmp_path: Path) -> None:
    output = tmp_path / "requirements.txt"
    shutil.copy(LOCK, output)  # uv keeps what is pinned there, if it can
    done = resolve(output, "--override", "infra/trainer-overrides.txt")
    assert done.returncode == 0, done.stderr
    assert pins(output) == pins(LOCK), "run `make constraints`"


@pytest.mark.slow
def test_without_the_overrides_verl_and_its_sglang_cannot_be_installed_together(tmp_path: Path) -> None:
    """Once this resolves, trainer-overrides.txt has served its time."""
    done = resolve(tmp_path / "requirements.txt")
    assert done.returncode == 1
    assert "sglang==0.5.12 depends on transformers==5.6.0" in done.stderr


def test_the_lock_for_vllm_has_the_versions_that_verl_requires() -> None:
    locked, with_sglang = pins(INFRA / "trainer-vllm-requirements.txt"), pins(LOCK)
    assert locked["vllm"] == "0.24.0"
    assert "sglang" not in locked
    for name in ("verl", "torch", "transformers", "cupy-cuda13x", "renderers"):
        assert locked[name] == with_sglang[name], name


def test_the_lock_pins_the_packages_requirements() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = dict(re.findall(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", " ".join(extras["verl"] + extras["trainer"])))
    assert wanted.keys() >= {"verl", "renderers", "sglang-router"}
    locked = pins(LOCK)
    assert {name: locked[name] for name in wanted} == wanted
    assert pins(INFRA / "trainer-overrides.txt").items() <= locked.items()


def test_the_image_is_built_on_verls_image_of_the_sglang_that_is_locked() -> None:
    locked = pins(LOCK)
    (base,) = re.findall(r"^ARG BASE=verlai/verl:sgl(\d+)\.latest$", DOCKERFILE, flags=re.M)
    assert base == locked["sglang"].replace(".", "")
    (wanted,) = re.findall(r"wanted = (\{.*?\})", DOCKERFILE)
    for name, version in re.findall(r"'([\w-]+)': '([\d.]+)'", wanted):
        assert locked[name] == version, name
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.M):
        assert all((ROOT / path).exists() for path in line.split())
    assert "--constraint /backend/trainer-requirements.txt" in DOCKERFILE
