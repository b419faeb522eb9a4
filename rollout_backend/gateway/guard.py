"""Around any renderer: what is said stays text, and what is sampled becomes a well-formed reply.

What must always hold, whatever the model's template and its parser do:

- No message makes a control token, and no description of a tool. Templates print them as they are, and tokenizers
  take the names of control tokens in them for the tokens themselves: a tool's result that spells `<|im_end|>` could
  end its turn and write the next one. Here such a name is encoded as the text that it is.
- A tool call is whole or it is malformed. Whole: its name is text, and its arguments are a JSON object.
- What was said is not dropped. Parsers leave out what they cannot place, such as an opened call without a name; an
  agent would take what is left, often nothing, for the final answer. Such a reply keeps its text, as malformed.
- A bridge extends. What it returns begins with all tokens before it, or it does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from renderers import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from tokenizers import pre_tokenizers

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

# A Unicode noncharacter, which no text has. Put into a name it hides the name from the search for added tokens; the
# tokenizer then cuts the text there and drops it.
_MARK = "\ufdd0"
# Not every vocabulary declares its turn tokens special: DeepSeek's `User` is a plain added token.
_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# What frames reasoning and tools. People write these into prompts on purpose; a tool's result has no business to.
_FRAME = re.compile(r"</?(?:think|tools?|tool_\w+|arg_\w+|observation)>")
# What begins a tool call in one format or another.
_CALL = re.compile(
    "|".join(
        [
            r"<(?:\w+:)?tool_?calls?>",
            r"<\|tool_calls?",
            r"<\uff5ctool\u2581calls?\u2581begin",
            r"<\|python_tag\|>",
            r" to=functions\.",
            r'\A\s*\{\s*"name"',
        ]
    ),
    re.IGNORECASE,
)
# gpt-oss: the reasoning, which its prompt begins, and the frame of what follows.
_ANALYSIS = re.compile(
    r"(?:\A|<\|channel\|>analysis<\|message\|>).*?(?=<\|(?:end|call|start|return)\|>|\Z)", re.DOTALL
)
_HEADER = re.compile(r"<\|start\|>assistant(?:<\|channel\|>\w+)?<\|message\|>")
_USABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class GuardedRenderer:
    """A renderer after the `renderers.Renderer` protocol, around another one.

    `stop_token_ids` are all that end a reply, those that `inner` does not know included. `encodes_text` says that
    `inner` itself makes no control token of a content: it then gets it as it is.
    """

    def __init__(
        self, inner: Any, tokenizer: Any, stop_token_ids: Iterable[int] = (), *, encodes_text: bool = False
    ) -> None:
        self.inner = inner
        self._tokenizer = tokenizer
        known = set(inner.get_stop_token_ids())
        self._stops = known | set(stop_token_ids)
        self._unknown_stops = self._stops - known
        added = tokenizer.added_tokens_decoder.values()
        self._is_harmony = any(token.content == "<|channel|>" for token in added)
        control = [token.content for token in added if token.special or _CONTROL.fullmatch(token.content)]
        self._control = _any_of(control)
        self._control_or_frame = _any_of(
            [*control, *(token.content for token in added if _FRAME.fullmatch(token.content))]
        )
        self._marks = not encodes_text
        if self._marks:
            _drop_marks(tokenizer)

    @property
    def is_prefix_stable(self) -> bool:
        return bool(self.inner.is_prefix_stable)

    def render(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        return self.inner.render(
            self._marked(messages), tools=self._marked_tools(tools), add_generation_prompt=add_generation_prompt
        )

    def render_ids(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return list(
            self.inner.render_ids(
                self._marked(messages), tools=self._marked_tools(tools), add_generation_prompt=add_generation_prompt
            )
        )

    def render_places(self, messages: Sequence[Message], *, tools: Tools = None) -> list[int]:
        """The prompt for the next reply, with one token in the place of each image."""
        rendered = self.inner.render(
            self._marked(messages),
            tools=self._marked_tools(tools),
            add_generation_prompt=True,
            process_multimodal=False,
        )
        return list(rendered.token_ids)

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        parsed = self.parse_beginning(token_ids, tools=tools, prompt_ids=prompt_ids)
        if parsed.tool_calls or parsed.reasoning_complete is False:
            return parsed
        return self._kept(parsed, list(token_ids), bool(tools))

    def parse_beginning(
        self, token_ids: Sequence[int], *, tools: Tools = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """As `parse_response`, while the reply is sampled: what the parser cannot place may yet become a call."""
        ids = list(token_ids)
        if ids and ids[-1] in self._unknown_stops:
            ids.pop()  # else its name would end the content
        parsed = self.inner.parse_response(ids, tools=tools, prompt_ids=prompt_ids)
        return replace(parsed, tool_calls=[_checked(call) for call in parsed.tool_calls])

    def get_stop_token_ids(self) -> list[int]:
        return list(self.inner.get_stop_token_ids())

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        places: bool = False,
    ) -> RenderedTokens | None:
        """With `places` one token stands in the place of each image, before and after."""
        extended = self.inner.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            self._marked(new_messages),
            tools=self._marked_tools(tools),
            **({"process_multimodal": False} if places else {}),
        )
        before = [*previous_prompt_ids, *previous_completion_ids]
        return extended if extended is not None and extended.token_ids[: len(before)] == before else None

    def _kept(self, parsed: ParsedResponse, ids: list[int], tools: bool) -> ParsedResponse:
        """A reply in which the parser found no call: if it dropped something, with all that was said."""
        said = ids[:-1] if ids and ids[-1] in self._stops else ids
        text = self._tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = self._after_reasoning(text, parsed.reasoning_content)
        begins_call = tools and _CALL.search(text)
        if not begins_call and (parsed.content.strip() or not self._visible(text)):
            return parsed
        text = text.strip()
        calls = [ParsedToolCall(raw=text, status=ToolCallParseStatus.MALFORMED_STRUCTURE)] if begins_call else []
        return replace(parsed, content=text, tool_calls=calls)

    def _after_reasoning(self, text: str, reasoning: str | None) -> str:
        if self._is_harmony:
            return _ANALYSIS.sub("", text)
        if reasoning is None:
            return text
        _, closed, after = text.partition("</think>")
        return after if closed else text.partition(reasoning)[2]

    def _visible(self, text: str) -> str:
        text = _HEADER.sub("", text) if self._is_harmony else text
        return self._control_or_frame.sub("", text).strip()

    def _marked_tools(self, tools: Tools) -> Any:
        return _mark(tools, self._control) if tools and self._marks else tools

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._marked_message(message) for message in messages]

    def _marked_message(self, message: Message) -> dict[str, Any]:
        names = self._control_or_frame if message["role"] == "tool" else self._control
        if not self._marks:
            return dict(message)
        calls = [_unescaped(call) for call in message.get("tool_calls") or ()]
        plain = {**message, "tool_calls": calls} if calls else message
        return {key: value if key == "role" else _mark(value, names) for key, value in plain.items()}


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Any of the names, the longest first. Grouped by how they begin: vocabularies have up to thousands of them."""
    groups: dict[str, list[str]] = {}
    for name in sorted((name for name in names if len(name) > 1), key=len, reverse=True):
        groups.setdefault(name[:2], []).append(re.escape(name[2:]))
    patterns = (f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in groups.items())
    return re.compile("|".join(patterns) or r"(?!)")


def _mark(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return names.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", value)
    if isinstance(value, Mapping):
        return {key: _mark(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(item, names) for item in value]
    return value


def _unescaped(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some templates print the values of the arguments, not their JSON: a name must not hide in its escapes."""
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str) or "\\u" not in arguments:
        return call
    try:
        plain = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return call  # no JSON: a template has only this text to print
    if _SURROGATE.search(plain):
        plain = json.dumps(json.loads(arguments))
    return {**call, "function": {**call["function"], "arguments": plain}}


def _drop_marks(tokenizer: Any) -> None:
    """Lets the tokenizer drop marks, in the first step after the search for added tokens.

    Where it cannot (it is Python code of its own), a marked name keeps its mark: one odd character in it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    drop, then = pre_tokenizers.Split(_MARK, "removed"), backend.pre_tokenizer
    backend.pre_tokenizer = drop if then is None else pre_tokenizers.Sequence([drop, then])


def _checked(call: ParsedToolCall) -> ParsedToolCall:
    if call.status not in _USABLE:
        return call
    if not isinstance(call.name, str) or not call.name or _SURROGATE.search(call.name):
        return replace(call, name=None, status=ToolCallParseStatus.MISSING_NAME)
    try:
        arguments = call.arguments if call.arguments is not None else {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return replace(call, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(arguments, dict):
        return replace(call, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    # Half a surrogate pair is JSON as an escape only, and no text that could be sent.
    return replace(call, arguments=json.dumps(arguments) if _SURROGATE.search(text) else arguments)
