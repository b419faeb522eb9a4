"""Credentials that are missing, that cannot be renewed, or that have expired: each error says which."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout_backend.collect.queue import AnnouncementQueue
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import AgentCoreConfig, AwsConfig, QueueConfig, StorageConfig
from rollout_backend.dispatch.agentcore import AgentCoreRuntime
from rollout_backend.errors import CredentialsExpired, PreflightError, Rejected, RuntimeCallError, Unsigned
from rollout_backend.local.fault_proxy import Fault, FaultProxy, Rule

ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/local-0123456789"
SESSION = "s" * 40
KEYS = """
import datetime, json, pathlib
assert pathlib.Path({good!r}).exists()
soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
keys = {{"AccessKeyId": "AK", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon.isoformat()}}
print(json.dumps({{"Version": 1, **keys}}))
"""


@pytest.fixture
async def proxy(local_aws) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(local_aws.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def a_runtime(proxy: FaultProxy, stack: AsyncExitStack) -> AgentCoreRuntime:
    runtime = await AgentCoreRuntime.open(AgentCoreConfig(arn=ARN, endpoint_url=proxy.url))
    stack.push_async_callback(runtime.aclose)
    return runtime


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException"])
async def test_what_s3_and_sqs_say_of_expired_credentials_ends_the_run(proxy, stack, local_aws, run_id, code) -> None:
    where = AwsConfig(endpoint_url=proxy.url)
    store = await ResultStore.open(StorageConfig(bucket=local_aws.bucket), where)
    stack.push_async_callback(store.aclose)
    queue = await AnnouncementQueue.open(QueueConfig(wait_s=0), where, run_id)
    stack.push_async_callback(queue.aclose)
    proxy.rules.append(Rule("*", Fault.FAIL, status=400, code=code))
    for call in (
        store.get("a"),
        store.put("a", b""),
        store.own(run_id, "me"),
        anext(store.keys("a")),
        queue.receive(),
    ):
        with pytest.raises(CredentialsExpired, match=rf"says {code}.*aws sso login.*under its run_id"):
            await call
    with pytest.raises(PreflightError, match=f"refuses us: {code}.*that they have not expired"):
        await store.check()
    proxy.rules.clear()


async def test_the_runtimes_refusal_of_expired_credentials_has_its_own_reason(proxy, stack) -> None:
    proxy.rules.append(Rule("*", Fault.FAIL, status=403, code="ExpiredTokenException"))
    runtime = await a_runtime(proxy, stack)
    for call in (runtime.invoke(SESSION, b"{}"), runtime.stop(SESSION)):
        with pytest.raises(Rejected, match="ExpiredTokenException") as caught:
            await call
        assert (caught.value.reason, caught.value.never_opened) == ("credentials_expired", True)
    assert [call.operation.partition(":")[2] for call in proxy.calls] == ["InvokeAgentRuntime", "StopRuntimeSession"]


@pytest.mark.parametrize("how", ["missing", "cannot be renewed"])
async def test_a_call_that_cannot_be_signed_is_not_sent_and_may_be_tried_again(
    proxy, stack, monkeypatch, tmp_path: Path, how: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    good, config = tmp_path / "good", tmp_path / "config"
    good.touch()
    (tmp_path / "keys.py").write_text(KEYS.format(good=str(good)))
    process = f"credential_process = {sys.executable} {tmp_path / 'keys.py'}\n" if how == "cannot be renewed" else ""
    config.write_text(f"[default]\n{process}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    runtime = await a_runtime(proxy, stack)
    good.unlink()
    for call in (runtime.invoke(SESSION, b"{}"), runtime.stop(SESSION)):
        with pytest.raises(RuntimeCallError, match="could not be signed") as caught:
            await call
        assert isinstance(caught.value, Unsigned)
        assert (caught.value.reason, caught.value.never_opened) == ("no_credentials", True)
    assert proxy.calls == []
