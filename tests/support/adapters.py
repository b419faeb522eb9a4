"""Write small models, and LoRA adapters with random weights, as `save_pretrained` does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollout_backend.model.serving.weights import ModelFolder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def save_model(folder: Path, value: float = 0.0, *, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a model whose weights have these shapes and one value."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_adapter(
    folder: Path,
    model: Path,
    seed: int = 0,
    rank: int = 4,
    modules: Sequence[str] = ATTENTION,
    std: float = 1.0,
    **settings: Any,
) -> Path:
    """Write an adapter of rank `rank` for the modules of a model; equal seeds give equal weights. `settings` are
    added to its adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*modules], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(ModelFolder(model).shapes.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = random.normal(scale=std / np.sqrt(size[1]), size=size).astype(np.float32)
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
