"""Estimate what a step costs in dollars, and which part is wasted. Pure.

The cost is an estimate, because only the times of sessions are known, and only the first start of earlier attempts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from rollout_backend.base.formats import dollars
from rollout_backend.config import AgentCoreConfig, RolloutConfig
from rollout_backend.run.accounts.summary import NO_USAGE, StepSummary, Usage

# Prices per vCPU-hour and GB-hour, by AgentCore platform.
_RATES = {"V1": (0.0895, 0.00945), "V2": (0.1276, 0.0169)}
LEFT_OUT = "storage, logs, data transfer, NAT and load balancers"


@dataclass(frozen=True)
class Cost:
    """Costs in dollars. `wasted` is the part of `total` for rollouts that are not trained."""

    agents: float
    requests: float
    """Requests to S3 and SQS."""
    gpus: float
    wasted: float

    @property
    def total(self) -> float:
        return self.agents + self.requests + self.gpus

    def fields(self) -> dict[str, float]:
        """Return the amounts by name, for JSON."""
        return {**vars(self), "total": self.total}

    @property
    def sums(self) -> str:
        return f"about {dollars(self.total)}, {dollars(self.wasted)} of it wasted (estimate)"

    @property
    def parts(self) -> str:
        """Describe the parts that are not 0."""
        parts = {"agents": self.agents, "S3 and SQS": self.requests, "GPUs": self.gpus}
        return ", ".join(f"{name} {dollars(value)}" for name, value in parts.items() if value)

    def __str__(self) -> str:
        return f"about {dollars(self.total)} ({self.parts}), {dollars(self.wasted)} of it wasted (estimate)"

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.agents + other.agents,
            self.requests + other.requests,
            self.gpus + other.gpus,
            self.wasted + other.wasted,
        )


@dataclass(frozen=True)
class Prices:
    """Prices in dollars per unit."""

    session_s: float
    """Per second of an open session."""
    own_s: float
    """Per second in which a session does not wait for the model."""
    result: float
    """For the requests of one result."""
    step_s: float
    """Per second of a step."""
    left_out: str = LEFT_OUT
    """Costs that the estimate leaves out."""

    @classmethod
    def of(cls, config: RolloutConfig) -> Self | None:
        """Return the prices from the settings; None if there are too few for an estimate."""
        prices = config.prices
        if prices.session_gb is None and prices.gpu_hour is None:
            return None
        runtime = config.runtime if isinstance(config.runtime, AgentCoreConfig) else None
        platform = prices.platform or (runtime and runtime.named_platform) or "V1"
        # A later platform gets the newest known rates.
        vcpu_hour, gb_hour = _RATES.get(platform, _RATES["V2"])
        on_instances = runtime is not None and runtime.capacity_provider is not None
        if on_instances:
            vcpu_hour = gb_hour = 0.0
        missing = {
            "sessions with their requests": prices.session_gb is None,
            "EC2 instances": on_instances and prices.gb_hour is None,
            "GPUs": prices.gpu_hour is None,
        }
        requests = prices.s3_put_million + prices.s3_get_million + 3 * prices.sqs_million
        return cls(
            session_s=(gb_hour if prices.gb_hour is None else prices.gb_hour) * (prices.session_gb or 0.0) / 3600,
            own_s=(vcpu_hour if prices.vcpu_hour is None else prices.vcpu_hour)
            * (prices.session_vcpus or 0.0)
            / 3600,
            result=requests / 1e6 if prices.session_gb is not None else 0.0,
            step_s=(prices.gpu_hour or 0.0) * (config.gpus or 0) / 3600,
            left_out=", ".join([*(name for name, is_missing in missing.items() if is_missing), LEFT_OUT]),
        )

    def cost(self, trained: Usage, wasted: Usage, seconds: float) -> Cost:
        """Return the cost of a step of this duration. GPUs are wasted in proportion to session time."""
        both = trained + wasted
        gpus = self.step_s * seconds
        share = wasted.session_s / both.session_s if both.session_s else 0.0
        return Cost(
            agents=self._agents(both),
            requests=self.result * both.results,
            gpus=gpus,
            wasted=self._agents(wasted) + self.result * wasted.results + gpus * share,
        )

    def at_most(self, rollouts: int, agent_s: float, step_s: float) -> Cost:
        """Return the cost of a step in which every agent uses all its time and none waits for the model."""
        return self.cost(Usage(rollouts * agent_s, 0.0, rollouts), NO_USAGE, step_s)

    def _agents(self, usage: Usage) -> float:
        return self.session_s * usage.session_s + self.own_s * (usage.session_s - usage.model_s)

    def cost_of_steps(self, steps: Iterable[StepSummary]) -> Cost:
        """Return the cost of steps. Asynchronous trainers run several steps at the same time; the GPUs are then
        charged once."""
        total, covered = Cost(0.0, 0.0, 0.0, 0.0), 0.0
        for step in sorted(steps, key=lambda each: (each.began, each.ended)):
            total += self.cost_of(step, covered)
            covered = max(covered, step.ended)
        return total

    def cost_of(self, step: StepSummary, gpus_since: float = 0.0) -> Cost:
        """Return the cost of a step. Rollouts that are not trained count as wasted."""
        seconds = max(0.0, step.ended - max(step.began, gpus_since))
        return self.cost(step.trained_use, step.wasted_use, seconds)
