"""What a run was started with."""

import subprocess
import time
from pathlib import Path

import pytest

from builders import run_config
from rollout_backend.config import load_config
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.run_info import RunStart, agent_of, git_commit, settings_yaml

SECRET = "a-seal-secret-" * 4
ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789"


def test_the_settings_that_are_kept_give_the_same_run_without_its_secrets(tmp_path):
    sections = {
        "run_id": "a",
        "runtime": {
            "kind": "agentcore",
            "image": "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1",
            "role": "arn:aws:iam::000000000000:role/agent",
            "environment": {"A": "1"},
        },
        "gateway": {"agent_sampling_overrides": ["temperature"], "secret": SECRET},
        "sampling": {"temperature": 0.5},
        "timeouts": {"heartbeat_s": None},
        "serving": {"extra_args": ["--log-level", "info"]},
    }
    config = run_config(**sections)
    text = settings_yaml(config)
    assert SECRET not in text
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert load_config(file, env={"ROLLOUT__GATEWAY__SECRET": SECRET}) == config


@pytest.mark.parametrize(
    "sections",
    [
        {"serving": {"engine": "vllm"}},
        {"router": {"policy": "random"}},
        {"model": {"path": "model", "routed_experts": True}},
        {"runtime": {"kind": "agentcore", "arn": ARN}},
        {"runtime": {"kind": "kubernetes", "image": "agent:1"}},
    ],
)
def test_the_stored_defaults_of_settings_are_accepted(sections, tmp_path):
    file = tmp_path / "config.yaml"
    config = run_config(**sections)
    file.write_text(settings_yaml(config))
    assert load_config(file, env={}) == config


def test_each_start_is_recorded_with_its_end(tmp_path):
    config = run_config(run_id="a", output_dir=tmp_path)
    for state in ("failed", None):
        archive = RunArchive(config.run_dir)
        archive.write_start(config, RunStart.of(config, "verl", {}, None))
        archive.write_end(state) if state is not None else archive.write_last_step_end()
        archive.close()
    first, second = RunArchive(config.run_dir).read_info().starts
    assert (first.current_state(0.0), first.ended_at is None) == ("failed", False)
    assert (second.current_state(0.0), second.last_step_ended) == ("running", True)


@pytest.mark.parametrize("last_step_ended", [False, True])
@pytest.mark.parametrize(
    ("process", "silent_s", "state"),
    [
        ({"started": 1}, 0, "killed"),
        ({"machine": "another"}, 0, "running"),
        ({"machine": "another"}, 3600, "silent"),
    ],
)
def test_the_state_of_a_start_whose_end_nothing_recorded(process, silent_s, state, last_step_ended):
    """Ray kills a trainer's process without notice, also after the last step."""
    start = RunStart.of(run_config(run_id="a"), "verl", {}, None)
    there = start.process.model_copy(update=process)
    start = start.model_copy(update={"process": there, "last_step_ended": last_step_ended})
    expected = "ended" if last_step_ended and state != "running" else state
    assert start.current_state(time.time() - silent_s) == expected


def test_a_run_json_that_cannot_be_read_is_replaced(tmp_path, caplog):
    config = run_config(run_id="a", output_dir=tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "run.json").write_text('{"schema_version": 9}')
    archive = RunArchive(config.run_dir)
    archive.write_start(config, RunStart.of(config, "python", {}, None))
    archive.close()
    assert len(archive.read_info().starts) == 1
    assert "run.json is replaced" in caplog.text


def test_an_agents_digest_follows_what_its_image_copies_and_not_what_git_ignores(tmp_path):
    def git(*arguments: str) -> None:
        who = "-c", "user.name=a", "-c", "user.email=a@example.com"
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    def digest() -> str:
        return agent_of(agent)["sha256"]

    agent = tmp_path / "agent.py"
    agent.write_text("a = 1\n")
    (tmp_path / "data.txt").write_text("1")
    outside = digest()
    (tmp_path / "data.txt").write_text("2")
    assert digest() == outside
    assert "commit" not in agent_of(agent)

    git("init", "--quiet")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    inside, commit = digest(), agent_of(agent)["commit"]
    assert commit == git_commit(tmp_path)
    (tmp_path / "ignored").write_text("1")
    assert digest() == inside
    (tmp_path / "data.txt").write_text("3")
    assert digest() == inside, "without a Dockerfile, only code counts"
    for copied, changes in {
        "COPY requirements.txt *.py ./": False,
        "COPY --from=other data.txt ./": False,
        "COPY --chown=1 data.txt ./": True,
        'ADD ["*.txt", "/app/"]': True,
        "COPY agent.py \
  ./da*.txt ./": True,
        "COPY . .": True,
        "COPY sub ./": False,
    }.items():
        (tmp_path / "Dockerfile").write_text(f"FROM python\n{copied}\n")
        (tmp_path / "data.txt").write_text("3")
        before = digest()
        (tmp_path / "data.txt").write_text("4")
        assert (digest() != before) == changes, copied
    (tmp_path / "Dockerfile").write_text("FROM python\nCOPY . .\n")
    (tmp_path / ".dockerignore").write_text("**/*.txt\n")
    before = digest()
    (tmp_path / "data.txt").write_text("5")
    assert digest() == before
    (tmp_path / ".dockerignore").write_text("# a note\n**/*.txt\n!data.txt\n")
    before = digest()
    (tmp_path / "data.txt").write_text("6")
    assert digest() != before
    agent.write_text("a = 2\n")
    assert digest() != before
    assert agent_of(agent)["commit"] == f"{commit}-dirty"
    assert git_commit(Path("/")) is None
