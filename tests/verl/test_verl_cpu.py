"""verl on the CPU: its registries find the platform, and weights reach the servers whole or not at all.

The tests of verl's trainers show that the servers serve these weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_backend.errors import WeightsMismatch
from rollout_backend.local.tiny_model import make_tiny_model
from rollout_backend.serving.weights import ModelFolder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "model")


def test_verl_finds_the_cpu_platform() -> None:
    from verl.utils.device import get_device_name, get_resource_name, get_torch_device

    assert get_device_name() == "cpu"
    assert get_resource_name() == "GPU"  # logical GPUs
    used, total = get_torch_device().mem_get_info()
    assert 0 < used < total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(stray=torch.zeros(2)), r"stray is \(2,\) and should be absent"),
        (lambda w: w.update({n: w[n][:1] for n in list(w) if "layers" in n}), "more"),
    ],
)
def test_weights_must_match_the_model(model, tmp_path, change, message):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    with pytest.raises(WeightsMismatch, match=message):
        ModelFolder.at(model).write(tensors, tmp_path, "float32")
    assert not list(tmp_path.iterdir())


def test_weights_through_a_shared_folder(model: Path, tmp_path: Path) -> None:
    from verl_cpu.folder_engine import SharedFolderEngine

    sent = load_file(model / "model.safetensors")
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
