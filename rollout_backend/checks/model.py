"""Check the model's folder, its context, and the renderer that converts its messages to tokens and back."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rollout_backend.config import ModelConfig, RolloutConfig
from rollout_backend.config.model import local_folder
from rollout_backend.core.api_error import NO_TOOL_PARSER
from rollout_backend.core.check_result import CheckResult
from rollout_backend.core.routed_experts import row_bytes
from rollout_backend.errors import ConfigError

_REPLY = "It is 7."
_LONGER = ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")


def check_context(config: RolloutConfig) -> CheckResult:
    model, setting = config.model, "model.context_length"
    try:
        tokens = model.context_tokens
    except ConfigError as error:
        return CheckResult("problem", setting, str(error))
    longest = model.longest_context
    # Engines take a longer one if their arguments or variables say so.
    forced = any("overrid" in each for each in config.serving.extra_args) or any(map(os.environ.get, _LONGER))
    if longest is not None and tokens > longest and config.serving.kind != "external" and not forced:
        text = f"{tokens:,} is above the model's {longest:,}, with which engines do not start: lower it, or set "
        return CheckResult("problem", setting, f"{text}rope_scaling in the model's config.json")
    reply = config.sampling.max_tokens
    if reply is not None and reply >= tokens:
        text = f"{reply:,} leave no room for a prompt in a context of {tokens:,} tokens: lower it"
        return CheckResult("problem", "sampling.max_tokens", text)
    return CheckResult("ok", setting, f"{tokens:,} tokens of context")


def check_parallel(model: ModelConfig, size: int, setting: str) -> Iterator[CheckResult]:
    """Yield a problem if engines cannot divide the model's attention among `size` GPUs."""
    heads = model.attention_heads
    if heads and heads % size:
        text = f"{size} does not divide the model's {heads} attention heads, so engines do not start: set a divisor"
        yield CheckResult("problem", setting, text)


def check_model(config: RolloutConfig) -> Iterator[CheckResult]:
    model, here = config.model, config.gateway.kind == "process"
    engines_here = config.serving.kind == "process"
    try:
        folder = model.weight_folder if engines_here else local_folder(model.path, download=here)
    except ConfigError as error:
        yield CheckResult("problem", "model.path", str(error))
        return
    there = folder.is_dir()
    if here and not there:
        yield CheckResult("problem", "model.path", f"there is no folder {folder}")
        return
    if engines_here and not (folder / "config.json").is_file():
        yield CheckResult("problem", "model.path", f"{folder} is no model folder: it has no config.json")
        return
    yield check_context(config)
    serving = config.serving
    if there and serving.kind in ("process", "ray"):
        size = serving.tensor_parallel // serving.attention_data_parallel
        yield from check_parallel(model, size, "serving.tensor_parallel")
    if there and model.routed_experts:
        yield check_experts(model)
    if there:
        yield check_renderer(config)
    else:
        yield CheckResult("ok", "model.path", f"{model.path} is not on this machine; its gateways must have it")


def check_experts(model: ModelConfig) -> CheckResult:
    setting = "model.routed_experts"
    try:
        shape = model.expert_shape
    except ConfigError as error:
        return CheckResult("problem", setting, str(error))
    assert shape is not None
    layers, topk, experts = shape
    text = f"{topk} of {experts} experts in {layers} layers: {row_bytes(shape)} bytes per token"
    return CheckResult("ok", setting, text)


def check_renderer(config: RolloutConfig) -> CheckResult:
    """Check that the renderer fits the model in `model.path`, a folder of this machine."""
    from rollout_backend.rendering.renderer import load_renderer  # transformers are slow to import

    try:
        bundle = load_renderer(config.model)
    except ConfigError as error:
        setting = "model.path" if str(error).startswith("model.path") else "model.renderer"
        return CheckResult("problem", setting, str(error))
    try:
        prompt = bundle.render([{"role": "user", "content": "What is 3 + 4?"}], None)
        reply = [*bundle.marker_ids(_REPLY), *bundle.stop_token_ids[:1]]
        parsed = bundle.renderer.parse_response(reply, prompt_ids=prompt)
        read = f"{parsed.content}{parsed.reasoning_content or ''}"
    except Exception as error:  # a renderer that does not fit this model may raise anything
        read = f"{type(error).__name__}: {error}"
    if _REPLY not in read:
        return CheckResult(
            "problem",
            "model.renderer",
            f"{bundle.name} does not fit {config.model.path}: the reply {_REPLY!r} is read as {read!r}. Set the "
            "renderer of this model's family, or default",
        )
    text = f"{bundle.name} renders a prompt and reads a reply. {bundle.name} is used because {bundle.reason}"
    if not bundle.reads_tool_calls:
        text += f". Agents that offer tools are refused (400): {NO_TOOL_PARSER}"
    return CheckResult("ok" if bundle.reads_tool_calls else "warning", "model.renderer", text)


# --- tools -----------------------------------------------------------------------------------------------


def check_tools(config: RolloutConfig) -> list[CheckResult]:
    """Check that the renderer's parser reads back a tool call that the template writes. Return nothing if the model
    cannot be loaded, which `check_renderer` reports."""
    from rollout_backend.rendering.renderer import load_renderer
    from rollout_backend.rendering.selection import CALL, call_turn, read_calls_of

    try:
        bundle = load_renderer(config.model)
    except ConfigError:
        return []
    try:
        prompt, turn = call_turn(bundle.renderer)
        read = read_calls_of(bundle.renderer, (prompt, turn))
    except Exception as error:  # a template or a parser may raise anything
        return [_warn(f"{bundle.name} cannot render and read a tool call ({type(error).__name__}: {error})")]
    if "four" not in bundle.decode(turn):  # of CALL
        text = "the chat template shows no tool calls: in a history that is rendered again, the model misses its own"
        return [CheckResult("warning", "model.renderer", text, "model-tools")]
    if read == [CALL]:
        text = f"{bundle.name} renders a tool call and reads it back"
        return [CheckResult("ok", "model.renderer", text, "model-tools")]
    return [_warn(f"{bundle.name} renders a tool call as {bundle.decode(turn)!r} and reads {read} from it")]


def _warn(text: str) -> CheckResult:
    advice = (
        "agents with tools will not get their calls. Set the renderer of this model's family, or for `default` its"
    )
    return CheckResult(
        "warning", "model.renderer", f"{text}: {advice} tool_parser in model.renderer_options", "model-tools"
    )
