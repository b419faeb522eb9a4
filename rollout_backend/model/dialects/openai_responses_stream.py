"""Write an answer in OpenAI's Responses API: its items, and the events that stream them. Pure.

Invariants:

- Events are numbered without gaps. Each item is opened, written and closed before the next is opened.
- The last event repeats the items exactly as streamed. A body that is not streamed equals that response.
- `store` is false. Sampling settings are null, because the trainer's may have replaced the agent's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from rollout_backend.model.dialects import base
from rollout_backend.model.dialects.base import EventStream
from rollout_backend.model.model_call import Answer, ApiError, Delta, ModelCall

_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}


@dataclass(frozen=True)
class ResponseEcho:
    """The parts of a request that its answer repeats, and which calls are not plain function calls."""

    fields: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    custom: Sequence[str]
    namespaces: Mapping[str, tuple[str, str]]
    """The namespace of a tool, and the tool's name within it."""


class ResponseEvents(EventStream):
    """Writes an answer's items as events. `response` repeats them; it is final after `end`."""

    def __init__(self, call: ModelCall, answer_id: str, created: int, model: str) -> None:
        self._id = answer_id
        self._echo: ResponseEcho = call.dialect_data
        self._numbers = count()
        self._items: list[dict[str, Any]] = []
        # The type of the last item while it is open.
        self._open: Literal["reasoning", "text"] | None = None
        self._pieces: list[str] = []
        self._started = False
        self.response: dict[str, Any] = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "parallel_tool_calls": call.parallel_tool_calls,
            "max_output_tokens": call.max_new_tokens,
            "tools": [{**_TOOL, **tool} if tool["type"] == "function" else tool for tool in self._echo.tools],
            "temperature": None,
            "top_p": None,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            **self._echo.fields,
        }

    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        self._started = True
        yield self._status("created", "in_progress")
        yield self._status("in_progress", "in_progress")

    def delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.kind == "tool_call":
            assert delta.tool_call is not None
            yield from self._function_call(delta.tool_call)
        elif delta.text:
            if self._open != delta.kind:
                yield from self._close()
                yield from self._begin(delta.kind)
            self._pieces.append(delta.text)
            yield self._in_part("delta", delta=delta.text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        cut = answer.choices[0].finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if all(item["type"] == "reasoning" for item in self._items) and self._open != "text":
            yield from self._close(status)
            # An empty reply needs an item too, or the history would lack the turn.
            yield from self._begin("text")
        yield from self._close(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        yield self._status(status, status, usage=_usage(answer), **more)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        if not self._started:
            yield from self.start(0)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if error.status < 500 and error.status != 429:
            code = error.code
        yield self._status("failed", "failed", error={"code": code, "message": error.message})

    def _status(self, event: str, status: str, **more: Any) -> bytes:
        items = self._items[:-1] if self._open else self._items
        self.response |= {"status": status, "output": list(items), **more}
        return self._event(f"response.{event}", response=self.response)

    def _begin(self, kind: Literal["reasoning", "text"]) -> Iterator[bytes]:
        if kind == "text":
            yield self._add("msg", type="message", role="assistant", content=[])
        else:
            yield self._add("rs", type="reasoning", summary=[], content=[])
        self._open, self._pieces = kind, []
        yield self._in_item("response.content_part.added", content_index=0, part=self._part())

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        part = self._part()
        yield self._in_part("done", text=part["text"])
        yield self._in_item("response.content_part.done", content_index=0, part=part)
        self._open = None
        yield self._done(status, content=[part])

    def _function_call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = _custom_input(arguments) if name in self._echo.custom else None
        named = {"call_id": call["id"], "name": name}
        if name in self._echo.namespaces:
            named["namespace"], named["name"] = self._echo.namespaces[name]
        if text is not None:
            yield self._add("ctc", type="custom_tool_call", input="", **named)
            yield self._in_item("response.custom_tool_call_input.delta", delta=text)
            yield self._in_item("response.custom_tool_call_input.done", input=text)
            yield self._done("completed", input=text)
            return
        yield self._add("fc", type="function_call", arguments="", **named)
        yield self._in_item("response.function_call_arguments.delta", delta=arguments)
        yield self._in_item("response.function_call_arguments.done", name=named["name"], arguments=arguments)
        yield self._done("completed", arguments=arguments)

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _add(self, prefix: str, **fields: Any) -> bytes:
        self._items.append({"id": f"{prefix}_{self._id}{len(self._items):02x}", "status": "in_progress", **fields})
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _done(self, status: str, **fields: Any) -> bytes:
        self._items[-1] = {**self._items[-1], "status": status, **fields}
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _in_part(self, what: Literal["delta", "done"], **fields: Any) -> bytes:
        if self._open == "reasoning":
            return self._in_item(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._in_item(f"response.output_text.{what}", content_index=0, logprobs=[], **fields)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        place = {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return base.event(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})


def _custom_input(arguments: str) -> str | None:
    """Return the input of a custom tool; None if these are not the arguments of one."""
    value = base.read_object(arguments)
    text = value["input"] if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) else None


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }
