"""Compute the age of sampled tokens in weight versions, and the pace that keeps it within a limit. Pure.

A trainer requests a group in step R, and version R - 1 or newer samples its tokens. Step T trains version T - 1. A
group is therefore at most `max_staleness` versions old if it is trained by step R + `max_staleness`.

Invariants:

- If a trainer requests at most `max_staleness` batches ahead, takes a batch only when `groups_to_await` is 0, and
  takes the oldest finished groups first, every group is trained within the limit, however long it runs.
- The age of a token from abandoned weights is the number of weight updates between these and the trained weights:
  back to the earliest checkpoint from which a trainer has resumed since, and forward again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent_wrapper.contract import Rollout, Segment
from rollout_backend.core.adapter import number_of, renumbered


def groups_to_await(
    unfinished: Iterable[int], step: int, max_staleness: int, batch_size: int, left_in_step: int = 0
) -> int:
    """Return the number of groups that must finish before a step may take its next batch; 0 if it may take it now.

    Each unfinished group needs a place in a later batch that is trained in time. Groups that are already too old are
    not awaited.

    Args:
        unfinished: The step that requested each unfinished group.
        step: The step that takes a batch.
        max_staleness: The age limit.
        batch_size: Number of groups that a step trains.
        left_in_step: Number of groups that this step takes after the batch.
    """
    due = sorted(requested + max_staleness for requested in unfinished)
    in_time = [last_step for last_step in due if last_step >= step]
    places = [left_in_step + (last_step - step) * batch_size for last_step in in_time]
    return max([0, *(needed - free for needed, free in enumerate(places, 1))])


def staleness(tokens: Iterable[tuple[int, float, int]], current: int) -> dict[str, float]:
    """Return the mean and maximum staleness of trained tokens against the `current` version.

    `tokens` holds one (count, mean version, oldest version) for each row.
    """
    parts = list(tokens)
    total = sum(count for count, _, _ in parts)
    if not total:
        return {}
    return {
        "rollouts/staleness/mean": sum(count * (current - mean) for count, mean, _ in parts) / total,
        "rollouts/staleness/max": float(current - min(oldest for _, _, oldest in parts)),
    }


@dataclass(frozen=True)
class AbandonedWeights:
    """The versions that killed trainers served after the checkpoints from which their successors resumed.

    `checkpoints` lists, in order, the versions from which the trainers resumed that began after the rollout started;
    the last one is this trainer's. Each of them trains versions with the same numbers again. `last` is the newest
    version that any killed trainer served.
    """

    checkpoints: tuple[int, ...]
    last: int

    def equivalent(self, version: int, restarts: int = 0) -> int:
        """Map an abandoned version to the version with the same number of updates to this trainer's weights.

        `restarts` is the number of restarts before the one whose trainer served the version.
        """
        if version > self.last:
            return version
        return 2 * min((version, *self.checkpoints[restarts:])) - version

    def relabel(self, rollout: Rollout) -> Rollout:
        """Return the rollout with equivalent versions in place of abandoned ones.

        The first trainer started this rollout. Later trainers may have sampled the last turns of a segment; the
        version number falls at a restart. If the number fits several trainers, the earliest is assumed, because its
        weights are the oldest.
        """
        if not self.checkpoints:
            return rollout
        segments = tuple(self._relabel_segment(segment) for segment in rollout.segments)
        return rollout.model_copy(update={"segments": segments})

    def _relabel_segment(self, segment: Segment) -> Segment:
        turns, restarts, before = [], 0, -1
        for turn in segment.turns:
            spans = []
            for span in turn.weight_versions:
                version = number_of(span.version)
                if version is not None:
                    if version < before:
                        # A later trainer must have served it: the first one that had such a version.
                        later = range(restarts + 1, len(self.checkpoints))
                        can_serve = (n for n in later if self.checkpoints[n - 1] <= version)
                        restarts = next(can_serve, len(self.checkpoints))
                    label = renumbered(span.version, self.equivalent(version, restarts))
                    span, before = replace(span, version=label), version
                spans.append(span)
            turns.append(replace(turn, weight_versions=tuple(spans)))
        return segment.model_copy(update={"turns": tuple(turns)})
