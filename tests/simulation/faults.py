"""The probability of each fault in one history. Each seed draws its own, so calm and wild runs both occur."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

_PER_RUN = frozenset({
    "outage", "hidden_quota", "s3_outage", "chatter", "cut_off", "kill", "journal_lost", "disk_full", "rival",
    "s3_cut_off", "queue_off", "queue_gone", "silent_outage", "unsaved", "checkpoint_lost", "killed_after_step",
    "silent_after_outage", "gateway_away",
})  # fmt: skip

SILENT = {  # up to how often
    "silent_s3": 0.1, "silent_outage": 1.0, "silent_sqs": 0.2, "silent_runtime": 0.1, "silent_gateway": 0.3,
    "silent_model": 0.1, "silent_scorer": 0.3, "silent_agent_put": 0.3,
}  # fmt: skip

_SITUATED = ("opened_by_503", "silent_after_outage", "disk_fails", "gateway_away", "dies_at_invoke")

# How a trainer comes to train a step that an earlier one has trained.
_LIVES = {"unsaved": 0.5, "checkpoint_lost": 0.3, "killed_after_step": 0.8}


@dataclass(frozen=True)
class Faults:
    """Probabilities, per call unless stated otherwise."""

    throttled: float = 0.0  # 429
    quota: float = 0.0  # 402
    conflict: float = 0.0  # 409
    container: float = 0.0  # 424
    unavailable: float = 0.0  # 5xx before the call has an effect
    outage: float = 0.0  # the runtime refuses every call for a minute; per run
    hidden_quota: float = 0.0  # the runtime grants fewer calls per second than configured; per run
    cut_after: float = 0.0  # the call has its effect, and the response is lost
    stop_refused: float = 0.0  # a stop fails and may be retried
    stop_unheard: float = 0.0  # a stop succeeds, but the agent keeps running; per session
    s3: float = 0.0  # S3 does not answer the training side
    s3_outage: float = 0.0  # S3 refuses every PUT, GET or LIST of the training side for up to two minutes; per kind
    slow_gets: float = 0.0  # how long reading a result takes, as a fraction of 15 s
    surprise: float = 0.0  # an unexpected exception while a result is read
    sqs: float = 0.0  # SQS does not answer
    put_cut: float = 0.0  # an agent's PUT succeeds, and the response is lost
    put_fails: float = 0.0  # an agent's PUT fails permanently
    announce_lost: float = 0.0
    chatter: float = 0.0  # foreign announcements arrive continuously; per run
    announce_twice: float = 0.0
    junk: float = 0.0  # a malformed message, or one that names foreign objects; per rollout
    malformed: float = 0.0  # a result breaks the contract; per rollout
    bomb: float = 0.0  # a small result expands beyond the limit; per rollout
    forged: float = 0.0  # a container writes an object for another rollout; per rollout
    dies: float = 0.0  # a session ends silently; per session
    beat_lost: float = 0.0  # a heartbeat does not arrive
    cut_off: float = 0.0  # for up to 100 s no heartbeat arrives; per run
    hangs: float = 0.0  # a session never ends; per session
    agent_error: float = 0.0  # the agent fails; per rollout
    poison: float = 0.0  # no container starts for a task; per task
    model_fails: float = 0.0  # a model call gets no response
    kill: float = 0.0  # the trainer is killed; per step and start
    journal_lost: float = 0.0  # the gateway's journal is lost; per start of the trainer
    disk_full: float = 0.0  # the trainer's disk is full
    rival: float = 0.0  # another manager starts while one is alive; per trainer process
    s3_cut_off: float = 0.0  # the first manager cannot reach S3 meanwhile, for up to four minutes; per rival
    queue_off: float = 0.0  # the run has no queue
    queue_gone: float = 0.0  # the queue is deleted during the run; per run
    scorer_fails: float = 0.0  # the scorer fails; only in runs that have one
    artifact_fails: float = 0.0  # an agent's PUT of its artifacts fails; only in runs that have a scorer
    opened_by_503: float = 0.0  # the outage's 503 opens the session nevertheless; per outage
    unsaved: float = 0.0  # no checkpoint is written after a step, so a restart trains it again; per step
    checkpoint_lost: float = 0.0  # a restarted trainer finds the checkpoint before the newest one; per start
    killed_after_step: float = 0.0  # the trainer is killed before it begins the next step; per step
    silent_s3: float = 0.0  # S3 accepts a trainer's call and says nothing: see `Environment.silence`
    silent_outage: float = 0.0  # an outage of S3 is silent instead of refusing calls; per kind of call
    silent_sqs: float = 0.0
    silent_runtime: float = 0.0  # for invokes and stops
    silent_gateway: float = 0.0  # for the trainer's calls of its gateways
    silent_model: float = 0.0  # for model calls: the engine, or the connection to the gateway
    silent_scorer: float = 0.0
    silent_agent_put: float = 0.0  # for an agent's PUT of its result

    # Only in the situations below.
    silent_after_outage: float = 0.0  # two stops of each session that was refused one in an outage; yes or no
    disk_fails: float = 0.0  # for up to an hour, the disk of the in-flight log is full or does not answer
    gateway_away: float = 0.0  # the gateway restarts again and again, and each time takes 40 s; yes or no
    dies_at_invoke: float = 0.0  # a session that was heard dies when it accepts a repeated invoke

    @classmethod
    def draw(cls, random: Random, severity: float = 1.0) -> Faults:
        """Draw some kinds of faults, each up to its worst. `severity` scales the probabilities of single events."""
        worst = {
            "throttled": 0.4, "quota": 0.2, "conflict": 0.2, "container": 0.1, "unavailable": 0.3, "outage": 0.6,
            "hidden_quota": 0.6, "cut_after": 0.3,
            "stop_refused": 0.4, "s3": 0.2, "s3_outage": 0.5, "sqs": 0.4, "put_cut": 0.3, "put_fails": 0.1,
            "announce_lost": 0.6, "announce_twice": 0.5, "junk": 0.4, "malformed": 0.15, "dies": 0.2,
            "hangs": 0.15, "agent_error": 0.3,
            "poison": 0.5, "model_fails": 0.2, "kill": 0.9, "journal_lost": 1.0, "disk_full": 1.0,
            "rival": 0.6, "s3_cut_off": 1.0,
            "queue_off": 1.0, "queue_gone": 1.0, "stop_unheard": 0.5, "forged": 0.3,
            "surprise": 0.1, "chatter": 1.0, "slow_gets": 1.0, "beat_lost": 0.1, "cut_off": 1.0,
        }  # fmt: skip
        others = {"scorer_fails", "artifact_fails", "bomb", *_SITUATED, *_LIVES, *SILENT}
        assert worst.keys() | others == {each.name for each in fields(cls)}
        often = dict.fromkeys(worst, 0.45) | {"kill": 0.8, "s3_cut_off": 0.8}
        chosen = {name: random.random() * most for name, most in worst.items() if random.random() < often[name]}
        for name, often_so in (("queue_off", 0.1), ("queue_gone", 0.1), ("chatter", 0.4)):  # yes or no
            chosen[name] = float(random.random() < often_so)
        own = Random(str(chosen))  # so that it changes no other draw of a seed
        chosen["scorer_fails"] = own.choice([0.0, 0.3, 0.6, 0.9])
        chosen["artifact_fails"] = own.choice([0.0, 0.3, 0.8])
        chosen["bomb"] = own.choice([0.0, 0.0, 0.2])
        if own.random() < 0.4:
            chosen |= {name: own.choice([0.0, 0.0, most / 5, most]) for name, most in SILENT.items()}
        if own.random() < 0.3:
            chosen |= _LIVES
        return cls(**{name: p if name in _PER_RUN else p * severity for name, p in chosen.items()})


@dataclass(frozen=True)
class Situation:
    """Faults and settings that replace the drawn ones, because they are rarely drawn together."""

    faults: Mapping[str, float] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    least_steps: int = 1

    @property
    def protocol(self) -> str:
        """Return the `runtime.agent_protocol` of the run."""
        return str(self.runtime.get("agent_protocol", "rollout"))

    @classmethod
    def of(cls, seed: int) -> Situation:
        return _SITUATIONS.get(seed % 12, cls())


# Stragglers finish while most calls of S3 fail. With silence, which costs a minute, no step would end in time.
_STRAGGLERS = Situation(
    {"s3": 0.8, "silent_s3": 0.0, "announce_lost": 0.2, "slow_gets": 0.0, "kill": 0.0},
    {"straggler_after": 0.5, "straggler_factor": 1.0, "size": 4, "target_groups": None},
)
# Refused invokes open sessions nevertheless, and their containers die; stops get no answer after an outage.
_HEARD = {"cut_off": 0.0, "silent_gateway": 0.0, "s3": 0.0, "silent_s3": 0.0, "s3_outage": 0.0, "silent_outage": 0.0}
_OPENED = Situation({
    "outage": 1.0, "opened_by_503": 1.0, "silent_after_outage": 1.0, "dies_at_invoke": 0.5, **_HEARD,
    "hidden_quota": 0.0, "stop_refused": 0.0, "silent_runtime": 0.0, "hangs": 0.4,
})  # fmt: skip
# The disk of the in-flight log fails, and then the trainer.
_UNLOGGED = Situation({"disk_fails": 0.4, "kill": 0.9, "outage": 0.0})
# The gateway restarts while agents start.
_AWAY = Situation(
    {"gateway_away": 1.0, "kill": 0.0, "outage": 0.0, "silent_runtime": 0.0, "model_fails": 0.0},
    runtime={"max_sessions": 2, "max_attempts": 3},
    least_steps=3,
)
# Several trainers train the same steps.
_RETRAINED = Situation(
    {**_LIVES, "kill": 0.0, "rival": 0.0, "outage": 0.0, "s3": 0.0, "s3_outage": 0.0, "poison": 0.0}, least_steps=3
)
# Agents leave their results somewhere else than under their rollouts' keys.
_OWN_SOURCE = {"queue_off": 1.0, "slow_gets": 0.0, "forged": 0.0, "junk": 0.0}
_POLLED = Situation({**_OWN_SOURCE, "unavailable": 0.7}, runtime={"agent_protocol": "agentcore-runtime-app"})
_REPORTED = Situation({**_OWN_SOURCE, "s3": 0.3}, runtime={"agent_protocol": "sagemaker-job-runtime"})
_WRITTEN = Situation({**_OWN_SOURCE, "s3": 0.8, "silent_s3": 0.0}, runtime={"agent_protocol": "agentcore-rl-toolkit"})
# Invokes and stops compete for one quota.
_SHARED = Situation({"outage": 0.0}, runtime={"calls_per_s": 2.0, "stop_per_s": 10.0, "max_sessions": 64})
_SITUATIONS = {
    2: _REPORTED, 3: _STRAGGLERS, 4: _POLLED, 5: _UNLOGGED, 6: _RETRAINED, 7: _SHARED, 8: _STRAGGLERS, 9: _AWAY,
    10: _WRITTEN, 11: _OPENED,
}  # fmt: skip
