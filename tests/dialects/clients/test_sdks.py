"""OpenAI's and Anthropic's own clients: conversations with tools, streaming and not, on the real engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import anthropic
import openai
import pytest

pytestmark = pytest.mark.engine

MODEL = "scripted"
SYSTEM = "Work each problem out with the calculator."
SHOTS = [("What is 2 + 3?", "2 + 3", "5"), ("What is 10 - 4?", "10 - 4", "6"), ("What is 6 * 9?", "6 * 9", "54")]
QUESTION, MORE = "What is 15 - 43?", "Now take 7 off."
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string", "pattern": "^[0-9 +*/-]{1,12}$"}},  # so few tokens that it ends
    "required": ["expression"],
    "additionalProperties": False,
}
MAX_TOKENS = 64
TURNS = ("free", "forced", "free")


class ChatAgent:
    """An agent's conversation, one model call at a time. `turn` gives what the client calls the end of the reply."""

    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        self._client = stack.enter_context(gateway.client(max_tokens=MAX_TOKENS, seed=1))
        self._stream = stream
        self.history: list = [{"role": "system", "content": SYSTEM}]
        for i, (question, expression, result) in enumerate(SHOTS):
            function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
            self.history += [
                {"role": "user", "content": question},
                {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": result},
                {"role": "assistant", "content": f"Answer: {result}"},
            ]
        self.history.append({"role": "user", "content": QUESTION})
        function = {"name": "calculator", "description": "Evaluates an expression.", "parameters": SCHEMA}
        self._tools = [{"type": "function", "function": function}]

    def turn(self, forced: bool) -> str:
        ask = {"model": MODEL, "messages": self.history, "tools": self._tools}
        if forced:
            ask["tool_choice"] = {"type": "function", "function": {"name": "calculator"}}
        if self._stream:
            with self._client.chat.completions.stream(**ask) as events:
                try:
                    completion = events.get_final_completion()
                except openai.LengthFinishReasonError as error:  # so this helper tells of it where there are tools
                    completion = error.completion
        else:
            completion = self._client.chat.completions.create(**ask)
        (choice,) = completion.choices
        message = choice.message
        assert message.role == "assistant"
        assert isinstance(message.content, str) or message.tool_calls
        assert completion.usage is None or completion.usage.completion_tokens > 0
        self.history.append(message.model_dump(exclude={"parsed"}, exclude_none=True))
        for call in message.tool_calls or ():
            assert isinstance(json.loads(call.function.arguments), dict)
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": "-28"})
        if not message.tool_calls:
            self.history.append({"role": "user", "content": MORE})
        return choice.finish_reason


class ResponsesAgent:
    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        self._client = stack.enter_context(gateway.client(max_tokens=MAX_TOKENS, seed=1))
        self._stream = stream
        self.history: list = []
        for i, (question, expression, result) in enumerate(SHOTS):
            arguments = json.dumps({"expression": expression})
            self.history += [
                {"role": "user", "content": question},
                {"type": "function_call", "call_id": f"c{i}", "name": "calculator", "arguments": arguments},
                {"type": "function_call_output", "call_id": f"c{i}", "output": result},
                {"role": "assistant", "content": f"Answer: {result}"},
            ]
        self.history.append({"role": "user", "content": QUESTION})
        tool = {"type": "function", "name": "calculator", "description": "Evaluates an expression."}
        self._tools = [{**tool, "parameters": SCHEMA}]

    def turn(self, forced: bool) -> str:
        ask = {"model": MODEL, "input": self.history, "instructions": SYSTEM, "tools": self._tools}
        if forced:
            ask["tool_choice"] = {"type": "function", "name": "calculator"}
        if self._stream:
            with self._client.responses.stream(**ask) as events:
                *_, last = events  # its get_final_response knows no reply that was cut
            assert last.type in ("response.completed", "response.incomplete")
            response = last.response
        else:
            response = self._client.responses.create(**ask)
        assert response.usage.output_tokens > 0
        self.history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            assert isinstance(json.loads(call.arguments), dict)
            self.history.append({"type": "function_call_output", "call_id": call.call_id, "output": "-28"})
        if not calls:
            self.history.append({"role": "user", "content": MORE})
        return "tool_calls" if calls else "stop" if response.status == "completed" else "length"


class MessagesAgent:
    def __init__(self, gateway, stream: bool, stack: ExitStack) -> None:
        key = gateway.key(max_tokens=MAX_TOKENS, seed=1)
        self._client = stack.enter_context(anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0))
        self._stream = stream
        self.history: list = []
        for i, (question, expression, result) in enumerate(SHOTS):
            use = {"type": "tool_use", "id": f"c{i}", "name": "calculator", "input": {"expression": expression}}
            self.history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{i}", "content": result}]},
                {"role": "assistant", "content": f"Answer: {result}"},
            ]
        self.history.append({"role": "user", "content": QUESTION})
        self._tools = [{"name": "calculator", "description": "Evaluates an expression.", "input_schema": SCHEMA}]

    def turn(self, forced: bool) -> str:
        ask = {"model": MODEL, "max_tokens": 1000, "system": SYSTEM, "messages": self.history, "tools": self._tools}
        if forced:
            ask["tool_choice"] = {"type": "tool", "name": "calculator"}
        if self._stream:
            with self._client.messages.stream(**ask) as events:
                message = events.get_final_message()
        else:
            message = self._client.messages.create(**ask)
        assert (message.type, message.role) == ("message", "assistant")
        assert message.usage.output_tokens > 0
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "-28"} for use in uses]
        self.history += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results or MORE},
        ]
        return {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}[message.stop_reason]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [ChatAgent, ResponsesAgent, MessagesAgent])
def test_a_conversation_is_one_row_of_what_was_sampled(gateway, recorded, agent, stream):
    with ExitStack() as stack:
        talk = agent(gateway, stream, stack)
        ends = [talk.turn(turn == "forced") for turn in TURNS]
    assert set(ends) <= {"stop", "length", "tool_calls"}
    assert ends[1] == "tool_calls"
    (segment,) = recorded().segments
    assert [turn.finish_reason == "length" for turn in segment.turns] == [end == "length" for end in ends]
    assert all(turn.cached_tokens > 0 for turn in segment.turns[1:])
    assert gateway.stats().constrained == 1


def test_agents_of_one_session_at_once_are_a_row_each(gateway, recorded):
    """Each in another API; the engine batches them."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        talks = [agent(gateway, stream, stack) for agent, stream in ((ChatAgent, True), (MessagesAgent, False))]
        for talk, name in zip(talks, ("Ann", "Bob"), strict=True):
            talk.history[-1] = {"role": "user", "content": f"I am {name}. {QUESTION}"}
        for task in [pool.submit(lambda talk: [talk.turn(False) for _ in range(2)], talk) for talk in talks]:
            task.result()
    assert [len(segment.turns) for segment in recorded().segments] == [2, 2]


def test_what_fails_is_of_a_class_that_the_client_knows(gateway, recorded, real_model):
    long = "word " * real_model.context_tokens
    with ExitStack() as stack:
        chat, responses, messages = (
            agent(gateway, stream, stack)
            for agent, stream in ((ChatAgent, True), (ResponsesAgent, False), (MessagesAgent, True))
        )
        for talk in (chat, responses, messages):
            talk.history[-1] = {"role": "user", "content": long}
        for talk in (chat, responses):
            with pytest.raises(openai.BadRequestError) as refused:
                talk.turn(False)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            messages.turn(False)
        assert recorded().segments == ()
        for talk, error in (
            (chat, openai.APIStatusError),
            (responses, openai.APIStatusError),
            (messages, anthropic.APIStatusError),
        ):
            with pytest.raises(error) as closed:
                talk.turn(False)
            assert closed.value.status_code == 410
