"""The training of a `TabularPolicy`, behind the emulators of training services.

Losses are Tinker's: importance sampling and PPO, added up over the tokens. The optimizer is Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tests.emulators.tinker_emulator import TabularPolicy

LOSSES = ("importance_sampling", "ppo")
_CLIP = 0.2


@dataclass(frozen=True)
class TrainedDatum:
    """What a client sent to train on."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, NDArray[Any]]


@dataclass
class Learner:
    """The gradient and the optimizer of a model. `history` has a list for each of its optimizer steps, also of those
    before it was loaded: the target tokens of its data."""

    gradient: NDArray[np.float64]
    mean: NDArray[np.float64]
    square: NDArray[np.float64]
    steps: int = 0
    waiting: list[tuple[int, ...]] = field(default_factory=list)
    history: list[list[tuple[int, ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, policy: TabularPolicy) -> Self:
        zeros = np.zeros_like(policy.logits)
        return cls(zeros, zeros, zeros)

    def add_gradient(self, policy: TabularPolicy, datum: TrainedDatum, loss_fn: str) -> float:
        """Add the gradient of a datum. Return its loss."""
        gradient, loss = self.gradient.copy(), 0.0
        inputs = (datum.inputs[name].tolist() for name in ("target_tokens", "logprobs", "advantages"))
        for before, target, sampled, advantage in zip(datum.tokens, *inputs, strict=True):
            if advantage == 0:
                continue
            logprobs, column = policy.logprobs(before), policy.column(target)
            ratio = float(np.exp(logprobs[column] - sampled))
            loss -= ratio * advantage
            clipped = ratio > 1 + _CLIP if advantage > 0 else ratio < 1 - _CLIP
            if loss_fn == "ppo" and clipped:
                continue
            slope = np.exp(logprobs) * ratio * advantage
            slope[column] -= ratio * advantage
            gradient[policy.row(before)] += slope
        self.gradient = gradient
        self.waiting.append(tuple(datum.inputs["target_tokens"].tolist()))
        return loss

    def take_step(self, policy: TabularPolicy, rate: float, beta1: float, beta2: float, eps: float) -> float:
        """Take a step of Adam. Return the norm of the gradient."""
        self.steps += 1
        self.mean = beta1 * self.mean + (1 - beta1) * self.gradient
        self.square = beta2 * self.square + (1 - beta2) * self.gradient**2
        mean = self.mean / (1 - beta1**self.steps)
        square = self.square / (1 - beta2**self.steps)
        policy.logits = policy.logits - rate * mean / (np.sqrt(square) + eps)
        norm = float(np.linalg.norm(self.gradient))
        self.gradient = np.zeros_like(self.gradient)
        self.history = [*self.history, self.waiting]
        self.waiting = []
        return norm
