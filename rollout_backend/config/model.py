"""The `model` section."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, JsonValue

from rollout_backend.config.section import Section
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.gguf")
# The engines do not load these formats.
_OTHER_FORMATS = ("original/*", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.gguf")
# This fits a long agent conversation, and the cache of a single GPU.
_MAX_DEFAULT_CONTEXT = 32_768
_EXPERTS_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


class ExpertShape(NamedTuple):
    """The mixture of experts of a model: each token passes `topk` of the `experts` of each layer."""

    layers: int
    topk: int
    experts: int


class ModelConfig(Section):
    path: Path
    """Model directory with weights, config, tokenizer and chat template; or a name on the Hugging Face hub, such as
    `Qwen/Qwen3-4B`, which is looked up in the local cache and then downloaded."""
    name: str = ""
    """Model name that agents request. Default: the last part of `path`."""
    renderer: str = "auto"
    """Converts messages to tokens and back: a name that the `renderers` package knows, `chatml` (built in, for ChatML
    models such as SmolLM2, with Hermes-style tools), `default` (the model's own template), or the import path
    `package.module.Class` of your own. `auto` selects the renderer that renders like the model's own template, else
    `default` with the parser that reads the template's tool calls."""
    renderer_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the renderer by name, such as `{"enable_thinking": false}` for `qwen3` or
    `{"tool_parser": "qwen3", "reasoning_parser": "think"}` for `default`. `auto` sets those that the model's template
    decides. A renderer of your own receives them as its
    config. Each renderer refuses unknown options."""
    trust_remote_code: bool = False
    """Run the Python code in the model directory that its tokenizer needs (Kimi K2), in this process and in the
    engines. This code has access to all keys and credentials of this process: read it first."""
    context_length: int | None = Field(default=None, ge=16)
    """Maximum tokens of one model call, prompt and completion together. Default: the maximum in the model's
    `config.json`, at most 32,768. It must fit into the engine's cache."""
    routed_experts: bool = False
    """Record which experts of a mixture of experts processed each token, so that the trainer can replay them (R3).
    Needs SGLang; external servers must run with `--enable-return-routed-experts`. A token costs a byte for each layer
    and each of its experts. See [training-options.md](training-options.md#replay-routed-experts)."""

    def check_run(self, run: RolloutConfig) -> None:
        if not self.routed_experts:
            return
        if run.serving.engine != "sglang":
            raise ValueError(f"model.routed_experts=true needs serving.engine=sglang, not {run.serving.engine}")
        if run.router.policy != "manual" and run.router.kind == "sglang-router":
            raise ValueError(
                f"router.policy={run.router.policy} has no effect with model.routed_experts=true, whose calls pass "
                "no sglang-router: remove it, or set router.kind=smg"
            )
        if "--enable-hierarchical-cache" in run.serving.extra_args:
            raise ValueError(
                "model.routed_experts=true: tokens that come back from a hierarchical cache of SGLang get the "
                "routing of others: remove --enable-hierarchical-cache from serving.extra_args"
            )

    @property
    def served_name(self) -> str:
        return self.name or self.path.name

    @property
    def folder(self) -> Path:
        """Return the folder with the model's configuration and tokenizer.

        Raises:
            ConfigError: `path` is a hub name that can be neither found in the local cache nor downloaded.
        """
        return local_folder(self.path)

    @property
    def weight_folder(self) -> Path:
        """Return `folder` after its weights are downloaded, too. Raises ConfigError like `folder`."""
        return local_folder(self.path, weights=True)

    @property
    def context_tokens(self) -> int:
        """Return `context_length`, or its default.

        Raises:
            ConfigError: it is not set, and the model's config.json has no maximum.
        """
        return self.context_length or min(_max_positions(self.folder), _MAX_DEFAULT_CONTEXT)

    @property
    def longest_context(self) -> int | None:
        """Return the longest context that engines accept for the model; None if its config.json does not say."""
        try:
            return _max_positions(self.folder)
        except ConfigError:
            return None

    @property
    def unscaled_context(self) -> int | None:
        """Return `longest_context` without the scaling of positions."""
        try:
            return _max_positions(self.folder, scaled=False)
        except ConfigError:
            return None

    @property
    def attention_heads(self) -> int | None:
        """Return the number of attention heads; None if the model's config.json does not say."""
        return next(iter(self._numbers("num_attention_heads")), None)

    @property
    def vocabulary_size(self) -> int | None:
        """Return the number of token ids; None if the model's config.json does not say."""
        return max(self._numbers("vocab_size"), default=None)

    def _numbers(self, name: str) -> list[int]:
        with contextlib.suppress(ConfigError):
            sections = _config_sections(self.folder / "config.json", "")
            return [section[name] for section in sections if isinstance(section.get(name), int)]
        return []

    @property
    def expert_shape(self) -> ExpertShape | None:
        """Return the shape of the routing to record; None without `routed_experts`.

        Raises:
            ConfigError: the model's config.json describes no mixture of experts whose routing can be replayed.
        """
        return _expert_shape(self.folder) if self.routed_experts else None


def local_folder(path: Path, *, weights: bool = False, download: bool = True) -> Path:
    """Return a model's folder: `path` itself, or the local folder of the Hugging Face model with that name.

    Weights are downloaded only with `weights`. A path that cannot be a name is returned unchanged.

    Raises:
        ConfigError: the hub and its local cache do not have the model.
    """
    if path.is_absolute() or len(path.parts) != 2 or ".." in path.parts or path.is_dir():
        return path
    return _hub_folder(path.as_posix(), weights, download)


@functools.cache
def _hub_folder(name: str, weights: bool, download: bool) -> Path:
    # This import is slow.
    from huggingface_hub import snapshot_download

    with contextlib.suppress(OSError, ValueError):
        cached = Path(snapshot_download(name, local_files_only=True))
        if _is_complete(cached, weights):
            return cached
    if not download:
        return Path(name)
    try:
        return Path(snapshot_download(name, ignore_patterns=list(_OTHER_FORMATS if weights else _WEIGHT_FILES)))
    except Exception as error:
        # The hub's HTTP client raises its own exceptions.
        raise ConfigError(
            f"model.path: there is no folder {name}, and no such model on the hub or in its local cache "
            f"({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}): correct the "
            f"path, or download the model first: hf download {name}"
        ) from None


def _is_complete(folder: Path, weights: bool) -> bool:
    """Return whether a folder of the hub's cache has all needed files. Downloads can be partial."""
    files = {file.name for file in folder.iterdir() if file.exists()}
    if "config.json" not in files or not files & {"tokenizer.json", "tokenizer_config.json"}:
        return False
    if weights and "model.safetensors.index.json" in files:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return files >= {*index["weight_map"].values()}
    return not weights or any(fnmatch.filter(files, pattern) for pattern in _WEIGHT_FILES)


@functools.cache
def _max_positions(model: Path, scaled: bool = True) -> int:
    """Return the maximum sequence length in the model's config.json. Raises ConfigError."""
    path = model / "config.json"
    for section in _config_sections(path, "model.context_length is not set"):
        for name in _LENGTH_FIELDS:
            if isinstance(section.get(name), int):
                return _extended(section[name], section) if scaled else int(section[name])
    raise ConfigError(f"model.context_length is not set, and {path} has none of {', '.join(_LENGTH_FIELDS)}: set it")


def _extended(maximum: int, section: Mapping[str, Any]) -> int:
    """Apply the scaling of positions to the maximum, unless it already includes it."""
    scaling = section.get("rope_scaling") or section.get("rope_parameters") or {}
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or scaling.get("rope_type") == "llama3":
        return maximum
    return max(maximum, int(factor * scaling.get("original_max_position_embeddings", maximum)))


@functools.cache
def _expert_shape(model: Path) -> ExpertShape:
    path = model / "config.json"
    for section in reversed(_config_sections(path, "model.routed_experts=true")):
        experts = next((section[name] for name in _EXPERTS_FIELDS if isinstance(section.get(name), int)), 0)
        layers, topk = section.get("num_hidden_layers"), section.get("num_experts_per_tok")
        if experts and isinstance(layers, int) and isinstance(topk, int):
            if topk < 2:
                # verl recognises a token without routing by its repeated expert.
                raise ConfigError(
                    f"model.routed_experts=true needs at least 2 experts per token, and {path} has {topk}"
                )
            return ExpertShape(layers, topk, experts)
    raise ConfigError(
        f"model.routed_experts=true needs a mixture of experts, and {path} lacks num_hidden_layers, "
        f"num_experts_per_tok or one of {', '.join(_EXPERTS_FIELDS)}: remove the setting"
    )


def _config_sections(path: Path, setting: str) -> list[Mapping[str, Any]]:
    """Return the model's config.json and its `text_config`. Raises ConfigError, which begins with `setting`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}, and {path} cannot be read: {error}") from None
    return [config, config.get("text_config") or {}]
