"""Check an agent against the container's contract before it is deployed.

The agent runs as a process on this machine, behind an emulator of AgentCore, with a scripted model and a local S3.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from agent_wrapper.contract import ContractError, Outcome, Rollout
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.formats import count
from rollout_backend.core.seal import Sealer
from rollout_backend.workbench.deploy.package import ENTRY_POINT, check_folder
from rollout_backend.workbench.local.harness import AgentHarness, AgentRunError

_REPLIES = ("This reply is scripted.",) * 100
_ROLLOUT_S = 120.0
_POLL_S = 0.1
_PING_S = 10.0
# Times may be whole seconds, so two pings are further apart.
_STAMP_S = 1.1
_PINGS = 30
# A wrong unit or a wrong clock differs by more than this.
_CLOCK_S = 600.0


async def check_contract(folder: Path, payload: Mapping[str, Any]) -> list[CheckResult]:
    """Run one rollout of the agent on a task's payload, then stop its session. Return the findings.

    Raises:
        ConfigError: the folder does not contain an agent.
    """
    check_folder(folder)
    script = folder / ENTRY_POINT
    with tempfile.TemporaryDirectory(prefix="rollout-check-") as logs:
        async with AgentHarness(run_dir=Path(logs)) as harness:
            pings: list[CheckResult] = []

            async def ping(session_id: str) -> None:
                open_now = {session["id"]: session for session in (await harness.sessions(script))["sessions"]}
                session = open_now[session_id]
                pings.append(await check_pings(session["url"], session["since"]))

            try:
                rollout = await harness.run(script, payload, _REPLIES, timeout_s=_ROLLOUT_S, before_stop=ping)
            except AgentRunError as error:
                return [CheckResult("problem", "agent", str(error))]
            started = CheckResult("ok", "agent", "starts, answers /ping and accepts an invoke")
            return [started, _check_result(rollout, harness.sealer), *pings, await _check_end(harness, script)]


def _check_result(rollout: Rollout, sealer: Sealer) -> CheckResult:
    failure = rollout.failure
    if rollout.outcome is Outcome.INFRA_ERROR or (failure is not None and failure.reason == "agent_timeout"):
        assert failure is not None
        return CheckResult("problem", "result", f"{rollout.outcome}, {failure.reason}: {failure.message}")
    try:
        sealer.check(rollout)
    except ContractError as error:
        return CheckResult("problem", "result", f"is not sealed: {error}")
    turns = sum(len(segment.turns) for segment in rollout.segments)
    if not turns:
        return CheckResult("problem", "result", "has no model call: the agent must call context.base_url")
    if failure is not None:
        # A script cannot know what this agent expects.
        text = f"is published; the agent raised {failure.message!r} on the scripted replies"
        return CheckResult("warning", "result", text)
    return CheckResult("ok", "result", f"is published and sealed, with {count(turns, 'model call')}")


async def check_pings(url: str, since: float) -> CheckResult:
    """Ping a session that started at `since` until two pings in different seconds find the same status."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PING_S)) as http:
        answers: list[dict[str, Any]] = []
        while len(answers) < 2 or (answers[-1]["status"] != answers[-2]["status"] and len(answers) < _PINGS):
            if answers:
                await asyncio.sleep(_STAMP_S)
            try:
                async with http.get(f"{url}/ping") as response:
                    answer = await response.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                return CheckResult("problem", "ping", f"/ping gave no JSON: {error!r}")
            wrong = _wrong_ping(answer, since)
            if wrong is not None:
                return CheckResult("problem", "ping", f"/ping answers {json.dumps(answer)[:200]}: {wrong}")
            answers.append(answer)
    before, now = (answer["time_of_last_update"] for answer in answers[-2:])
    if before != now and answers[-1]["status"] == answers[-2]["status"]:
        return CheckResult(
            "problem",
            "ping",
            f"/ping changes time_of_last_update from {before} to {now} although the status has not changed: "
            "AgentCore would never find the session idle, and bill it until the end of its lifetime",
        )
    return CheckResult("ok", "ping", "/ping names the time at which its status changed")


def _wrong_ping(answer: object, since: float) -> str | None:
    """Return what is wrong with the response to a ping of a session that started at `since`, or None."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Healthy", "HealthyBusy"):
        return "status must be Healthy or HealthyBusy"
    changed = answer.get("time_of_last_update")
    if not isinstance(changed, int | float) or isinstance(changed, bool):
        return "time_of_last_update must be a number of seconds, or AgentCore ends the session while it works"
    if not since - _CLOCK_S <= changed <= time.time() + _CLOCK_S:
        return "time_of_last_update must be the time in Unix seconds at which the status changed"
    return None


async def _check_end(harness: AgentHarness, script: Path) -> CheckResult:
    while (sessions := await harness.sessions(script))["ending"] or sessions["sessions"]:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if sessions["counters"]["killed"]:
        return CheckResult(
            "problem", "end", "the process ignores SIGTERM and was killed: AgentCore would cut off its last result"
        )
    return CheckResult("ok", "end", "the process ends in time after SIGTERM")
