"""Metrics for verl: how many rollouts a step left out and why, and how stale its tokens are. Pure, except `TALLY`.

`rollouts/NAME/sum` counts over the groups settled since the last step:

| NAME | counts |
|---|---|
| `planned` | rollouts that were planned |
| `left_out` | all planned rollouts that are not trained |
| `left_out/CLASS` | the same by class, see below |
| `left_out_by_reason/CLASS/REASON` | the same by reason, if known |
| `groups_dropped` | groups without a trained rollout |
| `truncated_tokens`, `unknown_logprobs` | sampled tokens not trained because they do not fit or lack a logprob |
| `unknown_versions` | trained tokens whose weight version is unknown |
| `too_old_tokens` | sampled tokens of rollouts that are `too_old`; `trained_tokens` are those in the batch |
| `moved_turn_rewards` | rewards of turns without a trained token, which are on a token of another turn |

The classes are the outcomes of rollouts other than `completed`, and four for rollouts that have a reward:
`group_dropped` (its group is not usable), `untrainable` (it has no token that can be trained), `masked` (by
`training.mask`, or because it lacks the routed experts that the trainer replays) and `too_old` (see
`rollout_backend.verl.sampler`).

`rollouts/trained/sum` counts the rollouts in the step's batches. `rollouts/staleness/mean` and `/max` say how many
versions the weights that sampled their tokens are behind the weights being trained.

If a step has several batches, the counts come with the last one. verl adds up most metrics with the suffix `/sum`,
but takes the minimum or maximum of those with "min" or "max" in their name.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from agent_wrapper.contract import Outcome
from rollout_backend.core.rows import Rows
from rollout_backend.run.accounts.step_report import GroupResult

GROUP_DROPPED, UNTRAINABLE, MASKED, TOO_OLD = "group_dropped", "untrainable", "masked", "too_old"
CLASSES = (
    *(str(outcome) for outcome in Outcome if outcome is not Outcome.COMPLETED),
    GROUP_DROPPED,
    UNTRAINABLE,
    MASKED,
    TOO_OLD,
)
_ALWAYS = (
    "planned",
    "groups_dropped",
    "truncated_tokens",
    "unknown_logprobs",
    "unknown_versions",
    "too_old_tokens",
    "trained_tokens",
    "moved_turn_rewards",
    *(f"left_out/{name}" for name in CLASSES),
)


def count_group(group: GroupResult, made: Sequence[Rows]) -> Counter[str]:
    """Count what is left out of one group. `made` holds the rows of its rollouts; empty if it is not usable."""
    counts = Counter({"planned": group.planned})
    present = {rollout.rollout_id for rollout in group.rollouts}
    failed = [failure for failure in group.failures if failure.rollout_id not in present]
    for failure in failed:
        counts[f"left_out/{failure.outcome}"] += 1
        counts[f"left_out_by_reason/{failure.outcome}/{failure.reason}"] += 1
    trained = sum(len(rows) > 0 for rows in made)
    counts[f"left_out/{UNTRAINABLE}"] += group.planned - len(failed) - len(present)
    masked = Counter(rows.masked for rows in made if rows.masked)
    for mask, count in masked.items():
        counts[f"left_out/{MASKED}"] += count
        counts[f"left_out_by_reason/{MASKED}/{mask}"] += count
    counts[f"left_out/{UNTRAINABLE if made else GROUP_DROPPED}"] += len(present) - trained - masked.total()
    counts["groups_dropped"] += trained == 0
    counts["truncated_tokens"] += sum(rows.truncated_tokens for rows in made)
    counts["unknown_logprobs"] += sum(rows.unknown_logprobs for rows in made)
    counts["moved_turn_rewards"] += sum(rows.moved_turn_rewards for rows in made)
    counts["unknown_versions"] += sum(row.trained_tokens for rows in made for row in rows if row.mean_version is None)
    return counts


def as_metrics(counts: Mapping[str, int], trained: int) -> dict[str, float]:
    """Return the counts as metrics. The fixed names are always present, so that a plotted curve has no gaps."""
    totals = dict.fromkeys(_ALWAYS, 0) | dict(counts)
    totals["left_out"] = sum(totals[f"left_out/{name}"] for name in CLASSES)
    totals["trained"] = trained
    return {f"rollouts/{name}/sum": float(count) for name, count in totals.items()}


class PartitionCounts:
    """Counts by partition. The thread that writes rows adds; the thread that takes batches takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, partition: str, counts: Counter[str]) -> None:
        with self._lock:
            self._counts.setdefault(partition, Counter()).update(counts)

    def take(self, partition: str) -> Counter[str]:
        """Return and reset the counts added since the last call."""
        with self._lock:
            return self._counts.pop(partition, Counter())


TALLY = PartitionCounts()
"""Shared by the manager and the sampler: verl makes both in one process and connects them by nothing else."""
