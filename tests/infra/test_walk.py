"""The pages for AWS, walked as a new user would: each command in turn, with what the commands before it have made.

A command runs on a machine that has a checkout and some files. It fails if it names a file that is not on that
machine, an output, parameter or stack that does not exist, or an option that the command does not have.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rollout_backend.cli import app
from rollout_backend.config import load_config
from rollout_backend.deploy.deployment import config_text
from rollout_backend.deploy.target import Network, Target

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/arithmetic"
ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/rollout_arithmetic-0123456789"
OF_VERL = {"model", "sampling", "group", "scoring", "serving"}


@dataclass
class Walk:
    """A user: two machines, and the stacks of the account."""

    load_template: Callable[[Path], dict[str, Any]]
    folder: Path
    stacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    machine: str = "laptop"
    files: dict[str, set[str]] = field(default_factory=lambda: {"laptop": set(), "gpu": set()})
    done: list[str] = field(default_factory=list)

    def run(self, page: str, until: str) -> None:
        text = (ROOT / "docs" / page).read_text().partition(until)[0].replace("path/to/agent", EXAMPLE)
        for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, flags=re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                self.command(line)

    def command(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        name = " ".join(words[:3] if words[0] == "aws" else words[:1])
        self.done.append(name)
        match name:
            case "aws cloudformation deploy":
                self.deploy_stack(words)
            case "aws cloudformation delete-stack":
                self.stacks.pop(words[words.index("--stack-name") + 1])
            case "aws ec2 run-instances":
                self.start_machine(words)
            case "scp":
                *copied, _ = [word for word in words[1:] if not word.startswith(("-", "ProxyCommand"))]
                for file in copied:
                    self.must_have(file)
                    self.files["gpu"].add(Path(file).name)
            case "ssh":
                self.machine = "gpu"
            case "docker":
                assert self.machine == "gpu"
                assert '"$PWD:/work"' in line
                assert "--gpus" in words
            case "rollout":
                self.rollout(words)
            case "pip":
                assert (ROOT / words[words.index("-c") + 1]).is_file()
            case _:
                assert name.startswith("SSM="), f"no new user can run {line}"

    def must_have(self, file: str) -> None:
        assert file in self.files[self.machine] or (ROOT / file).exists(), f"there is no {file} on the {self.machine}"

    def outputs(self) -> set[str]:
        return {name for stack in self.stacks.values() for name in stack["Outputs"]}

    def deploy_stack(self, words: list[str]) -> None:
        template = self.load_template(ROOT / words[words.index("--template-file") + 1])
        given = {each.partition("=")[0] for each in words[words.index("--parameter-overrides") + 1 :]}
        assert given <= template["Parameters"].keys()
        assert {name for name, each in template["Parameters"].items() if "Default" not in each} <= given
        roles = any(each["Type"].startswith("AWS::IAM::") for each in template["Resources"].values())
        assert ("CAPABILITY_IAM" in words) is roles
        self.stacks[words[words.index("--stack-name") + 1]] = template

    def start_machine(self, words: list[str]) -> None:
        """A machine that its user can log in to, with credentials for the containers on it."""
        options = dict(zip(words[3::2], words[4::2], strict=True))
        profile = options["--iam-instance-profile"].removeprefix("Name=")
        [stack] = [each for each in self.stacks.values() if profile in each["Outputs"]]
        role = stack["Resources"]["TrainerRole"]["Properties"]["ManagedPolicyArns"]
        assert any("AmazonSSMManagedInstanceCore" in str(each) for each in role), "nobody can log in"
        assert int(re.findall(r"HttpPutResponseHopLimit=(\d)", options["--metadata-options"])[0]) >= 2
        network = self.load_template(ROOT / "infra" / "network.yaml")["Outputs"]
        assert {options["--subnet-id"], options["--security-group-ids"]} <= network.keys()

    def rollout(self, words: list[str]) -> None:
        commands = typer.main.get_command(app)
        command = commands.get_command(typer.Context(commands), words[1])
        parsed = command.make_context(words[1], words[2:]).params
        if stack := parsed.get("stack"):
            assert stack in self.stacks
        if words[1] == "deploy":
            self.must_have(f"{parsed['folder']}/agent.py")
            if parsed["yes"]:
                network = Network("n", ("subnet-1",), ("sg-1",), "https://example.com/s/{shard}")
                target = Target("us-east-1", "my-bucket", "rollout_arithmetic", arn=ARN, network=network)
                text = config_text(target.settings(), ROOT / EXAMPLE, {}, parsed["override"] or [])
                (self.folder / "rollout.yaml").write_text(text)
                self.files[self.machine].add("rollout.yaml")
        for name in ("config", "tasks"):
            if (file := parsed.get(name)) is not None and words[1] != "deploy":
                self.must_have(str(file))


@pytest.fixture
def walk(load_template: Any, tmp_path: Path) -> Walk:
    return Walk(load_template, tmp_path)


def test_the_way_from_an_empty_account_to_the_first_training_step(walk):
    walk.run("deploy.md", "## Try it without an account")
    assert walk.stacks == {}
    assert walk.done[-1] == "aws cloudformation delete-stack"
    assert {"scp", "ssh", "docker", "aws ec2 run-instances"} <= {*walk.done}


def test_the_first_run_on_aws(walk):
    walk.run("first-aws-run.md", "Next: ")
    assert walk.stacks == {}
    assert walk.machine == "gpu"


def test_what_the_page_copies_for_verl_is_all_that_it_needs_and_overrides_nothing_of_verl(walk):
    walk.run("deploy.md", "## 6. ")
    step = (ROOT / "docs" / "deploy.md").read_text().partition("## 5. ")[2].partition("## 6. ")[0]
    copied = set(re.findall(r"`([a-z]+)`", step))
    tree = yaml.safe_load((walk.folder / "rollout.yaml").read_text())
    assert tree.keys() - copied <= OF_VERL
    assert copied & OF_VERL == set()
    config = load_config(
        base={"model": {"path": "/m"}, **{name: tree[name] for name in copied & tree.keys()}}, env={}
    )
    assert config.runtime.kind == "agentcore"
