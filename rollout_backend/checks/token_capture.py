"""Check that what engines sample arrives with ids and log-probabilities: one model call, as an agent makes it. The
engines also say for how many conversations they have room."""

import math
import secrets
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import aiohttp

from agent_wrapper.contract import Trajectory
from agent_wrapper.shared.trajectory import TrajectoryUnavailable, fetch_trajectory
from rollout_backend.config import RolloutConfig
from rollout_backend.core.check_result import CheckResult
from rollout_backend.core.formats import count
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import RolloutBackendError
from rollout_backend.gateway.stats import EngineSample
from rollout_backend.serving.model_serving import ModelServing

_MAX_TOKENS = 16
_NAME = "engine-capture"


async def check_capture(config: RolloutConfig) -> list[CheckResult]:
    """Start engines, router and gateway, or use the engines of `serving.urls`, and make one model call."""
    with tempfile.TemporaryDirectory(prefix="rollout-doctor-") as folder:
        serving = ModelServing(_alone(config, Path(folder)), Path(folder))
        try:
            await serving.start(secrets.token_urlsafe(48))
            found = await _call(config, serving)
            return [found, judge_room(config, (await serving.gateways.stats()).engines.values())]
        except (RolloutBackendError, TrajectoryUnavailable, aiohttp.ClientError, TimeoutError) as error:
            text = f"a model call failed: {str(error) or type(error).__name__}"
            return [CheckResult("problem", "serving", text, _NAME)]
        finally:
            await serving.stop()


def _alone(config: RolloutConfig, folder: Path) -> RolloutConfig:
    """Return the settings without what only agents need: the public address and its certificate."""
    inside = {"public_url": None, "tls_certificate": None, "tls_key": None}
    gateway = config.gateway.model_copy(update=inside)
    return config.model_copy(update={"gateway": gateway, "relay": None, "output_dir": folder})


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
            return CheckResult("problem", "serving", text, _NAME)
    return judge(await fetch_trajectory(endpoint, 10.0))


def judge(trajectory: Trajectory) -> CheckResult:
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
            "problem", "serving", "a model call was answered, but no sampled token was recorded", _NAME
        )
    if any(math.isnan(each) for each in logprobs):
        text = (
            f"the engine returned {len(logprobs)} tokens, but not every log-probability: training needs them. Use "
            "SGLang's native /generate behind the router, without a proxy that changes answers"
        )
        return CheckResult("problem", "serving", text, _NAME)
    versions = {span.version for segment in segments for turn in segment.turns for span in turn.weight_versions}
    text = f"{len(logprobs)} sampled tokens came through router and gateway with ids and log-probabilities"
    if not versions:
        text += ", but without a weight version: staleness cannot be measured. Use SGLang 0.5 or newer"
        return CheckResult("warning", "serving", text, _NAME)
    return CheckResult("ok", "serving", f"{text}, of weights {', '.join(sorted(versions))}", _NAME)


def judge_room(config: RolloutConfig, engines: Iterable[EngineSample]) -> CheckResult:
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
