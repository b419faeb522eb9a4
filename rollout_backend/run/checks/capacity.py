"""Compare the limits of gateways and engines with the number of sessions of a step.

Calls beyond a limit wait, so a limit that is too small costs time. Too few open files cost sessions.
"""

import math
import resource
from collections.abc import Iterator

from rollout_backend.base.check_result import CheckResult, Level
from rollout_backend.config import RolloutConfig
from rollout_backend.model.gateway.access import needed_files


def check_gateways(config: RolloutConfig, max_sessions: int, rollouts: int | None) -> Iterator[CheckResult]:
    """Yield whether the gateways can serve a batch. `rollouts` is its size; None if it is not known."""
    gateway = config.gateway
    sessions = max_sessions if rollouts is None else min(rollouts, max_sessions)
    each, setting = math.ceil(sessions / gateway.processes), "gateway.max_concurrent_calls"
    text = f"{gateway.processes} gateways" if gateway.processes > 1 else "1 gateway"
    text = f"{text} with {gateway.max_concurrent_calls:,} calls in flight each, for up to {sessions:,} sessions"
    if each <= gateway.max_concurrent_calls:
        yield CheckResult("ok", setting, text)
    else:
        wanted = math.ceil(sessions / gateway.max_concurrent_calls)
        text += f": further calls wait in order. Set gateway.processes={wanted} or auto, or {setting}={each}"
        yield CheckResult("ok" if rollouts is None else "warning", setting, text)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_files(gateway.max_concurrent_calls, each)
    if gateway.kind == "process" and hard != resource.RLIM_INFINITY and hard < needed:
        text = f"a gateway with {each:,} sessions takes {needed:,} open files, and this machine allows a process "
        text += f"{hard:,}: raise that (`ulimit -Hn`), or raise gateway.processes"
        level: Level = "problem" if rollouts is not None else "warning"
        yield CheckResult(level, "open files", text, "gateway-files")


def check_engines(config: RolloutConfig, max_sessions: int, rollouts: int, engines: int) -> Iterator[CheckResult]:
    """Yield a warning if more calls of a batch may wait for an engine than `gateway.max_queued_per_engine` allows."""
    each = math.ceil(min(rollouts, max_sessions) / engines)
    if each > 2 * config.gateway.max_queued_per_engine:
        text = f"up to {each:,} sessions call each of {engines:,} engines, and beyond "
        text += (
            f"{config.gateway.max_queued_per_engine:,} waiting calls per engine the gateways hold further ones for "
        )
        text += "up to timeouts.model_call_s: add engines, lower runtime.max_sessions, or raise timeouts.model_call_s"
        yield CheckResult("warning", "gateway.max_queued_per_engine", text)
