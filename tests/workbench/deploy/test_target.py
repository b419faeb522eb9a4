"""The outputs of a stack, as the settings of a run."""

from dataclasses import replace
from unittest.mock import AsyncMock

import pytest
import yaml
from aiohttp import web

from builders import served
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.cli.deploy import _write_config
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, PreflightError, Throttled
from rollout_backend.workbench.deploy.deployment import Deployment, config_text, run_smoke_rollout, runtime_settings
from rollout_backend.workbench.deploy.target import read_stack
from stacks import described_stack

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789"
ROLE = "arn:aws:iam::123456789012:role/my-agent-AgentRole"
OUTPUTS = {
    "BucketName": "my-agent-bucket",
    "AgentRoleArn": ROLE,
    "RepositoryUri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/my-agent",
    "QueueUrl": "https://sqs.us-east-1.amazonaws.com/123456789012/my-agent",
}
NETWORK = {
    "SubnetIds": "subnet-0123456789abcdef0,subnet-0123456789abcdef1",
    "SecurityGroupId": "sg-0123456789abcdef0",
    "PublicUrl": "https://rollouts.example.com/s/{shard}",
}


@pytest.fixture(autouse=True)
def account(local_keys, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")


async def read(
    status: str = "UPDATE_COMPLETE", outputs: dict[str, str] = OUTPUTS, internet: str = "true", **parameters: str
):
    text = described_stack(outputs, {"AgentName": "my_agent", **parameters}, status)
    network = described_stack(NETWORK, {"Internet": internet})
    texts = {"my-agent": text, "my-network": network}

    async def answer(request: web.Request) -> web.Response:
        name = str((await request.post())["StackName"])
        return web.Response(text=texts[name], content_type="text/xml")

    async with served(answer) as url:
        return await read_stack("my-agent", endpoint_url=url)


async def test_a_stack_describes_a_deployment_and_its_runs():
    target = await read()
    assert (target.runtime_name, target.role, target.arn) == ("rollout_my_agent", ROLE, None)
    assert target.settings() == {
        "aws": {"region": "us-east-1"},
        "storage": {"bucket": "my-agent-bucket"},
        "runtime": {"kind": "agentcore"},
    }


@pytest.mark.parametrize("parameters", [{"Presigned": "true"}, {"RunQueues": "false"}])
async def test_the_settings_follow_the_stacks_parameters(parameters):
    target = await read(outputs={**OUTPUTS, "RuntimeArn": ARN}, ResultPrefix="team/", **parameters)
    config = RolloutConfig.parse({"model": {"path": "/models/qwen"}, **target.settings()})
    assert config.storage.prefix == "team/"
    assert config.queue.url == OUTPUTS["QueueUrl"]
    assert config.storage.presigned == ("Presigned" in parameters)


async def test_a_stack_names_its_network_which_describes_the_gateway(tmp_path):
    target = await read(NetworkStack="my-network")
    deployed = await read(outputs={**OUTPUTS, "RuntimeArn": ARN}, NetworkStack="my-network")
    config = RolloutConfig.parse({"model": {"path": "/m"}, **deployed.settings()})
    assert (config.gateway.host, config.gateway.port) == ("0.0.0.0", 8000)
    assert config.gateway.public_url == NETWORK["PublicUrl"]
    subnets = tuple(NETWORK["SubnetIds"].split(","))
    assert f"run its sessions in {', '.join(subnets)}" in [*Deployment(tmp_path, target).plan()]
    other = Deployment(tmp_path, target, subnets=("subnet-2",), security_groups=("sg-2",))
    assert "run its sessions in subnet-2" in [*other.plan()]
    (tmp_path / "config.yaml").write_text("gateway: {processes: 4}")
    written = yaml.safe_load(config_text(target.settings(), tmp_path, {}, ["gateway.port=9000"]))
    assert written["gateway"] == {"processes": 4, "host": "0.0.0.0", "port": 9000, "public_url": NETWORK["PublicUrl"]}


async def test_agents_in_a_network_of_the_users_call_the_runs_own_address(tmp_path):
    target = replace(await read(), arn=ARN, in_network=True)
    config = RolloutConfig.parse({"model": {"path": "/m"}, **target.settings()})
    assert (config.gateway.public_url, config.gateway.port) == ("auto", 8000)
    (tmp_path / "config.yaml").write_text("gateway: {port: 9000, public_url: 'https://mine.example'}")
    written = yaml.safe_load(config_text(target.settings(), tmp_path, {}, []))
    assert written["gateway"] == {"port": 9000, "public_url": "https://mine.example"}
    for placeholder in ("<yours, the address>", "https://gateway.example.com"):  # of `rollout init`, of our examples
        (tmp_path / "config.yaml").write_text(f"gateway: {{public_url: '{placeholder}'}}")
        assert yaml.safe_load(config_text(target.settings(), tmp_path, {}, []))["gateway"]["public_url"] == "auto"


@pytest.mark.parametrize(
    ("gateway", "asked"),
    [
        ("{}", "model.path and gateway.public_url"),
        ("gateway: {public_url: 'https://gateway.example.com'}", "model.path and gateway.public_url"),
        ("gateway: {public_url: 'https://mine.example'}", "model.path"),
    ],
)
async def test_the_command_asks_for_each_value_that_the_config_lacks(tmp_path, capsys, gateway, asked):
    (tmp_path / "config.yaml").write_text(gateway)
    target = replace(await read(), arn=ARN)
    _write_config(Deployment(tmp_path, target), target.settings(), tmp_path / "rollout.yaml", {}, [])
    assert f"set {asked} in " in capsys.readouterr().out


async def test_without_a_way_to_the_internet_the_gateway_stays_the_users_own():
    target = await read(NetworkStack="my-network", internet="false")
    assert target.network is not None
    assert "gateway" not in target.settings()


async def test_a_qualifier_pins_an_endpoint_and_is_written_into_the_config(tmp_path):
    assert runtime_settings(tmp_path, []).qualifier == "DEFAULT"
    assert runtime_settings(tmp_path, ["runtime.qualifier=training"]).qualifier == "training"
    (tmp_path / "config.yaml").write_text("runtime: {kind: agentcore, qualifier: nightly}")
    assert runtime_settings(tmp_path, []).qualifier == "nightly"
    with pytest.raises(ConfigError, match=r"runtime\.qualifier='my-endpoint' is no name of an endpoint"):
        runtime_settings(tmp_path, ["runtime.qualifier=my-endpoint"])
    target = await read()
    plain, pinned = (Deployment(tmp_path, replace(target, qualifier=name)) for name in ("DEFAULT", "nightly"))
    assert pinned.target.settings()["runtime"]["qualifier"] == "nightly"
    assert {*pinned.plan()} - {*plain.plan()} == {
        "pin its endpoint nightly to that version, which later deployments do not change"
    }
    names = {call.name for call in pinned.calls()} - {call.name for call in plain.calls()}
    assert names == {"CreateAgentRuntimeEndpoint", "UpdateAgentRuntimeEndpoint"}


async def test_settings_of_the_runtime_are_deployed_and_not_written_into_the_config(tmp_path):
    (tmp_path / "config.yaml").write_text("runtime: {kind: agentcore, environment: {A: b}, invoke_per_s: 3}")
    overrides = ["runtime.platform_version=V2", "runtime.min_memory_mib=4096", "runtime.max_sessions=9"]
    found = runtime_settings(tmp_path, overrides)
    target = replace(await read(), arn=ARN)
    plan = [*Deployment(tmp_path, target, runtime=found).plan()]
    given = ["environment: A", "platform_version: V2", "min_memory_mib: 4096"]
    assert [line for line in plan if line.startswith("give it")] == [f"give it {each}" for each in given]
    written = yaml.safe_load(config_text(target.settings(), tmp_path, {}, overrides))
    assert written["runtime"] == {"kind": "agentcore", "arn": ARN, "max_sessions": 9}
    assert written["prices"] == {"platform": "V2"}
    with pytest.raises(ConfigError, match=r"runtime: .*max_lifetime_s above 28800 .* needs capacity_provider"):
        runtime_settings(tmp_path, ["runtime.max_lifetime_s=30000"])
    provider = "arn:aws:bedrock-agentcore:us-east-1:123456789012:capacity-provider/mine-0123456789"
    (tmp_path / "config.yaml").write_text(f"runtime: {{kind: agentcore, capacity_provider: '{provider}'}}\nprices:\n")
    written = yaml.safe_load(config_text(target.settings(), tmp_path, {}, []))
    assert written["prices"] == {"vcpu_hour": 0.0, "gb_hour": 0.0}  # the instances have a price of their own
    plan = [*Deployment(tmp_path, target, runtime=runtime_settings(tmp_path, [])).plan()]
    assert [line for line in plan if "for x86 instances, push an image and set runtime.image" in line]


async def test_a_stack_for_agents_of_another_protocol_says_so_to_runs():
    target = await read(AgentProtocol="verl-4216")
    assert target.settings()["runtime"] == {"kind": "agentcore", "agent_protocol": "verl-4216"}


async def test_sessions_are_removed_with_a_stack_that_allows_them():
    assert (await read(TrainingSessions="true")).trains_in_sessions
    assert not (await read()).trains_in_sessions


async def test_a_stack_that_is_not_complete_or_another_one():
    with pytest.raises(PreflightError, match="my-agent is CREATE_IN_PROGRESS: wait"):
        await read("CREATE_IN_PROGRESS")
    with pytest.raises(PreflightError, match=r"my-agent is ROLLBACK_COMPLETE: its creation failed.*Delete it"):
        await read("ROLLBACK_COMPLETE")
    with pytest.raises(PreflightError, match=r"has no output AgentRoleArn, QueueUrl, RepositoryUri"):
        await read(outputs={"BucketName": "b"})


async def test_a_missing_stack():
    text = (
        "<ErrorResponse><Error><Code>ValidationError</Code><Message>Stack with id my-agent does not exist</Message>"
        "</Error></ErrorResponse>"
    )

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, text=text, content_type="text/xml")

    async with served(refuse) as url:
        with pytest.raises(PreflightError, match=r"no stack my-agent in us-east-1: deploy infra/template\.yaml"):
            await read_stack("my-agent", endpoint_url=url)


async def test_a_stop_that_is_refused_fails_no_deployment(monkeypatch):
    runtime = AsyncMock()
    runtime.stop.side_effect = Throttled("too many stops")
    monkeypatch.setattr(AgentCoreRuntime, "open", AsyncMock(return_value=runtime))
    target = replace(await read(Presigned="true"), arn=ARN)
    assert "a session starts" in await run_smoke_rollout(target, {})
    runtime.aclose.assert_awaited()
