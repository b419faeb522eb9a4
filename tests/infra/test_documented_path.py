"""The documented configs against the documented stack, with its policies enforced: from deploy to a first step.

Of a config only what the page marks as the reader's own is replaced: bucket, queue, runtime, model and addresses.
"""

import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from agent_servers import ARN, IMAGE, serve_emulator
from agent_wrapper.contract import Outcome
from builders import eventually
from rollout_backend.agents.runtimes.base import open_runtime
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.core.tasks import Task
from rollout_backend.errors import PreflightError
from rollout_backend.manager import RolloutManager
from rollout_backend.run.checks import preflight
from rollout_backend.run.checks.examination import examine
from rollout_backend.run.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.janitor.janitor_process import Janitor
from rollout_backend.run.lease import LeaseHolder, RunLease
from rollout_backend.workbench.local.agentcore_emulator import ROLE
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from tests.emulators.iam_proxy import IamProxy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "infra" / "README.md"]

AGENT = """
import httpx
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
def agent(context):
    messages = [{"role": "user", "content": context.payload["question"]}]
    body = {"model": context.model, "messages": messages}
    key = {"Authorization": f"Bearer {context.api_key}"}
    httpx.post(f"{context.base_url}/chat/completions", json=body, headers=key, timeout=300).raise_for_status()
    return 1.0

if __name__ == "__main__":
    app.run()
"""


def documented() -> dict[str, dict[str, Any]]:
    """Return every config for the stack in the examples and the docs pages, keyed by its location."""
    examples = sorted((ROOT / "examples").glob("*/config.yaml"))
    found = {str(path.relative_to(ROOT)): path.read_text() for path in examples}
    for page in PAGES:
        for i, text in enumerate(re.findall(r"^```ya?ml\n(.*?)^```", page.read_text(), flags=re.M | re.S)):
            found[f"{page.relative_to(ROOT)}-{i}"] = text
    trees = {where: yaml.safe_load(text) for where, text in found.items()}
    whole = {where: tree for where, tree in trees.items() if {"storage", "runtime"} <= tree.keys()}
    return {where: tree for where, tree in whole.items() if tree["runtime"]["kind"] in ("agentcore", "http")}


CONFIGS = documented()


@dataclass
class Account:
    """A stack that was deployed, with its roles' policies in force."""

    proxy: IamProxy
    storage: LocalStorage
    queue_url: str
    folder: Path

    def settings(self, tree: dict[str, Any], **more: Any) -> RolloutConfig:
        """The config of a reader who put in what is theirs, and nothing else."""
        own = json.loads(json.dumps(tree))
        own["storage"]["bucket"] = self.storage.bucket
        model = {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 4096}
        own["model"] = {**own.get("model", {}), **model}
        own["aws"] = {**own.get("aws", {}), "region": "us-east-1", "endpoint_url": self.proxy.url}
        if "url" in own.get("queue", {}):
            own["queue"]["url"] = self.queue_url
        if own["runtime"]["kind"] == "http":  # a server of the reader's: here the stack's runtime
            own["runtime"] = {"kind": "agentcore", "arn": ""}
        theirs = {"arn": ARN, "image": IMAGE, "role": ROLE}
        own["runtime"] |= {key: value for key, value in theirs.items() if key in own["runtime"]}
        own["runtime"]["endpoint_url"] = self.proxy.url
        env = {"ROLLOUT__RELAY__KEY": "k" * 32} if "relay" in own else {}  # as the page says
        own.setdefault("output_dir", str(self.folder / "runs"))
        return load_config(base=own, top=more, env=env)

    async def collect(self, tree: dict[str, Any], folder: Path, **more: Any) -> None:
        """Run a step of this config with two rollouts, of which both complete and no call is denied."""
        collect = {**tree.get("collect", {}), "list_after_idle_s": 1.0, "list_interval_s": 0.3}
        with ScriptedEngine(("It is 7.",)) as engine:
            config = self.settings(
                {**tree, "collect": collect, "output_dir": str(folder / "runs")},
                serving={"kind": "external", "urls": [engine.url]},
                gateway={"host": "127.0.0.1", "port": 0, "public_url": None},
                group={"size": 2},
                **more,
            )
            async with RolloutManager(config) as manager:
                result = await manager.collect([Task("a", {"question": "3 + 4?", "answer": "7"})])
        assert self.proxy.denied == []
        assert result.report.outcomes[Outcome.COMPLETED] == 2, result.failures
        assert [rollout.trainable for rollout in result.rollouts] == [True, True]


def runtime_of(script: Path, folder: Path, storage: LocalStorage, proxy: IamProxy) -> Any:
    """Serve a runtime whose agents reach AWS through the proxy."""
    env = {**os.environ, **storage.environ, "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "agent"}
    limits = EmulatorLimits(grace_s=60.0)
    return serve_emulator(folder, command=(sys.executable, str(script)), env=env, limits=limits)


@pytest.fixture(scope="module")
def services(storage: LocalStorage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IamProxy]:
    """The proxy that enforces policies, with a runtime behind it."""
    script = tmp_path_factory.mktemp("services") / "agent.py"
    script.write_text(AGENT)
    proxy = IamProxy({"s3": storage.endpoint_url, "sqs": storage.endpoint_url}, {})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(proxy):
        runtime = runtime_of(script, script.parent, storage, proxy)
        with portal.wrap_async_context_manager(runtime) as (_, url):
            proxy.upstreams["bedrock-agentcore"] = url
            yield proxy


@pytest.fixture
async def deploy(
    storage: LocalStorage, services: IamProxy, stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Account]]]:
    """Deploys the template with these parameters; the trainer's and the agents' roles get its policies."""
    services.denied.clear()
    async with AsyncExitStack() as ends:

        async def deploy(**parameters: str) -> Account:
            sqs = await ends.enter_async_context(storage.client("sqs"))
            queue_url = (await sqs.create_queue(QueueName=f"stack-{tmp_path.name}"))["QueueUrl"]
            made = stack(
                {
                    "Bucket": f"arn:aws:s3:::{storage.bucket}",
                    "Queue": f"arn:aws:sqs:us-east-1:000000000000:{queue_url.rpartition('/')[2]}",
                    "Runtime": ARN,
                    "AgentRole": ROLE,
                    "Repository": "arn:aws:ecr:us-east-1:000000000000:repository/local/agent",
                },
                AgentName="local",
                ImageUri=IMAGE,
                **parameters,
            )
            services.principals = {"trainer": made.policy("TrainerPolicy"), "agent": made.policy("AgentRole")}
            for name, value in {**storage.environ, "AWS_ACCESS_KEY_ID": "trainer"}.items():
                monkeypatch.setenv(name, value)
            return Account(services, storage, queue_url, tmp_path)

        yield deploy


def parameters_of(tree: dict[str, Any]) -> dict[str, str]:
    """Those that the page says the stack must be deployed with."""
    told = {}
    if tree["storage"].get("presigned"):
        told["Presigned"] = "true"
    if "agent_protocol" in tree["runtime"]:
        told["AgentProtocol"] = tree["runtime"]["agent_protocol"]
    if "image" in tree["runtime"]:
        told["RunRuntimes"] = "true"
    return told


@pytest.mark.parametrize(
    "where",
    [where if where == "README.md-0" else pytest.param(where, marks=pytest.mark.slow) for where in CONFIGS],
)
async def test_a_documented_config_passes_the_check(deploy, where):
    account = await deploy(**parameters_of(CONFIGS[where]))
    await preflight.check_run(account.settings(CONFIGS[where]), machine=False)
    assert account.proxy.denied == []


@pytest.mark.parametrize(
    "where",
    [
        "examples/arithmetic/config.yaml",
        pytest.param("docs/security.md-0", marks=pytest.mark.slow),
        pytest.param("docs/deploy.md-1", marks=pytest.mark.slow),
    ],
)
async def test_a_first_step_with_the_stacks_roles_alone(deploy, where, tmp_path):
    account = await deploy(**parameters_of(CONFIGS[where]))
    await account.collect(CONFIGS[where], tmp_path)


@pytest.mark.slow
async def test_a_step_of_agents_of_another_protocol_with_the_stacks_roles_alone(
    deploy, services, tmp_path, monkeypatch
):
    account = await deploy(AgentProtocol="verl-4216")
    script = ROOT / "tests" / "e2e" / "training_block_agent.py"
    async with runtime_of(script, tmp_path, account.storage, services) as (_, url):
        monkeypatch.setitem(services.upstreams, "bedrock-agentcore", url)
        of_protocol = {"endpoint_url": services.url, "agent_protocol": "verl-4216"}
        await account.collect(CONFIGS["docs/toolkit-agents.md-0"], tmp_path, runtime=of_protocol)


async def test_the_janitor_puts_a_killed_run_in_order_with_the_trainers_role(deploy, tmp_path):
    account = await deploy()
    config = account.settings(CONFIGS["examples/arithmetic/config.yaml"], janitor={"grace_s": 0.1})
    log = tmp_path / "janitor.log"
    async with AsyncExitStack() as ends:
        store = await ResultStore.open(config.storage, config.aws)
        ends.push_async_callback(store.aclose)
        runtime = await open_runtime(config.runtime)
        ends.push_async_callback(runtime.aclose)
        lease = RunLease(store, config.run_id, LeaseHolder.this_process(), config.janitor.lease_s)
        await lease.begin()
        janitor = await Janitor.start(config, lease, runtime, log)
        queue = await AnnouncementQueue.open(config.queue, config.aws, queue_name(config.storage, config.run_id))
        ends.push_async_callback(queue.aclose)
        janitor.queue_made(queue)
        janitor.session_opened("a-session-that-has-ended-" + "0" * 20)
        await lease.claim()
        await janitor.aclose(done=False)  # as if the run had died
        await eventually(lambda: "stopped 0 of 1 sessions" in log.read_text())
        async with account.storage.client("sqs") as sqs:
            left = (await sqs.list_queues(QueueNamePrefix=queue_name(config.storage, config.run_id))).get(
                "QueueUrls", []
            )
    assert account.proxy.denied == []
    assert left == []


# --- what the check must find -----------------------------------------------------------------------------

ARITHMETIC = CONFIGS["examples/arithmetic/config.yaml"]


async def refused(config: RolloutConfig) -> str:
    with pytest.raises(PreflightError) as caught:
        await preflight.check_run(config, machine=False)
    return str(caught.value)


async def test_a_prefix_that_the_stack_does_not_allow_is_found(deploy):
    account = await deploy(ResultPrefix="team/")
    wrong, own = (
        account.settings(ARITHMETIC, storage={"bucket": account.storage.bucket, "prefix": prefix})
        for prefix in ("arithmetic/", "team/")
    )
    message = await refused(wrong)
    assert "storage.prefix" in message
    assert "ResultPrefix" in message
    with pytest.raises(PreflightError, match="ResultPrefix"):
        await RolloutManager(wrong).__aenter__()
    await preflight.check_run(own, machine=False)


async def test_a_run_that_may_not_make_its_queue_is_found(deploy):
    account = await deploy(RunQueues="false")
    assert "queue.url" in (message := await refused(account.settings(ARITHMETIC)))
    assert "RunQueues" in message
    await preflight.check_run(account.settings(ARITHMETIC, queue={"url": account.queue_url}), machine=False)


async def test_a_single_missing_permission_is_found(deploy):
    account = await deploy()
    for action in ("ReceiveMessage", "StopRuntimeSession", "GetObject"):
        denied = {"Effect": "Deny", "Action": f"*:{action}", "Resource": "*"}
        account.proxy.principals["trainer"].append(denied)
        assert action in await refused(account.settings(ARITHMETIC, queue={"url": account.queue_url}))
        account.proxy.principals["trainer"].remove(denied)


@pytest.mark.parametrize("simulated", [True, False])
async def test_the_doctor_finds_every_permission_in_the_stacks_policy(deploy, simulated):
    account = await deploy(RunRuntimes="true")
    if simulated:
        ask = {"Effect": "Allow", "Action": "iam:SimulatePrincipalPolicy", "Resource": "*"}
        account.proxy.principals["trainer"] = [*account.proxy.principals["trainer"], ask]
    url = account.queue_url.replace("123456789012", "000000000000")  # moto's account, and the proxy's
    found = await examine(account.settings(ARITHMETIC, queue={"url": url}), machine=False)
    judged = {each.setting: each.level for each in found if each.fields()["id"].startswith("permission:")}
    levels = {"ok"} if simulated else {"ok", "unchecked"}
    assert {*judged.values()} == levels, [str(each) for each in found if each.level == "warning"]
    if not simulated:
        assert [action for action, level in judged.items() if level == "unchecked"] == [
            "bedrock-agentcore:InvokeAgentRuntime"
        ]
