"""Count the events of a gateway."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

Counts = Counter[str]

_MAX_NAMES, _MAX_NAME_CHARS, _OTHERS = 100, 128, "(others)"
_OF_ENGINES = (
    "engine_running", "engine_waiting", "engine_kv_used", "engine_kv_tokens", "engine_is_service", "engine_given_up",
)  # fmt: skip


class EngineLoad(NamedTuple):
    """Load of one engine from all its clients, at one moment: requests that run in its batch or wait in its queue."""

    running: int
    waiting: int
    # Tokens in use in its KV cache, and its capacity in tokens; 0 if not reported.
    kv_used: int = 0
    kv_tokens: int = 0
    free: int = 0
    """Free slots of its batch; not part of `GatewayStats`."""
    is_service: bool = False
    """True if it is a training service, which samples but is no engine to add or remove."""
    given_up: Mapping[str, int] | None = None
    """See `GatewayStats.engine_given_up`."""


class GatewayStats(BaseModel):
    """Counts of a gateway since it started, except for fields marked as current, which are set on each request."""

    # The first four fields are current.
    sessions_open: int = 0
    sessions_closed: int = 0
    """Sealed or revoked sessions, remembered until their keys expire."""
    calls_in_flight: int = 0
    calls_waiting: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_unknown_tokens: int = 0
    """Prompt tokens of calls whose engine does not report its cache hits."""
    cache_breaks: int = 0
    """Calls that continued a conversation but missed the engine's prefix cache."""
    sampled_tokens: int = 0
    malformed: Counts = Counter()
    """Tool calls that could not be parsed and were returned as text, by renderer."""
    extra_tool_calls: int = 0
    """Tool calls that were sampled but dropped, because `parallel_tool_calls` was false."""
    constrained: int = 0
    """Replies sampled under a grammar, whose logprobs cannot be trained."""
    unknown_tools: Counts = Counter()
    left_out: int = 0
    """Replies excluded from training by `training.leave_out`."""
    runaways: Counts = Counter()
    """Tokens of rollouts whose session reached `gateway.session_tokens`."""
    after_stop: Counts = Counter()
    largest: dict[str, int] = {}
    """Current: the rollout whose open session sampled the most tokens, and their number."""
    replayed: int = 0
    """Retried requests that got the first request's answer."""
    client_disconnects: int = 0
    undelivered: int = 0
    """Replies dropped because no client received all of them and no later call continued them."""
    segments: Counts = Counter()
    overridden: Counts = Counter()
    """Sampling settings of agents that were ignored, by field."""
    ignored: Counts = Counter()
    """Calls with fields that only concern the provider, or names that no template renders."""
    unjournaled: int = 0
    """Sessions that the disk of the journal did not take: a restart of the gateway would end them."""
    dropped_log_lines: int = 0
    """Lines that the gateway's log lost, because its disk was full or did not answer."""
    errors: Counts = Counter()
    # The current load of each engine from all its clients, by its URL: see `EngineLoad`.
    engine_running: dict[str, int] = {}
    engine_waiting: dict[str, int] = {}
    engine_kv_used: dict[str, int] = {}
    engine_kv_tokens: dict[str, int] = {}
    engine_is_service: dict[str, int] = {}
    engine_given_up: Counts = Counter()
    """Current: `calls` whose clients hung up while a training service sampled them, with their `prompt_tokens`, their
    `sampled_tokens` if the service sampled to the end, and otherwise their limits as `limit_tokens`. Empty with other
    engines, or if it is unknown."""

    @property
    def cache_hit(self) -> float | None:
        """Return the fraction of prompt tokens found in the engines' prefix caches; None if no engine reports it."""
        counted = self.prompt_tokens - self.cache_unknown_tokens
        return self.cached_tokens / counted if counted else None

    @property
    def malformed_tool_calls(self) -> int:
        return sum(self.malformed.values())

    @property
    def engines(self) -> dict[str, EngineLoad]:
        """Return the current load of each engine, by its URL."""
        waiting, used, tokens = self.engine_waiting, self.engine_kv_used, self.engine_kv_tokens
        return {
            url: EngineLoad(
                running,
                waiting.get(url, 0),
                used.get(url, 0),
                tokens.get(url, 0),
                is_service=bool(self.engine_is_service.get(url)),
            )
            for url, running in self.engine_running.items()
        }

    @classmethod
    def total(cls, parts: Iterable[GatewayStats]) -> GatewayStats:
        """Return the sum over several gateways that share their engines."""
        numbers: Counter[str] = Counter()
        tables: dict[str, Counter[str]] = {}
        for part in parts:
            for name, value in part:
                if isinstance(value, int):
                    numbers[name] += value
                elif name in _OF_ENGINES:
                    # Gateways ask the engines at different times.
                    known = tables.setdefault(name, Counter())
                    known.update({key: max(0, number - known[key]) for key, number in value.items()})
                else:
                    tables.setdefault(name, Counter()).update(value)
        return cls.model_validate({**numbers, **tables})


def bounded_name(counts: Counts, name: str) -> str:
    """Return the key under which to count a name that a container chose, so that `counts` stays small."""
    name = name[:_MAX_NAME_CHARS]
    return name if name in counts or len(counts) < _MAX_NAMES else _OTHERS


def count(counts: Counts, names: Iterable[str]) -> None:
    """Count each of these names, which a container chose, under its `bounded_name`."""
    for name in islice(names, _MAX_NAMES):
        counts[bounded_name(counts, name)] += 1


_ENOUGH = 5


class EngineUse(BaseModel):
    """Engine utilisation during a step. Means are over samples taken every few seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: int
    """The largest number of engines that reported at once."""
    # Mean number of requests in all batches, and in all queues.
    running: float
    waiting: float
    idle: float
    """Fraction of samples of single engines without a request."""
    full_batch: float | None = None
    """Mean batch size of an engine with a queue; None if too few samples had one."""
    imbalance: float | None = None
    """Mean requests of the busiest engine divided by the mean of all engines; 1 is even."""
    kv_used: float | None = None
    """Mean fraction of the KV cache in use; None if unknown."""

    @property
    def needed(self) -> int | None:
        """Return how many engines would have run these requests without a queue; None if too few samples had one."""
        if self.full_batch is None:
            return None
        return max(self.engines, math.ceil((self.running + self.waiting) / self.full_batch))


class EngineUseMeter:
    """Accumulates the samples of one step."""

    def __init__(self) -> None:
        self._samples = 0
        self._most = 0
        self._each: list[EngineLoad] = []
        self._busiest, self._mean = 0.0, 0.0

    def add(self, engines: Mapping[str, EngineLoad]) -> None:
        """Add a sample of every engine that reports. Training services and an empty sample are ignored."""
        engines = {url: load for url, load in engines.items() if not load.is_service}
        if engines:
            self._samples += 1
            self._most = max(self._most, len(engines))
            self._each.extend(engines.values())
        if len(engines) > 1:
            requests = [sample.running + sample.waiting for sample in engines.values()]
            self._busiest += max(requests)
            self._mean += sum(requests) / len(requests)

    def result(self) -> EngineUse | None:
        """Return the utilisation of the engines; None without a sample."""
        if not self._samples:
            return None
        full = [sample.running for sample in self._each if sample.waiting and sample.running]
        known = [sample.kv_used / sample.kv_tokens for sample in self._each if sample.kv_tokens]
        return EngineUse(
            engines=self._most,
            running=sum(sample.running for sample in self._each) / self._samples,
            waiting=sum(sample.waiting for sample in self._each) / self._samples,
            idle=sum(not sample.running and not sample.waiting for sample in self._each) / len(self._each),
            full_batch=sum(full) / len(full) if len(full) >= _ENOUGH else None,
            imbalance=self._busiest / self._mean if self._mean else None,
            kv_used=sum(known) / len(known) if known else None,
        )
