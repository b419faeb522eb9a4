"""The zip of an agent that is deployed as code. `uv` is a fake: the slow journey runs the real one."""

import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_backend import cli
from rollout_backend.errors import ConfigError
from rollout_backend.workbench.deploy import package
from rollout_backend.workbench.deploy.package import make_package, requirements

SECRETS = [
    *(".env", ".env.local", "config/.env", ".aws/credentials", "credentials.json", "tls/server.key", "client.pem"),
    *(".ssh/id_ed25519", "id_rsa", ".netrc", ".git/config", ".venv/bin/python"),
]
WANTED = [
    "agent.py",
    "requirements.txt",
    "tools/search.py",
    "prompts/system.md",
    "data/tasks.jsonl",
    "environment.py",
]
UV = """#!{python} -IS
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
target.with_name("argv").write_text("\\n".join(sys.argv))
if {error!r}:
    sys.exit({error!r})
(target / "bin").mkdir()
(target / "bin" / "tool").write_text("#!/this/machine/python")
(target / "wheel-1.0.dist-info").mkdir()
(target / "wheel-1.0.dist-info" / "METADATA").write_text("")
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "my-agent"
    for name in [*SECRETS, *WANTED, "notes/plan.md", "root.pem"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "requirements.txt").write_text("httpx>=0.28\n")
    (folder / ".dockerignore").write_text("notes\n!root.pem\n")
    return folder


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fake(error: str = "") -> None:
        program = tmp_path / "uv"
        program.write_text(UV.format(python=sys.executable, error=error))
        program.chmod(0o755)
        monkeypatch.setattr(package.shutil, "which", lambda *_, **__: str(program))

    return fake


async def test_the_zip_holds_agent_wrapper_and_packages_and_no_secret(agent, fake_uv, tmp_path):
    fake_uv()
    made = await make_package(agent, tmp_path / "a.zip")
    names = set(zipfile.ZipFile(made.path).namelist())
    assert {*WANTED, "root.pem", "agent_wrapper/app.py", "wheel-1.0.dist-info/METADATA"} <= names
    assert not names & {*SECRETS, "notes/plan.md", "bin/tool"}
    assert made.packages == 1
    assert (await make_package(agent, tmp_path / "b.zip")).path.read_bytes() == made.path.read_bytes()
    (agent / "agent.py").write_text("changed")
    assert (await make_package(agent, tmp_path / "c.zip")).digest != made.digest


def test_the_wrapper_needs_no_training_side():
    names = " ".join(requirements())
    assert "boto3" in names
    assert "pydantic" in names
    assert not any(heavy in names for heavy in ("ray", "torch", "sglang", "aioboto3"))


async def test_a_package_without_a_wheel_is_named_with_what_to_do(agent, fake_uv, tmp_path):
    fake_uv("error: Failed to download and build `pycosat==0.6.6`")
    with pytest.raises(ConfigError, match=r"pycosat==0\.6\.6 has no wheel for Linux on arm64.*--build codebuild"):
        await make_package(agent, tmp_path / "a.zip")


async def test_a_zip_that_agentcore_refuses_is_refused_here(agent, fake_uv, tmp_path):
    fake_uv()
    with pytest.raises(ConfigError, match=r"bytes, and .* unpacked; AgentCore accepts"):
        await make_package(agent, tmp_path / "a.zip", max_unpacked_bytes=1000)


def test_a_missing_uv_is_named_before_anything_is_started(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(package.shutil, "which", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    (agent / "tasks.jsonl").write_text('{"payload": {}}')
    done = CliRunner().invoke(cli.app, ["deploy", str(agent), "--local"])
    assert done.exit_code == 2
    assert "uv, which installs packages, is not here" in done.output
    assert not (tmp_path / ".rollout").exists()


async def test_a_folder_without_an_agent(tmp_path):
    with pytest.raises(ConfigError, match=r"not an agent's folder: it has no agent\.py"):
        await make_package(tmp_path, tmp_path / "a.zip")
