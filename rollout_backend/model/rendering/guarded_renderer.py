"""Wrap any renderer, so that messages remain text and every sampled turn becomes a well-formed reply.

Invariants, whatever the model's template and parser do:

- No message and no tool description creates a control token. Templates print both verbatim, and tokenizers turn the
  name of a control token into the token, so a tool result that contains `<|im_end|>` could end its turn and forge the
  next one. This wrapper encodes such names as text.
- A tool call is either complete, with a string as its name and a JSON object as its arguments, or malformed.
- No sampled text is dropped. Parsers omit what they cannot classify, such as an opened call without a name. An agent
  would take the rest, often nothing, as the final answer. Such a reply keeps its text and counts as malformed.
- A bridge only appends: a result that does not start with all earlier tokens is discarded.
- A system message is rendered at its position, with the same tokens as in a bridge, or refused. Some renderers refuse
  every system message after the first, and others skip them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from tokenizers import pre_tokenizers

from rollout_backend.model.rendering.chatml import ChatMLRenderer
from rollout_backend.model.rendering.image_positions import Vision
from rollout_backend.model.rendering.reasoning import THINK, Markers
from rollout_backend.model.rendering.token_bytes import any_of, decode, token_bytes
from rollout_backend.model.rendering.tool_call_reader import FORMATS, NOTHING, USABLE, CallFormat, loads, read_calls

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

# A Unicode noncharacter, which no text contains. Inserted into a name, it hides the name from the search for added
# tokens; the tokenizer then splits the text there and drops the mark.
_MARK = "\ufdd0"
# Not every vocabulary declares its turn tokens special: DeepSeek's `User` is a plain added token.
_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# Markup of reasoning and tools. Prompts may contain it on purpose; tool results may not.
_FRAME = re.compile(
    r"</?(?:\w+:)?(?:think|tools?|tool_?\w+|arg_\w+|observation|functions?|function_\w+)(?::\w+)?>|\uff5cDSML\uff5c",
    re.IGNORECASE,
)
# The beginning of a tool call, in any format.
CALL_START = re.compile(
    "|".join(
        [
            r"<(?:\w+:)?tool_?calls?>",
            r"<\|tool_calls?",
            r"<\uff5ctool\u2581calls?\u2581begin",
            r"<\|python_tag\|>",
            r"\[TOOL_CALLS\]",
            r" to=functions\.",
            r'\A\s*\{\s*"name"',
        ]
    ),
    re.IGNORECASE,
)
# The reasoning of gpt-oss, and the header of the message after it.
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?=<\|(?:end|call|start|return)\|>|\Z)", re.DOTALL)
_HEADER = re.compile(r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?<\|message\|>")
# Templates that print the tool's name with its result. OpenAI's tool messages carry only the call's id.
_NEEDS_TOOL_NAMES = frozenset({"gpt-oss", "gemma4", "inkling"})
# Templates that sort the results of several calls by the order of the calls.
_SORTS_RESULTS = frozenset({"deepseek-v4"})
# Renderers that never show special tokens of a reply as text: they only delimit its parts.
_HIDES_SPECIAL_TOKENS = frozenset({"gpt-oss"})
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# No template contains this text.
_WORD = "zqxj"
_SURROGATE = re.compile("[\ud800-\udfff]")


class GuardedRenderer:
    """Renders and parses with another renderer, `inner`, which implements the `renderers.Renderer` protocol.

    `stop_token_ids` are all tokens that end a reply, even if `inner` does not know them. If `encodes_text`, `inner`
    never turns content into control tokens, so content is passed unchanged.
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
        config = getattr(inner, "config", None)
        self._format = FORMATS.get(str(getattr(config, "tool_parser", None) or getattr(config, "name", None)))
        markers: Markers = getattr(inner, "reasoning_markers", THINK)
        self._reasoning_open, self.reasoning_close = markers
        is_llama = getattr(config, "name", None) == "llama-3"
        self._ignored_start = tokenizer.convert_tokens_to_ids("<|python_tag|>") if is_llama else None
        self._is_harmony = any(token.content == "<|channel|>" for token in added)
        control = [token.content for token in added if token.special or _CONTROL.fullmatch(token.content)]
        self._control = any_of(control)
        self._control_or_frame = any_of(
            [*control, *(token.content for token in added if _FRAME.fullmatch(token.content))]
        )
        self._marks = not encodes_text
        # The tools of the latest call, as JSON and with marks.
        self._latest_tools: tuple[str, Any] = "", None
        if self._marks:
            _drop_marks(tokenizer)

    def render_ids(
        self, messages: Sequence[Message], *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> list[int]:
        if self._misplaced(messages):
            return self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        return list(
            self.inner.render_ids(
                self._marked(messages), tools=self._marked_tools(tools), add_generation_prompt=add_generation_prompt
            )
        )

    def render_places(self, messages: Sequence[Message], *, tools: Tools = None) -> list[int]:
        """Return the prompt for the next reply, with one token for each image."""
        return self._render(messages, tools, add_generation_prompt=True, process_multimodal=False)

    def _render(self, messages: Sequence[Message], tools: Tools, **more: Any) -> list[int]:
        marked = self._marked(messages)
        misplaced = {i: self._system_turn(marked[i], i) for i in self._misplaced(messages)}
        # An assistant's turn stands in and is then replaced. A user's turn could change other turns.
        stand_in = {"role": "assistant", "content": "a"}
        plain = [stand_in if i in misplaced else message for i, message in enumerate(marked)]
        rendered = self.inner.render(plain, tools=self._marked_tools(tools), **more)
        if not misplaced:
            return list(rendered.token_ids)
        ids: list[int] = []
        before = None
        for token, i in zip(rendered.token_ids, rendered.message_indices, strict=True):
            if i not in misplaced:
                ids.append(token)
            elif i != before:
                ids += misplaced[i]
            before = i
        return ids

    def _misplaced(self, messages: Sequence[Message]) -> list[int]:
        """Return the indices of system messages that `inner` would not render at their position."""
        late = [i for i, message in enumerate(messages) if i and message["role"] == "system"]
        return late if late and not self._shows_late_system else []

    @cached_property
    def _shows_late_system(self) -> bool:
        said = [
            {"role": role, "content": _WORD if role == "system" else "a"} for role in ("user", "assistant", "system")
        ]
        try:
            ids = self.inner.render_ids([*said, said[0]], add_generation_prompt=True)
            return _WORD in decode(self._tokenizer, ids)
        except Exception:
            # Templates raise any exception to refuse a conversation.
            return False

    def _system_turn(self, message: Message, i: int) -> list[int]:
        """Return the tokens with which a bridge appends the message."""
        prompt = self.inner.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
        reply = self._tokenizer.encode("a</think>", add_special_tokens=False)
        end = self.inner.get_stop_token_ids()[0]
        bridged = self.inner.bridge_to_next_turn(list(prompt), [*reply, end], [message])
        turn = (
            []
            if bridged is None
            else [token for token, of in zip(bridged.token_ids, bridged.message_indices, strict=True) if of == 0]
        )
        if not turn:
            raise ValueError(
                f"messages.{i}: this model's template shows a system message only at the start; send a user message"
            )
        return turn

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        parsed = self._parse(token_ids, tools, prompt_ids, whole=True)
        if any(call.status in USABLE for call in parsed.tool_calls) or parsed.reasoning_complete is False:
            return parsed
        return self._kept(parsed, list(token_ids), bool(tools))

    def parse_beginning(
        self, token_ids: Sequence[int], *, tools: Tools = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Parse an incomplete reply. Unlike `parse_response`, drop text that may still become a tool call."""
        return self._parse(token_ids, tools, prompt_ids, whole=False)

    def _parse(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] | None, *, whole: bool
    ) -> ParsedResponse:
        ids = list(token_ids)
        if ids and ids[-1] in self._unknown_stops:
            # Otherwise, the content would end with the token's name.
            ids.pop()
        # Llama 3.1 begins some calls with <|python_tag|>, which engines ignore.
        if ids and ids[0] == self._ignored_start and decode(self._tokenizer, ids[1:3]).lstrip().startswith("{"):
            del ids[0]
        prompt = None if prompt_ids is None or isinstance(self.inner, ChatMLRenderer) else list(prompt_ids)
        parsed = self.inner.parse_response(ids, tools=tools, prompt_ids=prompt)
        if self._format is not None and tools and (parsed.tool_calls or self._is_bare(parsed.content)):
            parsed = self._read_again(self._format, parsed, ids, tools, whole)
        reasoning = self._whole_reasoning(parsed.reasoning_content, ids)
        return replace(parsed, reasoning_content=reasoning, tool_calls=[_checked(call) for call in parsed.tool_calls])

    def _whole_reasoning(self, reasoning: str | None, ids: list[int]) -> str | None:
        """Restore the opening markers within the reasoning, which the package drops."""
        begin = self._reasoning_open
        said = decode(self._tokenizer, ids).lstrip().removeprefix(begin) if reasoning else ""
        plain, *pieces = said.partition(self.reasoning_close)[0].split(begin)
        if not reasoning or not pieces:
            return reasoning
        start = "".join([plain, *pieces]).find(reasoning)
        if start < 0:
            return reasoning
        parts, begun, at = list[str](), 0, len(plain) - start
        for piece in pieces:
            if 0 < at <= len(reasoning):
                parts += [reasoning[begun:at], begin]
                begun = at
            at += len(piece)
        return "".join([*parts, reasoning[begun:]])

    def _read_again(
        self, form: CallFormat, parsed: ParsedResponse, ids: list[int], tools: Tools, whole: bool
    ) -> ParsedResponse:
        """Parse the calls again, from the text after the start of the first one."""
        begin = parsed.tool_calls[0].token_span[0] if parsed.tool_calls else len(ids)
        end = next((i for i in range(begin, len(ids)) if ids[i] in self._stops), len(ids))
        before, text = (decode(self._tokenizer, part) for part in (ids[:begin], ids[begin:end]))
        content = parsed.content
        if self._is_bare(content):
            before, start, rest = content.partition(form.start)
            content, text = before.rstrip(), f"{start}{rest}{text}"
        said, calls = read_calls(form, text, tools, whole=whole)
        before = form.frame.sub("", before)
        if said.strip():
            between = before[len(before.rstrip()) :]
            content = f"{content.rstrip()}{between}{said}".rstrip() if content else said.strip()
        return replace(parsed, content=content, tool_calls=calls)

    def _is_bare(self, content: str) -> bool:
        """Return whether a call begins without the token by which the package's parser finds it."""
        return self._format is FORMATS["qwen3.5"] and self._format.start in content

    def continuation(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Tools = None,
        places: bool = False,
    ) -> list[int] | None:
        """Return the tokens that extend a conversation by new messages; None if it cannot be extended.

        With `places`, each image is a single token in all arguments and in the result.
        """
        # In ChatML, what follows a reply does not depend on the prompt, and copying a long prompt takes milliseconds.
        prompt = list(previous_prompt_ids[:1] if isinstance(self.inner, ChatMLRenderer) else previous_prompt_ids)
        completion = list(previous_completion_ids)
        extended = self.inner.bridge_to_next_turn(
            prompt,
            completion,
            self._marked(new_messages),
            tools=self._marked_tools(tools),
            **({"process_multimodal": False} if places else {}),
        )
        before = [*prompt, *completion]
        if extended is None or extended.token_ids[: len(before)] != before:
            return None
        return list(extended.token_ids[len(before) :])

    def _kept(self, parsed: ParsedResponse, ids: list[int], tools: bool) -> ParsedResponse:
        """Return a reply without a usable call, with its complete text if the parser dropped any of it."""
        said = ids[:-1] if ids and ids[-1] in self._stops else ids
        text = self._after_reasoning(decode(self._tokenizer, said), parsed.reasoning_content)
        if parsed.tool_calls:
            # Parsers drop text after a malformed call.
            read = parsed.content + "".join(call.raw for call in parsed.tool_calls)
            dropped = tools and len(_letters(self._visible(text))) > len(_letters(self._visible(read)))
            return replace(parsed, content=text.strip()) if dropped else parsed
        begins_call = tools and CALL_START.search(text)
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
        _, closed, after = text.partition(self.reasoning_close)
        if closed:
            return after
        return text.partition(reasoning)[2] if reasoning else text

    def _visible(self, text: str) -> str:
        text = _HEADER.sub("", text) if self._is_harmony else text
        return self._control_or_frame.sub("", text).strip()

    def _marked_tools(self, tools: Tools) -> Any:
        if not tools or not self._marks:
            return tools
        text, marked = self._latest_tools
        # Calls repeat their tools, and marking searches each string.
        if text != (text := json.dumps(tools)):
            marked = _mark(tools, self._control)
            self._latest_tools = text, marked
        return marked

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        # gpt-oss's renderer moves the first system message to the start of the conversation.
        late = {"role": "developer"} if self._is_harmony else {}
        return [
            self._marked_message({**message, **late} if i and message["role"] == "system" else message)
            for i, message in enumerate(messages)
        ]

    def _marked_message(self, message: Message) -> dict[str, Any]:
        names = self._control_or_frame if message["role"] == "tool" else self._control
        if not self._marks:
            return dict(message)
        calls = [_respelled(call) for call in message.get("tool_calls") or ()]
        plain = {**message, "tool_calls": calls} if calls else message
        return {key: value if key == "role" else _mark(value, names) for key, value in plain.items()}


@dataclass(frozen=True)
class RendererBundle:
    """A model's tokenizer and renderer. Use it in one thread at a time: the tokenizer has state."""

    name: str
    tokenizer: Any
    renderer: GuardedRenderer
    stop_token_ids: tuple[int, ...]
    vision: Vision | None = None
    """None for a text-only model."""
    reason: str = ""
    """Why this renderer was chosen."""
    _markers: dict[str, Sequence[int]] = field(default_factory=dict, compare=False)

    @property
    def reads_tool_calls(self) -> bool:
        """Whether the model's tool calls can be parsed. If not, the agent would get each one as text."""
        return bool(getattr(self.renderer.inner, "supports_tools", True))

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens end the model's turn."""
        return bool(ids) and ids[-1] in self.stop_token_ids

    @property
    def needs_tool_names(self) -> bool:
        return self.name in _NEEDS_TOOL_NAMES

    @property
    def sorts_results(self) -> bool:
        return self.name in _SORTS_RESULTS

    @cached_property
    def token_bytes(self) -> Mapping[int, bytes]:
        """The bytes of each token. Slow on first use with a large vocabulary."""
        return token_bytes(self.tokenizer)

    @cached_property
    def added_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.added_tokens_decoder)

    def marker_ids(self, text: str) -> Sequence[int]:
        """Return the tokens of a constant string. They are cached, so pass only a few different strings."""
        if text not in self._markers:
            self._markers[text] = list(self.tokenizer.encode(text, add_special_tokens=False))
        return self._markers[text]

    @cached_property
    def silent_token_ids(self) -> frozenset[int]:
        """Tokens that are never part of a reply's text: those that end a turn, and gpt-oss's special tokens."""
        special = self.special_token_ids if self.name in _HIDES_SPECIAL_TOKENS else ()
        return frozenset(self.stop_token_ids).union(special)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(int(token) for token in added if added[token].special)

    @cached_property
    def message_tokens(self) -> int:
        """The minimum number of tokens that a message adds to a prompt, measured with empty content."""
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
        try:
            added = len(self.render([user, assistant] * 4 + [user], None)) - len(self.render([user], None))
        except Exception:
            # Templates may raise any exception.
            return 1
        return max(1, added // 8 - 1)

    @cached_property
    def renders_call_ids(self) -> bool:
        """Whether the prompt contains the ids of tool calls. Most templates match calls and results by order."""
        one, other = (self._probe(call_id=call_id) for call_id in ("abcdefgh1", "abcdefgh2"))
        return one is None or one != other

    @cached_property
    def named_roles(self) -> frozenset[str]:
        """The roles of messages whose `name` the prompt contains. Most templates render no names."""
        plain = self._probe()
        probes = {role: self._probe(named=role) for role in ("system", "user", "assistant")}
        return frozenset(role for role, named in probes.items() if named is not None and named != plain)

    def _probe(self, call_id: str = "abcdefgh1", named: str | None = None) -> list[int] | None:
        """Render a conversation with a tool call. Return None if the template refuses it."""
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "t"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "u"},
        ]
        named_messages = [{**message, "name": "n"} if message["role"] == named else message for message in messages]
        try:
            return self.render(named_messages, [_TOOL])
        except Exception:
            return None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the prompt for the next reply."""
        return list(self.renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, including the names of special tokens."""
        return decode(self.tokenizer, ids)


def _mark(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return names.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", value)
    if isinstance(value, Mapping):
        return {_mark(key, names): _mark(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(item, names) for item in value]
    return value


def _respelled(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the arguments as templates print parsed ones, which engines pass, because clients send other spacing.

    This also removes JSON escapes, which could hide the name of a control token, and halves of surrogate pairs, which
    no tokenizer takes.
    """
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        return call
    try:
        plain = _SURROGATE.sub("\ufffd", json.dumps(json.loads(arguments), ensure_ascii=False))
    except (ValueError, RecursionError):
        # A template can only print arguments that are not JSON.
        return call
    return {**call, "function": {**call["function"], "arguments": plain}}


def _letters(text: str) -> str:
    return "".join(text.split())


def _drop_marks(tokenizer: Any) -> None:
    """Make the tokenizer drop the marks right after its search for added tokens.

    A tokenizer written in Python cannot do this; a marked name then keeps its mark.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    drop, then = pre_tokenizers.Split(_MARK, "removed"), backend.pre_tokenizer
    backend.pre_tokenizer = drop if then is None else pre_tokenizers.Sequence([drop, then])


def _drops_json(raw: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a JSON call has a duplicate key, or anything besides its name and these arguments."""
    if not raw.lstrip().startswith("{"):
        return False
    try:
        value = loads(raw)
    except (ValueError, RecursionError):
        return True
    fields = [field for key, field in value.items() if key not in ("name", "id", "type") and field not in NOTHING]
    return value != arguments and fields != ([arguments] if fields or arguments else [])


def _checked(call: ParsedToolCall) -> ParsedToolCall:
    if call.status not in USABLE:
        return call
    if not isinstance(call.name, str) or not call.name or _SURROGATE.search(call.name):
        return replace(call, name=None, status=ToolCallParseStatus.MISSING_NAME)
    try:
        arguments = loads(call.arguments) if call.arguments and isinstance(call.arguments, str) else call.arguments
        arguments = {} if arguments in NOTHING else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return replace(call, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(arguments, dict) or _drops_json(call.raw, arguments):
        return replace(call, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    # A lone surrogate is valid JSON only as an escape, and cannot be encoded as UTF-8.
    return replace(call, arguments=json.dumps(arguments) if _SURROGATE.search(text) else arguments)
