"""Load the model's tokenizer and renderer, and correct the renderers of some families.

Invariants:

- All files come from the model's folder; nothing is downloaded.
- Code in that folder runs only with `model.trust_remote_code`.
"""

import base64
import difflib
import itertools
import json
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import renderers
from pydantic import ValidationError
from renderers import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus, hy3
from renderers.base import resolve_thinking_retention
from renderers.configs import _CONFIG_BY_NAME, CustomRendererConfig, Qwen3RendererConfig
from renderers.deepseek_v4 import DeepSeekV4Renderer
from renderers.default import DefaultRenderer, _decode_tool_call_arguments
from renderers.gemma4 import Gemma4Renderer, _ArgumentParser
from renderers.glm5 import GLM5Renderer, GLM51Renderer, GLM53Renderer
from renderers.glm45 import GLM45Renderer
from renderers.gpt_oss import GptOssRenderer
from renderers.hy3 import Hy3Renderer
from renderers.laguna_s21 import LagunaS21Renderer
from renderers.laguna_xs2 import LagunaM1Renderer, LagunaXS2Renderer, LagunaXS21Renderer
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.chatml import ChatMLConfig, ChatMLRenderer
from rollout_backend.model.rendering.guarded_renderer import GuardedRenderer, RendererBundle
from rollout_backend.model.rendering.image_positions import load_vision
from rollout_backend.model.rendering.reasoning import THINK, markers_in, split
from rollout_backend.model.rendering.selection import Create, KnownModels, Selection, choose, complete
from rollout_backend.model.rendering.text_encoder import accelerate
from rollout_backend.model.rendering.token_bytes import decode, token_bytes
from rollout_backend.model.rendering.tool_call_reader import FORMATS, USABLE, ArgumentTypes, CallFormat

logger = logging.getLogger(__name__)

# Renderers whose encoder never reads content as control tokens, so the guard need not prevent it.
_ENCODES_TEXT = frozenset({"gpt-oss"})
# Renderers that derive a token's message from its offset in the text, or else from decoding each token.
_READS_OFFSETS = ("deepseek-v4", "hy3", "laguna")
# OpenAI's encoder of gpt-oss needs this file and would download it.
_VOCABULARY_FOLDER, _VOCABULARY_FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"
# These match in the header of a gpt-oss message.
_RECIPIENT = re.compile(r"\bto=(?P<namespace>functions\.)?(?P<name>[^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\b")
# Starts of calls that end unclosed reasoning. For other formats, the parsers of engines continue the reasoning.
_ENDS_REASONING = re.compile("<tool_calls?(?::opensource)?>|<minimax:tool_call>|<\uff5cDSML\uff5c")
_ODD_NAME = re.compile(r"[\s<>{}]")
# A reasoning marker that is encoded as text has at most as many tokens as characters.
_TAIL_TOKENS = 16


def load_renderer(model: ModelConfig) -> RendererBundle:
    """Load the tokenizer from `model.path` and the renderer that `model.renderer` names.

    `auto` selects the renderer that matches the model's own chat template: see `selection`.

    Raises:
        ConfigError: the folder has no tokenizer, the renderer is unknown, or it does not fit the model.
    """
    tokenizer = _load_tokenizer(model)
    choice, inner = _make_renderer(tokenizer, model)
    name = choice.name
    log = logger.warning if choice.warns else logger.info
    log("messages are rendered for %s by %s: %s", model.path, name, choice.reason)
    stop_ids = tuple(dict.fromkeys(int(token) for token in [*inner.get_stop_token_ids(), *_eos_ids(model.folder)]))
    renderer = GuardedRenderer(inner, tokenizer, stop_ids, encodes_text=name in _ENCODES_TEXT)
    if not name.startswith(_READS_OFFSETS):
        # The others look this attribute up to compute offsets, which take most of their time and which nobody reads.
        tokenizer.__call__ = None
    return RendererBundle(
        name, tokenizer, renderer, stop_ids, load_vision(model.folder, name, tokenizer), choice.reason
    )


def known_renderers() -> list[str]:
    """Return the names that `model.renderer` accepts besides the import path of a class."""
    return sorted(_configs())


def _configs() -> dict[str, Any]:
    """Return the classes of the options of each renderer."""
    return {**_CONFIG_BY_NAME, "qwen3": _Qwen3Config, "chatml": ChatMLConfig}


def _load_tokenizer(model: ModelConfig) -> Any:
    path = model.folder
    if not path.is_dir():
        raise ConfigError(f"model.path: there is no folder {path}")
    file = path / "tokenizer_config.json"
    has_own_code = file.is_file() and "AutoTokenizer" in json.loads(file.read_text()).get("auto_map", {})
    if has_own_code and not model.trust_remote_code:
        raise ConfigError(
            f"model.path: the tokenizer in {path} is Python code of the model. Read it; if you trust it with "
            "this process's keys and credentials, set model.trust_remote_code=true"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {path} holds no tokenizer that loads (tokenizer.json and tokenizer_config.json are "
            f"needed): {error}"
        ) from None
    accelerate(tokenizer)
    return tokenizer


def _make_renderer(tokenizer: Any, model: ModelConfig) -> tuple[Selection, Any]:
    names = _organisation_and_name(model.folder)
    if known := KnownModels(*names).exact:
        # Some renderers infer the model's size from this name.
        tokenizer.name_or_path = known[0]
    name = model.renderer

    def create(name: str, options: Mapping[str, Any]) -> Any:
        return _create(name, tokenizer, model.folder, options)

    try:
        if name == "auto":
            choice = _choose(tokenizer, names, model.renderer_options, create)
        else:
            choice = Selection(
                name, complete(tokenizer, name, model.renderer_options, create), "model.renderer names it"
            )
        return choice, create(choice.name, {**choice.options, **model.renderer_options})
    except ConfigError:
        raise
    except Exception as error:
        # A renderer that does not fit this model may raise any exception.
        raise ConfigError(f"model.renderer: {name} cannot be used with {model.path}: {error}") from error


# A process loads the same folder several times.
_choices: dict[str, Selection] = {}


def _choose(tokenizer: Any, names: tuple[str, str], options: Mapping[str, Any], create: Create) -> Selection:
    if options.keys() & {"tool_parser", "reasoning_parser"}:
        return Selection("default", {}, "model.renderer_options names a parser")
    seen = [names, options, tokenizer.chat_template, tokenizer.special_tokens_map, len(tokenizer)]
    key = repr([*seen, sorted((id, str(token)) for id, token in tokenizer.added_tokens_decoder.items())])
    if key not in _choices:
        candidates = [name for name in _configs() if name not in ("auto", "default")]
        _choices[key] = choose(tokenizer, names, options, create, candidates)
    return _choices[key]


def _create(name: str, tokenizer: Any, path: Path, options: Mapping[str, Any]) -> Any:
    try:
        if name in _configs():
            config: Any = _configs()[name](**options)
        elif "." in name or ":" in name:
            config = CustomRendererConfig(import_path=name, **options)
        else:
            known = known_renderers()
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]}? Known" if nearest else "; known"
            raise ConfigError(
                f"model.renderer: there is no renderer {name!r}{hint} are {', '.join(known)}, or "
                "package.module.Class of your code"
            )
    except ValidationError as error:
        if not options:
            raise
        raise ConfigError(f"model.renderer_options: {name} does not take them: {error}") from None
    if name == "default" and not tokenizer.chat_template:
        raise ConfigError(f"model.renderer: default needs a chat template, and {path} has none")
    with _vocabulary_of(tokenizer) if name == "gpt-oss" else nullcontext():
        return _OURS[name](tokenizer, config) if name in _OURS else renderers.create_renderer(tokenizer, config)


@contextmanager
def _vocabulary_of(tokenizer: Any) -> Iterator[None]:
    """Within this context, let gpt-oss's encoder find its vocabulary without a download.

    The model's tokenizer has the same tokens, so the file is built from it; the encoder verifies its hash.

    Raises:
        ValueError: the tokenizer is not that of gpt-oss. Building the file takes a second.
    """
    if not any(token.content == "<|channel|>" for token in tokenizer.added_tokens_decoder.values()):
        raise ValueError("its tokenizer has no token <|channel|>")
    if os.environ.get(_VOCABULARY_FOLDER):
        # The user provides the file.
        yield
        return
    added = tokenizer.added_tokens_decoder
    plain = sorted((rank, spelled) for rank, spelled in token_bytes(tokenizer).items() if rank not in added)
    # tiktoken's format: each token's bytes in base64, and its rank.
    lines = [f"{base64.b64encode(spelled).decode()} {rank}\n" for rank, spelled in plain]
    with TemporaryDirectory(prefix="o200k-") as folder:
        (Path(folder) / _VOCABULARY_FILE).write_text("".join(lines))
        os.environ[_VOCABULARY_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_VOCABULARY_FOLDER]


def _longer(rendered: RenderedTokens, header: Sequence[int], dropped: int = 0) -> RenderedTokens:
    end = len(rendered.token_ids) - dropped
    return RenderedTokens(
        token_ids=[*rendered.token_ids[:end], *header],
        message_indices=[*rendered.message_indices[:end], *([-1] * len(header))],
        message_roles=rendered.message_roles,
    )


class _Qwen3Config(Qwen3RendererConfig):  # type: ignore[misc]
    _template_fields = Qwen3RendererConfig._template_fields | {"opens_thinking"}
    opens_thinking: bool | None = None
    """Whether a prompt ends with `<think>`, as in the template of Qwen3-Thinking-2507."""


class _Qwen3(Qwen3Renderer):  # type: ignore[misc]
    """Adds `opens_thinking`, and support for Instruct-2507, whose template shows no reasoning."""

    def __init__(self, tokenizer: Any, config: _Qwen3Config) -> None:
        super().__init__(tokenizer, config.model_copy(update={"opens_thinking": bool(config.opens_thinking)}))
        opens = self.config.opens_thinking and self.config.enable_thinking
        self._header = self._encode("<think>\n") if opens else []
        self._reasons = "</think>" in str(tokenizer.chat_template or "</think>")
        if not self._reasons:
            # A new question does not change what a prompt shows of earlier replies.
            self.effective_thinking_retention = resolve_thinking_retention(self.config, "all")

    def _render_assistant(self, message: Any, i: int, content: str, query: int, is_last: bool, **emit: Any) -> None:
        if not self._reasons:
            message, is_last = {**message, "reasoning_content": ""}, False
        super()._render_assistant(message, i, content, query, is_last, **emit)

    def render(self, messages: Any, *, add_generation_prompt: bool = False, **more: Any) -> RenderedTokens:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt, **more)
        return _longer(rendered, self._header) if add_generation_prompt else rendered

    def bridge_to_next_turn(self, *turns: Any, tools: Any = None) -> RenderedTokens | None:
        bridged = super().bridge_to_next_turn(*turns, tools=tools)
        return None if bridged is None else _longer(bridged, self._header)


class _GptOss(GptOssRenderer):  # type: ignore[misc]
    """Ends a prompt with `<|start|>assistant`, as OpenAI's library, the chat template and engines do.

    The package's prompt also has the header of the reasoning. Elsewhere, the model samples it or answers directly.

    Reads calls without `functions.` before the tool's name, which the model leaves out in long contexts, and calls
    without arguments, as engines do.
    """

    def render(self, messages: Any, *, add_generation_prompt: bool = False, **more: Any) -> RenderedTokens:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt, **more)
        return self._without_header(rendered) if add_generation_prompt else rendered

    def bridge_to_next_turn(self, *turns: Any, tools: Any = None) -> RenderedTokens | None:
        bridged = super().bridge_to_next_turn(*turns, tools=tools)
        return None if bridged is None else self._without_header(bridged)

    def _without_header(self, rendered: RenderedTokens) -> RenderedTokens:
        return _longer(rendered, [], dropped=len([self._channel, *self._encode("analysis"), self._message]))

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        names = {tool["function"]["name"] for tool in tools or ()}
        calls: list[ParsedToolCall] = []
        reasoning, content, is_complete = "", "", True
        # The prompt contains the start of the first message.
        for header, text, mark in self._messages([self._start, *token_ids]):
            called, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if called is not None and (called["namespace"] or called["name"] in names):
                is_closed = mark in (self._end, self._call)
                status = ToolCallParseStatus.OK if is_closed else ToolCallParseStatus.UNCLOSED_BLOCK
                calls.append(ParsedToolCall(raw=text, name=called["name"], arguments=text.strip(), status=status))
            elif channel is not None and channel[1] == "analysis":
                reasoning += text
                is_complete = mark is not None
            elif channel is not None:
                content += text
        thought = reasoning.strip() or (None if is_complete else "")
        return ParsedResponse(content.strip(), thought, calls, reasoning_complete=is_complete)

    def _messages(self, ids: list[int]) -> Iterator[tuple[str, str, int | None]]:
        """Yield each message's header, text and following mark in linear time. The package takes quadratic time."""
        marks = {self._start, self._end, self._call, self._return}
        at = 0
        with suppress(ValueError):
            # `index` raises ValueError if no message follows.
            while True:
                begin = ids.index(self._start, at)
                body = ids.index(self._message, begin)
                at = next((i for i in range(body + 1, len(ids)) if ids[i] in marks), len(ids))
                header, text = (decode(self._tokenizer, part) for part in (ids[begin:body], ids[body + 1 : at]))
                yield header, text, ids[at] if at < len(ids) else None


class _ReasonsFirst:
    """Ends reasoning at its first end marker, or at the first call if there is none. Later markers are text.

    The package executes calls that are drafted in the reasoning, and drops markers from the answer.
    """

    _tokenizer: Any
    get_stop_token_ids: Any

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        stops = self.get_stop_token_ids()
        ids = list(itertools.takewhile(lambda token: token not in stops, token_ids))
        inherited: Any = super()
        is_open = inherited.parse_response([], prompt_ids=prompt_ids).reasoning_complete is False
        begin, end = map(self._tokenizer.convert_tokens_to_ids, THINK)
        first = next((i for i, token in enumerate(ids) if decode(self._tokenizer, [token]).strip()), len(ids))
        at, reasoning = 0, None
        if is_open or ids[first : first + 1] == [begin]:
            start = first + 1 if ids[first : first + 1] == [begin] else 0
            close = next((i for i in range(start, len(ids)) if ids[i] == end), self._first_call(ids, start))
            reasoning = decode(self._tokenizer, ids[start:close]).rstrip()
            if close is None:
                return ParsedResponse(content="", reasoning_content=reasoning, reasoning_complete=False)
            at = close + (ids[close] == end)
        call = self._first_call(ids, at)
        content = decode(self._tokenizer, ids[at:call])
        return ParsedResponse(
            content=content if call is None and content.strip() else content.strip(),
            reasoning_content=reasoning or None,
            tool_calls=[] if call is None else [_unread_call(call, len(ids))],
            reasoning_complete=True,
        )

    def _first_call(self, ids: list[int], at: int) -> int | None:
        call = self._tokenizer.convert_tokens_to_ids("<tool_call>")
        return next((i for i in range(at, len(ids)) if ids[i] == call), None)


def _unread_call(begin: int, end: int) -> ParsedToolCall:
    """Return the place of a reply's calls. The guard parses them."""
    return ParsedToolCall(raw="", token_span=(begin, end), status=ToolCallParseStatus.UNCLOSED_BLOCK)


class _EndsReasoningAtACall:
    """Ends reasoning that the model does not close at the first call, as engines do. `_calls` is its first token."""

    _calls: str
    reasoning_markers = THINK
    _tokenizer: Any

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        ids, inherited = list(token_ids), cast("Any", super())
        parse = partial(inherited.parse_response, tools=tools, prompt_ids=prompt_ids)
        at = self._call_in_reasoning(parse, ids)
        parsed: ParsedResponse = parse(ids) if at is None else _parse_closed(parse, ids, at, self._close)
        return parsed

    def bridge_to_next_turn(
        self, previous_prompt_ids: Any, previous_completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> RenderedTokens | None:
        prompt, ids, inherited = list(previous_prompt_ids), list(previous_completion_ids), cast("Any", super())
        at = self._call_in_reasoning(partial(inherited.parse_response, tools=tools, prompt_ids=prompt), ids)
        close = [] if at is None else self._close
        bridged = inherited.bridge_to_next_turn(
            prompt, [*ids[:at], *close, *ids[len(ids[:at]) :]], new_messages, tools=tools
        )
        begin = len(prompt) + len(ids[:at])
        return None if bridged is None else _without(bridged, begin, begin + len(close))

    def _call_in_reasoning(self, parse: Any, ids: list[int]) -> int | None:
        call = self._tokenizer.convert_tokens_to_ids(self._calls)
        return ids.index(call) if call in ids and parse(ids).reasoning_complete is False else None

    @property
    def _close(self) -> list[int]:
        return [self._tokenizer.convert_tokens_to_ids(self.reasoning_markers[1])]


def _parse_closed(parse: Any, ids: list[int], at: int, close: list[int]) -> ParsedResponse:
    """Parse a reply as if `close` ended the reasoning before its token `at`."""
    parsed: ParsedResponse = parse([*ids[:at], *close, *ids[at:]])
    spans = [(begin - len(close), end - len(close)) for begin, end in (call.token_span for call in parsed.tool_calls)]
    calls = [replace(call, token_span=span) for call, span in zip(parsed.tool_calls, spans, strict=True)]
    return replace(parsed, tool_calls=calls)


def _joined(one: RenderedTokens, other: RenderedTokens) -> RenderedTokens:
    ids, indices = one.token_ids + other.token_ids, one.message_indices + other.message_indices
    return RenderedTokens(token_ids=ids, message_indices=indices, message_roles=other.message_roles)


def _without(rendered: RenderedTokens, begin: int, end: int) -> RenderedTokens:
    ids, indices = (each[:begin] + each[end:] for each in (rendered.token_ids, rendered.message_indices))
    return RenderedTokens(token_ids=ids, message_indices=indices, message_roles=rendered.message_roles)


class _DeepSeekV4(_ReasonsFirst, DeepSeekV4Renderer):  # type: ignore[misc]
    """Corrects the DeepSeek V4 renderer of the package.

    The package prints the tools into a late system message if there is no other, and begins no reply after one. It
    bridges only a single result, because its results are in the order of the calls. The gateway sorts them so.
    """

    def render(self, messages: Any, *, add_generation_prompt: bool = False, **more: Any) -> RenderedTokens:
        late = any(message["role"] == "system" for message in messages[1:])
        if late and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt, **more)
        return self._begun(rendered) if add_generation_prompt and messages[-1]["role"] == "system" else rendered

    def bridge_to_next_turn(
        self, previous_prompt_ids: Any, previous_completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> RenderedTokens | None:
        results = {i for i, message in enumerate(new_messages) if message["role"] == "tool"}
        results -= {min(results, default=-1)}
        one = [message for i, message in enumerate(new_messages) if i not in results]
        bridged = super().bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, one, tools=tools)
        if bridged is not None and results:
            before = len(bridged.token_ids) - len(self._added(one).token_ids)
            bridged = _joined(_without(bridged, before, len(bridged.token_ids)), self._added(new_messages))
        if bridged is None or new_messages[-1]["role"] != "system":
            return bridged
        return self._begun(bridged)

    def _added(self, messages: Any) -> RenderedTokens:
        options = {"tools": None, "add_bos": False, "add_effort_prompt": False}
        return self._render(messages, add_generation_prompt=True, **options)

    def _begun(self, rendered: RenderedTokens) -> RenderedTokens:
        """Append the start of a reply to the prompt."""
        asked = [{"role": "user", "content": "a"}]
        turn, begun = (super(_DeepSeekV4, self).render(asked, add_generation_prompt=begin) for begin in (False, True))
        return _longer(rendered, begun.token_ids[len(turn.token_ids) :])

    def _first_call(self, ids: list[int], at: int) -> int | None:
        return next((i - 1 for i in range(at + 1, len(ids)) if ids[i] == self._dsml and self._opens(ids, i)), None)

    def _opens(self, ids: list[int], i: int) -> bool:
        return re.search("<\uff5cDSML\uff5c(?:invoke|tool)", decode(self._tokenizer, ids[i - 1 : i + 4])) is not None


@dataclass(frozen=True)
class _Layout:
    """White space that a template writes in a turn. If it stayed in a message, the template would write it twice."""

    before_reasoning: str
    after_reasoning: str
    before_content: str
    after_content: str
    """Also before the first call."""


class _OwnTemplate(DefaultRenderer):  # type: ignore[misc]
    """Renders with the model's own chat template, and passes it tool calls in the format that it expects.

    Most templates expect the arguments as an object. DeepSeek's append them as text, and V3's only if the message's
    content is null. `apply_chat_template` drops null fields, so the template is rendered directly.
    """

    def __init__(self, tokenizer: Any, config: Any) -> None:
        super().__init__(tokenizer, config.model_copy(update={"tool_parser": None}))
        self.config = config
        self.reasoning_markers = THINK if config.reasoning_parser else markers_in(tokenizer.chat_template)
        if config.tool_parser is not None:
            if config.tool_parser not in FORMATS:
                raise ValueError(
                    f"there is no tool_parser {config.tool_parser}; known are {', '.join(sorted(FORMATS))}"
                )
            self._tool_parser = _CallFinder(tokenizer, FORMATS[config.tool_parser])

    def _apply(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        text = self._text(messages, tools, add_generation_prompt, *self._form, chunks=self._shows_chunks)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(
        self, messages: Any, tools: Any, add_generation_prompt: bool, null: bool, as_text: bool, chunks: bool = False
    ) -> str:
        """Render the messages. The template may raise any exception."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        for message in plain:
            if chunks and message.get("reasoning_content"):
                text = message.get("content") or []
                text = [{"type": "text", "text": text}] if isinstance(text, str) else text
                message["content"] = [{"type": "thinking", "thinking": message["reasoning_content"]}, *text]
            if message.get("tool_calls") and not message.get("content"):
                message["content"] = None if null else ""
        rendered, _ = render_jinja_template(
            [plain if as_text else _decode_tool_call_arguments(plain)],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(None, tools),
            add_generation_prompt=add_generation_prompt,
            **{**self._tokenizer.special_tokens_map, **(self.config.model_extra or {})},
        )
        return str(rendered[0])

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        tail = decode(self._tokenizer, prompt_ids[-_TAIL_TOKENS:]) if prompt_ids else ""
        begin = self.reasoning_markers[0]
        opened = tail.rstrip().endswith(begin)
        parsed = self._parse(token_ids, tools, opened=opened)
        if parsed.reasoning_complete is False and (at := self._call_in_reasoning(token_ids)) is not None:
            close = self._tokenizer.encode(self.reasoning_markers[1], add_special_tokens=False)
            parsed = _parse_closed(partial(self._parse, tools=tools, opened=opened), list(token_ids), at, close)
        reasoning, content = parsed.reasoning_content, parsed.content
        if reasoning is not None:
            written = tail.rpartition(begin)[2] if opened else ""
            reasoning = reasoning.removeprefix(self._layout.before_reasoning.removeprefix(written))
            if parsed.reasoning_complete:
                reasoning = reasoning.removesuffix(self._layout.after_reasoning)
                content = content.removeprefix(self._layout.before_content)
        if parsed.tool_calls:
            content = content.removesuffix(self._layout.after_content)
        return replace(parsed, reasoning_content=reasoning, content=content)

    def _call_in_reasoning(self, ids: Any) -> int | None:
        """Return where a call ends reasoning that the model does not close, as it does in the family's renderer."""
        if not isinstance(self._tool_parser, _CallFinder):
            return None
        text = decode(self._tokenizer, ids)
        calls = (call.start() for call in self._tool_parser.start.finditer(text))
        at = next((at for at in calls if _ENDS_REASONING.match(text, at)), None)
        return None if at is None else _tokens_of(self._tokenizer, ids, at + 1) - 1

    def _parse(self, token_ids: Any, tools: Any, *, opened: bool) -> ParsedResponse:
        begin = self.reasoning_markers[0]
        if self.reasoning_markers == THINK:
            # The package finds a `<think>` that ends the prompt only after ChatML's header.
            prompt = self._tokenizer.encode(begin, add_special_tokens=False) if opened else None
            return super().parse_response(token_ids, tools=tools, prompt_ids=prompt)
        stops = self.get_stop_token_ids()
        ids = list(token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids)
        found = split(decode(self._tokenizer, ids), self.reasoning_markers, opened=opened)
        if found is None:
            return super().parse_response(ids, tools=tools)
        reasoning, end = found
        if end is None:
            return ParsedResponse(content="", reasoning_content=reasoning, reasoning_complete=False)
        at = _tokens_of(self._tokenizer, ids, end)
        rest = super().parse_response(ids[at:], tools=tools)
        calls = [replace(call, token_span=(call.token_span[0] + at, len(ids))) for call in rest.tool_calls]
        # The last token of the marker may contain more text.
        between = decode(self._tokenizer, ids[:at])[end:]
        read = {"content": between + rest.content, "tool_calls": calls, "reasoning_content": reasoning or None}
        return replace(rest, **read, reasoning_complete=True)

    @cached_property
    def _form(self) -> tuple[bool, bool]:
        """Whether empty content next to calls must be null, and whether arguments stay text."""
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": "zqxj"}'}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "t"},
        ]
        for form in ((False, False), (True, False), (False, True), (True, True)):
            with suppress(Exception):
                text = self._text(messages, None, True, *form)
                if "zqxj" in text and "{'a'" not in text and "None" not in text:
                    return form
        return False, False

    @cached_property
    def _layout(self) -> _Layout:
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
        begin, end = map(re.escape, self.reasoning_markers)
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "reasoning_content": "jqzx", "content": "zqxj", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "t"},
        ]
        with suppress(Exception):
            text = self._text(messages, None, False, *self._form, chunks=self._shows_chunks)
            reasoning = re.search(rf"{begin}(\s*)jqzx(\s*){end}(\s*)zqxj", text)
            finder = getattr(self._tool_parser, "start", None)
            called = finder and re.search(rf"zqxj(\s*)(?:{finder.pattern})", text)
            before, after, content = reasoning.groups() if reasoning else ("", "", "")
            return _Layout(before, after, content, called[1] if called else "")
        return _Layout("", "", "", "")

    @cached_property
    def _shows_chunks(self) -> bool:
        """Whether the template shows reasoning only as a part of the content, as Mistral's library passes it."""
        begin, end = self.reasoning_markers
        user = {"role": "user", "content": "u"}
        messages = [user, {"role": "assistant", "content": "a", "reasoning_content": "zqxj"}, user]
        shown = [False, False]
        for chunks in (False, True):
            with suppress(Exception):
                shown[chunks] = f"{begin}zqxj{end}" in self._text(messages, None, True, *self._form, chunks=chunks)
        return shown == [False, True]


class _RawLiteral(str):
    """A value without string delimiters, which the schema may declare as a string."""


class _GemmaArguments(_ArgumentParser):  # type: ignore[misc]
    """Keeps literals as strings, and refuses duplicate and odd names: text between arguments looks like a name."""

    def _object(self) -> dict[str, Any]:
        self._names = [*getattr(self, "_names", ()), set[str]()]
        found: dict[str, Any] = super()._object()
        self._names.pop()
        return found

    def _key(self) -> str:
        key = str(super()._key())
        if key in self._names[-1] or _ODD_NAME.search(key):
            raise ValueError(f"{key!r} occurs twice, or is no name")
        self._names[-1].add(key)
        return key

    def _literal(self) -> _RawLiteral:
        begin = self.i
        super()._literal()
        return _RawLiteral(self.text[begin : self.i].strip())


class _Gemma4(Gemma4Renderer):  # type: ignore[misc]
    """Converts values without string delimiters by their schema, like those of other formats."""

    def parse_response(self, token_ids: Sequence[int], *, tools: Any = None, **more: Any) -> ParsedResponse:
        self._types = ArgumentTypes(tools)
        parsed: ParsedResponse = super().parse_response(token_ids, tools=tools, **more)
        return parsed

    def _parse_tool_call(self, raw: str, span: tuple[int, int], tools: Any) -> ParsedToolCall:
        call: ParsedToolCall = super()._parse_tool_call(raw, span, tools)
        if call.status not in USABLE:
            return call
        try:
            arguments = _GemmaArguments(raw[raw.index("{") :]).parse()
        except (ValueError, RecursionError):
            return replace(call, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        if _ODD_NAME.search(call.name):
            return replace(call, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        schema = self._types.schemas.get(call.name)
        return replace(call, arguments=self._types.typed_literals(arguments, _RawLiteral, schema, schema))


class _Hy3(_EndsReasoningAtACall, Hy3Renderer):  # type: ignore[misc]
    _calls = hy3._TOOL_CALLS
    reasoning_markers = hy3._THINK, hy3._THINK_END


def _with(mixin: type, renderer: Any, **more: Any) -> Any:
    return type(f"_{renderer.__name__}", (mixin, renderer), more)


_OURS: Mapping[str, Any] = {
    "chatml": ChatMLRenderer,
    "default": _OwnTemplate,
    "qwen3": _Qwen3,
    "gpt-oss": _GptOss,
    "deepseek-v4": _DeepSeekV4,
    "glm-4.5": _with(_ReasonsFirst, GLM45Renderer),
    "glm-5": _with(_ReasonsFirst, GLM5Renderer),
    "glm-5.1": _with(_ReasonsFirst, GLM51Renderer),
    "glm-5.3": _with(_ReasonsFirst, GLM53Renderer),
    "gemma4": _Gemma4,
    "hy3": _Hy3,
    "laguna-xs.2": _with(_EndsReasoningAtACall, LagunaXS2Renderer, _calls="<tool_call>"),
    "laguna-m.1": _with(_EndsReasoningAtACall, LagunaM1Renderer, _calls="<tool_call>"),
    "laguna-xs-2.1": _with(_EndsReasoningAtACall, LagunaXS21Renderer, _calls="<tool_call>"),
    "laguna-s-2.1": _with(_EndsReasoningAtACall, LagunaS21Renderer, _calls="<tool_call>"),
}


def _tokens_of(tokenizer: Any, ids: list[int], characters: int) -> int:
    """Return how many of the first tokens have at least this many characters of text."""
    return bisect_left(range(len(ids) + 1), characters, key=lambda n: len(decode(tokenizer, ids[:n])))


class _CallFinder:
    """Finds the first call of a reply. The guard parses it and everything after it."""

    def __init__(self, tokenizer: Any, form: CallFormat) -> None:
        self._tokenizer = tokenizer
        self.start = re.compile(f"(?:{form.frame.pattern})|{re.escape(form.start)}")

    def extract(self, ids: list[int]) -> tuple[list[int], list[ParsedToolCall]]:
        start = self.start.search(decode(self._tokenizer, ids))
        if start is None:
            return ids, []
        at = _tokens_of(self._tokenizer, ids, start.start() + 1) - 1
        return ids[:at], [_unread_call(at, len(ids))]


def _organisation_and_name(path: Path) -> tuple[str, str]:
    """Return the last two parts of the path, or those of `models--ORGANISATION--NAME` in a hub cache."""
    for part in reversed(path.absolute().parts):
        if part.startswith("models--"):
            organisation, _, name = part.removeprefix("models--").partition("--")
            return organisation, name
    return path.resolve().parent.name, path.resolve().name


def _eos_ids(path: Path) -> list[int]:
    """Return the end tokens from the model's configuration: a converted tokenizer may lack some of them."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            if eos is not None:
                return list(eos) if isinstance(eos, list) else [eos]
    return []
