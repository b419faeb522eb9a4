"""How busy the engines are during a step, from samples of their queues. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

_ENOUGH = 5  # samples of an engine with a queue, before its capacity is told from them


class EngineSample(NamedTuple):
    """One engine at one moment: requests in its batch and in its queue, and tokens in its KV cache."""

    running: int
    waiting: int
    kv_used: int = 0
    kv_tokens: int = 0  # for which there is room; 0: unknown


class EngineUse(BaseModel):
    """How busy the engines were during a step. Means are over samples, of which there is one every few seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: int  # the most that reported at once
    running: float  # mean requests in all batches together
    waiting: float  # mean requests in all queues together
    idle: float  # part of the samples of single engines that had no request
    full_batch: float | None = None  # mean requests in the batch of an engine that had a queue; None: too few had one
    imbalance: float | None = None  # mean requests of the busiest engine, relative to all engines' mean; 1 is even
    kv_used: float | None = None  # mean part of the KV cache in use; None: unknown

    @property
    def needed(self) -> int | None:
        """Return how many engines would have run these requests without a queue; None if no engine had one for
        long."""
        if self.full_batch is None:
            return None
        return max(self.engines, math.ceil((self.running + self.waiting) / self.full_batch))


class EngineUseMeter:
    """Adds up the samples of one step."""

    def __init__(self) -> None:
        self._samples = 0  # of all engines together
        self._most = 0
        self._each: list[EngineSample] = []
        self._busiest, self._mean = 0.0, 0.0  # requests, added up over the samples of several engines

    def add(self, engines: Mapping[str, EngineSample]) -> None:
        """Add a sample of every engine that reports. Without any, do nothing."""
        if engines:
            self._samples += 1
            self._most = max(self._most, len(engines))
            self._each.extend(engines.values())
        if len(engines) > 1:
            requests = [sample.running + sample.waiting for sample in engines.values()]
            self._busiest += max(requests)
            self._mean += sum(requests) / len(requests)

    def result(self) -> EngineUse | None:
        """Return how busy the engines were; None without a sample."""
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
