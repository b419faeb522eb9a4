"""Compare recorded tokens with those that a scripted engine sampled."""

import math
from collections.abc import Callable, Iterable

import pytest

from agent_wrapper.contract import Rollout, Trajectory
from rollout_backend.workbench.local.scripted import LOGPROB, Reply, ScriptedEngine

Call = tuple[tuple[int, ...], tuple[int, ...]]  # the prompt, and what was sampled for it


def recorded_calls(rollouts: Iterable[Rollout]) -> list[Call]:
    """Return the model calls that the rollouts are trained on."""
    segments = (segment for rollout in rollouts for segment in rollout.segments)
    return [
        (tuple(segment.token_ids[: turn.start]), tuple(segment.token_ids[turn.start : turn.end]))
        for segment in segments
        for turn in segment.turns
    ]


def answered_calls(engine: ScriptedEngine, reply: Callable[[str], Reply]) -> list[Call]:
    """Return the model calls that `engine` got, with the tokens by which `reply` answers them."""
    calls = []
    for request in engine.requests:
        prompt = engine.tokenizer.decode(request["input_ids"], skip_special_tokens=False)
        sampled = engine._completion(str(reply(prompt)), request)["output_ids"]
        calls.append((tuple(request["input_ids"]), tuple(sampled)))
    return calls


def is_token_exact(rollouts: Iterable[Rollout], engine: ScriptedEngine, reply: Callable[[str], Reply]) -> None:
    """Assert that each call of the rollouts is one that `engine` got and answered by `reply`, none of them twice."""
    answered = answered_calls(engine, reply)
    recorded = recorded_calls(rollouts)
    assert recorded
    for call in recorded:
        assert call in answered
        answered.remove(call)


def is_as_sampled(
    trajectory: Trajectory, engine: ScriptedEngine, reply: Callable[[str], Reply], stop: str = ""
) -> None:
    """Assert that the trajectory has exactly what the engine sampled, each token once, up to the stop string."""
    sampled = answered_calls(engine, reply)
    if stop:
        text = engine.tokenizer.decode
        sampled = [(prompt, ids[: len(text(ids).partition(stop)[0] + stop)]) for prompt, ids in sampled]
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
    assert turns.keys() == {*sampled}
    for request, call in zip(engine.requests, sampled, strict=True):
        if {"structural_tag", "json_schema"} & request["sampling_params"].keys():  # its format was forced
            assert all(map(math.isnan, turns[call]))
        else:
            assert turns[call] == pytest.approx([LOGPROB] * len(turns[call]), abs=1e-6)
    assert sum(sum(segment.response_mask) for segment in trajectory.segments) == sum(len(ids) for _, ids in sampled)
