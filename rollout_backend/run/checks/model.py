"""Check the model: its folder, its context, and the renderer that converts messages to tokens and back. Check that
what engines sample in a model call, made as an agent makes it, arrives with ids and log-probabilities."""

from __future__ import annotations

import math
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp

from agent_wrapper.contract import Trajectory
from agent_wrapper.shared.trajectory import TrajectoryUnavailable, fetch_trajectory
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.formats import count
from rollout_backend.config import ModelConfig, RolloutConfig
from rollout_backend.config.model import local_folder
from rollout_backend.core.routed_experts import row_bytes
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ConfigError, RolloutBackendError
from rollout_backend.model.gateway.stats import EngineLoad
from rollout_backend.model.model_call import NO_TOOL_PARSER
from rollout_backend.model.serving.model_serving import ModelServing

_REPLY = "It is 7."
_MAX_TOKENS = 16
_CAPTURE = "engine-capture"
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
    if longest is not None and tokens > longest and config.serving.kind not in ("external", "tinker") and not forced:
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
    # The renderer imports transformers, which is slow to import.
    from rollout_backend.model.rendering.image_positions import prepares_images
    from rollout_backend.model.rendering.renderer import load_renderer

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
    except Exception as error:
        # A renderer that does not fit this model may raise anything.
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
    blind = bool(config.gateway.max_images) and bundle.vision is None and prepares_images(config.model.folder)
    if blind:
        text += (
            f". The model takes images, but {bundle.name} does not render them: calls with images are refused (400)"
        )
    return CheckResult("ok" if bundle.reads_tool_calls and not blind else "warning", "model.renderer", text)


# --- tools -----------------------------------------------------------------------------------------------


def check_tools(config: RolloutConfig) -> list[CheckResult]:
    """Check that the renderer's parser reads back a tool call that the template writes. Return nothing if the model
    cannot be loaded, which `check_renderer` reports."""
    from rollout_backend.model.rendering.renderer import load_renderer
    from rollout_backend.model.rendering.selection import CALL, call_turn, read_calls_of

    try:
        bundle = load_renderer(config.model)
    except ConfigError:
        return []
    try:
        prompt, turn = call_turn(bundle.renderer)
        read = read_calls_of(bundle.renderer, (prompt, turn))
    except Exception as error:
        # A template or a parser may raise anything.
        return [_warn(f"{bundle.name} cannot render and read a tool call ({type(error).__name__}: {error})")]
    # CALL contains "four".
    if "four" not in bundle.decode(turn):
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


# --- a model call ----------------------------------------------------------------------------------------


async def check_capture(config: RolloutConfig) -> list[CheckResult]:
    """Start engines, router and gateway, or use the engines of `serving.urls`, and make one model call."""
    with tempfile.TemporaryDirectory(prefix="rollout-doctor-") as folder:
        # Only agents need these settings.
        alone = {"public_url": None, "tls_certificate": None, "tls_key": None}
        gateway = config.gateway.model_copy(update=alone)
        settings = config.model_copy(update={"gateway": gateway, "relay": None, "output_dir": Path(folder)})
        serving = ModelServing(settings, Path(folder))
        try:
            await serving.start(secrets.token_urlsafe(48))
            found = await _call(config, serving)
            return [found, judge_room(config, (await serving.gateways.stats()).engines.values())]
        except (RolloutBackendError, TrajectoryUnavailable, aiohttp.ClientError, TimeoutError) as error:
            text = f"a model call failed: {str(error) or type(error).__name__}"
            return [CheckResult("problem", "serving", text, _CAPTURE)]
        finally:
            await serving.stop()


async def _call(config: RolloutConfig, serving: ModelServing) -> CheckResult:
    timeout_s = config.timeouts.model_call_s
    claims = SessionClaims(
        run_id="doctor",
        step=0,
        rollout_id="doctor",
        attempt=1,
        session_id=f"doctor-{secrets.token_hex(16)}",
        sampling=config.sampling.model_copy(update={"max_tokens": _MAX_TOKENS}),
        expires_at=time.time() + timeout_s + 60,
    )
    endpoint = serving.gateways.endpoint(claims)
    asked = {"model": endpoint.name, "messages": [{"role": "user", "content": "Count from one to ten."}]}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s + 5)) as http,
        http.post(
            f"{endpoint.base_url}/chat/completions",
            json=asked,
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
        ) as reply,
    ):
        if reply.status != 200:
            text = (
                f"a model call through gateway and router was answered {reply.status}: {(await reply.text())[:500]}"
            )
            return CheckResult("problem", "serving", text, _CAPTURE)
    return judge_capture(await fetch_trajectory(endpoint, 10.0))


def judge_capture(trajectory: Trajectory) -> CheckResult:
    """Judge what the gateway recorded of one call."""
    segments = trajectory.segments
    logprobs = [
        logprob
        for segment in segments
        for sampled, logprob in zip(segment.response_mask, segment.logprobs, strict=True)
        if sampled
    ]
    if not logprobs:
        return CheckResult(
            "problem", "serving", "a model call was answered, but no sampled token was recorded", _CAPTURE
        )
    if any(math.isnan(each) for each in logprobs):
        text = (
            f"the engine returned {len(logprobs)} tokens, but not every log-probability: training needs them. Use "
            "SGLang's native /generate behind the router, without a proxy that changes answers"
        )
        return CheckResult("problem", "serving", text, _CAPTURE)
    versions = {span.version for segment in segments for turn in segment.turns for span in turn.weight_versions}
    text = f"{len(logprobs)} sampled tokens came through router and gateway with ids and log-probabilities"
    if not versions:
        text += ", but without a weight version: staleness cannot be measured. Use SGLang 0.5 or newer"
        return CheckResult("warning", "serving", text, _CAPTURE)
    return CheckResult("ok", "serving", f"{text}, of weights {', '.join(sorted(versions))}", _CAPTURE)


def judge_room(config: RolloutConfig, engines: Iterable[EngineLoad]) -> CheckResult:
    """Compare the engines' KV caches with the conversations that a run can have open."""
    name, setting = "engine-room", "runtime.max_sessions"
    rooms = [engine.kv_tokens for engine in engines]
    if not rooms or not all(rooms):
        return CheckResult("unchecked", setting, "not every engine reports the size of its KV cache", name)
    sessions, context = config.runtime.max_sessions, config.model.context_tokens
    text = f"{count(len(rooms), 'engine')} with KV caches for {sum(rooms):,} tokens"
    if min(rooms) < context:
        text += f", one of them for {min(rooms):,}: a conversation of model.context_length ({context:,}) does not fit"
        advice = "lower model.context_length, or give each engine more memory: serving.tensor_parallel"
        return CheckResult("warning", setting, f"{text}: {advice}", name)
    each = f"{sum(rooms) // sessions:,} for each of {sessions:,} sessions"
    return CheckResult("ok", setting, f"{text}, {each}; what does not fit waits, or is computed again", name)
