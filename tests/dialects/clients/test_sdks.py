"""Each API's own SDK on the real engine: conversations with tools, streamed and not.

A proxy before the engine records what was sampled. The model is small and seldom calls a tool: the tests check that
each call ends with a well-formed answer or an error that the client knows, and that the recorded tokens are the
sampled ones, not what the model says.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from agent_wrapper.contract import Trajectory
from gateway_server import Witness
from rollout_backend.rendering.renderer import load_renderer
from sdk_agents import ChatAgent, MessagesAgent, ResponsesAgent
from token_exact import is_as_sampled

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTION, MORE = "What is 15 - 43?", "Now take 7 off."
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


@pytest.fixture
def witness(real_engine):
    with Witness(real_engine) as witness:
        yield witness


@pytest.fixture(scope="module")
def bundle(real_model):
    return load_renderer(real_model)


@pytest.fixture
def gateway(serve, witness, real_model):
    return serve(witness.url, model=real_model, model_call_s=150)


@pytest.fixture
def recorded(gateway, witness):
    """Seal the session, and check that it has exactly what the engine sampled, each token once."""

    def check() -> Trajectory:
        trajectory = gateway.trajectory()
        is_as_sampled(trajectory, witness.sampled)
        return trajectory

    return check


def make(api, gateway, stream: bool, question: str = QUESTION):
    return api(
        gateway,
        question,
        stream=stream,
        system="Work each problem out with the calculator.",
        tool=("calculator", SCHEMA),
        shots=SHOTS,
        max_tokens=64,
        seed=1,
    )


def turn(agent, forced: bool = False) -> str:
    reply = agent.turn(forced)
    agent.answer(reply, lambda _: "-28", MORE)
    return reply.finish


@pytest.mark.parametrize(
    ("api", "stream"),
    [(ChatAgent, True), (MessagesAgent, True), (ResponsesAgent, False)],
)
def test_a_conversation_is_one_row_of_what_was_sampled(gateway, recorded, api, stream):
    agent = make(api, gateway, stream)
    ends = [turn(agent, forced) for forced in (False, True, False)]
    assert set(ends) <= {"stop", "length", "tool_calls"}
    assert ends[1] == "tool_calls"
    [segment] = recorded().segments
    assert [turn.finish_reason == "length" for turn in segment.turns] == [end == "length" for end in ends]
    assert all(turn.cached_tokens > 0 for turn in segment.turns[1:])
    assert gateway.stats().constrained == 1


def test_concurrent_agents_of_one_session_are_a_row_each(gateway, recorded):
    """Each uses another API; the engine batches them."""
    agents = [
        make(ChatAgent, gateway, True, f"I am Ann. {QUESTION}"),
        make(MessagesAgent, gateway, False, f"I am Bob. {QUESTION}"),
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda agent: [turn(agent) for _ in range(2)], agents))
    assert [len(segment.turns) for segment in recorded().segments] == [2, 2]


def test_failures_are_errors_that_the_clients_know(gateway, recorded, real_model):
    long = "word " * real_model.context_tokens
    chat, responses, messages = (
        make(api, gateway, stream, long)
        for api, stream in ((ChatAgent, True), (ResponsesAgent, False), (MessagesAgent, True))
    )
    for agent in (chat, responses):
        with pytest.raises(openai.BadRequestError) as refused:
            agent.turn()
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages.turn()
    assert recorded().segments == ()
    errors = openai.APIStatusError, openai.APIStatusError, anthropic.APIStatusError
    for agent, error in zip((chat, responses, messages), errors, strict=True):
        with pytest.raises(error) as closed:
            agent.turn()
        assert closed.value.status_code == 410
