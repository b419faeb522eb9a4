"""Each API's own SDK through the gateway: what a client sends back continues what was sampled."""

import anthropic
import openai
import pytest

from builders import user
from rollout_backend.workbench.local.scripted import Fail, ToolCall
from sdk_agents import AGENTS, MessagesAgent, ResponsesAgent

ASK, MORE = "What is 2 + 3?", "Sure?"
TWO = f"I add twice.\n{ToolCall('add', {'a': 2, 'b': 3})}\n{ToolCall('add', {'a': 1})}"
SCRIPT = [ToolCall("add", {"a": 2, "b": 3}), TWO, "It is 5.", "Yes."]


def converse(agent) -> list[str]:
    said = []
    for _ in SCRIPT:
        reply = agent.turn()
        said.append(reply.text)
        agent.answer(reply, lambda arguments: str(sum(arguments.values())), MORE)
    return said


@pytest.fixture(scope="module")
def prompts() -> list:
    """The prompts of a conversation, which are the same in every API."""
    return []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", AGENTS)
def test_a_conversation_with_tools_is_one_segment_and_the_same_in_every_api(play, bundle, prompts, api, stream):
    gateway = play(SCRIPT)
    assert converse(api(gateway, stream=stream)) == ["", "I add twice.", "It is 5.", "Yes."]
    [segment] = gateway.trajectory().segments
    sent = [request["input_ids"] for request in gateway.engine.requests]
    assert [segment.token_ids.tolist()[: turn.start] for turn in segment.turns] == sent
    assert gateway.stats().segments == {"first_call": 1}
    text = bundle.decode(segment.token_ids)
    assert text.count("<tool_response>") == 3
    assert text.endswith(
        "It is 5.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    prompts.append(sent)
    assert sent == prompts[0]


def test_a_call_that_only_fills_a_cache_samples_nothing(play):
    gateway = play(lambda _: "x")
    ask = {"model": "scripted", "messages": [user(ASK)]}
    filled = gateway.anthropic().messages.create(**ask, max_tokens=0)
    assert (filled.content, filled.stop_reason, filled.usage.output_tokens) == ([], "max_tokens", 0)
    assert filled.usage.input_tokens == gateway.anthropic().messages.count_tokens(**ask).input_tokens
    assert gateway.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_reason_says_why_a_reply_ended(play, stream):
    client = play(lambda _: "one END two").anthropic()

    def reply(**more):
        ask = {"model": "scripted", "messages": [user(ASK)], **more}
        if stream:
            with client.messages.stream(**ask) as events:
                return events.get_final_message()
        return client.messages.create(**ask)

    stopped, cut = reply(max_tokens=100, stop_sequences=["END"]), reply(max_tokens=3)
    whole = reply(max_tokens=100)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text.strip() == "one"
    assert (cut.stop_reason, cut.content[0].text, cut.usage.output_tokens) == ("max_tokens", "one", 3)
    assert (whole.stop_reason, whole.content[0].text) == ("end_turn", "one END two")


@pytest.mark.parametrize("stream", [False, True])
def test_each_client_raises_failures_as_its_own_errors(play, stream):
    gateway = play(lambda _: Fail())
    with pytest.raises(anthropic.APIStatusError) as error:
        MessagesAgent(gateway, stream=stream).turn()
    assert error.value.type == "overloaded_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        MessagesAgent(gateway, "a" * 5000, stream=stream).turn()
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        ResponsesAgent(gateway).client.responses.create(model="scripted", input="a", previous_response_id="resp_1")


def test_anthropics_tool_runner_continues_without_a_stored_conversation(play):
    gateway = play([ToolCall("add", {"a": 2, "b": 3}), "It is 5."])

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    ask = {"model": "scripted", "max_tokens": 100, "messages": [user(ASK)]}
    said = gateway.anthropic().beta.messages.tool_runner(**ask, tools=[add]).until_done()
    assert said.content[0].text == "It is 5."
    assert gateway.stats().segments == {"first_call": 1}
    refusal = gateway.post({**ask, "thread": {"type": "create"}}, path="/v1/messages").json()["error"]
    assert refusal["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
