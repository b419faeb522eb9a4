"""The middleware before a real vLLM on the CPU, whose engine loads an adapter as in verl's servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from adapters import save_adapter
from rollout_backend.errors import EngineUnavailable
from rollout_backend.model.gateway.engine.client import EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest, VllmProtocol
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.serving.engine import is_responding
from rollout_backend.model.serving.local_engine import base_environment, cpu_threads
from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.testing.forward_pass import adapter_logprobs
from rollout_backend.verl.verl_api import ADAPTER
from rollout_backend.workbench.local.tiny_model import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROMPTS = [[10 + number, *range(40, 52)] for number in range(8)]
PARAMS = {"temperature": 1.0, "max_new_tokens": 40, "stop_token_ids": [2]}
SAME, OTHER = 1e-3, 0.05  # largest difference of logprobs with one adapter, and least mean difference with others


class Server(NamedTuple):
    url: str
    http: aiohttp.ClientSession
    client: EngineClient

    async def update_weights(self, version: int, folder: Path | None = None) -> list[int]:
        """Replace the engine's adapter, and return the ids of those that it has then."""
        body = {"version": version, "folder": str(folder) if folder is not None else None}
        async with self.http.post(f"{self.url}/verl/update_weights", json=body, raise_for_status=True) as reply:
            loaded: list[int] = (await reply.json())["loaded"]
            return loaded

    async def sample(self, adapter: str = ADAPTER) -> list[Completion]:
        """Sample a reply to each prompt, every second one as a stream."""
        calls = [
            self.client.generate(
                EngineRequest(ids, PARAMS, "s", adapter=adapter, progress=(lambda *_: None) if at % 2 else None)
            )
            for at, ids in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*calls)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), heads=2)


@pytest.fixture
async def server(model: Path, vllm_python: Path, tmp_path: Path) -> AsyncIterator[Server]:
    port = free_port()
    options = {
        "model": str(model), "port": str(port), "dtype": "float32", "max-model-len": "1024", "max-num-seqs": "16",
        "kv-cache-memory-bytes": str(1 << 28), "logprobs-mode": "processed_logprobs", "generation-config": "vllm",
        "max-loras": "1", "max-lora-rank": "8",
    }  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    script = HERE / "vllm_adapter_server.py"
    environment = base_environment(os.environ) | cpu_threads(1)
    environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(vllm_python), str(script), *arguments, "--enforce-eager", "--enable-lora"]
    process = ServerProcess("vLLM", command, tmp_path / "vllm.log", environment)
    await process.start()
    client = EngineClient(Engines(f"http://127.0.0.1:{port}"), 120.0, 2, protocol=VllmProtocol())
    await client.start()
    try:
        async with aiohttp.ClientSession() as http:
            server = Server(f"http://127.0.0.1:{port}", http, client)
            await process.wait_healthy(lambda: is_responding(server.url), 300)  # the middleware answers the probe
            yield server
    finally:
        await client.close()
        await process.stop(grace_s=20)


async def test_calls_sample_with_the_adapter_that_the_engine_has(
    server: Server, model: Path, vllm_python: Path, tmp_path: Path
) -> None:
    folders = [save_adapter(tmp_path / f"adapter{seed}", model, seed) for seed in range(2)]
    with pytest.raises(EngineUnavailable, match="the engine has no LoRA adapter yet"):
        await server.sample()
    replies: list[list[Completion]] = []
    for version, folder in enumerate(folders, start=1):
        assert await server.update_weights(version, folder) == [123]
        replies.append(await server.sample())
        for unnamed in ("", str(model), "123"):
            with pytest.raises(EngineRefused, match="would be sampled without the adapter"):
                await server.sample(unnamed)
    assert await server.update_weights(3) == []
    with pytest.raises(EngineUnavailable, match="the engine has no LoRA adapter yet"):
        await server.sample()
    assert await server.update_weights(4, folders[0]) == [123]  # the refused calls did not end the engine
    replies.append(await server.sample())

    for version, each in zip((1, 2, 4), replies, strict=True):
        spans = {(span.version, span.start) for reply in each for span in reply.weight_versions}
        assert spans == {(f"{ADAPTER}@{version}", 0)}
    sampled = [[*prompt, *reply.token_ids] for each in replies for prompt, reply in zip(PROMPTS, each, strict=True)]
    tables = await asyncio.to_thread(adapter_logprobs, vllm_python, model, sampled, [*folders, None])
    for batch, own in enumerate((0, 1, 0)):
        for adapter, table in enumerate(tables):
            rows = table[batch * len(PROMPTS) : (batch + 1) * len(PROMPTS)]
            differences = _differences(replies[batch], rows)
            mean = sum(differences) / len(differences)
            assert max(differences) < SAME if adapter == own else mean > OTHER, (batch, adapter, mean)


def _differences(replies: list[Completion], table: list[list[float]]) -> list[float]:
    """Return how far the logprobs of sampled tokens are from those of a forward pass."""
    return [
        abs(own - other)
        for prompt, reply, row in zip(PROMPTS, replies, table, strict=True)
        for own, other in zip(reply.logprobs, row[len(prompt) :], strict=True)
        if own is not None
    ]
