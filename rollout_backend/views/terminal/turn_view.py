"""Show one model call in a terminal or as JSON: messages in and out, tokens, log probabilities, time and weights."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from agent_wrapper.contract import Rollout, Segment, Turn, readable
from rollout_backend.base.formats import count
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.token_bytes import TokenText
from rollout_backend.run.accounts.findings import show_command
from rollout_backend.run.accounts.records import replies_by_turn
from rollout_backend.run.accounts.summary import mean
from rollout_backend.views.terminal.view import print_messages, print_text, print_words, print_wrapped

# Number of unlikely tokens to list.
_UNLIKELY = 5


@dataclass(frozen=True)
class TurnView:
    """One turn of a rollout. `show` is appended to each `rollout show`; it may be empty."""

    rollout: Rollout
    number: int
    """Index in the rollout."""
    segment_number: int
    turn_number: int
    """Index in its segment."""
    step: str
    """The step's number as the trainer counts it."""
    show: str = ""

    @classmethod
    def of(cls, rollout: Rollout, number: int, step: str, show: str = "") -> Self:
        """Find a turn by its index in the rollout.

        Raises:
            ConfigError: the rollout has no such turn.
        """
        turns = [(i, j) for i, segment in enumerate(rollout.segments) for j in range(len(segment.turns))]
        if not turns:
            raise ConfigError(f"{rollout.rollout_id} has no turns: it called no model")
        if number >= len(turns):
            raise ConfigError(f"{rollout.rollout_id} has no turn {number}: its turns are 0 to {len(turns) - 1}")
        return cls(rollout, number, *turns[number], step, show)

    @property
    def segment(self) -> Segment:
        """Return the segment that contains the turn."""
        return self.rollout.segments[self.segment_number]

    @property
    def turn(self) -> Turn:
        """Return the turn."""
        return self.segment.turns[self.turn_number]

    @cached_property
    def _reply(self) -> int | None:
        """Return the index of the reply among the segment's messages, or None."""
        return replies_by_turn(self.segment).get(self.turn_number)

    @property
    def prompt(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages that the model received; empty if unknown."""
        return self.segment.messages[: self._reply] if self._reply is not None else ()

    @property
    def reply(self) -> Mapping[str, Any] | None:
        """Return the message that the model sampled; None if unknown."""
        return self.segment.messages[self._reply] if self._reply is not None else None

    @property
    def logprobs(self) -> list[float | None]:
        """Return the log probability of each sampled token; None where the engine returned none."""
        return [None if math.isnan(each) else each for each in self.segment.logprobs[self.turn.start : self.turn.end]]

    def fields(self) -> dict[str, Any]:
        """Return the turn as an object for JSON, with the names of the table `turns`."""
        turn, rollout = self.turn, self.rollout
        known = [each for each in self.logprobs if each is not None]
        return {
            "run_id": rollout.run_id,
            "step": rollout.step,
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task_id,
            "number": self.number,
            "segment": self.segment_number,
            "turn": self.turn_number,
            "prompt_tokens": turn.start,
            "sampled_tokens": turn.end - turn.start,
            "cached_tokens": turn.cached_tokens,
            "finish_reason": turn.finish_reason,
            "weight_versions": [asdict(span) for span in turn.weight_versions],
            "seconds": turn.seconds,
            "mean_logprob": mean(known),
            "min_logprob": min(known, default=None),
            "prompt": list(self.prompt),
            "reply": self.reply,
            "token_ids": list(self.segment.token_ids[turn.start : turn.end]),
            "logprobs": self.logprobs,
        }

    def print(self, console: Console, text: TokenText | None = None) -> None:
        """Print the new messages, the reply, and the numbers. `text` decodes the tokens."""
        rollout = self.rollout
        where = (
            f"  run {rollout.run_id}, step {self.step}, task {rollout.task_id}; turn {self.turn_number} of "
            f"segment {self.segment_number} ({readable(self.segment.split_reason)})"
        )
        print_wrapped(console, Text(), Text.assemble((f"{rollout.rollout_id} turn {self.number}", "bold"), where))
        if self.reply is None:
            console.print("the result holds no messages of this turn", style="dim")
        else:
            replies = [i for i, message in enumerate(self.prompt) if message.get("role") == "assistant"]
            # The messages after the previous reply are new.
            earlier = replies[-1] + 1 if replies else 0
            if earlier:
                command = f"{show_command(rollout.rollout_id)}{self.show}"
                print_text(console, f"after {count(earlier, 'earlier message')}, which {command} prints", "dim")
            print_messages(console, [*self.prompt[earlier:], self.reply])
        for name, fact in self._facts(text):
            print_text(console, Text.assemble((f"{name:9}", "dim"), fact))
        print_words(console, "segment", "weights")

    def _facts(self, text: TokenText | None) -> Iterator[tuple[str, str]]:
        turn = self.turn
        sampled = turn.end - turn.start
        cached = "an unknown number" if turn.cached_tokens is None else f"{turn.cached_tokens:,}"
        hit = f", {cached} of them cached" if turn.start else ""
        yield "tokens", f"{turn.start:,} prompt{hit}; {sampled:,} sampled"
        cut = ", cut at max_tokens or the end of the context" if turn.finish_reason == "length" else ""
        yield "finish", f"{readable(turn.finish_reason)}{cut}"
        yield "time", f"{turn.seconds:.2f} s" + (f", {sampled / turn.seconds:,.0f} tokens/s" if turn.seconds else "")
        spans = [f"{span.version} ({count(span.end - span.start, 'token')})" for span in turn.weight_versions]
        versions = spans if len(spans) > 1 else [span.version for span in turn.weight_versions]
        yield "weights", readable(", ".join(versions)) or "unknown"
        known = {i: each for i, each in enumerate(self.logprobs) if each is not None}
        average = mean([*known.values()])
        if average is None:
            yield "logprobs", "unknown"
            return
        below = sum(each < math.log(0.1) for each in known.values())
        yield (
            "logprobs",
            f"mean {average:.3f}, lowest {min(known.values()):.3f}, perplexity {math.exp(-average):.2f}; "
            f"{below:,} of {count(len(known), 'token')} below 10 %",
        )
        pieces = text.pieces(self.segment.token_ids[turn.start : turn.end]) if text is not None else None
        lowest = sorted(known, key=known.__getitem__)[:_UNLIKELY]
        named = [f"{_spell(pieces, i)} {100 * math.exp(min(known[i], 0.0)):.2g} %" for i in lowest]
        yield "unlikely", ", ".join(named)


def _spell(pieces: Sequence[str] | None, token: int) -> str:
    return f"token {token}" if pieces is None else json.dumps(readable(pieces[token]), ensure_ascii=False)
