"""Classify a rollout by what its agent returned or raised and by what was sampled. Pure.

Invariants:

- a reward is a finite number that the agent returned, or absent;
- a failure of the model endpoint is never an agent error;
- neither a failure nor the extras contain the session key.

An exception is `model_unavailable` if an error in its chain of causes meets both conditions:

- the endpoint failed: the status, as errors of httpx, requests, aiohttp and urllib have it, is 408, 410 (the session
  is closed or lost), 429 or 5xx; or its class is a transport error of httpx, httpcore, aiohttp or requests; or its
  class has a name that model SDKs use (`APIConnectionError`, ...; plain `APIError` for an error event inside a
  stream);
- the call went to the model: the error's URL, or its host and port, is that of the session's endpoint. An error
  without them counts only if it is an SDK's.

A failed web call of a tool is therefore an agent error, and the check needs no SDK.

If an agent catches such an error and returns a reward, the gateway's count of unanswered calls still refuses it. The
same count makes a failed command, or one without a reward, `model_unavailable`.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import msgpack

from agent_wrapper.contract import (
    NO_REWARD,
    Failure,
    Images,
    Outcome,
    Rollout,
    RolloutRequest,
    Segment,
    Trajectory,
    check_rewards,
)
from agent_wrapper.contract.codec import unpacked_size
from agent_wrapper.errors import AgentFailure, CommandError, CommandNotStarted, RewardError, VerifierError
from agent_wrapper.runner import Raised, Returned, traceback_of
from agent_wrapper.shared.json_values import finite_number, read_extras, short
from agent_wrapper.shared.redaction import without_key
from agent_wrapper.shared.trajectory import TrajectoryTooLarge, TrajectoryUnavailable

_WANTED = "return a finite number, or a dict with one under 'reward' and other JSON values"

_OF_COMMANDS: dict[type[Exception], tuple[Outcome, str]] = {
    CommandError: (Outcome.AGENT_ERROR, "command_failed"),
    CommandNotStarted: (Outcome.INFRA_ERROR, "command_not_started"),
    RewardError: (Outcome.AGENT_ERROR, "bad_reward"),
    VerifierError: (Outcome.INFRA_ERROR, "verifier_failed"),
}
# No exception says so in this case.
_MODEL_COULD_CAUSE = frozenset(
    {"bad_extras", "bad_reward", "command_failed", "invocation_error", NO_REWARD, "status_code"}
)

SDK_ERRORS = frozenset(
    {
        "APIConnectionError",
        "APITimeoutError",
        "InternalServerError",
        "ModelThrottledException",
        "OverloadedError",
        "RateLimitError",
        "ServiceUnavailableError",
    }
)
_TRANSPORT_ERRORS = frozenset(
    {
        ("httpx", "TransportError"),
        ("httpcore", "NetworkError"),
        ("httpcore", "TimeoutException"),
        ("httpcore", "ProtocolError"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
    }
)
# Where errors have a status and a URL: those of httpx and the SDKs, of requests, of aiohttp, and of urllib.
_STATUS = (("status_code",), ("response", "status_code"), ("status",), ("code",))
_URL = (("request", "url"), ("response", "request", "url"), ("request_info", "url"), ("url",))


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent that has ended. What it sampled is not known yet."""

    outcome: Outcome
    reward: float | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    failure: Failure | None = None

    @property
    def finished(self) -> bool:
        """Whether the agent completed its work: it returned a reward, or leaves the reward to a scorer."""
        return self.failure is None or self.failure.reason == NO_REWARD


@dataclass(frozen=True)
class Unscored:
    """The return value of an agent that leaves the reward to a scorer."""

    values: Mapping[str, object]


def failed(
    outcome: Outcome, reason: str, message: str, trace: str | None = None, reward: float | None = None
) -> AgentResult:
    failure = Failure(reason=reason, message=_text(message), traceback=_text(trace) if trace else None)
    return AgentResult(outcome, reward, failure=failure)


def classify(result: Returned | Raised, base_url: str) -> AgentResult:
    """Return the result of an agent that ended before its deadline."""
    return _classify_value(result.value) if isinstance(result, Returned) else _classify_error(result.error, base_url)


def build_rollout(
    request: RolloutRequest,
    result: AgentResult,
    trajectory: Trajectory | TrajectoryUnavailable | None,
    started_at: float,
    finished_at: float,
) -> Rollout:
    """Return the rollout to publish: the agent's result, corrected by its trajectory (None: it did not run)."""
    model, key = request.endpoint.name, request.endpoint.api_key
    result = replace(result, extras=without_key(result.extras, key))
    segments: tuple[Segment, ...] = ()
    seal: str | None = None
    images: Images = {}
    if isinstance(trajectory, Trajectory):
        model, segments, seal = trajectory.model, trajectory.segments, trajectory.seal
        images = trajectory.images
        if result.reward is not None and trajectory.unanswered_calls:
            result = failed(
                Outcome.INFRA_ERROR,
                "model_unavailable",
                f"the model endpoint left {trajectory.unanswered_calls} calls unanswered and the agent continued, so "
                "its reward does not measure the model",
            )
        elif (
            result.failure is not None and result.failure.reason in _MODEL_COULD_CAUSE and trajectory.unanswered_calls
        ):
            message = (
                f"the model endpoint left {trajectory.unanswered_calls} calls unanswered: {result.failure.message}"
            )
            result = failed(Outcome.INFRA_ERROR, "model_unavailable", message)
        elif result.finished and not any(segment.sampled_tokens for segment in segments):
            message = (
                "the agent returned, yet nothing was sampled for it: call the model at the context's base_url with "
                "its api_key"
            )
            result = failed(Outcome.AGENT_ERROR, "no_model_call", message)
        if result.turn_rewards and len(result.turn_rewards) != (
            turns := sum(len(segment.turns) for segment in segments)
        ):
            message = f"the agent returned {len(result.turn_rewards)} turn_rewards, and {turns} model calls were made"
            result = failed(Outcome.AGENT_ERROR, "bad_reward", message)
    elif result.finished and isinstance(trajectory, TrajectoryTooLarge):
        result = failed(Outcome.AGENT_ERROR, "trajectory_too_large", str(trajectory))
    elif result.finished:
        result = failed(Outcome.INFRA_ERROR, "trajectory_unavailable", str(trajectory))
    elif trajectory is not None and result.failure is not None:
        message = f"{result.failure.message} (besides, {trajectory})"
        result = replace(result, failure=result.failure.model_copy(update={"message": message}))
    failure = result.failure
    if failure is not None:
        failure = Failure.model_validate(without_key(failure.model_dump(), key))
    return Rollout(
        run_id=request.run_id,
        step=request.step,
        task_id=request.task_id,
        rollout_id=request.rollout_id,
        attempt=request.attempt,
        session_id=request.session_id,
        outcome=result.outcome,
        reward=result.reward,
        extras=result.extras,
        failure=failure,
        model=model,
        segments=segments,
        seal=seal,
        started_at=started_at,
        finished_at=max(started_at, finished_at),
        images=images,
        turn_rewards=result.turn_rewards,
    )


def without_artifacts(rollout: Rollout, message: str) -> Rollout:
    """Return the rollout of an agent whose artifacts could not be written. Another attempt may succeed."""
    return _without_reward(rollout, failed(Outcome.INFRA_ERROR, "artifact_lost", message))


def encode(rollout: Rollout, max_bytes: int) -> tuple[Rollout, bytes]:
    """Return the rollout to publish and its encoding. Extras that make it too large are refused."""
    body = rollout.encode()
    if not rollout.extras or (size := unpacked_size(body)) <= max_bytes:
        return rollout, body
    extra_size, name = max((len(msgpack.packb(value)), name) for name, value in rollout.extras.items())
    message = (
        f"the result has {size} bytes, more than storage.max_result_bytes={max_bytes}, and {extra_size} of them are "
        f"{name!r}; return less, or raise the setting"
    )
    rollout = _without_reward(rollout, failed(Outcome.AGENT_ERROR, "bad_extras", message), extras={})
    return rollout, rollout.encode()


def _without_reward(rollout: Rollout, end: AgentResult, **more: object) -> Rollout:
    update = {"outcome": end.outcome, "reward": None, "turn_rewards": (), "failure": end.failure, **more}
    return rollout.model_copy(update=update)


def describe(error: BaseException) -> str:
    """Return `Class: message`, like the last line of a traceback."""
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        return type(error).__name__


def _said(error: BaseException) -> str:
    """Return the error's message. An agent's error may fail to give one."""
    try:
        return str(error)
    except Exception:
        return describe(error)


# --- what the agent returned ------------------------------------------------------------------------------


def _classify_value(value: object) -> AgentResult:
    turn_rewards: tuple[float, ...] = ()
    if isinstance(value, Unscored):
        message = (
            "the agent returned no `reward`, and no scorer has computed one: name a scorer by --scorer "
            "FILE.py:FUNCTION or scoring.function (docs/rewards.md)"
        )
        result = failed(Outcome.AGENT_ERROR, NO_REWARD, message)
    else:
        try:
            if isinstance(value, Mapping):
                if "reward" not in value:
                    raise ValueError(f"the agent returned a dict without 'reward' (it has {sorted(map(str, value))})")
                reward = finite_number(value["reward"])
                given = value.get("turn_rewards", ())
                if not isinstance(given, Iterable) or isinstance(given, str):
                    raise ValueError(f"turn_rewards is {short(given)}, not a list of numbers")  # noqa: TRY004
                turn_rewards = tuple(finite_number(each) for each in given)
            else:
                reward = finite_number(value)
            check_rewards(reward, turn_rewards)
        except Exception as error:
            # The agent's own objects can raise anything.
            return failed(Outcome.AGENT_ERROR, "bad_reward", f"{_said(error)}; {_WANTED}")
        result = AgentResult(Outcome.COMPLETED, reward, turn_rewards=turn_rewards)
    returned = value.values if isinstance(value, Unscored) else value if isinstance(value, Mapping) else {}
    try:
        extras = read_extras({k: v for k, v in returned.items() if k not in ("reward", "turn_rewards")})
    except Exception as error:
        return failed(Outcome.AGENT_ERROR, "bad_extras", f"{_said(error)}; return JSON values, numbers or arrays")
    return replace(result, extras=extras)


# --- what the agent raised --------------------------------------------------------------------------------


def _classify_error(error: BaseException, base_url: str) -> AgentResult:
    trace = traceback_of(error)
    cause = next((link for link in _chain(error) if _is_model_unavailable(link, base_url)), None)
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        # A TaskGroup wraps the error.
        error = error.exceptions[0]
    if isinstance(error, AgentFailure):
        try:
            reward = None if error.reward is None else finite_number(error.reward)
            check_rewards(reward or 0.0, ())
        except Exception as bad:
            return failed(
                Outcome.AGENT_ERROR, "bad_reward", f"{_said(bad)}, in AgentFailure({_said(error)!r})", trace
            )
        return failed(Outcome.AGENT_ERROR, "agent_failure", _said(error), trace, reward)
    if cause is not None:
        return failed(Outcome.INFRA_ERROR, "model_unavailable", describe(cause), trace)
    for kind, (outcome, reason) in _OF_COMMANDS.items():
        if isinstance(error, kind):
            return failed(outcome, reason, _said(error), trace)
    return failed(Outcome.AGENT_ERROR, "agent_exception", describe(error), trace)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__context__ if not link.__suppress_context__ else None, link.__cause__]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions


def _is_model_unavailable(error: BaseException, base_url: str) -> bool:
    classes = type(error).__mro__
    from_sdk = any(cls.__name__ in SDK_ERRORS for cls in classes) or classes[0].__name__ == "APIError"
    # httpx2 counts as httpx, and httpcore2 as httpcore.
    names = ((cls.__module__.partition(".")[0].rstrip("0123456789"), cls.__name__) for cls in classes)
    transport = any(name in _TRANSPORT_ERRORS for name in names)
    status = next((found for path in _STATUS if isinstance(found := _attribute(error, *path), int)), 0)
    if not (from_sdk or transport or status in (408, 410, 429) or status >= 500):
        return False
    url = next((found for path in _URL if (found := _attribute(error, *path)) is not None), None)
    if url is not None:
        return _server(str(url)) == _server(base_url)
    return from_sdk or (_attribute(error, "host"), _attribute(error, "port")) == _server(base_url)


def _server(url: str) -> tuple[str | None, int] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # An error may name anything as its URL.
        return None
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _attribute(value: object, *path: str) -> object:
    for name in path:
        try:
            value = getattr(value, name, None)
        except Exception:
            # httpx's errors raise for a request that was never set, and other errors in their properties.
            return None
    return value


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()
