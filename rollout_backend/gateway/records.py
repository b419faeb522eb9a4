"""What stands in a session's journal, and back. Pure.

    {"kind": "asked", "call"}     a call has begun, or was refused for want of room: nobody has answered it yet
    {"kind": "dropped", "call"}   that call was at fault itself, and needs no answer
    {"kind": "answered", ...}     all that an answered call leaves: its turns, its answer, the counts after it
    {"kind": "sealed", ...}       the session is sealed, since when (unix seconds), and what was unanswered then

What must always hold: a call is one record, with all its choices. Numbers come back as they were, logprobs as
float32, which is all that a trajectory keeps of them. What people and models wrote is JSON inside: it may be no valid
UTF-8. Of images there is a word only where a turn has some, and the bytes of one stand here once.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ImageSpan, VersionSpan
from rollout_backend.gateway.call import Answer, Choice
from rollout_backend.gateway.engine import Completion
from rollout_backend.gateway.images import Image
from rollout_backend.gateway.session import RecordedTurn, Session

Record = dict[str, Any]


@dataclass
class Restored:
    """What the records of a session come to, in order."""

    session: Session
    started: int = 0
    sampled_tokens: int = 0
    unanswered: set[bytes] = field(default_factory=set)
    answers: list[tuple[bytes, Answer]] = field(default_factory=list)  # by what the request is known by, latest last
    sealed_at: float | None = None

    def take(self, record: Record) -> None:
        match record["kind"]:
            case "asked":
                self.unanswered.add(record["call"])
            case "dropped":
                self.unanswered.discard(record["call"])
            case "answered":
                for turn in record["turns"]:
                    self.session.add(_turn_of(turn))
                self.unanswered.discard(record["call"])
                self.started, self.sampled_tokens = record["started"], record["sampled_tokens"]
                self.answers.append((record["request"], _answer_of(json.loads(record["answer"]))))
            case "sealed":
                self.sealed_at, self.unanswered = record["at"], set(record["unanswered"])


def asked(call: bytes) -> Record:
    return {"kind": "asked", "call": call}


def dropped(call: bytes) -> Record:
    return {"kind": "dropped", "call": call}


def sealed(at: float, unanswered: Iterable[bytes]) -> Record:
    return {"kind": "sealed", "at": at, "unanswered": list(unanswered)}


def answered(
    call: bytes, request: bytes, turns: Sequence[RecordedTurn], answer: Answer, started: int, sampled_tokens: int
) -> Record:
    """`request` is what a repetition of it is known by; the two counts are the session's own, after this call."""
    return {
        "kind": "answered",
        "call": call,
        "request": request,
        "turns": [_turn(turn) for turn in turns],
        "answer": _json(_answer(answer)),
        "started": started,
        "sampled_tokens": sampled_tokens,
    }


def _turn(turn: RecordedTurn) -> Record:
    completion = turn.completion
    logprobs = [math.nan if logprob is None else logprob for logprob in completion.logprobs]
    seen: Record = {"spans": [vars(span) for span in turn.spans]} if turn.spans else {}
    if turn.images:
        seen["images"] = [vars(image) for image in turn.images]
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
        "messages": _json(turn.messages),
        "opened_by": turn.opened_by,
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
        ),
        kept=record["kept"],
        messages=json.loads(record["messages"]),
        opened_by=record["opened_by"],
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


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=dict).encode("ascii")
