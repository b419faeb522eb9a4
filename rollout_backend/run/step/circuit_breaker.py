"""Stop a run after consecutive infrastructure failures for one reason. Pure: the caller passes outcomes and times.

Results without a reward and agents that never serve also count: the agent or its verifier is broken for every task.

Invariants:

- a delivered result, even one with an agent error, resets every count. A result without a reward does not reset the
  counts of results without a reward;
- failures end sooner than successes, so the breaker opens only after at least as many failures as rollouts still run;
- a burst is not a pattern (an engine restart loses all calls in flight), so the failures must also span some time;
- if the runtime of a task's image cannot be created, this counts only while no agent runs, and the failures must span
  the time in which the runtimes of other images may still be created;
- throttling and exhausted quotas do not count: they are temporary, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_wrapper.contract import NO_REWARD, quarantine_prefix
from rollout_backend.config import CircuitBreakerConfig, RolloutConfig
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.core.reasons import OF_THE_AGENT, SCORER_FAILED, documented_at, what_to_do

_WITHOUT_REWARD = frozenset({NO_REWARD, "bad_extras", "bad_reward", "no_model_call"})
_OF_ONE_IMAGE = "runtime_create_failed"
_FOR_WANT_OF_ROOM = frozenset({"throttled", "quota_exceeded"})
_OF_RUN_LOGS = frozenset({"model_unavailable", "model_unreachable", "trajectory_unavailable", SCORER_FAILED})
# Limits the characters of the last failure's message.
_MESSAGE = 600


@dataclass
class _Streak:
    """Consecutive failures for one reason."""

    since: float
    until: float
    last: LedgerEntry
    log: str
    count: int = 1


class CircuitBreaker:
    """A run has one breaker for all its steps. `opened` is None or the diagnosis. An open breaker stays open."""

    def __init__(self, settings: CircuitBreakerConfig, creation_s: float = 600.0) -> None:
        """`creation_s` is the maximum time for the creation of an image's runtime."""
        self._settings = settings
        self._creation_s = creation_s
        self._streaks: dict[str, _Streak] = {}
        self._running: dict[int, int] = {}
        self.opened: str | None = None

    def record_settled(self, entry: LedgerEntry, now: float, log: str) -> None:
        """Record a settled rollout, in the order of settlement. `now` is in seconds of any monotonic clock, and `log`
        describes the location of the rollout's log."""
        unrewarded = entry.delivered and entry.reason in _WITHOUT_REWARD
        # A rollout that the backend ended itself proves nothing about the infrastructure.
        if entry.delivered:
            for reason in self._streaks.keys() - (_WITHOUT_REWARD if unrewarded else ()):
                del self._streaks[reason]
        lost = entry.lost or entry.reason in (SCORER_FAILED, *OF_THE_AGENT)
        if unrewarded or (lost and entry.reason not in _FOR_WANT_OF_ROOM):
            # The original ledger would keep all entries of its step in memory.
            entry = replace(entry, ledger=Ledger(entry.ledger.step, {}))
            streak = self._streaks.get(entry.reason)
            if streak is None:
                self._streaks[entry.reason] = _Streak(now, now, entry, log)
            else:
                streak.until, streak.last, streak.log, streak.count = now, entry, log, streak.count + 1

    def evaluate(self, step: int, running: int) -> None:
        """Open the breaker if there are enough failures. `running` is the number of the step's running agents."""
        self._running[step] = running
        if not running:
            del self._running[step]
        if self._running:
            self._streaks.pop(_OF_ONE_IMAGE, None)
        if self._settings.max_failures is None or self.opened is not None:
            return
        enough = max(self._settings.max_failures, sum(self._running.values()))
        for reason, streak in self._streaks.items():
            span_s = max(self._settings.min_span_s, self._creation_s if reason == _OF_ONE_IMAGE else 0.0)
            if streak.count >= enough and streak.until - streak.since >= span_s:
                self.opened = self._diagnosis(streak)

    def _diagnosis(self, streak: _Streak) -> str:
        last = streak.last
        advice = what_to_do(last.reason).replace("`", "")
        if last.delivered:
            meanwhile, after = "no rollout had a reward", "Start under another run_id: a restart reuses these results"
        else:
            meanwhile = "no result was delivered"
            after = "Finished rollouts are kept: restart under the same run_id"
        return (
            f"the run is stopped: {streak.count} rollouts in {streak.until - streak.since:.0f} s ended as "
            f"{last.outcome}, {last.reason}, and {meanwhile} meanwhile. The last one, "
            f"{last.rollout_id}: {last.message[:_MESSAGE] or 'no message'}. Its log: {streak.log}. "
            f"What to try: {advice}; see {documented_at(last.reason)}. "
            f"{after} (setting: circuit_breaker.max_failures)"
        )


def describe_log(config: RolloutConfig, entry: LedgerEntry, session_log: Callable[[str | None], str]) -> str:
    """Describe the location of a lost rollout's log. `session_log` is the runtime's `log_location`."""
    session = f"session {entry.last_session_id or 'never opened'}"
    if entry.reason == "invalid_result":
        return f"s3://{config.storage.bucket}/{quarantine_prefix(config.storage.prefix, config.run_id)}, {session}"
    if entry.reason in _OF_RUN_LOGS:
        return f"{config.run_dir / 'logs'}, and the agent's own, {session}"
    return f"{session_log(entry.last_session_id)}, {session}"
