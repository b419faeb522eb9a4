"""Each line of `rollout doctor`, in the case that it is for: what it finds, and what it says to do."""

import asyncio
import json
import math
import resource
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import trustme

from agent_wrapper.contract import Trajectory
from builders import issue, run_config
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.base.aws import Identity
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import AgentCoreConfig, RolloutConfig
from rollout_backend.core.tasks import Task
from rollout_backend.errors import PreflightError
from rollout_backend.model.gateway.stats import EngineLoad
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.checks.account import check_clock_and_region, describe_credentials
from rollout_backend.run.checks.capacity import check_engines, check_gateways
from rollout_backend.run.checks.examination import check_forced_formats, estimate_cost, examine
from rollout_backend.run.checks.machine import check_engine_version, check_open_files, check_packages
from rollout_backend.run.checks.model import check_capture, check_context, check_parallel, judge_capture, judge_room
from rollout_backend.run.checks.preflight import check_run, check_tasks
from rollout_backend.run.checks.public_address import _check_name, check_public_address
from rollout_backend.testing.fault_proxy import Fault, FaultProxy, Rule
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.scripted import Fail, ScriptedEngine
from rollouts import make_rollout
from run_folders import make_step
from stub_server import Request, StubServer
from tests.emulators.ecr_emulator import REGISTRY, EcrEmulator
from tests.emulators.iam_proxy import IamProxy

ALL = {"Effect": "Allow", "Action": "*", "Resource": "*"}
ROLE = "arn:aws:iam::000000000000:role/agent"
ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/agent-0123456789"


def line(found: list[CheckResult], name: str) -> CheckResult:
    [wanted] = [each for each in found if each.fields()["id"] == name]
    return wanted


# --- the account ------------------------------------------------------------------------------------------


@dataclass
class Account:
    """AWS, as strict as it is: policies, sessions, clocks and regions are checked in front of moto."""

    iam: IamProxy
    faults: FaultProxy
    storage: LocalStorage
    runtime: str
    sections: dict[str, Any]

    def deny(self, *actions: str, on: str = "*") -> None:
        self.iam.principals["trainer"] = [ALL, {"Effect": "Deny", "Action": list(actions), "Resource": on}]

    def agentcore(self, *denied: str, quotas: dict[str, float] | None = None, **answers: tuple[int, object]) -> None:
        """Serve a runtime: what answers `get` (the runtime) and `endpoint`. Some actions on it may be denied."""
        self.iam.upstreams["bedrock-agentcore"] = self.runtime
        self.sections["runtime"] = {"kind": "agentcore", "arn": ARN, "endpoint_url": self.iam.url}
        self.deny(*denied or ("none:None",))
        self.iam.quotas = quotas or {}
        ANSWERS.update(answers)

    def config(self) -> RolloutConfig:
        return run_config(
            **{
                "storage": {"bucket": self.storage.bucket},
                "aws": {"endpoint_url": self.iam.url},
                "runtime": {"kind": "http", "url": self.runtime},
                **self.sections,
            }
        )


ANSWERS: dict[str, tuple[int, object]] = {}


def answer(request: Request) -> tuple[int, bytes]:
    """Answer as an agent's container to a ping, and as AgentCore otherwise."""
    names = {"/runtime-endpoints/": "endpoint", "/stopruntimesession": "stop", "/runtimes/agent": "get"}
    name = next((name for part, name in names.items() if part in request.path), "ping")
    ready = {"status": "READY", "agentRuntimeVersion": "1"}
    status, body = ANSWERS.get(name, (200, {} if name in ("ping", "stop") else ready))
    return status, json.dumps(body).encode()


@pytest.fixture(scope="module")
def runtime() -> Iterator[str]:
    with StubServer(answer) as server:
        yield server.url


@pytest.fixture
async def account(local_aws: LocalStorage, runtime: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Account]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "trainer")
    ANSWERS.clear()
    async with (
        FaultProxy(local_aws.endpoint_url) as faults,
        IamProxy({"s3": faults.url, "sqs": local_aws.endpoint_url}, {"trainer": [ALL]}) as iam,
    ):
        yield Account(iam, faults, local_aws, runtime, {})


def allow_only_the_probe(account: Account) -> None:
    """The policy of a stack whose prefix is another one."""
    bucket = f"arn:aws:s3:::{account.storage.bucket}"
    queues_and_iam = {"Action": ["s3:*", "sqs:*", "iam:*"], "Resource": [bucket, "arn:aws:sqs:*", "arn:aws:iam:*"]}
    probe = {"Action": "s3:*", "Resource": f"{bucket}/runs/preflight/*"}
    account.iam.principals["trainer"] = [{"Effect": "Allow", **queues_and_iam}, {"Effect": "Allow", **probe}]


def refuse_presigned_urls(account: Account) -> None:
    account.sections["storage"] = {"bucket": account.storage.bucket, "presigned": True}
    account.deny("s3:PutObject", on=f"arn:aws:s3:::{account.storage.bucket}/*/steps/*")


def train_in_sessions(account: Account, *denied: str) -> None:
    arn = "arn:aws:sagemaker:us-east-1:000000000000:model-package-group/checkpoints"
    account.sections["training_service"] = {
        "kind": "sagemaker",
        "base_model": "arn:aws:sagemaker:us-east-1:aws:hub-content/SageMakerPublicHub/Model/tiny",
        "sagemaker": {
            "role_arn": "arn:aws:iam::000000000000:role/sessions",
            "model_package_group_arn": arn,
            "output": "s3://bucket/checkpoints",
        },
    }
    account.deny(*denied)


# What is broken, and the line about it: its name, its level and some of its words.
ACCOUNT: dict[str, tuple[Callable[[Account], object], str, str, str]] = {
    "an expired token": (
        lambda account: account.iam.expired.add("trainer"),
        "credentials", "problem", "The AWS credentials have expired: get new ones",
    ),
    "a denied action": (
        lambda account: account.deny("s3:GetObject", "iam:SimulatePrincipalPolicy"),
        "permission:s3:GetObject", "problem", "was refused. It is needed on arn:aws:s3:::",
    ),
    "a denied invoke": (
        lambda account: account.agentcore("bedrock-agentcore:InvokeAgentRuntime"),
        "permission:bedrock-agentcore:InvokeAgentRuntime", "problem",
        f"an explicit Deny forbids it on {ARN} and {ARN}/runtime-endpoint/DEFAULT: attach the stack's",
    ),
    "a denied simulation": (
        lambda account: account.agentcore("iam:SimulatePrincipalPolicy"),
        "permission:bedrock-agentcore:InvokeAgentRuntime", "unchecked",
        "these credentials may not call iam:SimulatePrincipalPolicy, and no harmless call shows it",
    ),
    "a prefix of another stack": (
        allow_only_the_probe, "permission:s3:PutObject", "warning", "no policy allows it on",
    ),
    "a denied delete": (
        lambda account: account.deny("s3:DeleteObject"),
        "storage.bucket", "ok", "an object of 2 bytes stays under runs/preflight/",
    ),
    "another region": (
        lambda account: account.iam.bucket_regions.update({account.storage.bucket: "eu-west-1"}),
        "bucket-region", "problem", "set aws.region=eu-west-1",
    ),
    "a denied lifecycle": (
        lambda account: account.deny("s3:GetLifecycleConfiguration"),
        "bucket-keeping", "unchecked", "versioning and lifecycle are not known (these credentials may",
    ),
    "a clock that is off": (
        lambda account: setattr(account.iam, "clock_ahead_s", 600),
        "clock", "problem", "s behind S3's: AWS refuses calls that are 300 s off: synchronise it",
    ),
    "a store without conditions": (
        lambda account: account.faults.rules.append(Rule("s3:PutObject", Fault.STRIP, header="If-None-Match")),
        "storage.bucket", "problem", "does not support PutObject with If-None-Match: it ignores",
    ),
    "a refused presigned URL": (
        refuse_presigned_urls,
        "permission:s3:PutObject:presigned", "problem", "PutObject by a presigned URL was refused",
    ),
    "a denied receive": (
        lambda account: account.deny("sqs:ReceiveMessage"), "queue.url", "problem", "ReceiveMessage is not allowed",
    ),
    "a queue of another region": (
        lambda account: account.sections.update(queue={"url": "https://sqs.eu-west-1.amazonaws.com/0/mine"}),
        "queue-region", "problem", "bucket and queue must be in one region",
    ),
    "a failed runtime": (
        lambda account: account.agentcore(get=(200, {"status": "CREATE_FAILED", "failureReason": "no such image"})),
        "runtime.arn", "problem", "is CREATE_FAILED, not READY. no such image",
    ),
    "a missing endpoint": (
        lambda account: account.agentcore(
            endpoint=(404, {"__type": "ResourceNotFoundException", "message": "no"})
        ),
        "runtime.qualifier", "problem", "does not exist: create it, or correct runtime.qualifier",
    ),
    "quotas below the settings": (
        lambda account: account.agentcore(quotas={"L-1": 7.0, "L-3E5722B2": 1000.0, "L-8EE2AEA2": 25.0}),
        "runtime-quotas", "warning",
        "runtime.max_sessions=5000 is above 1000 active sessions, which the account's quotas grant",
    ),
    "denied quotas": (
        lambda account: account.agentcore("servicequotas:ListServiceQuotas", "iam:SimulatePrincipalPolicy"),
        "runtime-quotas", "unchecked", "these credentials may not call servicequotas:ListServiceQuotas",
    ),
    "a denied operation of training sessions": (
        lambda account: train_in_sessions(account, "sagemaker:ExecuteSamplingOperation"),
        "permission:sagemaker:ExecuteSamplingOperation", "problem",
        "on arn:aws:sagemaker:us-east-1:000000000000:training-session/rollout-doctor: attach the stack's "
        "TrainingSessionsPolicyArn, of a stack with TrainingSessions=true,",
    ),
    "a role that may not be given to sessions": (
        lambda account: train_in_sessions(account, "iam:PassRole"),
        "permission:iam:PassRole", "problem", "on arn:aws:iam::000000000000:role/sessions",
    ),
    "a denied stop": (
        lambda account: account.agentcore("bedrock-agentcore:StopRuntimeSession"),
        "runtime-stop", "problem", "may not call StopRuntimeSession",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("break_it", "name", "level", "words"), ACCOUNT.values(), ids=ACCOUNT)
async def test_a_line_about_the_account(account, break_it, name, level, words):
    break_it(account)
    found = line(await examine(account.config(), rollouts=1000, machine=False), name)
    assert words in str(found)
    assert found.level == level


async def test_the_clock_is_that_of_the_endpoint_in_the_environment(account, monkeypatch):
    account.iam.clock_ahead_s = 600
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", account.iam.url)
    account.sections["aws"] = {}
    assert "s behind S3's" in str(line(await check_clock_and_region(account.config()), "clock"))


async def test_the_runs_own_address_is_of_no_use_to_agents_in_the_public_network(account, monkeypatch):
    account.agentcore()
    account.sections["gateway"] = {"public_url": "auto", "port": free_port()}
    monkeypatch.setattr(AgentCoreRuntime, "is_in_public_network", True)
    expected = r"gateway\.public_url: auto .* private address.*--subnet.*a relay"
    with pytest.raises(PreflightError, match=expected):
        await check_run(account.config(), machine=False)

    async def preview(config: AgentCoreConfig) -> str:
        return "the runtime would be created"

    monkeypatch.setattr(AgentCoreRuntime, "preview", preview)
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/agent:1"
    account.sections["runtime"] = {
        "kind": "agentcore",
        "image": image,
        "role": "arn:aws:iam::123456789012:role/agent",
    }
    with pytest.raises(PreflightError, match=expected):
        await check_run(account.config(), machine=False)


async def test_tasks_whose_images_agentcore_cannot_run_are_named_or_left_out(local_keys, repository):
    images = {name: f"{REGISTRY}/tasks:{name}" for name in ("a", "b")}
    tasks = [
        Task(name, {}, private={"harbor": {"tests": "", "container": {"image": uri}}}) for name, uri in images.items()
    ]
    page = (repository / "docs" / "doctor.md").read_text()
    async with EcrEmulator() as ecr:
        runtime = {"kind": "agentcore", "image": images["a"], "role": ROLE, "endpoint_url": ecr.url}
        config = run_config(runtime=runtime)
        ecr.push(images["a"], "arm64")
        ecr.push(images["b"], "amd64")
        for leave_out, level in ((False, "problem"), (True, "warning")):
            fitting, found = await check_tasks(config, tasks, leave_out=leave_out)
            assert [task.task_id for task in fitting] == ["a"]
            assert [(each.name, each.level) for each in found] == [("task-images", "ok"), ("task:b", level)]
            assert all(f"`{each.name.partition(':')[0]}" in page for each in found)
        fitting, found = await check_tasks(config, tasks, leave_out=False, resumed=True)
        assert ([*fitting], found[-1].level) == (tasks, "warning")
        fitting, found = await check_tasks(config, tasks[1:], leave_out=True)
        assert ([*fitting], [each.level for each in found]) == ([], ["problem"]), "there is nothing else to run"


async def test_every_line_is_there_whatever_the_others_found(account, repository):
    account.agentcore()
    whole = [each.fields()["id"] for each in await examine(account.config(), machine=False)]
    assert len(set(whole)) == len(whole)
    page = (repository / "docs" / "doctor.md").read_text()
    assert [name for name in whole if f"`{name}`" not in page and not name.startswith("permission:")] == []
    account.iam.expired.add("trainer")
    broken = await examine(account.config(), machine=False)
    assert {each.fields()["id"] for each in broken} == {name for name in whole if not name.startswith("permission:")}
    assert {"credentials", "storage.bucket", "queue.url"} <= {
        each.fields()["id"] for each in broken if each.level == "problem"
    }


async def test_nothing_stays_in_the_account(account):
    account.sections["storage"] = {"bucket": account.storage.bucket, "prefix": "clean/", "presigned": True}
    await examine(account.config(), machine=False)
    async with account.storage.s3() as s3, account.storage.client("sqs") as sqs:
        stored = await s3.list_objects_v2(Bucket=account.storage.bucket, Prefix="clean/")
        queues = await sqs.list_queues(QueueNamePrefix="rollout-check-")
    assert stored["KeyCount"] == 0
    assert "QueueUrls" not in queues


@pytest.mark.parametrize("elsewhere", [{"s3"}, {"sqs"}, {"s3", "sqs"}])
async def test_s3_and_sqs_at_other_addresses(account, elsewhere):
    """IAM's policies hold for what it guards, and STS is not asked about the credentials of other servers."""
    account.sections["aws"] = {f"{name}_endpoint_url": account.storage.endpoint_url for name in elsewhere}
    if len(elsewhere) < 2:
        account.sections["aws"]["endpoint_url"] = account.iam.url
    found = await examine(account.config(), machine=False)
    assert [each.setting for each in found if each.level == "problem"] == []
    simulated = {each.setting.partition(":")[0] for each in found if ":" in each.setting}
    assert simulated == (set() if len(elsewhere) == 2 else {"s3", "sqs"} - elsewhere)
    if len(elsewhere) == 2:
        assert "STS is not asked" in line(found, "credentials").text


async def test_a_queue_without_a_dead_letter_queue(account):
    async with account.storage.client("sqs") as sqs:
        url = (await sqs.create_queue(QueueName="doctor-alone"))["QueueUrl"]
    account.sections["queue"] = {"url": url}
    found = line(await examine(account.config(), machine=False), "queue.url")
    assert (found.level, "add a RedrivePolicy" in found.text) == ("warning", True)


@pytest.mark.parametrize(
    ("source", "minutes", "level", "words"),
    [
        ("iam-role", 5, "ok", "from iam-role, which renews them"),
        ("env", 90, "ok", "in 90 min"),
        ("env", 20, "warning", "in 20 min: a step may take 60 min (timeouts.collection_s), and a run stops"),
        ("env", None, "warning", "temporary, and it is not known until when; a run stops when they expire"),
    ],
)
def test_how_long_credentials_last(source, minutes, level, words):
    now = datetime(2026, 11, 23, tzinfo=UTC)
    ends = None if minutes is None else now + timedelta(minutes=minutes)
    who = "arn:aws:sts::1:assumed-role/trainer/me"
    identity = Identity(who, "1", source, temporary=True, renewed=source == "iam-role", expires_at=ends)
    found = describe_credentials(identity, run_config(), now)
    assert words in found.text
    assert found.level == level


def test_an_estimate_of_the_cost():
    assert estimate_cost(run_config(), 100).level == "unchecked"
    priced = run_config(prices={"session_vcpus": 1, "session_gb": 2})
    text = estimate_cost(priced, 100).text  # 50 session-hours of a vCPU and 2 GB
    assert "a step of 100 rollouts costs at most $5.42 (agents $5.42, S3 and SQS $0.00066)" in text


# --- the public address -----------------------------------------------------------------------------------


def https(tmp_path: Path, host: str, days: float, *, in_file: bool = True) -> dict[str, Any]:
    """Return a gateway section with a certificate of this host, from a CA that this process trusts."""
    ca = trustme.CA()
    certificate, key = issue(ca, tmp_path, host, not_after=datetime.now(UTC) + timedelta(days=days))
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    return {
        "port": port if in_file else 0,
        "public_url": f"https://localhost:{port}",
        "tls_certificate": certificate,
        "tls_key": key,
    }


@pytest.mark.parametrize(
    ("shown", "host", "days", "trusted", "level", "words"),
    [
        ("by a server", "localhost", 90, True, "ok", "the certificate of localhost is valid until"),
        ("in a file", "localhost", 3, True, "warning", "renew it before the run"),
        ("in a file", "localhost", -1, True, "problem", "the certificate of localhost: certificate has expired"),
        ("by a server", "other.example", 90, True, "problem", "Hostname mismatch"),
        ("by a server", "localhost", 90, False, "warning", "the agents' image must trust it (SSL_CERT_FILE)"),
    ],
    ids=["valid", "expires soon", "expired", "of another host", "of an unknown CA"],
)
async def test_a_certificate(tmp_path, monkeypatch, shown, host, days, trusted, level, words):
    gateway = https(tmp_path, host, days, in_file=shown == "by a server")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    found = line(await check_public_address(run_config(gateway=gateway)), "gateway-certificate")
    assert words in found.text
    assert found.level == level


@pytest.mark.parametrize(
    ("name", "advice"), [("invalid", "create its DNS record"), ("example.com", "it is an example's. Set the address")]
)
async def test_a_name_that_does_not_resolve(name, advice):
    found = await check_public_address(run_config(gateway={"public_url": f"http://gateway.{name}"}))
    assert [each.level for each in found] == ["problem", "unchecked"]
    assert advice in found[0].text


async def test_a_private_address_for_agents_in_the_public_network():
    image = "000000000000.dkr.ecr.us-east-1.amazonaws.com/agent:1"
    runtime = {"kind": "agentcore", "image": image, "role": "arn:aws:iam::000000000000:role/agent"}
    gateway = {"public_url": f"http://127.0.0.1:{free_port()}"}
    found = line(await check_public_address(run_config(runtime=runtime, gateway=gateway)), "gateway-dns")
    assert (found.level, "set runtime.subnets, or use a relay" in found.text) == ("warning", True)


async def test_a_public_address_without_encryption(monkeypatch):
    async def resolve(self, *where, **how):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 0))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    for scheme, level in (("http", "warning"), ("https", "ok")):
        runtime = {"kind": "agentcore", "arn": ARN}
        config = run_config(runtime=runtime, gateway={"public_url": f"{scheme}://gateway.example"})
        found = await _check_name(config, "gateway.public_url", "gateway.example", plain=scheme == "http")
        assert (found.level, "unencrypted" in found.text) == (level, level == "warning")


@pytest.mark.parametrize(
    ("settings", "scaling", "level", "words"),
    [
        ({}, {}, "ok", "2,048 tokens"),
        ({"context_length": 4096}, {}, "problem", "above the model's 2,048, with which engines do not start"),
        ({"context_length": 4096}, {"rope_type": "yarn", "factor": 2.0}, "ok", "4,096 tokens"),
        ({"context_length": 4096}, {"rope_type": "llama3", "factor": 8.0}, "problem", "above the model's 2,048"),
        ({"max_tokens": 2048}, {}, "problem", "2,048 leave no room for a prompt"),
    ],
)
def test_a_context_that_no_engine_takes(tmp_path, settings, scaling, level, words):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048, "rope_scaling": scaling}))
    sampling = {"max_tokens": settings.get("max_tokens")}
    model = {"path": str(tmp_path), "context_length": settings.get("context_length")}
    found = check_context(run_config(model=model, sampling=sampling, serving={"kind": "process"}))
    assert (found.level, words in found.text) == (level, True), found


def test_attention_heads_that_engines_cannot_divide(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 12}}))
    model = run_config(model={"path": str(tmp_path), "context_length": 4096}).model
    found = [*check_parallel(model, 8, "serving.tensor_parallel")]
    assert [str(each) for each in found] == [
        "serving.tensor_parallel: 8 does not divide the model's 12 attention heads, so engines do not start: set a "
        "divisor"
    ]
    assert [*check_parallel(model, 4, "serving.tensor_parallel")] == []


@pytest.mark.parametrize(
    ("status", "body", "level", "words"),
    [
        (503, b"", "warning", "answers 503: the load balancer or tunnel there has reached no gateway yet"),
        (200, b"<html>", "problem", "another server answers at"),
        (200, b'{"server": "rollout-backend"}', "problem", "leads to the gateway of another machine"),
        (0, b"", "warning", "gives no answer"),
    ],
)
async def test_an_address_that_does_not_lead_here(status, body, level, words):
    with StubServer(lambda request: (status, body)) as server:
        config = run_config(gateway={"port": free_port(), "public_url": server.url})
        found = line(await check_public_address(config), "gateway-answer")
    assert words in found.text
    assert found.level == level


async def test_an_address_that_leads_here():
    port = free_port()
    found = await check_public_address(run_config(gateway={"port": port, "public_url": f"http://127.0.0.1:{port}"}))
    assert "leads to this machine" in line(found, "gateway-answer").text
    assert f"urlopen('http://127.0.0.1:{port}/health', timeout=10)" in line(found, "gateway-probe").text
    with StubServer(lambda request: (200, b'{"server": "rollout-backend"}')) as server:
        port = int(server.url.rpartition(":")[2])
        found = await check_public_address(run_config(gateway={"port": port, "public_url": server.url}))
    assert "a gateway that is running answers" in line(found, "gateway-answer").text


# --- this machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "forced_tools", "levels"),
    [
        ([0, 0], "constrain", ["warning"]),
        ([0, 2], "constrain", ["ok"]),
        ([0, 0], "as_auto", []),
        ([None], "constrain", []),  # no model call
    ],
)
@pytest.mark.parametrize("run_id", ["doctor-run", "another-run"])
def test_an_earlier_step_of_which_nothing_could_be_trained(tmp_path, known, forced_tools, levels, run_id):
    config = run_config(output_dir=tmp_path, run_id="doctor-run", gateway={"forced_tools": forced_tools})
    assert check_forced_formats(config) == []
    results = {}
    for i, tokens in enumerate(known):
        rollout = make_rollout(f"a.{i}")
        segment = rollout.segments[0]
        logprobs = segment.logprobs if tokens else array("f", [math.nan] * len(segment.logprobs))
        segments = () if tokens is None else (segment.model_copy(update={"logprobs": logprobs}),)
        results[rollout.rollout_id] = rollout.model_copy(update={"segments": segments})
    RunArchive(tmp_path / run_id).write_records(0, make_step(results).records)
    found = check_forced_formats(config)
    assert [each.level for each in found] == levels
    for each in found:
        assert each.text.startswith(f"in the last step of run {run_id}, ")
        assert ("none of 4 sampled tokens has a logprob" in each.text) == (each.level == "warning")


def test_a_package_of_another_version(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == "renderers" else real(name))
    found = check_packages()
    assert found.level == "problem"
    assert (
        "renderers 0.0.1 is installed, and renderers==0.1.12 is needed: uv pip install -c constraints/" in found.text
    )


@pytest.mark.parametrize(("version", "level"), [("0.5.23", "ok"), ("0.4.1", "warning")])
async def test_the_version_of_the_engine(tmp_path, version, level):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    [found] = await check_engine_version(run_config(serving={"python": python, "device": "cpu"}))
    assert (found.level, f"sglang {version}" in found.text) == (level, True)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((256, 1_000_000), "this process may open 256 files, and a run takes 578: raise that (`ulimit -n 578`)"),
        ((1024, 1024), "takes 3,840 open files, and this machine allows a process 1,024: raise that (`ulimit -Hn`)"),
    ],
)
def test_too_few_open_files(monkeypatch, limits, words):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    found = check_open_files(run_config())
    assert words in found.text
    assert found.level == "problem"


@pytest.mark.parametrize(("hard", "level"), [(1_000_000, "ok"), (4096, "problem")])
def test_each_agent_that_answers_its_invoke_late_takes_an_open_file(monkeypatch, hard, level):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))
    runtime = {"kind": "agentcore", "arn": ARN, "agent_protocol": "sagemaker-job-runtime"}
    found = check_open_files(run_config(runtime=runtime))
    assert (found.level, "a run takes 5,578" in found.text) == (level, True)


@pytest.mark.parametrize(
    ("gateway", "rollouts", "level", "words"),
    [
        ({}, 1024, "ok", "1 gateway with 1,024 calls in flight"),
        ({}, 4096, "warning", "Set gateway.processes=4 or auto, or gateway.max_concurrent_calls=4096"),
        ({"processes": 2}, 4096, "warning", "2 gateways with 1,024 calls in flight each, for up to 4,096 sessions"),
        ({"processes": 4}, 4096, "ok", "4 gateways"),
        ({}, 100_000, "warning", "for up to 5,000 sessions"),
        ({}, None, "ok", "Set gateway.processes=5 or auto"),
    ],
)
def test_gateways_are_compared_with_the_size_of_a_step(gateway, rollouts, level, words):
    [found] = check_gateways(run_config(gateway=gateway), 5000, rollouts)
    assert (found.level, words in found.text) == (level, True), found.text


def test_open_files_are_compared_with_the_sessions_of_a_gateway(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    _, found = check_gateways(run_config(), 5000, 4096)
    assert (found.level, "a gateway with 4,096 sessions takes 9," in found.text) == ("problem", True), found.text
    assert len([*check_gateways(run_config(gateway={"processes": 4}), 5000, 4096)]) == 1


def test_engines_are_compared_with_the_size_of_a_step():
    [found] = check_engines(run_config(), 5000, 4096, 2)
    assert (found.level, "2,048 sessions call each of 2 engines" in found.text) == ("warning", True)
    assert [*check_engines(run_config(), 5000, 4096, 8)] == []


def test_what_a_sampled_token_lacks():
    [segment] = make_rollout().segments
    unlabelled = tuple(replace(turn, weight_versions=()) for turn in segment.turns)
    for changes, level, words in (
        ({"logprobs": [math.nan] * len(segment.token_ids)}, "problem", "not every log-probability"),
        ({"turns": unlabelled}, "warning", "without a weight version"),
    ):
        found = judge_capture(Trajectory(model="m", segments=(segment.model_copy(update=changes),)))
        assert (found.level, words in found.text) == (level, True)
    found = judge_capture(Trajectory(model="m", segments=()))
    assert (found.level, "no sampled token was recorded" in found.text) == ("problem", True)


@pytest.mark.parametrize(
    ("tokens", "level", "words"),
    [
        ([400_000, 400_000], "ok", "2 engines with KV caches for 800,000 tokens, 100,000 for each of 8 sessions"),
        ([400_000, 2_000], "warning", "one of them for 2,000: a conversation of model.context_length (32,768)"),
        ([400_000, 0], "unchecked", "not every engine reports"),
    ],
)
def test_the_room_for_conversations(tokens, level, words):
    runtime = {"kind": "http", "url": "http://127.0.0.1:9", "max_sessions": 8}
    config = run_config(runtime=runtime, model={"path": "m", "context_length": 32_768})
    found = judge_room(config, [EngineLoad(0, 0, 0, each) for each in tokens])
    assert (found.level, found.name) == (level, "engine-room")
    assert words in found.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "level", "words"),
    [
        ("seven", "ok", "sampled tokens came through router and gateway with ids and log-probabilities"),
        (Fail(400, "no"), "problem", "the engine refused the call: HTTP 400"),
    ],
)
async def test_a_model_call_through_the_router(reply, level, words):
    with ScriptedEngine([reply]) as engine:
        config = run_config(
            serving={"kind": "external", "urls": [engine.url]},
            timeouts={"model_call_s": 120},
            gateway={"public_url": "https://gateway.invalid"},
        )
        found, *_ = await check_capture(config)
    assert words in found.text
    assert found.level == level
