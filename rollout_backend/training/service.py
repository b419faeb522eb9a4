"""Define what a training service does, and turn a step's result into its training data.

Invariants:

- A datum is a row (see `core.rows`) shifted by one token: for each token but the last, it has the next one, and the
  logprob with which that one was sampled.
- Where nothing was sampled, or the logprob is unknown, the advantage is 0, so the token trains nothing.
- Lost rollouts, and groups that the policy does not accept, are in no datum and in no baseline.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_backend.config import RolloutConfig
from rollout_backend.config.results import PriceConfig
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.core.advantages import ESTIMATORS, advantages_of
from rollout_backend.core.rows import Row, mask_group, rows_of
from rollout_backend.errors import TrainingServiceError
from rollout_backend.run.accounts.step_report import StepResult

Sampler = NewType("Sampler", object)
"""A service's handle of one set of weights."""
# The service's context already limits what was sampled.
_ANY_LENGTH = 2**31 - 1
_PERMANENT_AFTER_S = 60.0


@dataclass(frozen=True, eq=False)
class Datum:
    """A token sequence to train on. Each array is [T]."""

    tokens: NDArray[np.int64]
    target_tokens: NDArray[np.int64]
    """The token that follows each of `tokens`."""
    logprobs: NDArray[np.float32]
    """Sampled logprobs of `target_tokens`; 0 for those that were not sampled."""
    advantages: NDArray[np.float32]
    """Advantages of `target_tokens`; 0 for those that were not sampled."""


@dataclass(frozen=True)
class TrainingData:
    """What a step's result has to train on."""

    groups: tuple[tuple[Datum, ...], ...]
    """The data of each group that has an advantage other than 0."""
    rollouts: int
    """Rollouts with a trained token."""
    trained_tokens: int
    truncated_tokens: int
    """Sampled tokens after a token that cannot be trained."""
    unknown_logprobs: int
    """Sampled tokens without a logprob, such as those of forced formats."""
    versions: tuple[tuple[int, float, int], ...] = ()
    """Trained tokens of each row, and the mean and the oldest version of the weights that sampled them."""

    def batches(self, count: int) -> list[list[Datum]]:
        """Divide the groups into at most `count` batches of nearly equal numbers of groups."""
        parts = [self.groups[i::count] for i in range(count)]
        return [[datum for group in part for datum in group] for part in parts if part]


def training_data(result: StepResult, config: RolloutConfig, settings: TrainingServiceConfig) -> TrainingData:
    """Return what a training service trains on for a step's result."""
    made = [
        mask_group(
            group.rollouts,
            [rows_of(rollout, _ANY_LENGTH, _ANY_LENGTH) for rollout in group.rollouts],
            config.training.mask,
            config.group.needed,
        )
        if group.usable
        else []
        for group in result.groups
    ]
    found = [(number, rows) for number, group in enumerate(made) for rows in group]
    advantages = advantages_of(
        ESTIMATORS[settings.estimator],
        np.array([float(rows.rows[-1].scores.sum()) if len(rows) else 0.0 for _, rows in found]),
        np.array([float(sum(row.trained_tokens for row in rows)) for _, rows in found]),
        np.array([number for number, _ in found], np.int64),
        {"norm_adv_by_std_in_grpo": settings.normalize_by_std},
    )
    groups: dict[int, list[Datum]] = {}
    for (number, rows), advantage in zip(found, advantages, strict=True):
        if advantage:
            groups.setdefault(number, []).extend(_datum(row, float(advantage)) for row in rows)
    return TrainingData(
        groups=tuple(map(tuple, groups.values())),
        rollouts=sum(len(rows) > 0 for _, rows in found),
        trained_tokens=sum(row.trained_tokens for _, rows in found for row in rows),
        truncated_tokens=sum(rows.truncated_tokens for _, rows in found),
        unknown_logprobs=sum(rows.unknown_logprobs for _, rows in found),
        versions=tuple(
            (row.trained_tokens, row.mean_version, row.min_version)
            for _, rows in found
            for row in rows
            if row.mean_version is not None and row.min_version is not None
        ),
    )


def _datum(row: Row, advantage: float) -> Datum:
    given = np.zeros(row.prompt_tokens - 1, np.float32)
    return Datum(
        tokens=row.tokens[:-1],
        target_tokens=row.tokens[1:],
        logprobs=np.concatenate([given, row.logprobs]),
        advantages=np.concatenate([given, np.float32(advantage) * row.response_mask.astype(np.float32)]),
    )


@dataclass(frozen=True)
class Checkpoint:
    """Where the service has saved a model: its weights with the optimizer's state, and its weights for sampling."""

    state: str
    sampler: str


BILLED = ("prefill", "sample", "training")
"""What services bill tokens for: those of prompts, those that were sampled, and those to train on."""


def usage_metrics(tokens: Mapping[str, int], prices: PriceConfig, prefix: str = "") -> dict[str, float]:
    """Return tokens by the names of `BILLED` as metrics, with what they cost if their prices are set."""
    found = {f"{prefix}{kind}_tokens": float(tokens.get(kind, 0)) for kind in BILLED}
    per_million = [getattr(prices, f"{kind}_million") for kind in BILLED]
    if None not in per_million:
        cost = sum(price * count for price, count in zip(per_million, found.values(), strict=True))
        found[f"{prefix}dollars"] = cost / 1e6
    return found


class Refusals:
    """Decides whether a service refuses access permanently. A key, a policy or a path that worked may be refused for
    some seconds, while a server or a proxy in front of it is replaced."""

    def __init__(self) -> None:
        self._accepted = False
        self._since: float | None = None

    def accept(self) -> None:
        """Note that the service accepted a call."""
        self._accepted, self._since = True, None

    def refuse(self) -> bool:
        """Note a refusal. Return whether it is permanent: no call was accepted for a minute, or ever."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return not self._accepted or now - self._since >= _PERMANENT_AFTER_S


class Forgotten(TrainingServiceError):
    """The service does not know a session, a model or a sampler any more, as after a restart."""


class TrainingService(Protocol):
    """A model in training on a service.

    Each method raises ConfigError if the service refuses the call permanently, and TrainingServiceError if it fails
    or does not answer in time. After an error of `train` or `save` the model's weights are unknown: call `begin`.
    """

    may_end_samples: bool
    """Whether the service may end a sample whose call is cancelled. If not, it samples and bills all of it."""

    async def begin(self, state: str | None) -> None:
        """Create a model, with new weights or with the weights and the optimizer of a saved state."""
        ...

    async def train(self, batches: Sequence[Sequence[Datum]]) -> dict[str, float]:
        """Take an optimizer step for each batch. Return the service's metrics."""
        ...

    async def usage(self) -> dict[str, float]:
        """Return what the service has billed since the last call, see `usage_metrics`; empty if it does not say."""
        ...

    async def save(self, name: str, *, keep: bool) -> Checkpoint:
        """Save the model. With `keep`, the checkpoint does not expire."""
        ...

    async def sampler(self, path: str) -> Sampler:
        """Return a handle of saved weights, or of the base model if `path` is empty."""
        ...

    async def sample(
        self, sampler: Sampler, prompt: Sequence[int], params: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        """Return the tokens of one sequence, their logprobs, and why it ended: `stop` or `length`.

        `params` has Tinker's names: `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, and `stop`, token ids.
        """
        ...
