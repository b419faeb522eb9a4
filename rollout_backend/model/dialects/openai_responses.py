"""Speak OpenAI's Responses API: `POST /v1/responses` and its `input_tokens`. Pure.

Invariants:

- A conversation becomes the same messages as in the Chat Completions API. Consecutive items of the assistant
  (reasoning, message, function calls) form one message, as in one reply; only a message directly after another
  message starts a new one. The text of reasoning is kept, but not summaries, which the model did not sample.
- An answer's items sent back as input become the message that was sampled.
- The model sees all tools, even deferred ones. A request to compact the history is ignored and counted.
- A custom tool is offered as a function with one string, `input`, and a namespace's tools as functions with both
  names. Their calls are returned in the API's form, or as function calls if the model gave a custom tool other
  arguments. Tools that OpenAI runs, or on which it trains its models, are left out and counted.
- Nothing is stored, so each request carries the whole conversation. References to stored objects, files, and images
  for a text-only model are refused.
"""

import json
from collections import deque
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from rollout_backend.model.dialects import base
from rollout_backend.model.dialects.base import Body, Dialect, EventStream, ImageReader, refuse, refused
from rollout_backend.model.dialects.openai_responses_stream import ResponseEcho, ResponseEvents
from rollout_backend.model.images import Image
from rollout_backend.model.model_call import Answer, Message, ModelCall, whole_deltas

_TEXT_ONLY = "input_image cannot be read: this model takes text only, so send what it says as input_text"
_NOT_STORED = "are not stored here; send the whole conversation as input"
_HARMLESS = frozenset(
    {
        *("access_programs", "background_options", "context_management", "stream_options"),
        # This limits only tools that OpenAI runs.
        "max_tool_calls",
    }
)
_WHOLE_IMAGES = ({}, *({"context_compression": compression} for compression in ("auto", "disabled")))
_Sync = Annotated[Any, refuse("a tool's result is awaited before the next reply; leave it out", False)]
_DirectOnly = Annotated[Any, refuse("only the model itself calls tools here; leave it out", ["direct"])]
_Direct = Annotated[Any, refuse("there are no programs here that call tools; leave it out", {"type": "direct"})]
_LEFT_OUT = "a tool of OpenAI's"
_HOSTED = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
        *("local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"),
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    }
)
# In characters. Without this limit, the text of a request could grow quadratically.
_MAX_REPEATED = 4 * 2**20
_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


# --- the request ------------------------------------------------------------------------------------------


def _is_readable(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_file", "input_audio"):
        raise ValueError(f"{kind} is not supported: send the content of a file as input_text")
    return part


class _TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _RefusalPart(Body):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class _ImagePart(Body):
    type: Literal["input_image"]
    image_url: str | None = None
    detail: Annotated[Any, refuse("images are shown in full; leave it out", "auto", "high", "original")] = None


_Part = Annotated[
    Annotated[_TextPart | _RefusalPart | _ImagePart, Field(discriminator="type")],
    BeforeValidator(_is_readable),
]
_Parts = Annotated[base.Items[_Part], BeforeValidator(base.as_texts)]


class _Message(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _ReasoningText(Body):
    text: str


class _Reasoning(Body):
    content: base.Items[_ReasoningText] | None = None


class _Call(Body):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    is_async: _Sync = Field(default=None, alias="async")
    caller: _Direct = None
    namespace: str | None = None


class _FunctionCall(_Call):
    arguments: str | None = None


class _CustomCall(_Call):
    input: str

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input}, ensure_ascii=False)


class _CallOutput(Body):
    call_id: str = Field(min_length=1)
    output: _Parts
    caller: _Direct = None


def _kind(item: object) -> str | None:
    if not isinstance(item, dict):
        return None
    if item.get("type") is not None:
        return str(item["type"])
    return "message" if "role" in item else "item_reference" if "id" in item else None


def _is_whole(item: object) -> object:
    if _kind(item) == "item_reference":
        raise ValueError("items are not stored here; send the item itself")
    return item


_Item = Annotated[
    Annotated[
        Annotated[_Message, Tag("message")]
        | Annotated[_Reasoning, Tag("reasoning")]
        | Annotated[_FunctionCall, Tag("function_call")]
        | Annotated[_CallOutput, Tag("function_call_output")]
        | Annotated[_CustomCall, Tag("custom_tool_call")]
        | Annotated[_CallOutput, Tag("custom_tool_call_output")],
        Discriminator(_kind),
    ],
    BeforeValidator(_is_whole),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _Declared(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    is_async: _Sync = Field(default=None, alias="async")
    allowed_callers: _DirectOnly = None


class _Tool(_Declared):
    type: Literal["function"]
    parameters: base.JsonObject | None = None
    strict: bool | None = None
    output_schema: Annotated[Any, refuse("is not shown to the model; say it in the description")] = None


class _CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class _CustomTool(_Declared):
    type: Literal["custom"]
    format: _CustomFormat | None = None

    @property
    def explanation(self) -> str | None:
        """The description, extended by the grammar with which OpenAI constrains its own models."""
        if self.format is None or not self.format.definition:
            return self.description
        grammar = f"The input follows this {self.format.syntax} grammar:\n{self.format.definition}"
        return f"{self.description}\n\n{grammar}" if self.description else grammar


class _Namespace(Body):
    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: base.Items[Annotated[_Tool | _CustomTool, Field(discriminator="type")]]


def _tool_kind(tool: object) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return None
    return _LEFT_OUT if kind in _HOSTED else kind


_AnyTool = Annotated[
    Annotated[_Tool, Tag("function")]
    | Annotated[_CustomTool, Tag("custom")]
    | Annotated[_Namespace, Tag("namespace")]
    | Annotated[base.HostedTool, Tag(_LEFT_OUT)],
    Discriminator(_tool_kind),
]


def _flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool as the model sees it."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


class _ToolChoice(Body):
    type: Literal["auto", "none", "required", "function", "custom"]
    name: str | None = None
    namespace: str | None = None


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: base.JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _TextConfig(Body):
    format: _Format | None = None
    verbosity: Any = None


class _Request(base.SamplingFields):
    input: Annotated[base.Items[_Item], BeforeValidator(_as_items)] | None = None
    instructions: str | None = None
    tools: base.Items[_AnyTool] | None = None
    tool_choice: Annotated[_ToolChoice, BeforeValidator(base.as_choice)] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    # The engines' APIs have this field.
    stop: base.StopStrings = None
    text: _TextConfig | None = None
    include: base.Items[str] | None = None
    metadata: base.JsonObject | None = None
    reasoning: base.JsonObject | None = None
    previous_response_id: Annotated[Any, refuse(f"responses {_NOT_STORED}", False)] = None
    conversation: Annotated[Any, refuse(f"conversations {_NOT_STORED}", False)] = None
    background: Annotated[
        Any, refuse("nothing is stored here to fetch later; wait for the answer, or stream it", False)
    ] = None
    prompt: Annotated[
        Any, refuse("there are no prompt templates here; send their text as instructions and input", False)
    ] = None
    image: Annotated[Any, refuse("images are shown in full; leave it out", *_WHOLE_IMAGES)] = None
    moderation: Annotated[Any, refuse("nothing is moderated here; leave it out")] = None
    truncation: Annotated[Any, refuse("the input is never shortened here; shorten it yourself", "disabled")] = None


class OpenAIResponses(Dialect):
    """The dialect of `POST /v1/responses`."""

    name = "openai_responses"
    path = "/responses"
    count_path = "/responses/input_tokens"

    def parse(self, body: bytes) -> ModelCall:
        request = base.read(_Request, body, _HARMLESS)
        if "message.output_text.logprobs" in (request.include or ()):
            raise refused("include", "logprobs are not given in this API; ask /v1/chat/completions for them")
        choice = request.tool_choice or _ToolChoice(type="auto")
        names_tool = choice.type in ("function", "custom")
        if names_tool and choice.name is None:
            raise refused("tool_choice.name", "is missing; name the function that must be called")
        wanted = request.text.format if request.text else None
        tools, echo = _tools(request)
        images = ImageReader(self._images, _TEXT_ONLY)
        call = ModelCall(
            model=request.model,
            messages=_messages(request, images, self._separators),
            images=images.found,
            tools=tools or None,
            tool_choice="required" if choice.type == "function" or choice.type == "custom" else choice.type,
            tool_name=_flat_name(choice.name, choice.namespace) if names_tool and choice.name else None,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            json_schema=base.schema_of(wanted.type, wanted.json_schema, "text.format.schema") if wanted else None,
            max_new_tokens=request.max_output_tokens,
            stop=request.stop or (),
            stream=bool(request.stream),
            sampling=base.sampling_of(request, "reasoning")
            | ({"verbosity": True} if request.text and request.text.verbosity else {}),
            ignored=base.ignored(body, request.model_extra, request.tools or ()),
            dialect_data=echo,
        )
        if call.tool_choice == "required":
            base.check_forced(call.tool_name, call.tools)
        if not request.input:
            raise refused("input", "is empty; there is nothing to reply to")
        return call

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        events = ResponseEvents(call, answer.id, answer.created, answer.model)
        for delta in whole_deltas(answer.choices[0].message):
            deque(events.delta(delta), maxlen=0)
        deque(events.end(answer), maxlen=0)
        return events.response

    def count_body(self, prompt_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": prompt_tokens}

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        return ResponseEvents(call, answer_id, created, model)


def _tools(request: _Request) -> tuple[list[dict[str, Any]], ResponseEcho]:
    """Return the tools to offer to the model, and the fields of the request that the answer repeats."""
    offered, echoed, custom, namespaces, repeated = [], [], [], {}, 0
    for declared in request.tools or ():
        space = declared if isinstance(declared, _Namespace) else None
        if space is not None:
            repeated += len(space.tools) * len(space.name + (space.description or ""))
            if repeated > _MAX_REPEATED:
                raise refused(
                    "tools",
                    f"a namespace's name and description are shown with each of its tools, which "
                    f"makes more than {_MAX_REPEATED} characters; shorten them",
                )
        for tool in [declared] if space is None else space.tools:
            if isinstance(tool, (_Namespace, base.HostedTool)):
                continue
            name = _flat_name(tool.name, space.name if space is not None else None)
            if space is not None:
                namespaces[name] = space.name, tool.name
            if isinstance(tool, _CustomTool):
                custom.append(name)
                offered.append(base.chat_tool(name, tool.explanation, _TEXT_INPUT, None))
            else:
                offered.append(base.chat_tool(name, tool.description, tool.parameters, tool.strict))
            if space is not None and space.description:
                function = offered[-1]["function"]
                function["description"] = f"{space.description}\n\n{function.get('description', '')}".rstrip()
        if not isinstance(declared, base.HostedTool):
            echoed.append(declared.model_dump(by_alias=True, exclude_unset=True))
    return offered, ResponseEcho(_echo(request), echoed, custom, namespaces)


def _messages(request: _Request, images: ImageReader, separators: base.Separators) -> list[Message]:
    plain: list[Message] = []
    if request.instructions:
        plain.append({"role": "system", "content": request.instructions})
    # The assistant's message that the next item may extend.
    reply: Message = {}
    before = None
    for i, item in enumerate(request.input or ()):
        if isinstance(item, _CallOutput):
            content = _content(item.output, f"input.{i}.output", images, separators.output)
            plain.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            reply = {}
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            where = f"input.{i}.message.content"
            text_of = None if role == "user" else item.role
            content = _content(item.content, where, images, separators.message, text_of)
            plain.append({"role": role, "content": content})
            reply = {}
        else:
            if not reply or (isinstance(item, _Message) and isinstance(before, _Message)):
                reply = {"role": "assistant", "content": []}
                plain.append(reply)
            _add(reply, item, f"input.{i}", images)
        before = item
    for message in plain:
        if message["role"] == "assistant":
            for name in message.keys() & {"content", "reasoning_content"}:
                message[name] = "".join(message[name])
    return plain


def _add(
    reply: Message, item: _Message | _Reasoning | _FunctionCall | _CustomCall, where: str, images: ImageReader
) -> None:
    if isinstance(item, _Message):
        reply["content"].append(_content(item.content, f"{where}.message.content", images, "", item.role))
    elif isinstance(item, (_FunctionCall, _CustomCall)):
        arguments = base.call_arguments(item.arguments, f"{where}.arguments")
        function = {"name": _flat_name(item.name, item.namespace), "arguments": arguments}
        reply.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif item.content:
        reply.setdefault("reasoning_content", []).extend(part.text for part in item.content)


def _content(
    parts: list[_TextPart | _RefusalPart | _ImagePart],
    where: str,
    images: ImageReader,
    separator: str,
    text_of: str | None = None,
) -> str | list[dict[str, Any]]:
    """Return the content of a message. `text_of` is its role if messages of that role cannot contain images."""
    pieces: list[str | Image] = []
    for i, part in enumerate(parts):
        if not isinstance(part, _ImagePart):
            pieces.append(part.text)
            continue
        if part.image_url is None and images.taken:
            raise refused(f"{where}.{i}", "no files are stored here: send the image itself as image_url")
        pieces.append(images.url(part.image_url or "", f"{where}.{i}"))
        if text_of is not None:
            raise refused(f"{where}.{i}", f"a message of the {text_of} cannot hold an image")
    return base.message_content(pieces, separator)


def _echo(request: _Request) -> dict[str, Any]:
    """Return the request fields that the answer repeats and `ModelCall` lacks."""
    wanted, choice = request.text and request.text.format, request.tool_choice or _ToolChoice(type="auto")
    return {
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "reasoning": request.reasoning or {"effort": None, "summary": None},
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
        "tool_choice": choice.type if choice.name is None else choice.model_dump(exclude_none=True),
    }
