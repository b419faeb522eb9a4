"""The model's tokenizer and the renderer that turns messages into its tokens and its tokens into messages.

Everything is read from the model's folder: nothing is downloaded, and no code from it is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import renderers
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import _CONFIG_BY_NAME, CustomRendererConfig
from transformers import AutoTokenizer

from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.gateway.chatml import ChatMLRenderer

# Templates that print the tool's name beside its result. OpenAI's tool messages carry only the call's id.
_NEEDS_TOOL_NAMES = frozenset({"gpt-oss", "gemma4", "inkling"})
_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "b"}, {"role": "user", "content": " c\n"}, {"role": "assistant", "content": "d"}],
)


@dataclass(frozen=True)
class RendererBundle:
    """What the gateway needs of the model. Not to be used by two threads at once: the tokenizer has state."""

    name: str
    tokenizer: Any
    renderer: Any  # after `renderers.Renderer`
    stop_token_ids: tuple[int, ...]

    @property
    def needs_tool_names(self) -> bool:
        return self.name in _NEEDS_TOOL_NAMES

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """The prompt for the next reply."""
        return list(self.renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens spelled out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def load_renderer(model: ModelConfig) -> RendererBundle:
    """Loads the tokenizer of `model.path` and the renderer that `model.renderer` names.

    `auto` takes the renderer that `renderers` has for a model of this folder's name (or of its last two parts);
    failing that, ours for ChatML if it renders as the model's own template does; failing that, `default`.

    Raises:
        ConfigError: no tokenizer there, no such renderer, or one that does not fit the model.
    """
    tokenizer = _load_tokenizer(model.path)
    name, renderer = _make_renderer(tokenizer, model)
    stop_ids = dict.fromkeys([*renderer.get_stop_token_ids(), *_eos_ids(model.path)])
    return RendererBundle(name, tokenizer, renderer, tuple(int(token) for token in stop_ids))


def known_renderers() -> list[str]:
    """The names that `model.renderer` may have, beside a class of your own."""
    return sorted({*_CONFIG_BY_NAME, "chatml"})


def _load_tokenizer(path: Path) -> Any:
    if not path.is_dir():
        raise ConfigError(f"model.path: there is no folder {path}")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {path} holds no tokenizer that loads (tokenizer.json and tokenizer_config.json are "
            f"needed): {error}"
        ) from None


def _make_renderer(tokenizer: Any, model: ModelConfig) -> tuple[str, Any]:
    name = model.renderer
    try:
        if name == "auto":
            return _auto(tokenizer, model.path)
        if name == "chatml":
            return name, ChatMLRenderer(tokenizer)
        if name in _CONFIG_BY_NAME:
            return name, renderers.create_renderer(tokenizer, renderers.config_from_name(name))
        if "." in name or ":" in name:
            return name, renderers.create_renderer(tokenizer, CustomRendererConfig(import_path=name))
    except ConfigError:
        raise
    except Exception as error:  # whatever a renderer raises that does not fit this model
        raise ConfigError(f"model.renderer: {name} cannot be used with {model.path}: {error}") from error
    raise ConfigError(
        f"model.renderer: there is no renderer {name!r}; known are {', '.join(known_renderers())}, "
        "or package.module.Class of your own"
    )


def _auto(tokenizer: Any, path: Path) -> tuple[str, Any]:
    parts = path.resolve().parts[-2:]
    found = {model for model in MODEL_RENDERER_MAP if model.lower() == "/".join(parts).lower()} or {
        model for model in MODEL_RENDERER_MAP if model.rpartition("/")[2].lower() == parts[-1].lower()
    }
    names = {MODEL_RENDERER_MAP[model] for model in found}
    if len(names) > 1:
        raise ConfigError(
            f"model.renderer: the folder's name {parts[-1]} fits {', '.join(sorted(found))}; "
            f"set one of {', '.join(sorted(names))}"
        )
    if names:
        tokenizer.name_or_path = min(found)  # some renderers look at it for what differs between sizes
        return names.pop(), renderers.create_renderer(tokenizer)
    try:
        chatml = ChatMLRenderer(tokenizer)
        if all(chatml.render_ids(probe) == _own_template(tokenizer, probe) for probe in _PROBES):
            return "chatml", chatml
    except ValueError:
        pass  # not a ChatML vocabulary
    return "default", renderers.create_renderer(tokenizer, renderers.config_from_name("default"))


def _own_template(tokenizer: Any, messages: list[dict[str, str]]) -> list[int] | None:
    if not tokenizer.chat_template:
        return None
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def _eos_ids(path: Path) -> list[int]:
    """End tokens by the model's own word, which knows better than a tokenizer that was converted."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            if eos is not None:
                return list(eos) if isinstance(eos, list) else [eos]
    return []
