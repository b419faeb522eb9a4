"""Define the record of one planned rollout: how it ended, why, and where to look."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Self

import numpy as np
from pydantic import BaseModel

from agent_wrapper.contract import Outcome, Rollout, Segment
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.core.seal import read_seal


class ResultSummary(BaseModel, frozen=True, use_attribute_docstrings=True):
    """The figures of a rollout's result. Tables, reports and their documentation have a column for each field."""

    reward: float | None
    """the agent's reward, or the scorer's; null: it has none"""
    turns: int
    """model calls"""
    segments: int
    """rows for training"""
    sampled_tokens: int
    """tokens that the model sampled"""
    trained_tokens: int
    """of them, those with a logprob"""
    prompt_tokens: int
    """sum over turns; each turn counts its whole prompt"""
    cached_tokens: int | None
    """prompt tokens that the engine found in its prefix cache; null also if it does not report them"""
    cut_replies: int
    """turns that ended at `max_tokens` or at the end of the context"""
    model_s: float
    """seconds in model calls"""
    agent_s: float | None
    """seconds from the agent's start to its end, by its container's clock"""
    first_call_s: float | None = None
    """seconds from the last invoke until the gateway received the first model call; null also without a seal"""

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        turns = [turn for segment in rollout.segments for turn in segment.turns]
        cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
        seal = read_seal(rollout)
        timed = rollout.started_at > 0 and rollout.finished_at >= rollout.started_at
        return cls(
            reward=rollout.reward,
            turns=len(turns),
            segments=len(rollout.segments),
            sampled_tokens=rollout.sampled_tokens,
            trained_tokens=sum(int(np.isfinite(segment.logprobs).sum()) for segment in rollout.segments),
            prompt_tokens=sum(turn.start for turn in turns),
            cached_tokens=sum(cached) if len(cached) == len(turns) else None,
            cut_replies=sum(turn.finish_reason == "length" for turn in turns),
            model_s=sum(turn.seconds for turn in turns),
            agent_s=rollout.finished_at - rollout.started_at if timed else None,
            first_call_s=seal and seal.first_call_s,
        )

    @property
    def cache_hit(self) -> float | None:
        """Return the part of the prompt tokens found in the prefix cache; None if unknown."""
        return self.cached_tokens / self.prompt_tokens if self.cached_tokens is not None and self.turns else None


class RolloutRecord(BaseModel, frozen=True):
    """A planned rollout of a step, and its end. Times in unix seconds by this machine's clock; None if never reached.

    Attempts, sessions and times belong to the manager that wrote the record.
    """

    step: int
    rollout_id: str
    task_id: str
    """The task, which also names the group."""
    group_usable: bool
    """Whether the group policy accepts the rollout's group for training."""
    is_replacement: bool
    """Whether it replaces a rollout that the infrastructure lost."""
    outcome: Outcome | None
    """None if the process was interrupted before it settled the rollout."""
    reason: str
    """Empty for a completed rollout that is trained."""
    message: str
    trainable: bool
    attempts: int
    session_ids: tuple[str, ...]
    """One session per attempt that may have opened one, in order."""
    log: str | None
    """Where to find the log of the last session."""
    planned_at: float
    first_invoked_at: float | None = None
    """Time of the first invoke that was not throttled."""
    invoked_at: float | None
    """Time of the last invoke."""
    accepted_at: float | None
    """When the agent accepted that invoke."""
    result_at: float | None
    """When the result that settled the rollout arrived."""
    settled_at: float | None
    deadline: float | None = None
    """The latest time at which an open rollout ends."""
    result: ResultSummary | None = None
    """None if no result arrived."""

    @property
    def reward(self) -> float | None:
        """Return the reward; None if it is missing, which never counts as 0."""
        return self.result.reward if self.result is not None else None

    @property
    def times(self) -> dict[str, float]:
        """Return the times of the rollout's events, in order, without events that did not happen."""
        events = ("planned", "invoked", "accepted", "result", "settled")
        return {event: at for event in events if (at := getattr(self, f"{event}_at")) is not None}

    @property
    def trained(self) -> bool:
        """Return whether the trainer gets the rollout: it is trainable, and its group is usable."""
        return self.trainable and self.group_usable

    @property
    def failed(self) -> bool:
        """Return whether the rollout ended and did not complete."""
        return self.outcome is not None and self.outcome is not Outcome.COMPLETED

    def is_of(self, rollout: Rollout) -> bool:
        """Return whether this stored result settled the rollout. It may come from an earlier trainer's attempt."""
        return self.result_at is not None and self.outcome is rollout.outcome


# A record takes these fields as the ledger has them. An entry's deadline is in seconds of the loop's clock.
_OF_THE_ENTRY = RolloutRecord.model_fields.keys() & {field.name for field in fields(LedgerEntry)} - {"deadline"}


def _record_of(
    ledger: Ledger,
    entry: LedgerEntry,
    log_of: Callable[[LedgerEntry], str],
    result: ResultSummary | None = None,
    deadline: float | None = None,
) -> RolloutRecord:
    return RolloutRecord.model_validate(
        {name: getattr(entry, name) for name in _OF_THE_ENTRY}
        | {
            "step": ledger.step,
            "group_usable": ledger.groups[entry.task_id].usable,
            "log": (log_of(entry) or None) if entry.session_ids else None,
            "result_at": entry.arrived_at if entry.by_result else None,
            "result": result,
            "deadline": deadline,
        }
    )


class StepRecords:
    """The records of a step. While it runs, a settled rollout is encoded again only if its group becomes usable."""

    def __init__(self, ledger: Ledger, log_of: Callable[[LedgerEntry], str], received: Sequence[Rollout]) -> None:
        """`received` are the results that have settled rollouts; more are appended while the step runs."""
        self.ledger = ledger
        self.received = received
        self.settled: list[RolloutRecord] = []
        self._log_of = log_of
        self._lines: list[str] = []
        self._results: dict[str, ResultSummary] = {}
        # Number of received results that are summarized.
        self._summarized = 0

    def update(self) -> None:
        """Add the rollouts that were settled since the last call."""
        for rollout in self.received[self._summarized :]:
            self._results[rollout.rollout_id] = ResultSummary.of(rollout)
        self._summarized = len(self.received)
        for entry in self.ledger.settled[len(self.settled) :]:
            self.settled.append(_record_of(self.ledger, entry, self._log_of, self._results.get(entry.rollout_id)))

    def all(self) -> list[RolloutRecord]:
        """Return the records of all planned rollouts as they are now, in the order in which they were planned."""
        self.update()
        entries = self.ledger.entries.values()
        return [_record_of(self.ledger, each, self._log_of, self._results.get(each.rollout_id)) for each in entries]

    def lines(self, ends_at: Callable[[LedgerEntry], float]) -> list[str]:
        """Return the records as JSON. `ends_at` returns the Unix time at which an open rollout ends at the latest."""
        self.update()
        for i, record in enumerate(self.settled):
            usable = self.ledger.groups[record.task_id].usable
            # Later rollouts can change this field.
            if record.group_usable is not usable:
                record = self.settled[i] = record.model_copy(update={"group_usable": usable})
            elif i < len(self._lines):
                continue
            self._lines[i : i + 1] = [record.model_dump_json()]
        entries = self.ledger.open_entries()
        still_open = (_record_of(self.ledger, each, self._log_of, deadline=ends_at(each)) for each in entries)
        return [*self._lines, *(record.model_dump_json() for record in still_open)]


# --- messages in the OpenAI format ------------------------------------------------------------------------


def replies_by_turn(segment: Segment) -> dict[int, int]:
    """Return the index of the message that each turn sampled; empty if the messages do not contain them all."""
    replies = [i for i, message in enumerate(segment.messages) if message.get("role") == "assistant"]
    turns = len(segment.turns)
    # The last replies are the sampled ones; earlier ones belong to the prompt.
    return dict(enumerate(replies[-turns:])) if 0 < turns <= len(replies) else {}


def text_of(content: object) -> str:
    """Return the text of a message's content. Other parts are named, such as `[image_url]`."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(map(_text_of_part, content))
    return json.dumps(content, ensure_ascii=False) if content else ""


def _text_of_part(part: object) -> str:
    if isinstance(part, Mapping):
        return part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"
    return str(part)
