"""What a gateway counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict


class GatewayStats(BaseModel):
    """Counts since the start, except for what is said to be of this moment."""

    model_config = ConfigDict(frozen=True)

    sessions_open: int  # at this moment
    sessions_closed: int  # at this moment: sealed or revoked, and remembered until their keys expire
    calls_in_flight: int  # at this moment
    calls: int  # answered
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, those found in an engine's prefix cache
    cache_breaks: int  # calls that went on with a conversation which the engine's cache no longer held
    sampled_tokens: int
    malformed_tool_calls: int
    extra_tool_calls: int  # sampled beside the one that an agent without parallel_tool_calls gets
    constrained: int  # replies whose form was forced: their tokens have no logprob that training could use
    replayed: int  # requests sent again that got the first one's answer
    hung_up: int  # calls whose client left before the answer; their generation was aborted
    segments: dict[str, int]  # opened, by reason
    overridden: dict[str, int]  # agents' sampling settings that did not count, by field
    errors: dict[str, int]  # answers other than 200, by code

    @classmethod
    def total(cls, parts: Iterable[GatewayStats]) -> GatewayStats:
        """Of several gateways together."""
        numbers: Counter[str] = Counter()
        tables: dict[str, Counter[str]] = {}
        for part in parts:
            for name, value in part:
                if isinstance(value, int):
                    numbers[name] += value
                else:
                    tables.setdefault(name, Counter()).update(value)
        return cls.model_validate({**numbers, **tables})


@dataclass
class Counters:
    """The running counts behind `GatewayStats`."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_breaks: int = 0
    sampled_tokens: int = 0
    malformed_tool_calls: int = 0
    extra_tool_calls: int = 0
    constrained: int = 0
    replayed: int = 0
    hung_up: int = 0
    segments: Counter[str] = field(default_factory=Counter)
    overridden: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def snapshot(self, sessions_open: int, sessions_closed: int, calls_in_flight: int) -> GatewayStats:
        return GatewayStats(
            sessions_open=sessions_open,
            sessions_closed=sessions_closed,
            calls_in_flight=calls_in_flight,
            **vars(self),
        )
