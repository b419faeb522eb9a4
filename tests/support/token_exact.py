"""Compare the tokens of rollouts with those that a scripted engine sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent_wrapper.contract import Rollout
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
