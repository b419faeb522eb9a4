"""Stop a run after consecutive infrastructure failures for one reason. Pure: the caller passes outcomes and times.

Results without a reward count like such failures: the agent or what verifies it is broken for every task.

Invariants:

- a delivered result, even one with an agent error, resets every count; one without a reward leaves those of results
  without a reward;
- failures end sooner than successes, so the breaker opens only after at least as many failures as rollouts still run;
- one burst is no pattern (an engine restart loses all calls in flight), so the failures must also span some time;
- failures of one task's image, whose runtime cannot be created, count only while no agent runs, and over the time in
  which the runtimes of other images may still be created;
- throttling and exhausted quotas do not count: they pass, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_wrapper.contract import NO_REWARD, quarantine_prefix
from rollout_backend.config import CircuitBreakerConfig, RolloutConfig
from rollout_backend.core.ledger import CONTAINER_LOST, NO_RESULT, Ledger, LedgerEntry
from rollout_backend.core.reasons import SCORER_FAILED, documented_at

_ADVICE = {
    "access_denied": "attach the trainer's policy (output TrainerPolicyArn of the stack), and see that the "
    "credentials are those of its account",
    "credentials_expired": "log in again (aws sso login), or set new AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    "AWS_SESSION_TOKEN",
    "no_credentials": "log in (aws sso login), or see why the credentials could not be renewed",
    "wrong_clock": "synchronise this machine's clock, e.g. by chrony",
    "runtime_not_found": "correct runtime.arn and runtime.qualifier: this runtime or this endpoint does not exist",
    "runtime_create_failed": "the last message has AgentCore's reason: see that the tasks' images exist and are "
    "built for arm64, and that runtime.role may pull them",
    "container_error": "read the container's log; an image that is not arm64 says 'exec format error' there",
    "invoke_rejected": "the last message says why; 'not MMDSv2-enabled' is dealt with in docs/deploy.md",
    "not_a_rollout_app": "wrap the agent in RolloutApp, and deploy the current image",
    "invalid_result": "the wrapper in the image and this backend must be of one version; the refused objects are "
    "recorded in quarantine. If their session_id is wrong, a container writes in the names of others: set "
    "storage.presigned=true",
    "model_unavailable": "if the engine refused the call, its version or its flags do not fit this backend: read its "
    "log; else try gateway.public_url with curl from where the agents run, then the logs of gateway, router and "
    "engines",
    "model_unreachable": "the last message names the address that containers tried: set gateway.public_url to one "
    "that leads to the gateway from where agents run, and open its port to them",
    "trajectory_unavailable": "try gateway.public_url with curl from where the agents run; then the gateway's log",
    "terminated": "containers get SIGTERM while agents run: keep runtime.max_lifetime_s above timeouts.agent_s, and "
    "deploy nothing during a run",
    "runtime_conflict": "the last message says what else acts on the runtime: a deployment, say",
    "container_start_timeout": "the container does not answer /ping in time: make the image smaller, import less "
    "before app.run(), and read the container's log",
    "runtime_unavailable": "look at the runtime's status and at the network between here and there",
    "invoke_outcome_unknown": "raise runtime.read_timeout_s if the agent's container is slow to start",
    "out_of_memory": "agents need more memory than runtime.limits gives them, or leak it",
    "image_pull_failed": "correct runtime.image, and name a secret of the registry in runtime.image_pull_secrets",
    "evicted": "nodes are drained, or have no memory or disk left: reserve what agents use in runtime.requests",
    "unschedulable": "no node has room for runtime.requests, or none matches runtime.node_selector",
    CONTAINER_LOST: "containers die while agents run: are they killed for memory, or does something hold their "
    "Python process for a minute at a time?",
    NO_REWARD: "no agent returns a reward: return `reward`, or set scoring.function",
    "bad_reward": "return a finite number as `reward`",
    "no_model_call": "let the agent call the model at the base_url and with the api_key of its context",
    SCORER_FAILED: "correct the scorer, or what it calls: the last message says how it failed",
    NO_RESULT: "agents accept and are never heard of again: are they killed for memory, and may their role write "
    "under storage.prefix?",
}
_WITHOUT_REWARD = frozenset({NO_REWARD, "bad_reward", "no_model_call"})
_OF_ONE_IMAGE = "runtime_create_failed"
_FOR_WANT_OF_ROOM = frozenset({"throttled", "quota_exceeded"})
_OF_RUN_LOGS = frozenset({"model_unavailable", "model_unreachable", "trajectory_unavailable", SCORER_FAILED})


_MESSAGE = 600  # characters of the last failure's message


@dataclass
class _Streak:
    """Consecutive failures for one reason."""

    since: float
    until: float
    last: LedgerEntry
    count: int = 1


class CircuitBreaker:
    """A run has one breaker for all its steps. `opened` is None or the diagnosis. An open breaker stays open."""

    def __init__(
        self,
        settings: CircuitBreakerConfig | None = None,
        log_of: Callable[[LedgerEntry], str] = lambda entry: f"that of session {entry.last_session_id}",
        creation_s: float = 600.0,
    ) -> None:
        """Without settings it never opens. `log_of` returns the location of a lost rollout's log. `creation_s` is how
        long the creation of an image's runtime may take."""
        self._settings = settings or CircuitBreakerConfig(max_failures=None)
        self._log_of = log_of
        self._creation_s = creation_s
        self._streaks: dict[str, _Streak] = {}
        self._running: dict[int, int] = {}  # by step
        self.opened: str | None = None

    def record_settled(self, entry: LedgerEntry, now: float) -> None:
        """Record a settled rollout, in the order of settlement. `now` is in seconds of any monotonic clock."""
        unrewarded = entry.delivered and entry.reason in _WITHOUT_REWARD
        if entry.delivered:  # a rollout that we ended proves nothing about the infrastructure
            for reason in self._streaks.keys() - (_WITHOUT_REWARD if unrewarded else ()):
                del self._streaks[reason]
        lost = entry.lost or entry.reason == SCORER_FAILED
        if unrewarded or (lost and entry.reason not in _FOR_WANT_OF_ROOM):
            entry = replace(entry, ledger=Ledger(entry.ledger.step, {}))  # which would keep all entries of its step
            streak = self._streaks.get(entry.reason)
            if streak is None:
                self._streaks[entry.reason] = _Streak(now, now, entry)
            else:
                streak.until, streak.last, streak.count = now, entry, streak.count + 1

    def evaluate(self, step: int, running: int) -> None:
        """Open if the failures suffice. `running` is the number of the step's rollouts whose agents run."""
        self._running[step] = running
        if not running:
            del self._running[step]
        if self._running:  # runtimes can be created
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
        if last.delivered:
            meanwhile, after = "no rollout had a reward", "Start under another run_id: a restart reuses these results"
        else:
            meanwhile = "no result was delivered"
            after = "Finished rollouts are kept: restart under the same run_id"
        return (
            f"the run is stopped: {streak.count} rollouts in {streak.until - streak.since:.0f} s ended as "
            f"{last.outcome}, {last.reason}, and {meanwhile} meanwhile. The last one, "
            f"{last.planned.rollout_id}: {last.message[:_MESSAGE] or 'no message'}. Its log: {self._log_of(last)}. "
            f"What to try: {_ADVICE.get(last.reason, 'read the message')}; see {documented_at(last.reason)}. "
            f"{after} (setting: circuit_breaker.max_failures)"
        )


def describe_log(config: RolloutConfig, entry: LedgerEntry, session_log: Callable[[str | None], str]) -> str:
    """Describe where a person finds the log of a lost rollout. `session_log` is the runtime's `log_location`."""
    session = f"session {entry.last_session_id or 'never opened'}"
    if entry.reason == "invalid_result":
        return f"s3://{config.storage.bucket}/{quarantine_prefix(config.storage.prefix, config.run_id)}, {session}"
    if entry.reason in _OF_RUN_LOGS:
        return f"{config.run_dir / 'logs'}, and the agent's own, {session}"
    return f"{session_log(entry.last_session_id)}, {session}"
