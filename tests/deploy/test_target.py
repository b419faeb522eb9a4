"""The outputs of a stack, as the settings of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollout_backend.config import RolloutConfig
from rollout_backend.deploy.target import read_stack
from rollout_backend.errors import PreflightError

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789"
ROLE = "arn:aws:iam::123456789012:role/my-agent-AgentRole"
OUTPUTS = {
    "BucketName": "my-agent-bucket",
    "AgentRoleArn": ROLE,
    "RepositoryUri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/my-agent",
    "QueueUrl": "https://sqs.us-east-1.amazonaws.com/123456789012/my-agent",
}


@pytest.fixture(autouse=True)
def account(local_keys, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def described(status: str, outputs: dict[str, str], parameters: dict[str, str]) -> str:
    def members(kind: str, values: dict[str, str]) -> str:
        found = (
            f"<member><{kind}Key>{name}</{kind}Key><{kind}Value>{value}</{kind}Value></member>"
            for name, value in values.items()
        )
        return f"<{kind}s>{''.join(found)}</{kind}s>"

    return (
        "<DescribeStacksResponse><DescribeStacksResult><Stacks><member><StackName>my-agent</StackName>"
        f"<StackStatus>{status}</StackStatus><CreationTime>2026-11-01T00:00:00Z</CreationTime>"
        f"{members('Output', outputs)}{members('Parameter', parameters)}"
        "</member></Stacks></DescribeStacksResult></DescribeStacksResponse>"
    )


@asynccontextmanager
async def cloudformation(answer: Callable[[], web.Response]) -> AsyncIterator[str]:
    async def respond(_: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_post("/", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def read(status: str = "UPDATE_COMPLETE", outputs: dict[str, str] = OUTPUTS, **parameters: str):
    text = described(status, outputs, {"AgentName": "my_agent", **parameters})
    async with cloudformation(lambda: web.Response(text=text, content_type="text/xml")) as url:
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


async def test_a_stack_for_agents_of_another_protocol_says_so_to_runs():
    target = await read(AgentProtocol="verl-4216")
    assert target.settings()["runtime"] == {"kind": "agentcore", "agent_protocol": "verl-4216"}


async def test_a_stack_that_is_not_complete_or_another_one():
    with pytest.raises(PreflightError, match="my-agent is CREATE_IN_PROGRESS: wait"):
        await read("CREATE_IN_PROGRESS")
    with pytest.raises(PreflightError, match=r"has no output AgentRoleArn, QueueUrl, RepositoryUri"):
        await read(outputs={"BucketName": "b"})


async def test_a_missing_stack():
    text = (
        "<ErrorResponse><Error><Code>ValidationError</Code><Message>Stack with id my-agent does not exist</Message>"
        "</Error></ErrorResponse>"
    )
    async with cloudformation(lambda: web.Response(status=400, text=text, content_type="text/xml")) as url:
        with pytest.raises(PreflightError, match=r"no stack my-agent in us-east-1: deploy infra/template\.yaml"):
            await read_stack("my-agent", endpoint_url=url)
