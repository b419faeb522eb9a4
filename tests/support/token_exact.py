"""Compare recorded tokens with those that an engine sampled."""

import math
from collections.abc import Callable, Iterable, Sequence

import pytest

from agent_wrapper.contract import Rollout, Trajectory
from gateway_server import Sampled
from rollout_backend.local.scripted import Reply, ScriptedEngine

Call = tuple[tuple[int, ...], tuple[int, ...]]  # the prompt, and what was sampled for it


def recorded_calls(rollouts: Iterable[Rollout]) -> list[Call]:
    """Return the model calls that the rollouts are trained on."""
    segments = (segment for rollout in rollouts for segment in rollout.segments)
    return [
        (tuple(segment.token_ids[: turn.start]), tuple(segment.token_ids[turn.start : turn.end]))
        for segment in segments
        for turn in segment.turns
    ]


def is_token_exact(rollouts: Iterable[Rollout], engine: ScriptedEngine, reply: Callable[[str], Reply]) -> None:
    """Assert that each call of the rollouts is one that `engine` got and answered by `reply`, none of them twice."""
    end = engine.tokenizer.token_to_id("<|im_end|>")
    answered = []
    for request in engine.requests:
        prompt = engine.tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        ids = engine.tokenizer.encode(str(reply(prompt)), add_special_tokens=False).ids
        answered.append((tuple(request["input_ids"]), (*ids, end)))
    recorded = recorded_calls(rollouts)
    assert recorded
    for call in recorded:
        assert call in answered
        answered.remove(call)


def is_as_sampled(trajectory: Trajectory, sampled: Sequence[Sampled]) -> None:
    """Assert that the trajectory has exactly what the engine sampled, each token once."""
    turns = {}
    for segment in trajectory.segments:
        ids, logprobs, mask = (getattr(segment, name).tolist() for name in ("token_ids", "logprobs", "response_mask"))
        at = 0
        for turn in segment.turns:
            assert mask[at : turn.end] == [0] * (turn.start - at) + [1] * (turn.end - turn.start)
            assert all(map(math.isnan, logprobs[at : turn.start]))
            assert turn.weight_versions[0].start == turn.start
            assert turn.weight_versions[-1].end == turn.end
            turns[tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])] = logprobs[turn.start : turn.end]
            at = turn.end
        assert at == len(ids)
    assert turns.keys() == {(tuple(call.prompt), tuple(call.ids)) for call in sampled}
    for call in sampled:
        logprobs = turns[tuple(call.prompt), tuple(call.ids)]
        if call.constrained:
            assert all(map(math.isnan, logprobs))
        else:
            assert logprobs == pytest.approx(call.logprobs, abs=1e-6)
    assert sum(sum(segment.response_mask) for segment in trajectory.segments) == sum(
        len(call.ids) for call in sampled
    )
