"""The commands of the pages for AWS: the stacks, parameters, outputs and files that they name are there, and those of
the first run do what the page says."""

import ast
import asyncio
import os
import re
import shlex
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from agent_servers import serve_emulator
from builders import issue
from harnesses import installed
from rollout_backend.base.child_process import find_uv
from rollout_backend.config import load_config
from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.workbench.deploy.deployment import config_text
from rollout_backend.workbench.deploy.target import Network, Target
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.code_artifacts import CodeStore
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums
from tests.emulators.iam_proxy import IamProxy
from tests.infra.conftest import ACCOUNT, load_template

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


# --- the first run, from its first command to its last ----------------------------------------------------


class Aws(LocalStorage):
    """moto with CloudFormation, in the environment of the AWS CLI."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir=run_dir, any_key=True)
        host, _, port = self.endpoint_url.removeprefix("http://").partition(":")
        serve = [str(ROOT / "tests" / "emulators" / "aws_account.py"), "--host", host, "--port", port]
        # The emulator of AgentCore has this account, too.
        env = {**os.environ, **self.environ, "MOTO_ACCOUNT_ID": ACCOUNT}
        argv = [f"{installed('aws.txt')}/bin/python", *serve]
        self.process = ServerProcess("moto", argv, run_dir / "moto.log", env)


class Users:
    """Those who act in the account, each with the policies of the stack that are for them."""

    def __init__(self, folder: Path, aws: Aws, proxy: IamProxy) -> None:
        self.folder, self.aws, self.proxy = folder, aws, proxy
        self.ca = trustme.CA()

    def environ(self, who: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ROLLOUT__"))}
        paths = str(Path(sys.executable).parent), f"{installed('aws.txt')}/bin", own["PATH"]
        account = {**self.aws.environ, "AWS_ENDPOINT_URL": self.proxy.url, "AWS_ACCESS_KEY_ID": who}
        return {**own, **account, "PATH": os.pathsep.join(paths)}

    async def run(self, who: str, folder: Path, *words: str) -> str:
        """Return what a command prints."""
        limited = "timeout", "--kill-after", "9", "1200", *words
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        process = await asyncio.create_subprocess_exec(*limited, cwd=folder, env=self.environ(who), **pipes)
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{shlex.join(words)}\n{printed}"
        return printed

    async def take_roles(self, stack: str) -> str:
        """Give each user the policy of the stack. Return the agents' role."""
        async with self.aws.client("cloudformation") as client, self.aws.client("iam") as iam:
            [found] = (await client.describe_stacks(StackName=stack))["Stacks"]
            outputs = {each["OutputKey"]: each["OutputValue"] for each in found["Outputs"]}
            for who in ("Trainer", "Deployer"):
                version = {"PolicyArn": outputs[f"{who}PolicyArn"], "VersionId": "v1"}
                policy = (await iam.get_policy_version(**version))["PolicyVersion"]["Document"]
                self.proxy.principals[who.lower()] = policy["Statement"]
            role = str(outputs["AgentRoleArn"])
            document = (await iam.get_role_policy(RoleName=role.partition("/")[2], PolicyName="agent"))[
                "PolicyDocument"
            ]
        # moto writes the policy of a role as Python would.
        statements = (ast.literal_eval(document) if isinstance(document, str) else document)["Statement"]
        # AgentCore reads the code with the permissions of who deploys.
        code = f"arn:aws:s3:::{outputs['BucketName']}/code/*"
        self.proxy.principals["agent"] = [
            *statements,
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": code},
        ]
        return role

    def complete(self, config: Path, engine: ScriptedEngine) -> None:
        """Set what the page leaves to its reader: the model, its engine and the gateway's address."""
        tree = yaml.safe_load(config.read_text())
        tree["model"] = {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 4096}
        tree["serving"] = {"kind": "external", "urls": [engine.url]}
        certificate, key = issue(self.ca, config.parent, "localhost")
        tls = {"tls_certificate": str(certificate), "tls_key": str(key)}
        port = free_port()
        tree["gateway"] |= {"port": port, "public_url": f"https://localhost:{port}", **tls}
        # The loopback address is the agents', because AgentCore is on this machine.
        tree["runtime"]["endpoint_url"] = self.proxy.url
        tree["group"]["size"] = 2
        config.write_text(yaml.safe_dump(tree))


_install = CodeStore.install


async def install_for_this_machine(self: CodeStore, configuration: Any) -> Path:
    """Replace the packages for arm64 by those for this machine, in the same versions."""
    script = await _install(self, configuration)
    pins = [path.name.removesuffix(".dist-info").replace("-", "==") for path in script.parent.glob("*.dist-info")]
    options = ["--quiet", "--no-config", "--no-deps", "--python", sys.executable, "--target", str(script.parent)]
    process = await asyncio.create_subprocess_exec(find_uv(), "pip", "install", *options, *pins)
    assert await process.wait() == 0
    return script


# aiohttp warns of a body as large as the agent's zip, which the proxy forwards.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_each_command_of_the_first_run_does_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setattr(CodeStore, "install", install_for_this_machine)
    laptop, machine = tmp_path / "laptop", tmp_path / "machine"
    for folder in (laptop, machine, tmp_path / "agentcore"):
        folder.mkdir()
    for name in ("infra", "examples"):
        (laptop / name).symlink_to(ROOT / name)
    where, who, printed = laptop, "administrator", dict[str, str]()
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    async with AsyncExitStack() as ends:
        engine = ends.enter_context(ScriptedEngine(ScriptedSums()))
        aws = await ends.enter_async_context(Aws(tmp_path))
        services = dict.fromkeys(("s3", "sqs", "cloudformation", "codebuild"), aws.endpoint_url)
        proxy = await ends.enter_async_context(IamProxy(services, {who: [everything]}))
        users = Users(tmp_path, aws, proxy)
        for words in commands("first-aws-run.md", "Next: "):
            match words:
                case ["scp", *files, _]:
                    users.complete(laptop / "rollout.yaml", engine)
                    for file in files:
                        shutil.copy(laptop / file, machine)
                    # With all tasks, the sessions alone would take minutes.
                    tasks = machine / "tasks.jsonl"
                    tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[:16]))
                    continue
                case ["ssh", _]:
                    where, who = machine, "trainer"
                    continue
                case ["rollout", "deploy" | "down", *_]:
                    where, who = laptop, "deployer"
                case ["aws", *_]:
                    where, who = laptop, "administrator"
            if words[-1] == "s3://BUCKET":
                [words[-1]] = re.findall(r"aws s3 rb --force (\S+)", printed["rollout down"])
            printed[" ".join(words[:2])] = printed[shlex.join(words)] = await users.run(who, where, *words)
            if words[:3] == ["aws", "cloudformation", "deploy"]:
                role = await users.take_roles(words[4])
                users.ca.cert_pem.write_to_path(tmp_path / "root.pem")
                env = {**users.environ("agent"), "SSL_CERT_FILE": str(tmp_path / "root.pem")}
                runtime = serve_emulator(tmp_path / "agentcore", env=env, role=role)
                _, proxy.upstreams["bedrock-agentcore"] = await ends.enter_async_context(runtime)
        async with aws.client("cloudformation") as client, aws.client("s3") as s3:
            assert (await client.describe_stacks())["Stacks"] == []
            buckets = [each["Name"] for each in (await s3.list_buckets())["Buckets"]]
    assert {access.action for _, access in proxy.denied} <= {"iam:SimulatePrincipalPolicy"}
    told = "\n".join(printed.values())
    assert "a session starts, accepts a rollout, and writes its result" in told
    assert "8 = 8 completed" in told
    assert "32 = 32 completed" in told
    assert "What is 6 + 5?" in printed["rollout show sum-6-5.0"]
    assert "nothing else that this backend made is left" in told
    assert buckets == [aws.bucket]
