"""A tiny language model and its training, behind the emulators of training services.

Losses are Tinker's: importance sampling and PPO, added up over the tokens. The optimizer is Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

LOSSES = ("importance_sampling", "ppo")
_CLIP = 0.2


class TabularPolicy:
    """A language model whose next token depends on the previous one alone: a softmax over a row of `logits`.

    It samples the ids of `vocabulary`. Row 0 follows each token outside of it, such as the end of a prompt.
    """

    def __init__(self, vocabulary: Sequence[int], logits: NDArray[np.float64] | None = None, seed: int = 0) -> None:
        self.vocabulary = tuple(vocabulary)
        size = len(self.vocabulary)
        self.logits = np.random.default_rng(seed).normal(size=(size + 1, size)) if logits is None else logits
        self._columns = {token: column for column, token in enumerate(self.vocabulary)}

    def copy(self) -> TabularPolicy:
        return TabularPolicy(self.vocabulary, self.logits.copy())

    def row(self, previous: int) -> int:
        """Return the row that follows a token."""
        return self._columns.get(previous, -1) + 1

    def column(self, token: int) -> int:
        """Return the column of a token. Raises KeyError if the policy cannot sample it."""
        return self._columns[token]

    def logprobs(self, previous: int) -> NDArray[np.float64]:
        """Return the logprob of each id of the vocabulary after a token."""
        logits = self.logits[self.row(previous)]
        shifted = logits - logits.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))

    def sample(
        self, prompt: Sequence[int], params: Mapping[str, Any], rng: np.random.Generator
    ) -> tuple[list[int], list[float], str]:
        """Return the tokens, their logprobs and the stop reason of one sequence.

        The logprobs are the model's, before temperature, top_p and top_k, as SkyRL's are. A stop token ends the
        sequence and is part of it.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        stops = params.get("stop") or ()
        while len(tokens) < params["max_tokens"]:
            given = self.logprobs(tokens[-1] if tokens else prompt[-1])
            column = _choose(given, params, rng)
            tokens.append(self.vocabulary[column])
            # The wire carries float32.
            logprobs.append(float(np.float32(given[column])))
            if tokens[-1] in stops:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"


def _choose(logprobs: NDArray[np.float64], params: Mapping[str, Any], rng: np.random.Generator) -> int:
    """Return the column of a token sampled with temperature, top_k and top_p."""
    temperature, top_k, top_p = params.get("temperature", 1), params.get("top_k", -1), params.get("top_p", 1)
    if temperature == 0:
        return int(logprobs.argmax())
    weights = np.exp((logprobs - logprobs.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[:top_k] if top_k > 0 else order
    shares = np.cumsum(weights[kept]) / weights[kept].sum()
    kept = kept[: int(np.searchsorted(shares, top_p)) + 1]
    return int(rng.choice(kept, p=weights[kept] / weights[kept].sum()))


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
