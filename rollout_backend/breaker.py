"""Stops a run whose rollouts are all lost in one way, before more is spent on them. Pure: told what ends and when.

What must always hold: a rollout that the infrastructure let through, whatever its agent made of it, begins every
count anew. What fails ends sooner than what works, so failures alone prove little: there must be as many of them as
rollouts that are running. Nor is one burst a pattern, such as the restart of an engine that many agents were calling:
they must also lie some time apart. Refusals for want of room do not count: they pass, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_backend.config import AgentCoreConfig, BreakerConfig, RolloutConfig
from rollout_backend.ledger import NO_RESULT, Entry

_ADVICE = {
    "access_denied": "attach the trainer's policy (output TrainerPolicyArn of the stack), and see that the "
    "credentials are those of its account",
    "credentials_expired": "log in again (aws sso login), or set new AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    "AWS_SESSION_TOKEN",
    "no_credentials": "log in (aws sso login), or see why the credentials could not be renewed",
    "runtime_not_found": "mend runtime.arn and runtime.qualifier: no such runtime, or no such endpoint of it, exists",
    "container_error": "read the container's log; an image that is not arm64 says 'exec format error' there",
    "invoke_rejected": "the last message says why; 'not MMDSv2-enabled' is dealt with in docs/deploy.md",
    "not_a_rollout_app": "wrap the agent in RolloutApp, and deploy the current image",
    "invalid_result": "the wrapper in the image and this backend must be of one version; the refused objects are "
    "recorded in quarantine",
    "model_unavailable": "try gateway.public_url with curl from where the agents run; then the logs of gateway, "
    "router and engines",
    "trajectory_unavailable": "try gateway.public_url with curl from where the agents run; then the gateway's log",
    "terminated": "containers get SIGTERM while agents run: keep runtime.max_lifetime_s above timeouts.agent_s, and "
    "deploy nothing during a run",
    "runtime_conflict": "raise runtime.max_attempts",
    "runtime_unavailable": "look at the runtime's status and at the network between here and there",
    "invoke_outcome_unknown": "raise runtime.read_timeout_s if the agent's container is slow to start",
    NO_RESULT: "agents accept and are never heard of again: are they killed for memory, and may their role write "
    "under storage.prefix?",
}
_FOR_WANT_OF_ROOM = frozenset({"throttled", "quota_exceeded"})
_OF_SERVING = frozenset({"model_unavailable", "trajectory_unavailable"})


_MESSAGE = 600  # characters of the last failure's message


@dataclass
class _Streak:
    """Rollouts lost for one reason, with none let through meanwhile."""

    since: float
    until: float
    last: Entry
    count: int = 1


class Breaker:
    """One for a run, across its steps. `opened` is the diagnosis once it has opened, which it stays."""

    def __init__(
        self,
        settings: BreakerConfig | None = None,
        log_of: Callable[[Entry], str] = lambda entry: f"that of session {entry.session_id}",
    ) -> None:
        """Without settings it never opens. `log_of` says where the log of a lost rollout is."""
        self._settings = settings or BreakerConfig(consecutive=None)
        self._log_of = log_of
        self._streaks: dict[str, _Streak] = {}
        self._running: dict[int, int] = {}  # by step
        self.opened: str | None = None

    def settled(self, entry: Entry, now: float) -> None:
        """Told of each rollout that ends, in their order. `now` in seconds, of any clock that only goes forward."""
        if entry.let_through:  # what we have ended ourselves says nothing of the infrastructure
            self._streaks.clear()
        elif entry.lost and entry.reason not in _FOR_WANT_OF_ROOM:
            streak = self._streaks.get(entry.reason)
            if streak is None:
                self._streaks[entry.reason] = _Streak(now, now, entry)
            else:
                streak.until, streak.last, streak.count = now, entry, streak.count + 1

    def judge(self, step: int, running: int) -> None:
        """Opens if it is time. `running`: rollouts of the step that agents are at work on."""
        self._running[step] = running
        if not running:
            del self._running[step]
        if self._settings.consecutive is None or self.opened is not None:
            return
        enough = max(self._settings.consecutive, sum(self._running.values()))
        for streak in self._streaks.values():
            if streak.count >= enough and streak.until - streak.since >= self._settings.over_s:
                self.opened = self._diagnosis(streak)

    def _diagnosis(self, streak: _Streak) -> str:
        last = streak.last
        return (
            f"the run is stopped: {streak.count} rollouts in {streak.until - streak.since:.0f} s ended as "
            f"{last.outcome}, {last.reason}, and none was let through meanwhile. The last one, "
            f"{last.planned.rollout_id}: {last.message[:_MESSAGE] or 'no message'}. Its log: {self._log_of(last)}. "
            f"What to try: {_ADVICE.get(last.reason, 'see the table of reasons in docs/run-rollouts.md')}. "
            "Finished rollouts are kept: begin again under the same run_id (setting: breakers.consecutive)"
        )


def log_place(config: RolloutConfig, entry: Entry) -> str:
    """Where a person finds the log of a rollout that was lost."""
    runtime, session = config.runtime, f"session {entry.session_id or 'never opened'}"
    if entry.reason == "invalid_result":
        return f"s3://{config.storage.bucket}/{config.storage.prefix}runs/{config.run_id}/quarantine/, {session}"
    if entry.reason in _OF_SERVING:
        return f"{config.run_dir / 'logs'}, and the agent's own, {session}"
    if not isinstance(runtime, AgentCoreConfig):
        return f"that of the agent server at {runtime.url}, {session}"
    runtime_id = runtime.arn.rpartition("/")[2] if runtime.arn else f"{runtime.runtime_name}-ID"
    return f"CloudWatch, /aws/bedrock-agentcore/runtimes/{runtime_id}-{runtime.qualifier}, {session}"
