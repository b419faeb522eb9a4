import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_wrapper.contract import ImageSpan, Trajectory, VersionSpan
from rollout_backend.model.rendering import segments
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder


def add(trajectory, prompt, sampled, *, weight_versions=(), cached_tokens=None, seconds=0.0, **more):
    logprobs = (-0.5,) * len(sampled)
    completion = Completion(
        tuple(sampled), logprobs, tuple(weight_versions), cached_tokens=cached_tokens, seconds=seconds
    )
    return trajectory.add(prompt, completion, **more)


def test_a_turn_that_extends_a_segment_is_appended():
    trajectory = SegmentRecorder()
    assert add(trajectory, [1, 2], [3, 4]).opened
    place = add(trajectory, [1, 2, 3, 4, 5], [6], split_reason="never")
    assert place == (0, 4, 5, 6, False)
    (segment,) = trajectory.segments()
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert segment.response_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert [math.isnan(logprob) for logprob in segment.logprobs] == [True, True, False, False, True, False]
    assert [(turn.start, turn.end) for turn in segment.turns] == [(2, 4), (5, 6)]
    assert segment.split_reason == "first_call"
    assert trajectory.prompt_ids(place).tolist() == [1, 2, 3, 4, 5]
    assert trajectory.completion_ids(place).tolist() == [6]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_turn_digests_its_prompt_once_and_only_new_tokens_if_its_segment_is_known(monkeypatch, is_known):
    digested, make = [], segments._digest

    class Counted:
        def __init__(self, ids=b"", hasher=None):
            self._hasher = hasher or make()
            self.update(ids)

        def copy(self):
            return Counted(hasher=self._hasher.copy())

        def update(self, ids):
            digested.append(memoryview(ids).nbytes)
            self._hasher.update(ids)

        def digest(self):
            return self._hasher.digest()

    monkeypatch.setattr(segments, "_digest", Counted)
    trajectory, prompt, prompts = SegmentRecorder(), [1], 0
    for turn in range(40):
        prompt += [2] * 100
        prompts += 0 if is_known else len(prompt)
        assert add(trajectory, prompt, [3], continues=0 if is_known and turn else None).segment == 0
        prompt.append(3)
    assert sum(digested) <= prompts * array("i").itemsize + 2 * len(prompt) * array("i").itemsize


def test_a_turn_with_other_images_opens_a_segment():
    def shown(start: int, name: str) -> ImageSpan:
        return ImageSpan(start=start, end=start + 2, sha256=name * 64, media_type="image/png")

    trajectory = SegmentRecorder()
    prompt = [1, 7, 7, 2]
    add(trajectory, prompt, [3], images=[shown(1, "a")])
    assert add(trajectory, [*prompt, 3, 4], [5], images=[shown(1, "b")], split_reason="history_rewritten").opened
    assert add(trajectory, [*prompt, 3, 4], [5], split_reason="history_rewritten").opened
    place = add(trajectory, [*prompt, 3, 7, 7], [5], images=[shown(1, "a"), shown(5, "b")])
    assert (place.segment, place.opened) == (0, False)
    first, *others = trajectory.segments()
    assert first.images == (shown(1, "a"), shown(5, "b"))
    assert [segment.images for segment in others] == [(shown(1, "b"),), ()]
    assert trajectory.images(0, end=5) == [shown(1, "a")]


def test_a_turn_extends_the_longest_segment_that_its_prompt_begins_with():
    trajectory = SegmentRecorder()
    add(trajectory, [1], [2])
    add(trajectory, [1, 2, 3], [4])
    assert add(trajectory, [1, 2, 3], [5], split_reason="branched").opened
    assert add(trajectory, [1], [2], split_reason="branched").opened
    assert add(trajectory, [1, 2, 3, 4, 5], [6]).segment == 0
    assert add(trajectory, [1, 2, 3, 5, 5], [6]).segment == 1


def test_weight_versions_have_the_positions_of_their_tokens():
    trajectory = SegmentRecorder()
    spans = [VersionSpan(version="a", start=0, end=1), VersionSpan(version="b", start=1, end=3)]
    add(trajectory, [1, 2], [3, 4, 5], weight_versions=spans, cached_tokens=2, seconds=0.25)
    (turn,) = trajectory.segments()[0].turns
    assert [(span.version, span.start, span.end) for span in turn.weight_versions] == [("a", 2, 3), ("b", 3, 5)]
    assert (turn.cached_tokens, turn.seconds) == (2, 0.25)


def test_an_unknown_logprob_is_nan_and_a_missing_one_is_refused():
    trajectory = SegmentRecorder()
    trajectory.add([1], Completion((2, 3), (None, -1.0), finish_reason="length"))
    logprobs = trajectory.segments()[0].logprobs
    assert math.isnan(logprobs[1])
    assert logprobs[2] == -1.0
    with pytest.raises(ValueError, match="1 logprobs for 2"):
        trajectory.add([1], Completion((2, 3), (-1.0,)))


def test_segments_are_snapshots():
    trajectory = SegmentRecorder()
    add(trajectory, [1], [2])
    [before] = trajectory.segments()
    add(trajectory, [1, 2, 3], [4])
    arrays = before.token_ids, before.response_mask, before.logprobs
    assert ([len(each) for each in arrays], len(before.turns)) == ([2] * 3, 1)


ids = st.lists(st.integers(min_value=0, max_value=3), max_size=6)


@given(st.lists(st.tuples(st.booleans(), st.integers(min_value=0), ids, ids), max_size=25), st.integers())
def test_any_sequence_of_calls_is_recorded_exactly(calls, seed):
    """Prompts extend earlier calls, or none. The vocabulary is so small that prefixes coincide by chance."""
    rng = random.Random(seed)
    trajectory = SegmentRecorder()
    made: list[tuple[list[int], list[int], list[float]]] = []
    for extend, _, given_ids, sampled in calls:
        prompt = given_ids
        if extend and made:
            before = rng.choice(made)
            prompt = before[0] + before[1] + given_ids
        found = trajectory.extended_by(array("i", prompt), [])
        for known in range(len(trajectory.segments())):
            assert trajectory.extended_by(array("i", prompt), [], known) == found
        logprobs = [-rng.random() for _ in sampled]
        place = trajectory.add(prompt, Completion(tuple(sampled), tuple(logprobs)), split_reason="branched")
        made.append((prompt, sampled, logprobs))
        assert trajectory.prompt_ids(place).tolist() == prompt
        assert trajectory.completion_ids(place).tolist() == sampled
    segments = trajectory.segments()
    decoded = Trajectory.decode(Trajectory(model="m", segments=segments).encode()).segments
    assert [segment.token_ids for segment in decoded] == [segment.token_ids for segment in segments]
    turns = [(segment, turn) for segment in segments for turn in segment.turns]
    assert len(turns) == len(made)
    recorded = sorted(
        (
            segment.token_ids[: turn.start].tolist(),
            segment.token_ids[turn.start : turn.end].tolist(),
            segment.logprobs[turn.start : turn.end].tolist(),
        )
        for segment, turn in turns
    )
    wanted = sorted((prompt, sampled, array("f", logprobs).tolist()) for prompt, sampled, logprobs in made)
    assert recorded == wanted
    assert sum(sum(segment.response_mask) for segment in segments) == sum(len(sampled) for _, sampled, _ in made)
