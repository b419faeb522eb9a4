"""Keep track of the newest version of each LoRA adapter, and load it into the engines.

Invariants:

- A version permanently names one set of an adapter's weights, even after a restart of the trainer and after the
  adapter was unloaded. The versions of each adapter are counted from 1.
- An engine knows each version by a separate name, so a request samples only with the version that it names, and
  versions and adapters never share a prefix cache.
- Only adapters that all engines compute identically reach an engine. SGLang ignores PEFT settings that it does not
  know, such as the scaling of rsLoRA, and would silently sample from another distribution.
- The newest version of each loaded adapter stays on disk, because a restarted engine loads it again.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent_wrapper.contract import Identifier
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.disk import call_disk
from rollout_backend.config import EngineName, RolloutConfig, ServingConfig
from rollout_backend.core.adapter import NamedAdapter
from rollout_backend.errors import ConfigError, ServingError, WeightsMismatch
from rollout_backend.model.serving.engine import control
from rollout_backend.model.serving.weights import ModelFolder, Weights, tensor_shapes

_TIMEOUT_S = 120.0
_NAMES: TypeAdapter[str] = TypeAdapter(Identifier)
_PATHS: Mapping[EngineName, tuple[str, str]] = {
    "sglang": ("/load_lora_adapter", "/unload_lora_adapter"),
    "vllm": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


@dataclass(frozen=True)
class Adapter:
    """One version of an adapter."""

    name: str
    weights: Weights

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def folder(self) -> Path:
        assert self.weights.folder is not None
        return self.weights.folder

    @property
    def engine_name(self) -> str:
        """The engine's name of this version."""
        return NamedAdapter(self.name, self.version).engine_name


@dataclass(frozen=True)
class AdapterUpdate:
    """Result of `RolloutManager.load_adapter`.

    `failed` maps each engine that did not load the adapter to the reason. Such an engine is restarted, and gets
    requests once it has loaded the adapter.
    """

    name: str
    version: int
    failed: Mapping[str, str]


class AdapterStore:
    """The newest version of each adapter of a run. `loaded` maps names to the adapters that are loaded."""

    def __init__(self, config: RolloutConfig) -> None:
        """Read which adapters an earlier trainer of this run loaded.

        Raises:
            ConfigError: an adapter is missing, changed or for another model, or the record cannot be read.
        """
        self._serving = config.serving
        self._model = config.model
        self._file = config.run_dir / "adapters.json"
        # The last version of each adapter, even if it was unloaded.
        self._last: dict[str, int] = {}
        self.loaded: dict[str, Adapter] = {}
        self._read()

    @property
    def versions(self) -> dict[str, int]:
        """The newest version of each loaded adapter."""
        return {name: adapter.version for name, adapter in self.loaded.items()}

    def prepare(self, name: str, folder: Path) -> Adapter:
        """Check the next version of an adapter against the model and the settings. Blocks.

        Raises:
            ConfigError: the name is invalid, too many adapters are loaded, or the settings do not allow the adapter.
            WeightsMismatch: the adapter's tensors do not fit the model.
        """
        try:
            _NAMES.validate_python(name)
        except ValidationError:
            raise ConfigError(
                f"{name!r} is no name for an adapter: use letters, digits, '.', '_' and '-', not '.' first"
            ) from None
        if name not in self.loaded and len(self.loaded) >= self._serving.max_adapters:
            raise ConfigError(
                f"{len(self.loaded)} adapters are loaded, and serving.max_adapters is {self._serving.max_adapters}: "
                "unload one, or raise it"
            )
        weights = Weights.of(self._last.get(name, 0) + 1, folder.absolute())
        self._check(folder)
        return Adapter(name, weights)

    async def commit(self, adapter: Adapter) -> None:
        """Record this version as the newest. Raises ServingError if that fails."""
        await self._write({**self.loaded, adapter.name: adapter})

    async def remove(self, name: str) -> None:
        """Record that an adapter was unloaded. Raises ServingError if that fails."""
        await self._write({other: adapter for other, adapter in self.loaded.items() if other != name})

    def _check(self, folder: Path) -> None:
        check_adapter(folder, ModelFolder(self._model.weight_folder), self._serving)

    async def _write(self, loaded: dict[str, Adapter]) -> None:
        last = {**self._last, **{name: adapter.version for name, adapter in loaded.items()}}
        record: dict[str, dict[str, object]] = {name: {"version": version} for name, version in last.items()}
        for name, adapter in loaded.items():
            record[name] |= {"folder": str(adapter.folder), "digest": adapter.weights.digest}
        try:
            await call_disk(lambda: write_file(self._file, json.dumps(record).encode()))
        except OSError as error:
            raise ServingError(f"the adapters could not be recorded in {self._file}: {error}") from None
        self._last, self.loaded = last, loaded

    def _read(self) -> None:
        try:
            record = json.loads(self._file.read_text())
            self._last = {name: int(entry["version"]) for name, entry in record.items()}
            self.loaded = {
                name: Adapter(name, Weights(int(entry["version"]), Path(entry["folder"]), str(entry["digest"])))
                for name, entry in record.items()
                if "folder" in entry
            }
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._file} cannot be read ({error}), so it is unknown which adapters this run served last: "
                "restore it, or use a new run_id"
            ) from None
        if self.loaded and self._serving.lora_rank is None:
            names = ", ".join(sorted(self.loaded))
            raise ConfigError(f"this run has loaded the adapters {names}: set serving.lora_rank, or use a new run_id")
        for name, adapter in self.loaded.items():
            try:
                adapter.weights.check_unchanged()
                self._check(adapter.folder)
            except (ServingError, WeightsMismatch, ConfigError) as error:
                raise ConfigError(
                    f"this run cannot serve its adapter {name} again, use a new run_id: {error}"
                ) from None


async def load_on_engine(url: str, adapter: Adapter, engine: EngineName) -> None:
    """Make a server load one version of an adapter. Its other requests continue.

    Raises:
        ServingError: the server did not load it, or the folder has changed.
    """
    await adapter.weights.check()
    body = {"lora_name": adapter.engine_name, "lora_path": str(adapter.folder)}
    await control(url + _PATHS[engine][0], body, f"load the adapter {adapter.engine_name}", _TIMEOUT_S)
    await adapter.weights.check()


async def unload_from_engine(url: str, adapter: Adapter, engine: EngineName) -> None:
    """Make a server unload one version of an adapter, once no request uses it. Raises ServingError on failure."""
    body = {"lora_name": adapter.engine_name}
    await control(url + _PATHS[engine][1], body, f"unload the adapter {adapter.engine_name}", _TIMEOUT_S)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_REFUSED = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias",
    "trainable_token_indices", "target_parameters",
)  # fmt: skip
_NAMED = 5


def check_adapter(path: Path, model: ModelFolder, serving: ServingConfig) -> None:
    """Check that the engines can load the adapter in this folder, by its settings and the shapes of its tensors.

    Raises:
        ConfigError: `path` is not the folder of a LoRA adapter, has unsupported PEFT settings, or its rank or modules
            exceed `serving.lora_rank` or `serving.lora_targets`.
        WeightsMismatch: the tensors do not fit the model's.
    """
    assert serving.lora_rank is not None, "the caller checks that the engines take adapters"
    try:
        config = json.loads((path / CONFIG).read_text())
    except OSError as error:
        raise ConfigError(f"{path} is not an adapter's folder: {error.strerror} for {CONFIG}") from None
    except ValueError as error:
        raise ConfigError(f"{path / CONFIG} cannot be read ({error}): is it still being written?") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{path / CONFIG} does not describe a LoRA adapter: peft_type must be LORA")
    rank, shapes = _rank(path, config), tensor_shapes(path / WEIGHTS)
    if rank > serving.lora_rank:
        raise ConfigError(f"{path} has rank {rank}, and serving.lora_rank is {serving.lora_rank}")
    faults, modules = [], set()
    for name, shape in sorted(shapes.items()):
        match = _TENSOR.fullmatch(name)
        module = match["module"] if match is not None else ""
        of_model = model.shapes.get(f"{module}.weight", ())
        if match is None or len(of_model) != 2:
            faults.append(f"{name} changes no matrix of the model")
            continue
        modules.add(module.rpartition(".")[2])
        expected = (rank, of_model[1]) if match["part"] == "A" else (of_model[0], rank)
        if shape != expected:
            faults.append(f"{name} is {shape} and should be {expected}")
    if faults:
        more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise WeightsMismatch(
            f"the adapter {path} does not fit the model {model.path}, and was not loaded: "
            f"{'; '.join(faults[:_NAMED])}{more}. Was it trained on another model?"
        )
    if others := sorted(modules - set(serving.lora_targets)):
        raise ConfigError(f"{path} changes {', '.join(others)}, which serving.lora_targets does not name")


def _rank(path: Path, config: Mapping[str, Any]) -> int:
    """Return the rank. Raises ConfigError for PEFT settings that engines ignore or lack."""
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
