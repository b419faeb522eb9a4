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
LOCKS = {"sglang": LOCK, "vllm": INFRA / "trainer-vllm-requirements.txt"}
NO_INDEX = ("Could not connect", "error sending request", "Connection refused", "dns error")


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), flags=re.M))


def resolve(output: Path, engine: str, *without: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of `make constraints`, without some of its words; skips without uv or a package index."""
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv") or ""]
    if not uv[0]:
        pytest.skip("uv is not installed")
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    source = re.escape(LOCKS[engine].name.replace(".txt", ".in"))
    (options,) = re.findall(r"^LOCK := \$\(RUN\)/uv (.*)$", makefile, flags=re.M)
    (recipe,) = re.findall(rf"\$\(LOCK\) (pyproject\.toml infra/{source} .*) > ", makefile)
    words = [word for word in f"{options} {recipe}".split() if word not in ("--upgrade", *without)]
    done = subprocess.run(
        [*uv, *words, "--output-file", str(output)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if any(said in done.stderr for said in NO_INDEX):
        pytest.skip(f"no package index answers: {done.stderr[-300:]}")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("engine", LOCKS)
def test_the_lock_resolves_and_is_up_to_date(engine: str, tmp_path: Path) -> None:
    output = tmp_path / "requirements.txt"
    shutil.copy(LOCKS[engine], output)  # uv keeps what is pinned there, if it can
    done = resolve(output, engine)
    assert done.returncode == 0, done.stderr
    assert pins(output) == pins(LOCKS[engine]), "run `make constraints`"


@pytest.mark.slow
@pytest.mark.release
def test_without_the_overrides_verl_and_its_sglang_cannot_be_installed_together(tmp_path: Path) -> None:
    """Once this resolves, trainer-overrides.txt has served its time."""
    done = resolve(tmp_path / "requirements.txt", "sglang", "--override", "infra/trainer-overrides.txt")
    assert done.returncode == 1
    assert "sglang==0.5.12 depends on transformers==5.6.0" in done.stderr


def test_the_lock_for_vllm_has_the_versions_that_verl_requires() -> None:
    locked, with_sglang = pins(LOCKS["vllm"]), pins(LOCK)
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


@pytest.mark.parametrize("engine", LOCKS)
def test_the_image_has_the_engine_and_the_versions_of_its_lock(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, lock = pins(LOCKS[engine]), LOCKS[engine]
    (stage,) = re.findall(rf"^FROM (\S+) AS {engine}$(.*?)^FROM ", DOCKERFILE, flags=re.M | re.S)
    short = {"sglang": "sgl0512", "vllm": "vllm024"}[engine]
    assert f":{short}." in stage[0]
    assert locked[engine].replace(".", "").startswith(short.lstrip("abcdefghijklmnopqrstuvwxyz"))
    assert f"LOCK={lock.name}" in stage[1]
    (check,) = re.findall(r'python3 -c "(.*?)"$', DOCKERFILE.replace("\\\n", ""), flags=re.M)
    check = check.replace("$ENGINE", engine).replace("/backend/$LOCK", str(lock))
    versions = {name: f"{version}+cu130" for name, version in locked.items()}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    exec(check, {})
    for name in ("verl", "torch", "transformers", "cupy-cuda13x", engine):
        monkeypatch.setattr("importlib.metadata.version", (versions | {name: "0.1"}).__getitem__)
        with pytest.raises(AssertionError, match=name):
            exec(check, {})


def test_the_image_gets_files_that_exist_and_runs_as_a_user() -> None:
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.M):
        assert all((ROOT / path).exists() for path in line.split())
    assert DOCKERFILE.rstrip().endswith("USER 10001")
