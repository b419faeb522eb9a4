import signal
import socket
import time

import openai
import pytest

from agent_wrapper.contract import Sampling
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.gateway.process import GatewayProcess
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine

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


def claims(session: str = "s") -> SessionClaims:
    return SessionClaims(
        run_id="r",
        step=0,
        rollout_id="x",
        attempt=1,
        session_id=session,
        sampling=Sampling(),
        expires_at=time.time() + 600,
    )


async def call(endpoint):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        return await client.chat.completions.create(
            model=endpoint.name, messages=[{"role": "user", "content": "a very private question"}]
        )


async def test_a_whole_life(tmp_path):
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
    assert await gateway.wait() == -signal.SIGTERM  # uvicorn ends in order, then as the signal would have it
    with pytest.raises(ServingError, match="not running"):
        await gateway.stats()
    logged = log.read_text()
    assert endpoint.api_key not in logged
    assert "private" not in logged
    assert "Traceback" not in logged


async def test_agents_may_have_another_way_in(tmp_path):
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
