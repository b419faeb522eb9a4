"""An agent with one tool, written with each API's own SDK: `say`, `turn`, `results`."""

import base64
import json
from dataclasses import dataclass
from typing import Any

from builders import assistant, message, tool_result, user
from gateway_server import GatewayServer


@dataclass
class Reply:
    text: str
    calls: list[tuple[str, dict[str, Any]]]  # id and arguments


class Agent:
    """Keep a conversation's `history`, and send it with each `turn`. Keyword arguments go into the key.

    An agent of each API also has `results`, which appends those of calls, and makes parts of a message's content of
    a `text` or an `image`.
    """

    def __init__(
        self,
        gateway: GatewayServer,
        question: Any = "What is 2 + 3?",
        *,
        stream: bool = False,
        system: str | None = "Use tools.",
        tool: tuple[str, dict[str, Any]] = ("add", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        model: str = "scripted",
        **sampling: Any,
    ) -> None:
        self.stream, self.system, self.model, self.tool, self.schema = stream, system, model, *tool
        self.client = self.connect(gateway, **sampling)
        self.history: list[Any] = []
        if question is not None:
            self.say(question)

    def connect(self, gateway: GatewayServer, **sampling: Any) -> Any:
        return gateway.client(**sampling)

    def say(self, content: Any) -> None:
        self.history.append(user(content))

    def answer(self, reply: Reply, result: Any, more: Any) -> None:
        """Send `result` for each call of the reply, or else ask `more`."""
        if reply.calls:
            self.results([(call_id, result(arguments)) for call_id, arguments in reply.calls])
        else:
            self.say(more)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class ChatAgent(Agent):
    def __init__(self, gateway: GatewayServer, *args: Any, **more: Any) -> None:
        super().__init__(gateway, *args, **more)
        if self.system:
            self.history.insert(0, message("system", self.system))

    def results(self, results: list[tuple[str, Any]]) -> None:
        self.history += [tool_result(call_id, content) for call_id, content in results]

    def text(self, text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    def image(self, data: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}

    def turn(self) -> Reply:
        function = {"name": self.tool, "description": "Computes.", "parameters": self.schema}
        tools = [{"type": "function", "function": function}]
        ask: dict[str, Any] = {"model": self.model, "messages": self.history, "tools": tools}
        if self.stream:
            with self.client.chat.completions.stream(**ask) as events:
                completion = events.get_final_completion()
        else:
            completion = self.client.chat.completions.create(**ask)
        [choice] = completion.choices
        assert choice.message.role == "assistant"
        assert isinstance(choice.message.content, str) or choice.message.tool_calls
        assert completion.usage is None or completion.usage.completion_tokens > 0
        # Agents send fields that are null, or leave them out.
        self.history.append(choice.message.model_dump(exclude={"parsed"}, exclude_none=self.stream))
        calls = [(call.id, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
        return Reply(choice.message.content or "", calls)


class ResponsesAgent(Agent):
    def results(self, results: list[tuple[str, Any]]) -> None:
        self.history += [
            {"type": "function_call_output", "call_id": call_id, "output": content} for call_id, content in results
        ]

    def text(self, text: str) -> dict[str, Any]:
        return {"type": "input_text", "text": text}

    def image(self, data: bytes) -> dict[str, Any]:
        return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}

    def turn(self) -> Reply:
        tool = {"type": "function", "name": self.tool, "description": "Computes.", "parameters": self.schema}
        ask: dict[str, Any] = {"model": self.model, "input": self.history, "tools": [tool]}
        if self.system:
            ask["instructions"] = self.system
        if self.stream:
            with self.client.responses.stream(**ask) as events:
                response = events.get_final_response()
        else:
            response = self.client.responses.create(**ask)
        assert response.usage.output_tokens > 0
        self.history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        calls = [
            (item.call_id, json.loads(item.arguments)) for item in response.output if item.type == "function_call"
        ]
        return Reply(response.output_text, calls)


class MessagesAgent(Agent):
    def connect(self, gateway: GatewayServer, **sampling: Any) -> Any:
        return gateway.anthropic(**sampling)

    def results(self, results: list[tuple[str, Any]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": content} for call_id, content in results]
        self.history.append(user(blocks))

    def text(self, text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    def image(self, data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}

    @property
    def asked(self) -> dict[str, Any]:
        """What a call and a count of its tokens have in common."""
        tool = {"name": self.tool, "description": "Computes.", "input_schema": self.schema}
        system = {"system": self.system} if self.system else {}
        return {"model": self.model, **system, "messages": self.history, "tools": [tool]}

    def turn(self) -> Reply:
        ask = {**self.asked, "max_tokens": 1000}
        if self.stream:
            with self.client.messages.stream(**ask) as events:
                answer = events.get_final_message()
        else:
            answer = self.client.messages.create(**ask)
        assert (answer.type, answer.role) == ("message", "assistant")
        assert answer.usage.output_tokens > 0
        self.history.append(assistant([block.model_dump() for block in answer.content]))
        calls = [(block.id, block.input) for block in answer.content if block.type == "tool_use"]
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Reply(text, calls)


AGENTS = (ChatAgent, ResponsesAgent, MessagesAgent)
