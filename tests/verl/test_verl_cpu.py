"""verl on the CPU: its registries find the platform and the rollout, and servers serve the trained weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from rollout_backend.errors import EngineUnavailable, WeightsMismatch
from rollout_backend.local.tiny_model import make_tiny_model
from rollout_backend.serving.engine import pause_generation, resume_generation
from rollout_backend.serving.engine_commands import ServerNode
from rollout_backend.serving.weights import ModelFolder
from verl_cpu.environment import ROLLOUT_NAME, overrides
from verl_cpu.replica_server import SGLangServer
from verl_cpu.replica_settings import ServerSettings, model_of

pytestmark = [
    pytest.mark.engine,
    # Raised in Ray and in verl.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FAKE_ENGINE = Path(__file__).parents[1] / "serving" / "fake_engine.py"
PROMPT = [1, 40, 41, 42]
OLD, NEW, OTHER = 0, 1, 2  # seeds of the models
SAME = 1e-4  # maximum difference from the trainer's own forward pass, by float32's rounding


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), seed) for seed in (OLD, NEW, OTHER)]


@pytest.fixture(scope="module")
def weights(models: list[Path]) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return the tensors that a trainer sends: all of the model's, including the tied output layer."""
    from transformers import AutoModelForCausalLM

    def of(seed: int) -> dict[str, torch.Tensor]:
        return dict(AutoModelForCausalLM.from_pretrained(models[seed]).state_dict())

    return of


@pytest.fixture(scope="module")
def config(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`actor_rollout_ref` of verl's settings, with our overrides."""
    from hydra import compose, initialize_config_module

    rollout = "actor_rollout_ref.rollout"
    folders = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("logs")
    own = "{{threads: 1, weights_dir: {}, log_dir: {}}}".format(*folders)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                *overrides(),
                f"actor_rollout_ref.model.path={models[OLD]}",
                f"{rollout}.dtype=float32",
                f"{rollout}.prompt_length=64",
                f"{rollout}.response_length=256",
                f"+{rollout}.engine_kwargs.{ROLLOUT_NAME}={own}",
            ],
        ).actor_rollout_ref


@pytest.fixture(scope="module")
def replica(config: Any) -> Iterator[Any]:
    import ray
    from verl.workers.rollout.replica import get_rollout_replica_class

    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    replica = get_rollout_replica_class(ROLLOUT_NAME)(
        replica_rank=0, config=config.rollout, model_config=config.model, gpus_per_node=1
    )
    asyncio.run(replica.launch_servers())
    yield replica
    ray.shutdown()


@pytest.fixture
def adapter(config: Any, replica: Any) -> Any:
    from verl.workers.rollout.base import get_rollout_class

    return get_rollout_class(ROLLOUT_NAME, "async")(config.rollout, config.model, None, replica_rank=0)


def request(tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


def streamed(http: httpx.AsyncClient, replica: Any, tokens: int) -> AbstractAsyncContextManager[httpx.Response]:
    return http.stream("POST", f"http://{replica.server_address}/generate", json={**request(tokens), "stream": True})


def generate(replica: Any, tokens: int = 16) -> dict[str, Any]:
    reply = httpx.post(f"http://{replica.server_address}/generate", json=request(tokens), timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def version(reply: dict[str, Any]) -> str:
    return str(reply["meta_info"]["weight_version"])


def distance(reply: dict[str, Any], model: Path) -> float:
    """Return the largest difference between served logprobs and those of the model's own forward pass."""
    from transformers import AutoModelForCausalLM

    ids, served = reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([PROMPT + ids])).logits[0]
    own = torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return float((own - torch.tensor(served)).abs().max())


def test_verl_finds_the_cpu_platform() -> None:
    from verl.utils.device import get_device_name, get_resource_name, get_torch_device

    assert get_device_name() == "cpu"
    assert get_resource_name() == "GPU"  # logical GPUs
    used, total = get_torch_device().mem_get_info()
    assert 0 < used < total


@pytest.mark.slow
def test_new_weights_are_served_with_their_version(replica, adapter, models, weights):
    assert distance(generate(replica), models[OLD]) < SAME
    asyncio.run(adapter.update_weights(iter(weights(NEW).items()), global_steps=1))
    reply = generate(replica)
    assert version(reply) == "1"
    assert distance(reply, models[NEW]) < SAME
    assert not list(ServerSettings.of(adapter.config).weights_dir.glob("rollout-weights-*")), "weights are left"


@pytest.mark.slow
def test_a_paused_server_ends_running_requests_and_holds_new_ones(replica: Any, adapter: Any) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=60) as http, streamed(http, replica, 250) as running:
            lines = running.aiter_lines()
            assert (await anext(lines)).startswith("data: "), "the server does not generate"
            await pause_generation(f"http://{replica.server_address}")
            await replica.sleep()
            *_, last = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"]["completion_tokens"] < 250
        held = asyncio.create_task(asyncio.to_thread(generate, replica, 4))
        await adapter.resume(["weights"])
        await adapter.resume(["kv_cache"])
        done, _ = await asyncio.wait({held}, timeout=0.5)
        assert not done, "a paused server generated"
        await resume_generation(f"http://{replica.server_address}")
        assert len((await held)["output_ids"]) == 4

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("how", ["GET /health", "released in the middle of a call"])
async def test_a_sleeping_server_crashes_as_on_a_gpu(how: str, models: list[Path], tmp_path: Path) -> None:
    """SGLang's own code releases the memory and asserts that no request is running."""
    model = model_of(rollout_of(512), SimpleNamespace(path=models[OLD]))
    server = SGLangServer("server", model, ServerSettings(threads=1).serving("float32"), tmp_path / "log")
    url = f"http://{await server.launch()}"
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            if how.startswith("released"):
                async with http.stream("POST", f"{url}/generate", json={**request(400), "stream": True}) as running:
                    assert (await anext(running.aiter_lines())).startswith("data: ")
                    with pytest.raises(EngineUnavailable, match="release_memory_occupation"):
                        await server.sleep()
                cause = "release_memory_occupation should be called only when server is idle"
            else:
                await pause_generation(url)
                await server.sleep()
                await server.resume_generation()  # verl does not pause its servers
                with contextlib.suppress(httpx.HTTPError):
                    await http.get(f"{url}/health")
                cause = "an illegal memory access was encountered"
        assert "ended with code" in await asyncio.wait_for(server._engine.wait(), 60)
        assert cause in (tmp_path / "log").read_text(errors="replace")
    finally:
        await server.close()


@pytest.mark.slow
def test_a_held_request_is_answered_by_the_new_weights(replica, adapter, models, weights):
    async def scenario() -> dict[str, Any]:
        await replica.abort_all_requests()
        held = asyncio.create_task(asyncio.to_thread(generate, replica))
        await adapter.update_weights(iter(weights(OTHER).items()), global_steps=6)
        await replica.clear_kv_cache()
        assert not held.done()
        await replica.resume_generation()
        return await held

    reply = asyncio.run(scenario())
    assert version(reply) == "6"
    assert distance(reply, models[OTHER]) < SAME


@pytest.mark.slow
def test_verls_own_client_path(replica: Any) -> None:
    import ray

    ray.get(replica.server_handle.update_weights.remote(Path(replica.model_config.path), 7))
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 5, "logprobs": True}
    output = ray.get(replica.server_handle.generate.remote(PROMPT, params, request_id="r"))
    assert 1 <= len(output.token_ids) <= 5
    assert len(output.log_probs) == len(output.token_ids)
    assert output.stop_reason in ("length", "stop")
    assert output.extra_fields["global_steps"] == 7


@pytest.mark.slow
def test_a_server_ends_with_its_actor(replica: Any) -> None:
    import ray

    pid = ray.get(replica.server_handle.pid.remote())
    family = [pid, *children(pid)]
    assert len(family) > 1, "SGLang's scheduler is a separate process"
    ray.kill(replica.server_handle)
    assert all(gone(member) for member in family)


@pytest.mark.slow
async def test_a_dead_server_is_reported(models: list[Path], tmp_path: Path) -> None:
    """SGLang crashes without a response if weights have a wrong shape."""

    def command(model: object, serving: object, node: ServerNode) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-S", str(FAKE_ENGINE), node.host, str(node.port)], {}

    model, log = model_of(rollout_of(64), SimpleNamespace(path=models[OLD])), tmp_path / "log"
    server = SGLangServer("server-0", model, ServerSettings().serving("float32"), log, command=command)
    await server.launch()
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"server-0.*update_weights_from_disk"):
        await server.update_weights(tmp_path, 1)
    await server.close()


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def gone(pid: int, within_s: float = 120) -> bool:
    deadline = time.monotonic() + within_s
    while running := Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return not running


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(stray=torch.zeros(2)), r"stray is \(2,\) and should be absent"),
        (lambda w: w.update({n: w[n][:1] for n in list(w) if "layers" in n}), "more"),
    ],
)
def test_weights_must_match_the_model(models, weights, tmp_path, change, message):
    tensors = weights(NEW)
    change(tensors)
    with pytest.raises(WeightsMismatch, match=message):
        ModelFolder.at(models[OLD]).write(tensors, tmp_path, "float32")
    assert not list(tmp_path.iterdir())


def rollout_of(length: int, *, records_experts: bool = False) -> Any:
    return SimpleNamespace(max_model_len=length, enable_rollout_routing_replay=records_experts)


@pytest.mark.parametrize("records_experts", [False, True])
def test_a_server_records_routed_experts_if_verl_asks_for_them(records_experts: bool) -> None:
    rollout = rollout_of(64, records_experts=records_experts)
    assert model_of(rollout, SimpleNamespace(path="model")).routed_experts is records_experts


def test_weights_through_a_shared_folder(weights: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    from verl_cpu.folder_engine import SharedFolderEngine

    sent = weights(NEW)
    trainers = [SharedFolderEngine(bucket_size=1, is_master=master, folder=str(tmp_path)) for master in (True, False)]
    servers = [SharedFolderEngine(bucket_size=1, folder=str(tmp_path)) for _ in range(2)]
    to_trainers, to_servers = SharedFolderEngine.build_topology(2, 2, [{}] * 4)
    for engines, arguments in ((trainers, to_trainers), (servers, to_servers)):
        for i, engine in enumerate(engines):
            engine.init_process_group(**{key: values[i] for key, values in arguments.items()})

    async def receive(engine: Any) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}

    async def update() -> list[dict[str, torch.Tensor]]:
        receiving = [asyncio.create_task(receive(engine)) for engine in servers]
        await asyncio.gather(*(engine.send_weights(iter(sent.items()), global_steps=1) for engine in trainers))
        return await asyncio.gather(*receiving)

    for received in asyncio.run(update()):
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[name], sent[name]) for name in sent)
    for engine in (*trainers, *servers):
        engine.finalize()
    assert not list(tmp_path.iterdir())
