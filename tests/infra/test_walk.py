"""The commands of the pages for AWS: the stacks, parameters, outputs and files that they name are there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_backend.config import load_config
from rollout_backend.workbench.deploy.deployment import config_text
from rollout_backend.workbench.deploy.target import Network, Target
from tests.infra.conftest import load_template

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/arithmetic"
OF_VERL = {"model", "sampling", "group", "scoring", "serving"}


def commands(page: str, until: str) -> list[list[str]]:
    text = (ROOT / "docs" / page).read_text().partition(until)[0].replace("path/to/agent", EXAMPLE)
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def check_stack(template: dict[str, Any], words: list[str]) -> None:
    given = {each.partition("=")[0] for each in words[words.index("--parameter-overrides") + 1 :]}
    needed = {name for name, each in template["Parameters"].items() if "Default" not in each}
    assert needed <= given <= template["Parameters"].keys()
    roles = any(each["Type"].startswith("AWS::IAM::") for each in template["Resources"].values())
    assert ("CAPABILITY_IAM" in words) is roles


def check_machine(template: dict[str, Any], network: dict[str, Any], words: list[str]) -> None:
    """Check that users can log in to the machine, and that containers on it have credentials."""
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--iam-instance-profile"].removeprefix("Name=") in template["Outputs"]
    role = template["Resources"]["TrainerRole"]["Properties"]["ManagedPolicyArns"]
    assert any("AmazonSSMManagedInstanceCore" in str(each) for each in role), "nobody can log in"
    assert int(re.findall(r"HttpPutResponseHopLimit=(\d)", options["--metadata-options"])[0]) >= 2
    assert {options["--subnet-id"], options["--security-group-ids"]} <= network["Outputs"].keys()


@pytest.mark.parametrize(
    ("page", "until"), [("deploy.md", "## Try it without an account"), ("first-aws-run.md", "Next: ")]
)
def test_each_command_names_what_is_there(page, until):
    stacks: dict[str, dict[str, Any]] = {}
    for words in commands(page, until):
        match words:
            case ["aws", "cloudformation", "deploy", _, name, _, file, *_]:
                stacks[name] = load_template(ROOT / file)
                check_stack(stacks[name], words)
            case ["aws", "cloudformation", "delete-stack", _, name]:
                del stacks[name]
            case ["aws", "ec2", "run-instances", *_]:
                check_machine(*stacks.values(), load_template(ROOT / "infra" / "network.yaml"), words)
            case ["scp", *paths, _]:
                for path in (each for each in paths if not each.startswith(("-", "ProxyCommand"))):
                    assert path == "rollout.yaml" or (ROOT / path).is_file()
            case ["pip", *_]:
                assert (ROOT / words[words.index("-c") + 1]).is_file()
            case ["docker", "run", *_]:
                assert {"$PWD:/work", "--gpus"} <= {*words}
            case ["rollout", *_] if "--stack" in words:
                assert words[words.index("--stack") + 1] in stacks
    assert stacks == {}


def test_what_the_page_copies_for_verl_is_all_that_it_needs_and_overrides_nothing_of_verl():
    network = Network("n", ("subnet-1",), ("sg-1",), "https://example.com/s/{shard}")
    arn = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/rollout_arithmetic-0123456789"
    target = Target("us-east-1", "my-bucket", "rollout_arithmetic", arn=arn, network=network)
    tree = yaml.safe_load(config_text(target.settings(), ROOT / EXAMPLE, {}, []))
    step = (ROOT / "docs" / "deploy.md").read_text().partition("## 5. ")[2].partition("## 6. ")[0]
    copied = set(re.findall(r"`([a-z]+)`", step))
    assert tree.keys() - copied <= OF_VERL
    assert copied & OF_VERL == set()
    base = {"model": {"path": "/m"}, **{name: tree[name] for name in copied & tree.keys()}}
    assert load_config(base=base, env={}).runtime.kind == "agentcore"
