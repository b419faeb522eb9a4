import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import urlsplit

import aioboto3
import aiohttp
import boto3
import httpx
import pytest
from botocore.exceptions import ClientError

from builders import eventually, processes_with
from rollout_backend.agents.runtimes.base import open_runtime
from rollout_backend.base import aws
from rollout_backend.config import load_config
from rollout_backend.errors import CloudLost, ConfigError, StartupError
from rollout_backend.workbench.local.cloud import LocalCloud

SESSION = "a" * 40


@asynccontextmanager
async def client(service: str, cloud: LocalCloud, url: str):
    with patch.dict(os.environ, cloud.environ):
        async with aioboto3.Session().client(service, endpoint_url=url) as made:
            yield made


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A marker in the environment of all processes that a test starts."""
    monkeypatch.setenv("MARK", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "production")  # the user's profile must not be read
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the user's own")
    return str(tmp_path)


async def invoke(cloud: LocalCloud, payload: bytes = b"{}") -> dict:
    runtime = cloud.settings()["runtime"]
    async with client("bedrock-agentcore", cloud, runtime["endpoint_url"]) as agentcore:
        answer = await agentcore.invoke_agent_runtime(
            agentRuntimeArn=runtime["arn"], runtimeSessionId=SESSION, payload=payload
        )
        return json.loads(await answer["response"].read())


async def test_cloud_leaves_no_process(app, tmp_path, mark):
    run_dir = tmp_path / "run"
    async with LocalCloud(app, run_dir=run_dir, bucket="mine", env={"GREETING": "hi"}, region="eu-west-1") as cloud:
        config = load_config(overrides=["model.path=/models/tiny"], env={}, base=cloud.settings())
        assert config.storage.bucket == "mine"
        assert config.runtime.kind == "agentcore"
        with patch.dict(os.environ, cloud.environ):
            runtime = await open_runtime(config.runtime)
        log = runtime.log_location(SESSION)
        await runtime.aclose()
        async with client("s3", cloud, config.aws.endpoint_url) as s3:
            await s3.put_object(Bucket="mine", Key="k", Body=b"v", IfNoneMatch="*")
        async with client("sqs", cloud, config.aws.endpoint_url) as sqs:
            queue = await sqs.create_queue(QueueName="q")
            assert queue["QueueUrl"].startswith(config.aws.endpoint_url)
        seen = await invoke(cloud)
        assert seen["cwd"] == str(app.parent)
        assert seen["env"] == {
            "GREETING": "hi",
            "HOST": "127.0.0.1",
            "AWS_ENDPOINT_URL": config.aws.endpoint_url,
            "AWS_ACCESS_KEY_ID": cloud.storage.access_key,
            "AWS_PROFILE": "default",
        }
        state = await cloud.sessions()
        assert [(s["id"], s["pid"], s["status"]) for s in state["sessions"]] == [(SESSION, seen["pid"], "Healthy")]
        assert state["counters"]["started"] == 1
        assert seen["pid"] in processes_with(f"MARK={mark}")
        os.kill(cloud.storage.process.pid, signal.SIGKILL)
        with pytest.raises(CloudLost, match=r"^moto \(local S3 and SQS\) ended with code -9, so this run cannot"):
            await cloud.wait_lost()
        await cloud.stop()  # idempotent
    assert not processes_with(f"MARK={mark}")
    assert log == str(run_dir / "sessions" / f"{SESSION}.log")
    assert "got SIGTERM" in (run_dir / "sessions" / f"{SESSION}.log").read_text()
    with pytest.raises(StartupError, match="not running"):
        await cloud.sessions()


@pytest.mark.parametrize(
    ("agent", "python", "message"),
    [
        ("folder", None, "there is no agent at"),
        ("plain.py", None, "import it from agent_wrapper.bedrock_agentcore"),
        ([], None, "the agent's command is empty"),
        ("agent.py", Path("/no/python"), "no Python interpreter at /no/python"),
    ],
)
def test_invalid_agents_are_refused_at_once(app, tmp_path, monkeypatch, agent, python, message):
    monkeypatch.chdir(app.parent)
    (app.parent / "folder").mkdir()
    (app.parent / "plain.py").write_text("from bedrock_agentcore.runtime import BedrockAgentCoreApp\n")
    with pytest.raises(ConfigError, match=message):
        LocalCloud(agent, run_dir=tmp_path, python=python)


async def test_failed_start_leaves_no_process(app, tmp_path, mark):
    cloud = LocalCloud(app, run_dir=tmp_path, bucket="NOT A BUCKET")
    with pytest.raises(Exception, match="bucket"):
        await cloud.start()
    await eventually(lambda: not processes_with(f"MARK={mark}"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a process that was killed")
async def test_no_process_outlives_a_kill(app, tmp_path, mark):
    program = f"""
import asyncio, json, pathlib
from rollout_backend.workbench.local.cloud import LocalCloud

async def main():
    async with LocalCloud({str(app)!r}, run_dir=pathlib.Path({str(tmp_path)!r})) as cloud:
        print(json.dumps([cloud.settings(), cloud.environ]), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with process:
        settings, environ = json.loads(await asyncio.to_thread(process.stdout.readline))
        pid = (await invoke(SimpleNamespace(settings=lambda: settings, environ=environ)))["pid"]
        assert {process.pid, pid} <= processes_with(f"MARK={mark}").keys()
        process.send_signal(signal.SIGKILL)
    await eventually(lambda: not processes_with(f"MARK={mark}"))


def test_a_write_whose_body_is_cut_stores_nothing(storage, run_id):
    """moto alone is kinder than S3."""
    url = urlsplit(storage.endpoint_url)
    path = f"/{storage.bucket}/{run_id}/cut"
    with socket.create_connection((url.hostname, url.port)) as client:
        client.sendall(f"PUT {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 9\r\n\r\nfour".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{storage.endpoint_url}{path}", timeout=60).status_code == 404


async def test_a_cloud_serves_its_own_user_only(app, tmp_path, monkeypatch):
    """Every user of the machine reaches its ports. This user's clients need no credentials in the environment, so
    settings of `rollout deploy --local` work in any program, and send real credentials nowhere."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAREAL")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "real")
    async with LocalCloud(app, run_dir=tmp_path / "run") as cloud:
        url, session = cloud.storage.endpoint_url, {"agentRuntimeArn": cloud.runtime.arn, "runtimeSessionId": SESSION}
        place = {"region": "us-east-1", "endpoint_url": url}
        async with aws.client("s3", **place) as s3, aws.client("sqs", **place) as sqs:
            await s3.put_object(Bucket=cloud.storage.bucket, Key="key", Body=b"mine")
            await sqs.list_queues()
            signed = await s3.generate_presigned_url("get_object", {"Bucket": cloud.storage.bucket, "Key": "key"})
        place["endpoint_url"] = cloud.runtime.endpoint_url
        async with aws.client("bedrock-agentcore", **place) as agentcore:
            answer = await agentcore.invoke_agent_runtime(**session, payload=b"{}")
            await answer["response"].read()

        def read(path: str) -> int:
            return httpx.get(path, timeout=120).status_code

        def of_others(keys: dict[str, str], runtime_url: str) -> Iterator[Callable[[], object]]:
            agentcore, control = (
                boto3.client(name, "us-east-1", endpoint_url=runtime_url, **keys)
                for name in ("bedrock-agentcore", "bedrock-agentcore-control")
            )
            yield lambda: agentcore.invoke_agent_runtime(**session, payload=b"{}")
            yield lambda: agentcore.stop_runtime_session(**session)
            yield control.list_agent_runtimes

        def of_others_at_storage(keys: dict[str, str]) -> Iterator[Callable[[], object]]:
            s3, sqs = (boto3.client(name, "us-east-1", endpoint_url=url, **keys) for name in ("s3", "sqs"))
            yield lambda: s3.put_object(Bucket=cloud.storage.bucket, Key="code.zip", Body=b"")
            yield sqs.list_queues

        async def refused(calls: Iterator[Callable[[], object]], status: int) -> None:
            for call in calls:
                with pytest.raises(ClientError) as refused:
                    await asyncio.to_thread(call)
                assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == status

        assert await asyncio.to_thread(read, signed) == 200
        for path in ("", "/rollouts/key", "/moto-api/data.json", "/rollouts/key?X-Amz-Credential=other%2F2026"):
            assert await asyncio.to_thread(read, f"{url}{path}") == 403
        async with aiohttp.ClientSession() as http, http.head(url) as reply:  # `rollout doctor` reads the time
            assert reply.status == 403
            assert "Date" in reply.headers
        for keys in ({}, {"aws_access_key_id": "local", "aws_secret_access_key": "local"}):
            await refused(of_others_at_storage(keys), 403)
            await refused(of_others(keys, place["endpoint_url"]), 403)
        port, _, secret = place["endpoint_url"].rpartition("/")
        own = {"aws_access_key_id": cloud.storage.access_key, "aws_secret_access_key": "local"}
        for guess in (port, f"{port}/{'0' * len(secret)}"):
            assert await asyncio.to_thread(read, f"{guess}/_local/sessions") == 404
            await refused(of_others(own, guess), 404)
        assert (await cloud.sessions())["counters"]["started"] == 1
        files = [*(tmp_path / "cache" / "local-keys").iterdir()]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert not [*(tmp_path / "cache" / "local-keys").iterdir()]
