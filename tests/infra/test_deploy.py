"""deploy.sh, with an `aws` and a `docker` that write down how they are called and answer as AWS would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.config import AgentCoreConfig, RolloutConfig, load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "infra" / "deploy.sh"
ARN = "arn:aws:bedrock-agentcore:eu-west-1:123456789012:runtime/my_agent-0123456789"
REPOSITORY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/stack-repository"
OUTPUTS = {
    "RepositoryUri": REPOSITORY,
    "RuntimeId": "my_agent-0123456789",
    "RuntimeArn": ARN,
    "BucketName": "stack-bucket",
    "QueueUrl": "https://sqs.eu-west-1.amazonaws.com/123456789012/stack-queue",
    "TrainerPolicyArn": "arn:aws:iam::123456789012:policy/stack-trainer",
}

FAILED = [
    "CREATE_FAILED",
    *(pytest.param(status, marks=pytest.mark.slow) for status in ("UPDATE_FAILED", "DELETE_FAILED", "DELETING")),
]

FAKE = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
import jmespath

here = Path(__file__).parent
program, argv = Path(sys.argv[0]).name, sys.argv[1:]
with (here / "calls.jsonl").open("a") as log:
    log.write(json.dumps([program, *argv]) + "\\n")
if "--password-stdin" in argv:
    sys.stdin.read()
if "buildx" in argv:
    ignored = Path(argv[argv.index("--file") + 1] + ".dockerignore")
    (here / "ignored").write_text(ignored.read_text() if ignored.exists() else "")
state = json.loads((here / "state.json").read_text())
if "update-agent-runtime" in argv:
    state["runtime"] |= json.loads(argv[argv.index("--cli-input-json") + 1])
    (here / "state.json").write_text(json.dumps(state))
endpoint = {{}}
if "get-agent-runtime-endpoint" in argv:
    endpoint = state["endpoint"].pop(0) if len(state["endpoint"]) > 1 else state["endpoint"][0]
    (here / "state.json").write_text(json.dumps(state))
reply = {{
    "describe-stacks": state["stacks"],
    "get-agent-runtime": state["runtime"],
    "get-agent-runtime-endpoint": endpoint,
}}
found = next((reply[word] for word in argv if word in reply), "")
if "--query" in argv:
    found = jmespath.search(argv[argv.index("--query") + 1], found)
    if "json" in argv:
        found = json.dumps(found)
    elif isinstance(found, list):
        found = " ".join(found)
print(found)
"""


class Machine:
    done: subprocess.CompletedProcess[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for program in ("aws", "docker"):
            (folder / program).write_text(FAKE)
            (folder / program).chmod(0o755)
        (folder / "agent").mkdir()

    def deploy(
        self, *arguments: str, endpoint: list[dict[str, str]] | None = None, **runtime: Any
    ) -> subprocess.CompletedProcess[str]:
        """`endpoint`: what its endpoint says, one answer after another."""
        outputs = [{"OutputKey": key, "OutputValue": value} for key, value in OUTPUTS.items()]
        given = {"ResultPrefix": "", "RunQueues": "true", "Presigned": "false"} | dict(
            argument.split("=") for argument in arguments
        )
        parameters = [{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()]
        state = {
            "stacks": {"Stacks": [{"Outputs": outputs, "Parameters": parameters}]},
            "runtime": runtime,
            "endpoint": endpoint or [{"status": "READY", "liveVersion": "1"}],
        }
        (self.folder / "state.json").write_text(json.dumps(state))
        return subprocess.run(
            [str(SCRIPT), "stack", "my_agent", str(self.folder / "agent"), *arguments],
            env={"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}", "POLL_S": "0"},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self, word: str) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [call for call in map(json.loads, lines) if word in call]


READY = {
    "agentRuntimeId": "my_agent-0123456789",
    "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": f"{REPOSITORY}:1"}},
    "roleArn": "arn:aws:iam::123456789012:role/agent",
    "networkConfiguration": {"networkMode": "PUBLIC"},
    "protocolConfiguration": {"serverProtocol": "HTTP"},
    "lifecycleConfiguration": {"idleRuntimeSessionTimeout": 120, "maxLifetime": 3600},
    "environmentVariables": {"AWS_DEFAULT_REGION": "eu-west-1"},
    "agentRuntimeVersion": "1",
    "status": "READY",
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """After a deployment that went well, of a runtime that did not require MMDSv2."""
    machine = Machine(tmp_path_factory.mktemp("deployed"))
    machine.done = machine.deploy("KeepResultsDays=7", **READY)
    assert machine.done.returncode == 0, machine.done.stderr
    return machine


def test_the_stack_is_deployed_then_the_image_pushed_then_the_runtime_made(deployed: Machine) -> None:
    first, second = deployed.calls("deploy")
    assert first[first.index("--parameter-overrides") + 1 :] == ["AgentName=my_agent", "KeepResultsDays=7"]
    (build,) = deployed.calls("buildx")
    image = build[build.index("--tag") + 1]
    assert image.startswith(f"{REPOSITORY}:")
    assert build[build.index("--platform") + 1] == "linux/arm64"
    assert build[build.index("--file") + 1].endswith("infra/agent.Dockerfile")
    assert second[second.index("--parameter-overrides") + 1 :] == ["AgentName=my_agent", f"ImageUri={image}"]


def test_mmdsv2_is_required_and_everything_else_kept(deployed: Machine) -> None:
    (update,) = deployed.calls("update-agent-runtime")
    kept = {key: value for key, value in READY.items() if key not in ("status", "agentRuntimeVersion")}
    assert json.loads(update[-1]) == kept | {"metadataConfiguration": {"requireMMDSV2": True}}


def printed_config(done: subprocess.CompletedProcess[str], tmp_path: Path) -> RolloutConfig:
    path = tmp_path / "config.yaml"
    path.write_text(done.stdout[done.stdout.index("aws:\n") :])
    return load_config(path, ["model.path=models/qwen"], env={})


def test_the_output_is_a_config(deployed: Machine, tmp_path: Path) -> None:
    config = printed_config(deployed.done, tmp_path)
    assert isinstance(config.runtime, AgentCoreConfig)
    assert (config.runtime.arn, config.aws.region) == (ARN, "eu-west-1")
    assert config.storage.bucket == OUTPUTS["BucketName"]
    assert (config.storage.prefix, config.queue.url) == ("", None)  # a stack's defaults allow these alone


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("ResultPrefix=team/", ("team/", False, None)),
        ("RunQueues=false", ("", False, OUTPUTS["QueueUrl"])),
        ("Presigned=true", ("", True, OUTPUTS["QueueUrl"])),
    ],
)
def test_the_output_follows_the_stacks_parameters(machine, tmp_path, parameter, expected) -> None:
    done = machine.deploy(parameter, **READY)
    assert done.returncode == 0, done.stderr
    config = printed_config(done, tmp_path)
    assert (config.storage.prefix, config.storage.presigned, config.queue.url) == expected


def test_a_runtime_that_requires_it_already_is_left_alone(machine: Machine) -> None:
    own = machine.folder / "agent" / "Dockerfile"
    own.write_text("FROM scratch\n")
    assert machine.deploy(**READY, metadataConfiguration={"requireMMDSV2": True}).returncode == 0
    assert machine.calls("update-agent-runtime") == []
    assert str(own) in machine.calls("buildx")[0]  # and a folder's own Dockerfile is used


def test_a_folders_own_dockerignore_comes_after_ours(machine: Machine) -> None:
    (machine.folder / "agent" / ".dockerignore").write_text("notes\n!root.pem\n")
    assert machine.deploy(**READY).returncode == 0
    ignored = (machine.folder / "ignored").read_text().splitlines()
    assert "**/.env*" in ignored
    assert ignored[-2:] == ["notes", "!root.pem"]


@pytest.mark.parametrize("status", FAILED)
def test_a_runtime_that_will_not_be_ready_stops_the_deployment(machine: Machine, status: str) -> None:
    done = machine.deploy(**READY | {"status": status, "failureReason": "image is amd64"})
    assert done.returncode == 1
    assert status in done.stderr
    assert "image is amd64" in done.stderr


def test_it_waits_until_the_endpoint_serves_the_new_version(machine: Machine) -> None:
    updating = {"status": "UPDATING", "liveVersion": "1"}
    behind = {"status": "READY", "liveVersion": "1"}  # of the version before, as AgentCore says for a moment
    ready = {"status": "READY", "liveVersion": "2"}
    required = {"metadataConfiguration": {"requireMMDSV2": True}, "agentRuntimeVersion": "2"}
    done = machine.deploy(endpoint=[updating, behind, behind, ready], **READY | required)
    assert done.returncode == 0, done.stderr
    assert len(machine.calls("get-agent-runtime-endpoint")) >= 4


@pytest.mark.parametrize("status", FAILED)
def test_an_endpoint_that_will_not_be_ready_stops_the_deployment(machine: Machine, status: str) -> None:
    done = machine.deploy(endpoint=[{"status": status, "failureReason": "no address is free"}], **READY)
    assert done.returncode == 1
    assert f"endpoint is {status}" in done.stderr
    assert "no address is free" in done.stderr


def test_too_few_arguments_print_the_usage() -> None:
    done = subprocess.run([str(SCRIPT), "stack"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "STACK AGENT_NAME AGENT_FOLDER" in done.stderr
