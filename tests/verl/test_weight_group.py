"""New weights as tensors, over a gloo group to scripted and real SGLang servers. Here, because they need torch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
from contextlib import AsyncExitStack

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from builders import eventually, run_config, served, skip
from rollout_backend.errors import ServingError, WeightsMismatch
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest
from rollout_backend.model.serving.engine import PROBE
from rollout_backend.model.serving.install import find_engine
from rollout_backend.model.serving.model_serving import ModelServing
from rollout_backend.model.serving.weights import ModelFolder, Weights, load_weights
from rollout_backend.testing.forward_pass import reference_logprobs
from rollout_backend.workbench.local.tiny_model import make_tiny_model

TENSORS = {
    "norm": torch.arange(5, dtype=torch.bfloat16),
    "steps": torch.arange(3),
    "layer": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
}


class ScriptedServer:
    """SGLang's interface for a group, with a real gloo group. `fault` is a path that fails, and how."""

    def __init__(self, fault: tuple[str, str] = ("", "")) -> None:
        self.fault = fault
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = "0"
        self.flushed: list[bool] = []
        self._group = None

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == PROBE:
            return web.json_response({"weight_version": self.version})
        self.calls.append(request.path)
        body = await request.json()
        path, how = self.fault
        if request.path == path and how == "hangs":
            await asyncio.Event().wait()
        if request.path == path and how == "refuses":
            return web.json_response({"success": False, "message": "it cannot"}, status=400)
        if request.path == "/init_weights_update_group":
            await asyncio.to_thread(self._join, body)
        if request.path == "/update_weights_from_distributed":
            await asyncio.to_thread(self._receive, body)
        return web.json_response({"success": True, "message": ""})

    def _join(self, body) -> None:
        size, timeout = body["world_size"], torch.distributed.default_pg_timeout
        assert body["backend"] == "gloo"
        store = TCPStore(body["master_address"], body["master_port"], size, is_master=False, timeout=timeout)
        name = body["group_name"]
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._group = ProcessGroupGloo(store, body["rank_offset"], size, timeout)

    def _receive(self, body) -> None:
        """As SGLang's FlattenedTensorBucket, which refuses a tensor that is not aligned."""
        described = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in described]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast(flat, 0).wait()
        at = 0
        for (name, dtype, shape), size in zip(described, sizes, strict=True):
            assert at % dtype.itemsize == 0
            self.tensors[name] = flat[at : at + size].view(dtype).view(shape)
            at += size
        self.version = body.get("weight_version", self.version)
        self.flushed.append(body["flush_cache"])


async def load(server: ScriptedServer, version: int = 1, timeout_s: float = 120.0, **options: int) -> None:
    serving = run_config(serving={"startup_timeout_s": timeout_s}).serving
    async with served(server.handle, shutdown_timeout=0.1) as url:
        await load_weights(url, Weights(version, None, tensors=TENSORS), serving, **options)


@pytest.mark.parametrize("bucket_bytes", [2**20, 64])
async def test_a_server_receives_each_tensor_in_aligned_buckets(bucket_bytes):
    server = ScriptedServer()
    await load(server, version=7, bucket_bytes=bucket_bytes)
    assert server.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert server.version == "7"
    assert server.flushed == ([True] if bucket_bytes > 64 else [False, False, True])
    assert server.calls[:2] == ["/init_weights_update_group", "/begin_weight_update"]
    assert server.calls[-2:] == ["/end_weight_update", "/destroy_weights_update_group"]


async def test_a_server_that_hangs_is_named():
    before = {*threading.enumerate()}
    server = ScriptedServer(("/init_weights_update_group", "hangs"))
    loading = asyncio.create_task(load(server, timeout_s=1000.0))
    await eventually(lambda: server.calls)
    [sending] = [each for each in {*threading.enumerate()} - before if each.name.startswith("rollout-")]
    skip(60)
    with pytest.raises(ServingError, match=r"did not join a gloo group at 127\.0\.0\.1:\d+ within 60 s"):
        await loading
    await eventually(lambda: not sending.is_alive())
    server = ScriptedServer(("/update_weights_from_distributed", "hangs"))
    loading = asyncio.create_task(load(server))
    await eventually(lambda: "/update_weights_from_distributed" in server.calls)
    skip(120)
    with pytest.raises(ServingError, match="did not load new weights within 120 s"):
        await loading


async def test_a_lost_server_ends_the_thread_that_sends_to_it():
    before = {*threading.enumerate()}  # of other tests, whose threads may last as long as their limit
    server = ScriptedServer(("/begin_weight_update", "refuses"))
    with pytest.raises(ServingError, match=r"answered 400 to new weights.*it cannot"):
        await load(server, timeout_s=1000.0)
    [sending] = [each for each in {*threading.enumerate()} - before if each.name.startswith("rollout-")]
    server._group = None  # its end of the group, as when its process ends
    await eventually(lambda: not sending.is_alive())


async def test_a_server_that_is_gone_is_named():
    serving = run_config().serving
    with pytest.raises(ServingError, match="does not accept connections"):
        await load_weights("http://127.0.0.1:1", Weights(1, None, tensors=TENSORS), serving)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(stray=torch.zeros(2)), r"stray is \(2,\) and should be absent"),
        (lambda w: w.update({n: w[n][:1] for n in list(w) if "layers" in n}), "more"),
        (lambda w: w["model.norm.weight"].fill_(math.nan), r"NaN .* in model\.norm\.weight \(1 tensors\) as float16"),
        (lambda w: w["model.norm.weight"].fill_(1e5), r"model\.norm\.weight .* serving\.dtype is too narrow"),
    ],
)
def test_weights_must_match_the_model(tmp_path, change, message):
    model, into = make_tiny_model(tmp_path / "model"), tmp_path / "into"
    into.mkdir()
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    with pytest.raises(WeightsMismatch, match=message):
        ModelFolder(model).write(tensors, into, "float16")
    assert not list(into.iterdir())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_real_server_samples_with_the_tensors_also_after_its_restart(tmp_path):
    models = [make_tiny_model(tmp_path / f"model-{seed}", seed) for seed in range(2)]
    tensors = load_file(models[1] / "model.safetensors")
    config = run_config(
        model={"path": models[0], "renderer": "chatml"},
        serving={"device": "cpu", "dtype": "float32", "weight_transfer": "gloo"},
        output_dir=tmp_path,
    )
    serving = ModelServing(config, tmp_path)
    async with serving.engines, AsyncExitStack() as stack:
        client = EngineClient(Engines(serving.engines.router_url), 240)
        await client.start()
        stack.push_async_callback(client.close)
        prompt = [72, 101, 108, 108, 111]
        progressed = asyncio.Event()

        async def sample(tokens=16, temperature=0.0):
            params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
            return await client.generate(
                EngineRequest(prompt, params, "session", progress=lambda *_: progressed.set())
            )

        before = await sample()
        progressed.clear()
        crossing = asyncio.create_task(sample(700, 1.0))
        await progressed.wait()
        update = await serving.update_weights(tensors)
        assert (update.version, dict(update.failed)) == (1, {})
        crossed, of_tensors = await crossing, await sample()
        assert [span.version for span in crossed.weight_versions] == ["0", "1"]
        await serving.update_weights(models[1])
        of_folder = await sample()
        await serving.update_weights({name: 1.0 * tensor for name, tensor in tensors.items()})
        os.kill(serving.engines._engines[0].server.pid, signal.SIGKILL)
        await eventually(
            lambda: serving.engines.snapshot()[1].restarts == 1 and serving.engines.snapshot()[1].serving, 400
        )
        after_restart = await sample()
    assert [done.weight_versions[0].version for done in (of_tensors, of_folder, after_restart)] == ["1", "2", "3"]
    assert of_tensors.token_ids == of_folder.token_ids == after_restart.token_ids
    assert of_tensors.logprobs == pytest.approx(of_folder.logprobs, abs=1e-5)
    assert of_tensors.logprobs == pytest.approx(after_restart.logprobs, abs=1e-5)
    assert of_tensors.logprobs != pytest.approx(before.logprobs, abs=1e-2)
    assert json.loads((config.run_dir / "weights.json").read_text())["folder"] is None

    sequence = [*prompt, *crossed.token_ids]
    passes = [reference_logprobs(find_engine(), model, [sequence])[0][len(prompt) :] for model in models]
    of_others = []
    for span in crossed.weight_versions:
        for at in range(span.start, span.end):
            assert abs(crossed.logprobs[at] - passes[int(span.version)][at]) < 1e-3
            of_others.append(abs(crossed.logprobs[at] - passes[1 - int(span.version)][at]))
    assert sum(of_others) / len(of_others) > 0.05  # the comparison can tell the versions apart
