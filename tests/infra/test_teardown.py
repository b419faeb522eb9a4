"""teardown.sh, with an `aws` that keeps an account in a file and refuses what AWS refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_backend.collect.queue import queue_name
from rollout_backend.config import StorageConfig
from rollout_backend.runtimes.agentcore.provision import MARK

SCRIPT = Path(__file__).parents[2] / "infra" / "teardown.sh"
ROLE, OTHER_ROLE = "arn:aws:iam::123456789012:role/stack-agent", "arn:aws:iam::123456789012:role/other"
QUEUE = "https://sqs.us-east-1.amazonaws.com/123456789012"

FAKE = f"""#!{sys.executable}
import json, sys
from pathlib import Path
import jmespath

argv, path = sys.argv[1:], Path(__file__).with_name("account.json")
account = json.loads(path.read_text())

def option(name):
    return argv[argv.index("--" + name) + 1]

def refuse(text):
    sys.exit("An error occurred: " + text)

def stack():
    name = option("stack-name")
    return account["stacks"].get(name) or refuse(f"(ValidationError) Stack with id {{name}} does not exist")

reply = None
match argv[:2]:
    case ["cloudformation", "describe-stacks"]:
        reply = {{"Stacks": [stack()]}}
    case ["cloudformation", "delete-stack"]:
        held = account["attached"] and option("stack-name") == "my-agent"
        stack()["failed"] = ["Cannot delete a policy attached to entities"] if held else []
        if not held:
            del account["stacks"][option("stack-name")]
    case ["cloudformation", "wait"]:
        if option("stack-name") in account["stacks"]:
            refuse("(Waiter) StackDeleteComplete failed")
    case ["cloudformation", "describe-stack-events"]:
        reply = {{"StackEvents": [
            {{"ResourceStatus": "DELETE_FAILED", "LogicalResourceId": "TrainerPolicy", "ResourceStatusReason": why}}
            for why in stack()["failed"]
        ]}}
    case ["bedrock-agentcore-control", "list-agent-runtimes"]:
        reply = {{"agentRuntimes": [{{"agentRuntimeId": name}} for name in account["runtimes"]]}}
    case ["bedrock-agentcore-control", "get-agent-runtime"]:
        reply = account["runtimes"][option("agent-runtime-id")]
    case ["bedrock-agentcore-control", "delete-agent-runtime"]:
        del account["runtimes"][option("agent-runtime-id")]
    case ["s3api", "list-objects-v2"]:
        runs = account["runs"]
        reply = {{"CommonPrefixes": [{{"Prefix": option("prefix") + run + "/"}} for run in runs]}} if runs else {{}}
    case ["sqs", "list-queues"]:
        reply = {{"QueueUrls": [url for url in account["queues"] if "/" + option("queue-name-prefix") in url]}}
    case ["sqs", "delete-queue"]:
        account["queues"].remove(option("queue-url"))
    case ["iam", "list-entities-for-policy"]:
        reply = {{"PolicyRoles": [{{"RoleName": name}} for name in account["attached"]], "PolicyUsers": []}}
    case ["iam", "detach-role-policy"]:
        account["attached"].remove(option("role-name"))
    case ["s3", "rb"]:
        account["buckets"].remove(argv[-1])
    case ["logs", "describe-log-groups"]:
        found = [name for name in account["logs"] if name.startswith(option("log-group-name-prefix"))]
        reply = {{"logGroups": [{{"logGroupName": name}} for name in found]}}
    case ["logs", "delete-log-group"]:
        account["logs"].remove(option("log-group-name"))
    case ["ec2", "describe-network-interfaces"]:
        group = option("filters").partition("Values=")[2]
        reply = {{"NetworkInterfaces": [one for one in account["interfaces"] if one["group"] == group]}}
    case other:
        refuse(f"no such operation: {{other}}")
path.write_text(json.dumps(account))
if reply is not None:
    found = jmespath.search(option("query"), reply)
    rows = found if isinstance(found, list) else [found]
    lines = ["\\t".join(map(str, row)) for row in rows if isinstance(row, list)]
    print("\\n".join(lines) or ("\\t".join(map(str, rows))))
"""


class Account:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "aws").write_text(FAKE)
        (folder / "aws").chmod(0o755)
        outputs = {
            "BucketName": "results",
            "AgentRoleArn": ROLE,
            "TrainerPolicyArn": "arn:aws:iam::123456789012:policy/trainer",
            "RuntimeId": "my_agent-0123456789",
        }
        given = {"ResultPrefix": "team/", "SecurityGroupIds": "sg-stack"}
        self.state: dict[str, Any] = {
            "stacks": {
                "my-agent": {
                    "Outputs": [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()],
                    "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
                },
                "my-relay": {"Outputs": []},
                "another": {"Outputs": []},
            },
            "runtimes": {
                "rollout_of_a_run-0123456789": self.runtime(ROLE, MARK, "sg-run"),
                "by_hand-0123456789": self.runtime(ROLE, "by hand"),
                "rollout_of_another-0123456789": self.runtime(OTHER_ROLE, MARK),
            },
            "runs": ["run-1", "a.b", "r" * 120],
            "queues": [],
            "attached": ["trainer-role"],
            "buckets": ["s3://results"],
            "logs": [
                "/aws/bedrock-agentcore/runtimes/my_agent-0123456789-DEFAULT",
                "/aws/bedrock-agentcore/runtimes/rollout_of_a_run-0123456789-DEFAULT",
                "/aws/bedrock-agentcore/runtimes/by_hand-0123456789-DEFAULT",
            ],
            "interfaces": [],
        }

    @staticmethod
    def runtime(role: str, description: str, *groups: str) -> dict[str, Any]:
        network = {"networkModeConfig": {"securityGroups": list(groups)}} if groups else {"networkMode": "PUBLIC"}
        return {"roleArn": role, "description": description, "networkConfiguration": network}

    def teardown(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        file = self.folder / "account.json"
        file.write_text(json.dumps(self.state))
        done = subprocess.run(
            [str(SCRIPT), *arguments],
            env={"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        self.state = json.loads(file.read_text())
        return done


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def test_everything_of_the_stack_and_its_runs_goes_and_nothing_else(account: Account) -> None:
    storage = StorageConfig(bucket="results", prefix="team/")
    ours = [queue_name(storage, run) + end for run in account.state["runs"] for end in ("", "-dlq")]
    same_run_elsewhere = queue_name(StorageConfig(bucket="other", prefix="team/"), "run-1")
    left = [same_run_elsewhere, "rollout-of-another-stack", "unrelated"]
    account.state["queues"] = [f"{QUEUE}/{name}" for name in [*ours, *left]]
    done = account.teardown("my-agent", "--relay", "my-relay")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(account.state["stacks"]) == {"another"}
    assert set(account.state["runtimes"]) == {"by_hand-0123456789", "rollout_of_another-0123456789"}
    assert account.state["queues"] == [f"{QUEUE}/{name}" for name in left]
    assert "rollout-of-another-stack stays" in done.stdout
    assert account.state["attached"] == []  # or the stack's deletion would fail
    assert account.state["buckets"] == ["s3://results"]
    assert len(account.state["logs"]) == 3
    assert "s3://results" in done.stdout


def test_results_and_logs_are_deleted_on_demand(account: Account) -> None:
    done = account.teardown("my-agent", "--delete-results")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(account.state["stacks"]) == {"my-relay", "another"}
    assert account.state["buckets"] == []
    assert account.state["logs"] == ["/aws/bedrock-agentcore/runtimes/by_hand-0123456789-DEFAULT"]


def test_network_interfaces_that_linger_are_named_and_do_not_fail_it(account: Account) -> None:
    account.state["interfaces"] = [
        {"NetworkInterfaceId": "eni-1", "SubnetId": "subnet-1", "InterfaceType": "agentic_ai", "group": "sg-stack"},
        {"NetworkInterfaceId": "eni-2", "SubnetId": "subnet-1", "InterfaceType": "agentic_ai", "group": "sg-run"},
        {"NetworkInterfaceId": "eni-3", "SubnetId": "subnet-1", "InterfaceType": "interface", "group": "sg-stack"},
    ]
    done = account.teardown("my-agent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "up to 8 hours" in done.stdout
    assert [name for name in ("eni-1", "eni-2", "eni-3") if name in done.stdout] == ["eni-1", "eni-2"]


def test_an_account_where_nothing_was_run(account: Account) -> None:
    account.state |= {"runtimes": {}, "runs": [], "attached": []}
    done = account.teardown("my-agent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my-agent" not in account.state["stacks"]


def test_a_stack_that_cannot_be_deleted_says_why(account: Account) -> None:
    fake = account.folder / "aws"
    fake.write_text(fake.read_text().replace('account["attached"].remove(option("role-name"))', "pass"))
    done = account.teardown("my-agent")
    assert done.returncode == 1
    assert "Cannot delete a policy attached to entities" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--relay", "r"], ["s", "--relay"], ["s", "--all"]])
def test_wrong_arguments_print_the_usage(account: Account, arguments: list[str]) -> None:
    done = account.teardown(*arguments)
    assert done.returncode == 2
    assert "STACK [--relay RELAY_STACK]" in done.stderr
