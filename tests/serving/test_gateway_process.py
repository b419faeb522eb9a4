import resource
import signal
import socket
import subprocess
import sys

import openai
import pytest

from agent_wrapper.trajectory import fetch_trajectory
from rollout_backend.config import RolloutConfig
from rollout_backend.core.seal import Sealer
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.serving.gateway_process import GatewayProcess
from rollout_backend.serving.server_process import ServerProcess

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/agent-0123456789"


def config(**sections) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "model": {"path": BYTE_MODEL, "name": "m"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "agentcore", "arn": ARN},
            **sections,
        }
    )


async def call(endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        return await client.chat.completions.create(
            model=endpoint.name, messages=[{"role": "user", "content": "a very private question"}]
        )


async def test_a_whole_life(tmp_path, claims):
    log = tmp_path / "logs" / "gateway.log"
    with ScriptedEngine(["a very private answer"]) as engine:
        gateway = GatewayProcess(config(), engine.url, log)
        await gateway.stop()  # of what never ran is nothing
        await gateway.start()
        try:
            endpoint = gateway.endpoint(claims())
            assert endpoint.trajectory_url == f"{gateway.url}/v1/rollout/trajectory"
            assert (await call(endpoint)).choices[0].message.content == "a very private answer"
            stats = await gateway.stats()
            assert (stats.calls, stats.sessions_open) == (1, 1)
            await gateway.revoke(["s"])
            with pytest.raises(openai.APIStatusError, match="closed"):
                await call(endpoint)
        finally:
            await gateway.stop()
    assert f"the gateway ended with code {-signal.SIGTERM}." in await gateway.wait()  # as the signal would have it
    with pytest.raises(ServingError, match="not running"):
        await gateway.stats()
    logged = log.read_text()
    assert endpoint.api_key not in logged
    assert "private" not in logged
    assert "Traceback" not in logged


async def test_agents_may_have_another_way_in(tmp_path, claims):
    gateway = GatewayProcess(config(gateway={"public_url": "https://lb.example/gw/"}), "http://e", tmp_path / "log")
    endpoint = gateway.endpoint(claims())
    assert endpoint.base_url == "https://lb.example/gw/v1"
    assert endpoint.trajectory_url == "https://lb.example/gw/v1/rollout/trajectory"


async def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = GatewayProcess(config(gateway={"port": taken.getsockname()[1]}), "http://e", tmp_path / "log")
        with pytest.raises(StartupError, match=r"gateway\.port"):
            await gateway.start()


async def test_a_model_that_cannot_be_used_is_named(tmp_path):
    gateway = GatewayProcess(config(model={"path": str(tmp_path)}), "http://e", tmp_path / "log")
    with pytest.raises(StartupError, match="holds no tokenizer"):
        await gateway.start()


FILES = """
import resource
from rollout_backend.errors import ConfigError
from rollout_backend.gateway.__main__ import allow_files

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024))
allow_files(64)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
allow_files(16)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    allow_files(1000)
except ConfigError as error:
    print(error)
"""


def test_the_limit_of_open_files_is_raised_or_named():
    told = subprocess.run([sys.executable, "-c", FILES], check=True, capture_output=True, text=True).stdout
    enough, kept, refused = told.splitlines()
    assert enough == kept == "(960, 1024)"
    assert "gateway.max_concurrent_calls=1000 takes 3768 open files" in refused
    assert "ulimit -Hn" in refused


async def test_a_server_may_open_more_files_than_the_shell_that_started_it(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        process = ServerProcess("sh", ["sh", "-c", "ulimit -n"], tmp_path / "log")
        await process.start()
        await process.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert int((tmp_path / "log").read_text()) == min(hard, 65_536)


async def test_what_it_hands_out_is_sealed_with_the_runs_secret(tmp_path, claims):
    secret = "the secret of the settings " * 2
    with ScriptedEngine(["seven"]) as engine:
        settings = config(gateway={"secret": secret})
        gateway = GatewayProcess(settings, engine.url, tmp_path / "log", seal_secret=secret)
        await gateway.start()
        try:
            endpoint = gateway.endpoint(claims())
            await call(endpoint)
            trajectory = await fetch_trajectory(endpoint, budget_s=20)
        finally:
            await gateway.stop()
    assert trajectory.seal == Sealer(secret).seal(trajectory, claims()).seal
    assert secret not in (tmp_path / "log").read_text()
