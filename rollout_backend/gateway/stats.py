"""Count what a gateway does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from rollout_backend.core.engine_use import EngineSample
from rollout_backend.gateway.admission import EngineLoad

_MAX_NAMES, _MAX_NAME_CHARS, _OTHERS = 100, 128, "(others)"  # names that containers choose
_OF_ENGINES = ("engine_running", "engine_waiting", "engine_kv_used", "engine_kv_tokens")


class GatewayStats(BaseModel):
    """Counts since the gateway started, except where marked as current."""

    model_config = ConfigDict(frozen=True)

    sessions_open: int  # current
    sessions_closed: int  # current: sealed or revoked, and remembered until their keys expire
    calls_in_flight: int  # current
    calls: int  # answered calls
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in an engine's prefix cache
    cache_unknown_tokens: int  # prompt tokens of calls whose engine did not report what it found there
    cache_breaks: int  # calls that continued a conversation which the engine's cache no longer held
    sampled_tokens: int
    malformed: dict[str, int]  # tool calls that could not be read and were returned as text, by renderer
    extra_tool_calls: int  # sampled but dropped, because parallel_tool_calls was false
    constrained: int  # replies under a grammar: their logprobs cannot be trained
    unknown_tools: dict[str, int]  # tool calls of tools that were not offered, by name
    left_out: int  # replies that `training.leave_out` leaves out of training
    runaways: dict[str, int]  # tokens of the rollouts whose session reached `gateway.session_tokens`
    after_stop: dict[str, int]  # requests of sessions that had been stopped, by session
    largest: dict[str, int]  # current: tokens of the open session that sampled most, by its rollout
    replayed: int  # retried requests that got the first one's answer
    client_disconnects: int  # calls aborted because the client disconnected
    undelivered: int  # replies that no client received and no later call continued: left out of their trajectories
    segments: dict[str, int]  # opened segments, by reason
    overridden: dict[str, int]  # ignored sampling settings of agents, by field
    ignored: dict[str, int]  # calls with a field that only concerns the provider, or a name that no template shows
    errors: dict[str, int]  # error responses, by code
    engine_running: dict[str, int]  # current: requests in an engine's batch, of all its clients, by the engine's URL
    engine_waiting: dict[str, int]  # current: those in its queue
    engine_kv_used: dict[str, int]  # current: tokens in its KV cache that are in use; 0 if it does not report them
    engine_kv_tokens: dict[str, int]  # the tokens for which its KV cache has room; 0 if it does not report them

    @property
    def cache_hit(self) -> float | None:
        """Return the part of the prompt tokens found in the engines' prefix caches; None if no engine reports it."""
        counted = self.prompt_tokens - self.cache_unknown_tokens
        return self.cached_tokens / counted if counted else None

    @property
    def malformed_tool_calls(self) -> int:
        return sum(self.malformed.values())

    @property
    def engines(self) -> dict[str, EngineSample]:
        """Return the current load of each engine, by its URL."""
        others = self.engine_waiting, self.engine_kv_used, self.engine_kv_tokens
        return {
            url: EngineSample(running, *(table.get(url, 0) for table in others))
            for url, running in self.engine_running.items()
        }

    @classmethod
    def total(cls, parts: Iterable[GatewayStats]) -> GatewayStats:
        """Return the sum over several gateways, which share their engines."""
        numbers: Counter[str] = Counter()
        tables: dict[str, Counter[str]] = {}
        for part in parts:
            for name, value in part:
                if isinstance(value, int):
                    numbers[name] += value
                elif name in _OF_ENGINES:
                    tables[name] = Counter({**tables.get(name, {}), **value})
                else:
                    tables.setdefault(name, Counter()).update(value)
        return cls.model_validate({**numbers, **tables})


class NameCounter(Counter[str]):
    """Counts names that containers choose, in bounded memory."""

    def add(self, name: str) -> None:
        self[self._kept(name)] += 1

    def update_to(self, name: str, value: int) -> None:
        self[self._kept(name)] = value

    def _kept(self, name: str) -> str:
        name = name[:_MAX_NAME_CHARS]
        return name if name in self or len(self) < _MAX_NAMES else _OTHERS


@dataclass
class Counters:
    """The running counts behind `GatewayStats`."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_unknown_tokens: int = 0
    cache_breaks: int = 0
    sampled_tokens: int = 0
    malformed: Counter[str] = field(default_factory=Counter)
    extra_tool_calls: int = 0
    constrained: int = 0
    unknown_tools: NameCounter = field(default_factory=NameCounter)
    left_out: int = 0
    runaways: NameCounter = field(default_factory=NameCounter)
    after_stop: NameCounter = field(default_factory=NameCounter)
    replayed: int = 0
    client_disconnects: int = 0
    segments: Counter[str] = field(default_factory=Counter)
    overridden: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def snapshot(
        self,
        sessions_open: int,
        sessions_closed: int,
        calls_in_flight: int,
        loads: Iterable[EngineLoad] = (),
        undelivered: int = 0,
        largest: Mapping[str, int] | None = None,
    ) -> GatewayStats:
        loads = tuple(loads)
        return GatewayStats(
            sessions_open=sessions_open,
            sessions_closed=sessions_closed,
            calls_in_flight=calls_in_flight,
            undelivered=undelivered,
            largest=dict(largest or {}),
            engine_running={load.url: load.running for load in loads},
            engine_waiting={load.url: load.waiting for load in loads},
            engine_kv_used={load.url: load.kv_used for load in loads},
            engine_kv_tokens={load.url: load.kv_tokens for load in loads},
            **vars(self),
        )
