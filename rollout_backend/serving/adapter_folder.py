"""The folder of a LoRA adapter, as PEFT's `save_pretrained` writes it.

Invariants:

- Only adapters that every engine computes alike reach an engine. SGLang ignores the settings of PEFT that it does not
  know, such as the scaling of rsLoRA, and would sample from another distribution without an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_backend.config import ServingConfig
from rollout_backend.errors import ConfigError, WeightsMismatch
from rollout_backend.serving.model_folder import ModelFolder, Shape, tensor_shapes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_REFUSED = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias",
    "trainable_token_indices", "target_parameters",
)  # fmt: skip
_NAMED = 5


class AdapterFolder:
    """The settings and the tensors' shapes of an adapter; the tensors themselves are not read.

    Raises:
        ConfigError: `path` is no folder of a LoRA adapter, or PEFT settings in it are not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            config = json.loads((path / CONFIG).read_text())
        except OSError as error:
            raise ConfigError(f"{path} is not an adapter's folder: {error.strerror} for {CONFIG}") from None
        except ValueError as error:
            raise ConfigError(f"{path / CONFIG} cannot be read ({error}): is it still being written?") from None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ConfigError(f"{path / CONFIG} does not describe a LoRA adapter: peft_type must be LORA")
        self.rank = _rank(path, config)
        self.shapes = tensor_shapes(path / WEIGHTS)

    def check(self, model: ModelFolder, serving: ServingConfig) -> None:
        """Check that the engines can load the adapter.

        Raises:
            ConfigError: its rank or its modules exceed `serving.lora_rank` or `serving.lora_targets`.
            WeightsMismatch: its tensors do not fit the model's.
        """
        assert serving.lora_rank is not None, "the caller checks that the engines take adapters"
        if self.rank > serving.lora_rank:
            raise ConfigError(f"{self.path} has rank {self.rank}, and serving.lora_rank is {serving.lora_rank}")
        if faults := list(self._faults(model)):
            more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            raise WeightsMismatch(
                f"the adapter {self.path} does not fit the model {model.path}, and was not loaded: "
                f"{'; '.join(faults[:_NAMED])}{more}. Was it trained on another model?"
            )
        modules = {_module(name).rpartition(".")[2] for name in self.shapes}
        if others := sorted(modules - set(serving.lora_targets)):
            raise ConfigError(f"{self.path} changes {', '.join(others)}, which serving.lora_targets does not name")

    def _faults(self, model: ModelFolder) -> Iterator[str]:
        for name, shape in sorted(self.shapes.items()):
            match = _TENSOR.fullmatch(name)
            weight = f"{match['module']}.weight" if match is not None else ""
            of_model = model.shapes.get(weight, ())
            if match is None or len(of_model) != 2:
                yield f"{name} changes no matrix of the model"
                continue
            expected: Shape = (self.rank, of_model[1]) if match["part"] == "A" else (of_model[0], self.rank)
            if shape != expected:
                yield f"{name} is {shape} and should be {expected}"


def _rank(path: Path, config: Mapping[str, Any]) -> int:
    """Return the rank. Raise ConfigError for PEFT settings that engines ignore or do not have."""
    refused = [f"{name}={config[name]}" for name in _REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        refused.append(f"bias={config['bias']}")
    if refused:
        raise ConfigError(f"{path / CONFIG}: {', '.join(refused)} is not supported: train the adapter without it")
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise ConfigError(f"{path / CONFIG} has no r and lora_alpha")
    if not isinstance(config.get("target_modules"), list):
        raise ConfigError(f"{path / CONFIG}: target_modules must be a list of names, not a pattern")
    return int(config["r"])


def _module(tensor: str) -> str:
    """Return the name of the module that a tensor changes."""
    match = _TENSOR.fullmatch(tensor)
    return match["module"] if match is not None else tensor
