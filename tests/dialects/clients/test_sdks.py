"""Each API's own SDK on the real engine: a conversation with a tool is one row of what was sampled.

A proxy before the engine records what was sampled. The model is small and seldom calls a tool by itself, so what it
says is not checked.
"""

from __future__ import annotations

import pytest

from gateway_server import Witness
from rollout_backend.rendering.renderer import load_renderer
from sdk_agents import ChatAgent, MessagesAgent, ResponsesAgent
from token_exact import is_as_sampled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string", "pattern": "^[0-9 +*/-]{1,12}$"}},  # short, so that it ends
    "required": ["expression"],
    "additionalProperties": False,
}
SHOTS = [
    (f"What is {expression}?", {"expression": expression}, result)
    for expression, result in (("2 + 3", "5"), ("10 - 4", "6"), ("6 * 9", "54"))
]


@pytest.fixture(scope="module")
def bundle(real_model):
    return load_renderer(real_model)


@pytest.mark.parametrize(("api", "stream"), [(ChatAgent, True), (MessagesAgent, True), (ResponsesAgent, False)])
def test_a_conversation_is_one_row_of_what_was_sampled(serve, real_engine, real_model, api, stream):
    with Witness(real_engine) as witness:
        gateway = serve(witness.url, model=real_model, model_call_s=150)
        agent = api(
            gateway,
            "What is 15 - 43?",
            stream=stream,
            system="Work each problem out with the calculator.",
            tool=("calculator", SCHEMA),
            shots=SHOTS,
            max_tokens=64,
            seed=1,
        )
        replies = []
        for forced in (False, True, False):
            replies.append(agent.turn(forced))
            agent.answer(replies[-1], lambda _: "-28", "Now take 7 off.")
        trajectory = gateway.trajectory()
        is_as_sampled(trajectory, witness.sampled)
    assert replies[1].finish == "tool_calls"
    [segment] = trajectory.segments
    cut = [turn.finish_reason == "length" for turn in segment.turns]
    assert cut == [reply.finish == "length" for reply in replies]
    assert all(turn.cached_tokens > 0 for turn in segment.turns[1:])
    assert gateway.stats().constrained == 1
