"""Every dialect's own client through the real gateway: what a client sends back continues what was sampled."""

import json
from contextlib import ExitStack

import anthropic
import openai
import pytest

from rollout_backend.local.scripted import Fail, ScriptedEngine, ToolCall

MODEL = "scripted"
SYSTEM, ASK, MORE = "Use tools.", "What is 2 + 3?", "Sure?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TWO = f"I add twice.\n{ToolCall('add', {'a': 2, 'b': 3})}\n{ToolCall('add', {'a': 1})}"
SCRIPT = [ToolCall("add", {"a": 2, "b": 3}), TWO, "It is 5.", "Yes."]


def total(arguments: dict) -> str:
    return str(sum(arguments.values()))


class ChatAgent:
    """An agent's conversation, one model call at a time; `turn` answers with the text that the model said."""

    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        self._client = stack.enter_context(
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key(), max_retries=0)
        )
        self._stream = stream
        self.history: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
        function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
        self._asked = {"model": MODEL, "tools": [{"type": "function", "function": function}]}

    def turn(self) -> str:
        ask = {**self._asked, "messages": self.history}
        if self._stream:
            with self._client.chat.completions.stream(**ask) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = self._client.chat.completions.create(**ask).choices[0].message
        self.history.append(message.model_dump(exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = total(json.loads(call.function.arguments))
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            self.history.append({"role": "user", "content": MORE})
        return message.content or ""


class MessagesAgent:
    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        self._client = stack.enter_context(
            anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0)
        )
        self._stream = stream
        self.history: list = [{"role": "user", "content": ASK}]
        tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
        self._asked = {"model": MODEL, "max_tokens": 500, "system": SYSTEM, "tools": [tool]}

    def turn(self) -> str:
        ask = {**self._asked, "messages": self.history}
        if self._stream:
            with self._client.messages.stream(**ask) as events:
                message = events.get_final_message()
        else:
            message = self._client.messages.create(**ask)
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": total(use.input)} for use in uses]
        self.history += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results or MORE},
        ]
        return "".join(block.text for block in message.content if block.type == "text")


class ResponsesAgent:
    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        self._client = stack.enter_context(
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key(), max_retries=0)
        )
        self._stream = stream
        self.history: list = [{"role": "user", "content": ASK}]
        tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
        self._asked = {"model": MODEL, "instructions": SYSTEM, "tools": [tool]}

    def turn(self) -> str:
        ask = {**self._asked, "input": self.history}
        if self._stream:
            with self._client.responses.stream(**ask) as events:
                response = events.get_final_response()
        else:
            response = self._client.responses.create(**ask)
        self.history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": total(json.loads(call.arguments))}
            for call in calls
        ]
        if not calls:
            self.history.append({"role": "user", "content": MORE})
        return response.output_text


AGENTS = [ChatAgent, MessagesAgent, ResponsesAgent]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_a_conversation_with_tools_is_one_segment(serve, bundle, stack, agent, stream):
    with ScriptedEngine(SCRIPT) as engine:
        gateway = serve(engine.url)
        talk = agent(gateway, stream, stack)
        assert [talk.turn() for _ in SCRIPT] == ["", "I add twice.", "It is 5.", "Yes."]
        prompts = [request["input_ids"] for request in engine.requests]
    (segment,) = gateway.trajectory().segments
    assert [segment.token_ids.tolist()[: turn.start] for turn in segment.turns] == prompts
    assert gateway.stats().segments == {"first_call": 1}
    assert bundle.decode(segment.token_ids).count("<tool_response>") == 3


def test_every_dialect_renders_the_same_prompts(serve, stack):
    prompts = []
    for agent in AGENTS:
        with ScriptedEngine(SCRIPT) as engine:
            talk = agent(serve(engine.url), False, stack)
            for _ in SCRIPT:
                talk.turn()
            prompts.append([request["input_ids"] for request in engine.requests])
    assert prompts[0] == prompts[1] == prompts[2]


def test_turns_of_one_session_join_up_across_dialects(serve, stack):
    with ScriptedEngine(["5", "Yes."]) as engine:
        gateway = serve(engine.url)
        assert ChatAgent(gateway, False, stack).turn() == "5"
        talk = MessagesAgent(gateway, True, stack)
        talk.history += [{"role": "assistant", "content": "5"}, {"role": "user", "content": MORE}]
        assert talk.turn() == "Yes."
    (segment,) = gateway.trajectory().segments
    assert len(segment.turns) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_reply_ended(serve, stack, stream):
    with ScriptedEngine(lambda _: "one END two") as engine:
        gateway = serve(engine.url)
        client = stack.enter_context(anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0))
        ask = {"model": MODEL, "messages": [{"role": "user", "content": ASK}]}

        def reply(**more):
            if stream:
                with client.messages.stream(**ask, **more) as events:
                    return events.get_final_message()
            return client.messages.create(**ask, **more)

        stopped, cut = reply(max_tokens=100, stop_sequences=["END"]), reply(max_tokens=3)
        whole = reply(max_tokens=100)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text.strip() == "one"
    assert (cut.stop_reason, cut.content[0].text, cut.usage.output_tokens) == ("max_tokens", "one", 3)
    assert (whole.stop_reason, whole.content[0].text) == ("end_turn", "one END two")


def test_what_is_counted_is_what_is_sent(serve, stack):
    with ScriptedEngine(["5"]) as engine:
        gateway = serve(engine.url)
        client = stack.enter_context(anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0))
        ask = {"model": MODEL, "system": SYSTEM, "messages": [{"role": "user", "content": ASK}]}
        counted = client.messages.count_tokens(**ask).input_tokens
        usage = client.messages.create(**ask, max_tokens=9).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens == len(engine.requests[0]["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_failures_reach_each_client_in_its_own_words(serve, stack, stream):
    with ScriptedEngine(lambda _: Fail()) as engine:
        gateway = serve(engine.url)
        with pytest.raises(anthropic.APIStatusError) as error:
            MessagesAgent(gateway, stream, stack).turn()
        assert error.value.type == "overloaded_error"
        long = MessagesAgent(gateway, stream, stack)
        long.history[0]["content"] = "a" * 5000
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            long.turn()
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            ResponsesAgent(gateway, False, stack)._client.responses.create(
                model=MODEL, input="a", previous_response_id="resp_1"
            )
