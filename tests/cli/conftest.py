"""A task file, settings over local S3 and SQS, and the command line in this process."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollout_backend import cli
from rollout_backend.workbench.local.scripted import BYTE_MODEL


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"payload": {"question": "What is 3 + 4?", "answer": "7"}}\n')
    return file


@pytest.fixture
def settings(tmp_path: Path, local_aws):
    """Writes a settings file; keyword arguments replace whole sections."""

    def write(**sections) -> Path:
        tree = {
            "model": {"path": str(BYTE_MODEL), "renderer": "chatml"},
            "storage": {"bucket": local_aws.bucket},
            "aws": {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url},
            "runtime": {"kind": "http", "url": "http://127.0.0.1:9"},
            "serving": {"kind": "external", "urls": ["http://127.0.0.1:9"]},
            "output_dir": str(tmp_path / "runs"),
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({**tree, **sections}))
        return file

    return write


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch):
    """Runs the command line here; answers its exit code and what it printed, with line breaks as blanks."""
    monkeypatch.setattr(cli.console, "width", 400)

    def run(*args: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Work in the folder that has `runs/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
