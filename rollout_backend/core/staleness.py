"""Compute the age of sampled tokens in weight versions, and the pace that keeps it within a limit. Pure.

A trainer requests a group in step R, and version R - 1 or newer samples its tokens. Step T trains version T - 1. A
group is therefore at most `max_staleness` versions old if it is trained by step R + `max_staleness`.

Invariants:

- If a trainer requests at most `max_staleness` batches ahead, takes a batch only when `groups_to_await` is 0, and
  takes the oldest finished groups first, every group is trained within the limit, however long it runs.
- The age of a token from abandoned weights is the number of weight updates between these and the trained weights:
  back to the checkpoint, and forward again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

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


@dataclass(frozen=True)
class AbandonedWeights:
    """The versions that a killed trainer served after the checkpoint from which its successor resumed.

    `checkpoint` is the checkpoint's version, `last` the last abandoned one. The successor trains versions with the
    same numbers again.
    """

    checkpoint: int
    last: int

    def equivalent(self, version: int) -> int:
        """Return the version before the checkpoint that is as far from it as an abandoned version."""
        return 2 * self.checkpoint - version if self.checkpoint < version <= self.last else version

    def relabel(self, rollout: Rollout) -> Rollout:
        """Return the rollout with equivalent versions in place of abandoned ones.

        The killed trainer started this rollout. Its successor may have sampled the last turns of a segment, which
        begin where the version number falls.
        """
        if self.last <= self.checkpoint:
            return rollout
        segments = tuple(self._relabel_segment(segment) for segment in rollout.segments)
        return rollout.model_copy(update={"segments": segments})

    def _relabel_segment(self, segment: Segment) -> Segment:
        versions = [number_of(span.version) for turn in segment.turns for span in turn.weight_versions]
        falls = [i for i, (a, b) in enumerate(pairwise(versions), 1) if a is not None and b is not None and b < a]
        abandoned = falls[-1] if falls else len(versions)  # of the versions, those before their last fall
        turns, at = [], 0
        for turn in segment.turns:
            spans = []
            for span in turn.weight_versions:
                version = versions[at]
                if at < abandoned and version is not None:
                    label = renumbered(span.version, self.equivalent(version))
                    span = replace(span, version=label)
                spans.append(span)
                at += 1
            turns.append(replace(turn, weight_versions=tuple(spans)))
        return segment.model_copy(update={"turns": tuple(turns)})
