"""What a step left out, and how old what it trains is, as numbers among verl's own metrics. Pure, but for `TALLY`.

`rollouts/NAME/sum` counts, of the groups that were settled since the last batch:

| NAME | counts |
|---|---|
| `planned` | rollouts that were asked for |
| `left_out` | those of them that do not train, in all |
| `left_out/CLASS` | the same by class, see below |
| `left_out_by_reason/CLASS/REASON` | and by reason, where there is one |
| `groups_dropped` | groups of which nothing trains |
| `retokenised` | rollouts that train on tokens made of messages |
| `truncated_tokens`, `unknown_logprobs` | sampled tokens that do not train: no place, no logprob |
| `unknown_versions` | tokens that train though no engine said which weights sampled them |

The classes are those in which rollouts end, less `completed`, and three of rollouts that did complete:
`group_dropped`, of a group that is not usable; `untrainable`, without a token that can be trained; `too_old`, see
`rollout_backend.verl.sampler`.

`rollouts/trained/sum` counts the rollouts of the batch itself. `rollouts/staleness/mean` and `/max` say how many
versions the weights that sampled its tokens were behind those that it trains.

The suffixes are for verl: where it makes one step of several batches it adds up what is called a sum.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agent_wrapper.contract import Outcome
from rollout_backend.report import MESSAGES_ONLY, GroupResult
from rollout_backend.verl.rows import Rows

GROUP_DROPPED, UNTRAINABLE, TOO_OLD = "group_dropped", "untrainable", "too_old"
CLASSES = (
    *(str(outcome) for outcome in Outcome if outcome is not Outcome.COMPLETED),
    GROUP_DROPPED,
    UNTRAINABLE,
    TOO_OLD,
)
_ALWAYS = (
    "planned",
    "groups_dropped",
    "retokenised",
    "truncated_tokens",
    "unknown_logprobs",
    "unknown_versions",
    *(f"left_out/{name}" for name in CLASSES),
)


def count_group(group: GroupResult, made: Sequence[Rows]) -> Counter[str]:
    """What is left out of one group. `made` are the rows of its rollouts, none where it is not usable."""
    counts = Counter({"planned": group.planned})
    present = {rollout.rollout_id for rollout in group.rollouts}
    failed = [failure for failure in group.failures if failure.rollout_id not in present]
    for failure in failed:
        counts[f"left_out/{failure.outcome}"] += 1
        counts[f"left_out_by_reason/{failure.outcome}/{failure.reason}"] += 1
    trained = sum(len(rows) > 0 for rows in made)
    counts[f"left_out/{UNTRAINABLE}"] += group.planned - len(failed) - len(present)
    counts[f"left_out/{UNTRAINABLE if made else GROUP_DROPPED}"] += len(present) - trained
    if group.messages_only:
        counts[f"left_out_by_reason/{UNTRAINABLE}/{MESSAGES_ONLY}"] += len(group.messages_only)
    counts["groups_dropped"] += trained == 0
    counts["retokenised"] += sum(rows.retokenised > 0 for rows in made)
    counts["truncated_tokens"] += sum(rows.truncated_tokens for rows in made)
    counts["unknown_logprobs"] += sum(rows.unknown_logprobs for rows in made)
    counts["unknown_versions"] += sum(row.trained_tokens for rows in made for row in rows if row.min_version is None)
    return counts


def named(counts: Mapping[str, int], trained: int) -> dict[str, float]:
    """The metrics of these counts. Those of the fixed names are always there, so that a curve has no gaps."""
    all_of_them = dict.fromkeys(_ALWAYS, 0) | dict(counts)
    all_of_them["left_out"] = sum(all_of_them[f"left_out/{name}"] for name in CLASSES)
    all_of_them["trained"] = trained
    return {f"rollouts/{name}/sum": float(count) for name, count in all_of_them.items()}


def staleness(tokens: Iterable[tuple[int, float, int]], current: int) -> dict[str, float]:
    """Of trained tokens, in parts of (how many, their mean version, the oldest), against the `current` version."""
    parts = list(tokens)
    total = sum(count for count, _, _ in parts)
    if not total:
        return {}
    return {
        "rollouts/staleness/mean": sum(count * (current - mean) for count, mean, _ in parts) / total,
        "rollouts/staleness/max": float(current - min(oldest for _, _, oldest in parts)),
    }


class Tally:
    """Counts by partition, from the thread that writes rows to the one that takes batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, partition: str, counts: Counter[str]) -> None:
        with self._lock:
            self._counts.setdefault(partition, Counter()).update(counts)

    def take(self, partition: str) -> Counter[str]:
        """What came since the last time."""
        with self._lock:
            return self._counts.pop(partition, Counter())


TALLY = Tally()
"""Where the manager and the sampler meet: verl makes both in one process, and neither knows the other."""
