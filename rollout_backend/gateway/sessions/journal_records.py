"""Encode and decode the records of a session's journal. Pure.

    {"kind": "asked", ...}        a call has started, or was refused by admission; it has no answer yet
    {"kind": "dropped", "call"}   the call was invalid, or its client disconnected, so it needs no answer
    {"kind": "answered", ...}     an answered call: its turns, its answer, and the session's counts after it
    {"kind": "sealed", ...}       the session was sealed: when (unix seconds), which calls were unanswered, and which
                                  replies no client received

Invariants:

- A call is one record, with all its choices.
- Numbers are restored exactly; logprobs as float32, which is the precision of a trajectory.
- Text of agents and models is stored as JSON, because it may not be valid UTF-8.
- The bytes of an image are stored once.
"""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ImageSpan, VersionSpan
from rollout_backend.core.images import Image
from rollout_backend.core.model_call import Answer, Choice
from rollout_backend.core.routed_experts import ExpertRows
from rollout_backend.dialects.wire import to_json
from rollout_backend.gateway.engine.client import Completion
from rollout_backend.gateway.sessions.conversations import Conversations, RecordedReply, RecordedTurn
from rollout_backend.rendering.segments import TurnPosition

Record = dict[str, Any]


@dataclass
class RestoredSession:
    """State of a session after applying its records in order."""

    conversations: Conversations
    started: int = 0
    sampled_tokens: int = 0
    unanswered: Counter[bytes] = field(default_factory=Counter)  # attempts since the last answer, by question
    attempts: Counter[bytes] = field(default_factory=Counter)  # without an answer, by call
    answers: list[tuple[bytes, bytes, Answer]] = field(default_factory=list)  # request, call, answer; latest last
    left_out: list[RecordedReply] = field(default_factory=list)
    sealed_at: float | None = None
    undelivered: Sequence[RecordedReply] = ()  # when it was sealed

    def apply(self, record: Record) -> None:
        match record["kind"]:
            case "asked":
                self.unanswered[record["call"]] += 1
                if not record.get("is_retry"):  # a retry belongs to an attempt that is already counted
                    self.attempts[record["call"]] += 1
            case "dropped":
                self.unanswered[record["call"]] -= 1
                self.unanswered = +self.unanswered
            case "answered":
                for turn in turns(record):
                    self.conversations.add(turn)
                    if record.get("left_out"):
                        self.left_out.append(self.conversations.recorded(turn))
                del self.unanswered[record["call"]]
                self.started, self.sampled_tokens = record["started"], record["sampled_tokens"]
                self.attempts[record["call"]] -= 1
                self.attempts = +self.attempts
                answer = _answer_of(json.loads(record["answer"]))
                self.answers.append((record["request"], record["call"], answer))
            case "sealed":
                self.sealed_at, self.unanswered = record["at"], Counter(record["unanswered"])
                self.undelivered = [
                    RecordedReply(TurnPosition(*place), end) for place, end in record.get("undelivered", ())
                ]


def turns(record: Record) -> list[RecordedTurn]:
    """Return the turns that a record adds; none unless the record is an answered call."""
    return [_turn_of(turn) for turn in record.get("turns", ())]


def asked(call: bytes, *, is_retry: bool) -> Record:
    """Encode the start of a call. `is_retry` means that the request declares itself a retry."""
    return {"kind": "asked", "call": call, "is_retry": is_retry}


def dropped(call: bytes) -> Record:
    return {"kind": "dropped", "call": call}


def sealed(at: float, unanswered: Iterable[bytes], undelivered: Iterable[RecordedReply]) -> Record:
    replies = [[list(reply.place), reply.end] for reply in undelivered]
    return {"kind": "sealed", "at": at, "unanswered": list(unanswered), "undelivered": replies}


def answered(
    call: bytes,
    request: bytes,
    turns: Sequence[RecordedTurn],
    answer: Answer,
    started: int,
    sampled_tokens: int,
    *,
    left_out: bool = False,
) -> Record:
    """Encode an answered call. `request` is the request's digest; `started` and the token count are the session's
    totals after this call. `left_out` means that the call is not trained."""
    more: Record = {"left_out": True} if left_out else {}
    return more | {
        "kind": "answered",
        "call": call,
        "request": request,
        "turns": [_turn(turn) for turn in turns],
        "answer": to_json(_answer(answer)),
        "started": started,
        "sampled_tokens": sampled_tokens,
    }


def _turn(turn: RecordedTurn) -> Record:
    completion = turn.completion
    logprobs = [math.nan if logprob is None else logprob for logprob in completion.logprobs]
    seen: Record = {"spans": [vars(span) for span in turn.spans]} if turn.spans else {}
    if turn.images:
        seen["images"] = [vars(image) for image in turn.images]
    if completion.experts is not None:
        seen["experts"] = list(completion.experts)
    return seen | {
        "extends": turn.extends,
        "given": array("i", turn.given).tobytes(),
        "sampled": array("i", completion.token_ids).tobytes(),
        "logprobs": array("f", logprobs).tobytes(),
        "versions": [[span.version, span.start, span.end] for span in completion.weight_versions],
        "finish_reason": completion.finish_reason,
        "matched": completion.matched,
        "cached_tokens": completion.cached_tokens,
        "seconds": completion.seconds,
        "kept": turn.kept,
        "messages": to_json(turn.messages),
        "split_reason": turn.split_reason,
        "tools": turn.tools_digest,
        "end": turn.end,
        "seen": list(turn.seen),
    }


def _turn_of(record: Record) -> RecordedTurn:
    return RecordedTurn(
        extends=record["extends"],
        given=array("i", record["given"]).tolist(),
        completion=Completion(
            token_ids=tuple(array("i", record["sampled"])),
            logprobs=tuple(array("f", record["logprobs"])),
            weight_versions=tuple(
                VersionSpan(version=version, start=start, end=end) for version, start, end in record["versions"]
            ),
            finish_reason=record["finish_reason"],
            matched=record["matched"],
            cached_tokens=record["cached_tokens"],
            seconds=record["seconds"],
            experts=ExpertRows(*record["experts"]) if "experts" in record else None,
        ),
        kept=record["kept"],
        messages=json.loads(record["messages"]),
        split_reason=record["split_reason"],
        tools_digest=record["tools"],
        end=record["end"],
        seen=record["seen"],
        spans=[ImageSpan(**span) for span in record.get("spans", ())],
        images=[Image(**image) for image in record.get("images", ())],
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {**vars(answer), "choices": [vars(choice) for choice in answer.choices]}


def _answer_of(fields: dict[str, Any]) -> Answer:
    return Answer(**{**fields, "choices": tuple(Choice(**choice) for choice in fields["choices"])})
