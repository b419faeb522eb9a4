"""The `model` section."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from pydantic import Field, JsonValue

from rollout_backend.config.section import Section
from rollout_backend.errors import ConfigError

_MAX_DEFAULT_CONTEXT = 32_768  # fits a long agent conversation, and the cache of a single GPU
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


class ModelConfig(Section):
    path: Path
    """Model directory with weights, config, tokenizer and chat template."""
    name: str = ""
    """Model name that agents request. Default: the name of the directory."""
    renderer: str = "auto"
    """Converts messages to tokens and back: a name that the `renderers` package knows, `chatml` (built in, for ChatML
    models such as SmolLM2, with Hermes-style tools), `default` (the model's own template), or the import path
    `package.module.Class` of your own. `auto` selects the renderer that `renderers` has for a model with this
    directory name, else `chatml` if it renders like the model's own template, else `default`."""
    renderer_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the renderer by name, such as `{"enable_thinking": false}` for `qwen3` or
    `{"tool_parser": "qwen3", "reasoning_parser": "think"}` for `default`. A renderer of your own receives them as its
    config. Each renderer refuses unknown options."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings for its tokenizer, as Kimi K2 does, in this process and in the
    engines. Such code has access to all keys and credentials of this process: read it first."""
    context_length: int | None = Field(default=None, ge=16)
    """Maximum tokens of one model call, prompt and completion together. Default: the maximum in the model's
    `config.json`, at most 32,768. The engine's cache must have room for it."""

    @property
    def served_name(self) -> str:
        return self.name or self.path.name

    @property
    def context_tokens(self) -> int:
        """Return `context_length`, or its default.

        Raises:
            ConfigError: it is not set, and the model's config.json has no maximum.
        """
        return self.context_length or min(_max_positions(self.path), _MAX_DEFAULT_CONTEXT)


@functools.cache
def _max_positions(model: Path) -> int:
    """Return the maximum sequence length in the model's config.json. Raises ConfigError."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.context_length is not set, and {path} cannot be read: {error}") from None
    for section in (config, config.get("text_config") or {}):
        for name in _LENGTH_FIELDS:
            if isinstance(section.get(name), int):
                return int(section[name])
    raise ConfigError(f"model.context_length is not set, and {path} has none of {', '.join(_LENGTH_FIELDS)}: set it")
