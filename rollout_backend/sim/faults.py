"""How likely each misfortune is in one history. Drawn anew for each seed, so that quiet and wild runs both occur."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random


@dataclass(frozen=True)
class Faults:
    """Probabilities: of a call unless it says otherwise."""

    throttled: float = 0.0  # 429
    quota: float = 0.0  # 402
    conflict: float = 0.0  # 409
    container: float = 0.0  # 424
    unavailable: float = 0.0  # 5xx before anything was done
    cut_after: float = 0.0  # the work was done and the answer was lost
    stop_refused: float = 0.0  # a stop that fails and may be repeated
    s3: float = 0.0  # S3 does not answer the training side
    sqs: float = 0.0  # nor does SQS
    put_cut: float = 0.0  # an agent's PUT that was done, though its answer was lost
    put_fails: float = 0.0  # an agent's PUT that fails for good
    announce_lost: float = 0.0
    announce_twice: float = 0.0
    junk: float = 0.0  # a message that names nothing, or nothing of ours; per rollout
    malformed: float = 0.0  # a result that does not keep to the contract; per rollout
    dies: float = 0.0  # a session that ends without a word; per session
    hangs: float = 0.0  # a session that never ends; per session
    agent_error: float = 0.0  # the agent's own fault; per rollout
    poison: float = 0.0  # no container comes up for a task; per task
    model_fails: float = 0.0  # a model call that gets no answer
    kill: float = 0.0  # the trainer is killed; per step and take
    journal_lost: float = 0.0  # what the gateway has written is gone; per start of the trainer
    queue_off: float = 0.0  # the whole run has no queue
    queue_gone: float = 0.0  # the queue is deleted in mid-run; per run

    @classmethod
    def draw(cls, random: Random) -> Faults:
        """Some kinds at all, each up to its worst."""
        worst = {
            "throttled": 0.4, "quota": 0.2, "conflict": 0.2, "container": 0.1, "unavailable": 0.3, "cut_after": 0.3,
            "stop_refused": 0.4, "s3": 0.2, "sqs": 0.4, "put_cut": 0.3, "put_fails": 0.1, "announce_lost": 0.6,
            "announce_twice": 0.5, "junk": 0.4, "malformed": 0.15, "dies": 0.2, "hangs": 0.15, "agent_error": 0.3,
            "poison": 0.5, "model_fails": 0.2, "kill": 0.9, "journal_lost": 1.0, "queue_off": 1.0, "queue_gone": 1.0,
        }  # fmt: skip
        assert worst.keys() == {field.name for field in fields(cls)}
        often = dict.fromkeys(worst, 0.45) | {"kill": 0.8}
        chosen = {name: random.random() * most for name, most in worst.items() if random.random() < often[name]}
        for name in ("queue_off", "queue_gone"):  # yes or no, and mostly no
            chosen[name] = float(random.random() < 0.1)
        return cls(**chosen)
