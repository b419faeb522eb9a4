"""Select the renderer whose prompts match those of the model's own chat template.

Invariants:

- The template decides: each renderer's prompts for some conversations are compared with the template's, and each
  parser is tried on a tool call as the template writes it. Names decide only between renderers that match equally
  well, and for models without a template.
- The choice depends on the model's folder and on `model.renderer_options` only, not on time or load.
- The template gets a few seconds of CPU time. It comes with the model and may be slow, endless, or raise any
  exception.
"""

import ctypes
import itertools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from renderers.base import MODEL_RENDERER_MAP

from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.guarded_renderer import GuardedRenderer
from rollout_backend.model.rendering.token_bytes import decode
from rollout_backend.model.rendering.tool_call_reader import FORMATS

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Create = Callable[[str, Mapping[str, Any]], Any]
"""Creates a renderer from its name and options. Raises if it does not fit the vocabulary or the options."""

# Typical templates take 0.05 s.
TEMPLATE_CPU_S = 2.0
# Limits a template that blocks in an uninterruptible call.
_WALL_S = 60.0
# A renderer may differ from the template in this fraction of its words.
_NEAR = 0.1
# Without tools, it may differ in this many words, such as a token at the start.
_SAME_START = 3
# Engines, too, render gpt-oss with OpenAI's library. Its calls and results differ from the template's.
_NOT_BY_TEMPLATE = frozenset({"gpt-oss"})
# Ranked last among the renderers that match, because it parses no reasoning.
_LAST = "chatml"


def _tool(name: str, **parameters: Mapping[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


def _said(content: str, *names: str, **more: str) -> dict[str, Any]:
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS[name]}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, **more, **({"tool_calls": calls} if calls else {})}


def _result(content: str, name: str, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"functions.{name}:{i}", "name": name, "content": content}


_THOUGHT = "Hm."
# These conversations decide more than their share of words.
_REASONED, _LATE = "earlier reasoning", "a late system message"
_ARGUMENTS = {"fetch": '{"path": "x"}', "add": '{"a": 3, "b": "four", "c": true}'}
_TOOLS = (
    _tool("fetch", path={"type": "string", "description": "A path."}),
    _tool("add", a={"type": "integer"}, b={"type": "string"}, c={"type": "boolean"}),
)
_BRIEF = {"role": "system", "content": "Be brief."}
_ASKED = {"role": "user", "content": "Fetch x."}
_NEXT = {"role": "user", "content": "Two?"}
_CALLED = _said("", "add")
CALL = ("add", {"a": 3, "b": "four", "c": True})


@dataclass(frozen=True)
class _Conversation:
    """A conversation to compare. `counts` is false where many templates are wrong and good renderers differ."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    counts: bool = True


_FETCHED = (_said("", "fetch"), _result("text of x", "fetch"))
CONVERSATIONS: Mapping[str, _Conversation] = {
    "a message": _Conversation([_ASKED]),
    "a system message": _Conversation([_BRIEF, _ASKED]),
    "an answer": _Conversation([_BRIEF, _ASKED, _said("Yes."), _NEXT]),
    "tools": _Conversation([_ASKED], _TOOLS),
    "tools and a system message": _Conversation([_BRIEF, _ASKED], _TOOLS),
    "a call": _Conversation([_BRIEF, _ASKED, *_FETCHED], _TOOLS),
    "two calls": _Conversation(
        [_ASKED, _said("", "fetch", "add"), _result("X", "fetch"), _result("3", "add", 1)], _TOOLS
    ),
    "a question after a call": _Conversation([_ASKED, *_FETCHED, _said("Done."), _NEXT], _TOOLS),
    "text beside a call": _Conversation([_ASKED, _said("I do.", "fetch"), _FETCHED[1]], _TOOLS, counts=False),
    "reasoning before a call": _Conversation(
        [_ASKED, _said("", "fetch", reasoning_content="I must."), _FETCHED[1]], _TOOLS, counts=False
    ),
    _REASONED: _Conversation([_ASKED, _said("Yes.", reasoning_content=_THOUGHT), _NEXT], counts=False),
    _LATE: _Conversation([_ASKED, _said("Yes."), _BRIEF, _NEXT], counts=False),
    "spaces around a message": _Conversation([{"role": "user", "content": "  a\n"}], counts=False),
}


@dataclass(frozen=True)
class Selection:
    """A selected renderer. `reason` completes "NAME was chosen because". `warns` if prompts or calls may be wrong."""

    name: str
    options: Mapping[str, Any]
    reason: str
    warns: bool = False


class _Stopped(BaseException):
    """Raised in a thread that used up its CPU time. Templates that catch Exception do not catch it."""


def bounded(function: Callable[[], _T], cpu_s: float = TEMPLATE_CPU_S) -> _T:
    """Call `function` in a thread, and stop it after `cpu_s` seconds of CPU time.

    Raises:
        TimeoutError: it was stopped.
    """
    returned: list[_T] = []
    raised: list[BaseException] = []
    clocks: list[int] = []

    def call() -> None:
        try:
            clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            returned.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True, name="chat-template")
    thread.start()
    until = time.monotonic() + _WALL_S
    while thread.is_alive() and time.monotonic() < until:
        thread.join(0.05)
        with suppress(OSError):
            # The thread may have ended.
            if clocks and time.clock_gettime(clocks[0]) > cpu_s and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
    if returned:
        return returned[0]
    if raised and not isinstance(raised[0], _Stopped):
        raise raised[0]
    raise TimeoutError(f"it takes more than {cpu_s:g} s of CPU time")


# --- the template ---------------------------------------------------------------------------------------------


@dataclass
class _Template:
    """Prompts rendered by the model's own chat template. Conversations that it refuses are absent."""

    texts: dict[str, str] = field(default_factory=dict)
    call_turn: tuple[list[int], list[int]] | None = None
    """Prompt and call; None if the template renders no calls."""
    start: str | None = None
    """Text that starts a reply."""
    default_system: str | None = None
    failure: str = ""
    reasons: bool = False
    is_slow: bool = False

    @property
    def shows_tools(self) -> bool:
        return self.texts.get("tools") != self.texts.get("a message") or self.call_turn is not None

    @property
    def only_appends(self) -> bool:
        """Whether the prompt of each call starts with the conversation before it, reasoning included."""
        grows = (
            ("a message", _REASONED),
            ("a system message", "an answer"),
            ("tools and a system message", "a call"),
        )
        known = [(self.texts[one], self.texts[other]) for one, other in grows if {one, other} <= self.texts.keys()]
        shown = not self.reasons or _THOUGHT in self.texts.get(_REASONED, "")
        return bool(known) and shown and all(longer.startswith(shorter) for shorter, longer in known)

    def compared(self) -> Iterator[tuple[str, _Conversation]]:
        for name, conversation in CONVERSATIONS.items():
            if name in self.texts and (conversation.tools is None or self.shows_tools):
                yield name, conversation


def call_turn(renderer: Any) -> tuple[list[int], list[int]]:
    """Return a prompt, and the turn with a tool call that a renderer writes after it."""
    prompt = renderer.render_ids([_ASKED], tools=list(_TOOLS), add_generation_prompt=True)
    whole = renderer.render_ids([_ASKED, _CALLED], tools=list(_TOOLS))
    begin = _common(prompt, whole)
    return list(whole[:begin]), list(whole[begin:])


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def read_calls_of(renderer: Any, turn: tuple[list[int], list[int]]) -> list[tuple[str, Any]]:
    """Return the calls that a guarded renderer parses from the turn after a prompt; none if it leaves any text."""
    parsed = renderer.parse_response(turn[1], tools=list(_TOOLS), prompt_ids=turn[0])
    return (
        []
        if parsed.content.replace("</think>", "").strip()
        else [(call.name, call.arguments) for call in parsed.tool_calls]
    )


def _render_all(tokenizer: Any, own: Any) -> _Template:
    template = _Template(reasons="think" in str(tokenizer.chat_template))

    def render() -> None:
        for name, conversation in CONVERSATIONS.items():
            try:
                template.texts[name] = decode(tokenizer, _prompt(own, conversation))
            except Exception as error:
                # Templates raise any exception to refuse a conversation.
                template.failure = template.failure or f"{type(error).__name__}: {error}"
        with suppress(Exception):
            turn = call_turn(own)
            template.call_turn = turn if "four" in decode(tokenizer, turn[1]) else None
        with suppress(Exception):
            template.start = _start(tokenizer, own)
        with suppress(Exception):
            template.default_system = _default_system(template.texts, tokenizer, own)

    try:
        bounded(render)
    except TimeoutError as error:
        template.is_slow, template.failure = True, str(error)
    return template


def _prompt(renderer: Any, conversation: _Conversation) -> list[int]:
    messages = [dict(message) for message in conversation.messages]
    tools = None if conversation.tools is None else list(conversation.tools)
    return list(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))


def _start(tokenizer: Any, renderer: Any) -> str:
    """Return the text with which a prompt starts the reply."""
    before, after = (
        decode(tokenizer, renderer.render_ids([_ASKED], add_generation_prompt=asks)) for asks in (False, True)
    )
    return after.removeprefix(before)


def _default_system(texts: Mapping[str, str], tokenizer: Any, own: Any) -> str | None:
    """Return the system message that the template adds to a conversation without one."""
    without, given = texts["a message"], texts["a system message"]
    head, said, tail = given.partition(str(_BRIEF["content"]))
    found = said and without.startswith(head) and without.endswith(tail) and len(without) > len(head) + len(tail)
    return without[len(head) : len(without) - len(tail)] if found else None


# --- the renderers --------------------------------------------------------------------------------------------

_WORDS = re.compile(r"<[^<>\s]*>|\w+|[^\w\s]")
_DATES = re.compile(r"\d{1,2} [A-Z][a-z]{2,8} \d{4}|\d{4}-\d\d-\d\d")


@dataclass
class _Score:
    """A renderer's differences from the template. Dates, spaces and the order of words do not count as `words`.

    `counted` are the conversations in `differs` that count, and `words` the words that differ in them. `start_words`
    is the maximum number of words that differ in a conversation without tools.
    """

    name: str
    options: Mapping[str, Any]
    renderer: Any
    differs: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    words: int = 0
    start_words: int = 0
    of: int = 1

    @property
    def distance(self) -> float:
        return self.words / self.of


def _score(tokenizer: Any, template: _Template, name: str, options: Mapping[str, Any], renderer: Any) -> _Score:
    score = _Score(name, options, renderer)
    for what, conversation in template.compared():
        theirs = _DATES.sub("DATE", template.texts[what])
        try:
            ours = _DATES.sub("DATE", decode(tokenizer, _prompt(renderer, conversation)))
        except Exception:
            # A renderer may refuse a conversation that the template renders.
            ours = ""
        words = Counter(_WORDS.findall(theirs))
        score.of += conversation.counts * words.total()
        if ours == theirs:
            continue
        score.differs.append(what)
        if conversation.counts:
            score.counted.append(what)
            others = Counter(_WORDS.findall(ours))
            different = ((words - others) + (others - words)).total()
            score.words += different
            score.start_words = max(score.start_words, different if conversation.tools is None else 0)
    return score


def _reads(tokenizer: Any, template: _Template, renderer: Any) -> bool:
    """Return whether a renderer parses the call as the template writes it; true if the template writes none."""
    if template.call_turn is None:
        return True
    try:
        # The guard marks nothing here, because that would change the tokenizer. The parser may raise any exception.
        guarded = GuardedRenderer(renderer, tokenizer, encodes_text=True)
        return read_calls_of(guarded, template.call_turn) == [CALL]
    except Exception:
        return False


def _variants(
    config: Any, options: Mapping[str, Any], template: _Template, *, open_only: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield option sets that may match the template's defaults: each switch flipped, and its default system message.

    With `open_only`, vary only options whose default depends on the model.
    """
    fields = type(config).model_fields
    for name in sorted(getattr(type(config), "_template_fields", ())):
        value = getattr(config, name, None)
        if name in options or (open_only and fields[name].default is not None):
            continue
        if isinstance(value, bool):
            yield {name: not value}
        elif name == "model_identity" and template.default_system is not None:
            yield {name: template.default_system}
    if template.only_appends and "thinking_retention" not in options:
        yield {"thinking_retention": "all"}


def choose(
    tokenizer: Any,
    names: tuple[str, str],
    options: Mapping[str, Any],
    create: Create,
    candidates: Sequence[str],
) -> Selection:
    """Select one of `candidates`, or `default` with the parser that reads the template's calls.

    `names` are the model's organisation and name, from its folder.

    Raises:
        ConfigError: the folder has no usable chat template, and its name is not that of a known model.
    """
    known = KnownModels(*names)
    template = _Template()
    if tokenizer.chat_template:
        template = _render_all(tokenizer, create("default", options))
    if not template.texts:
        why = f"its chat template fails ({template.failure})" if template.failure else "it has no chat template"
        return Selection(
            known.renderer(why), {}, f"the model is named {names[1]}, and {why}", warns=bool(template.failure)
        )
    scores = []
    for name in candidates:
        if name == _LAST and template.is_slow:
            # This renderer would render the slow template again.
            continue
        with suppress(Exception):
            # The renderer may be written for another vocabulary.
            scores.append(_score(tokenizer, template, name, {}, create(name, options)))
    if all(score.differs for score in scores):
        for score in [score for score in scores if score.distance < 3 * _NEAR]:
            for more in _variants(score.renderer.config, options, template, open_only=False):
                with suppress(Exception):
                    renderer = create(score.name, {**options, **more})
                    scores.append(_score(tokenizer, template, score.name, more, renderer))

    def rank(score: _Score) -> tuple[Any, ...]:
        near_name = known.closeness(score.name)
        return (
            bool(score.counted),
            score.distance,
            score.name == _LAST,
            len(score.differs),
            -near_name,
            len(score.options),
        )

    scores = sorted(scores, key=rank)
    readers = [
        score for score in scores if score.name in _NOT_BY_TEMPLATE or _reads(tokenizer, template, score.renderer)
    ]
    near = [score for score in readers if score.distance <= _NEAR]
    exact: str | None = None
    differs = set(near[0].differs) - {_LATE} if near and near[0].name not in _NOT_BY_TEMPLATE else set()
    if differs and template.only_appends:
        # With the template itself, too, each call extends its row.
        exact = find_parser(tokenizer, template, create, options)
    for score in near if exact is None else ():
        starts = _starts_like(tokenizer, template, score.renderer)
        if not score.counted or (score.start_words <= _SAME_START and starts):
            return _chosen(score)
    if template.is_slow:
        raise ConfigError(
            f"model.path: the chat template of {names[1]} is too slow ({template.failure}): correct it, or set "
            "model.renderer to the renderer of this model's family"
        )
    nearest = f", {scores[0].name} in {_listed(scores[0].differs)}" if scores else ""
    why = f"every other renderer differs from the model's chat template{nearest}"
    parser = exact or find_parser(tokenizer, template, create, options)
    if parser is not None:
        return Selection("default", {"tool_parser": parser}, f"{why}; calls are read by the tool_parser {parser}")
    if near and template.shows_tools:
        return _chosen(near[0])
    return Selection("default", {}, f"{why}, and no tool_parser reads its tool calls", warns=True)


def complete(tokenizer: Any, name: str, options: Mapping[str, Any], create: Create) -> Mapping[str, Any]:
    """Return the options of a named renderer, with defaults that depend on the model taken from the chat template.

    Raises:
        ConfigError: `name` renders with the chat template, and the template takes too long.
    """
    if name in ("default", _LAST):
        try:
            bounded(lambda: create(name, options).render_ids([_ASKED], add_generation_prompt=True))
        except TimeoutError as error:
            raise ConfigError(f"model.path: the chat template is too slow ({error}): correct it") from None
        except Exception:
            logger.debug("the chat template refuses a conversation of one message", exc_info=True)
        return {}
    if not tokenizer.chat_template:
        return {}
    renderer = create(name, options)
    found = list(_variants(getattr(renderer, "config", None), options, _Template(), open_only=True))
    if not found:
        return {}
    template = _render_all(tokenizer, create("default", {}))
    scores = [_score(tokenizer, template, name, {}, renderer)]
    scores += [_score(tokenizer, template, name, more, create(name, {**options, **more})) for more in found]
    return min(scores, key=lambda score: score.distance).options


def _starts_like(tokenizer: Any, template: _Template, renderer: Any) -> bool:
    try:
        return _start(tokenizer, renderer) == template.start
    except Exception:
        return False


def _chosen(score: _Score) -> Selection:
    options = "".join(f" with {name}={value!r}" for name, value in score.options.items())
    if not score.differs:
        return Selection(score.name, score.options, f"it renders like the model's chat template{options}")
    like = "nearly like" if score.counted else "like"
    reason = f"it renders {like} the model's chat template{options}; they differ in {_listed(score.differs)}"
    return Selection(score.name, score.options, reason, warns=score.words > 0 and score.name not in _NOT_BY_TEMPLATE)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if "a message" not in names else "most conversations"


def find_parser(tokenizer: Any, template: _Template, create: Create, options: Mapping[str, Any]) -> str | None:
    """Return the name of the tool parser that reads the calls that the template writes or describes."""
    if "tool_parser" in options:
        return str(options["tool_parser"])
    if template.call_turn is not None:
        read = (
            name
            for name in _PARSERS
            if _reads(tokenizer, template, create("default", {**options, "tool_parser": name}))
        )
        return next(read, None)
    described = template.texts.get("tools", "")
    for name, argument in _DESCRIBED.items():
        form = FORMATS[name]
        if form.start in described and argument in described and form.begin.search(described):
            return name
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} if template.shows_tools else ()
    return next((name for name in _BY_TOKEN if FORMATS[name].start in added), None)


_PARSERS = (
    *("qwen3", "qwen3.5", "glm", "minimax-m2", "hy3", "deepseek-v3", "deepseek-v3.1", "deepseek-v4", "mistral"),
    *("seed-oss", "lfm2", "olmo3", "nemotron-nano-v2", "hunyuan-a13b", "granite-3"),
)
# The start of an argument, for formats whose calls start like those of another format.
_DESCRIBED = dict.fromkeys(("qwen3.5", "minimax-m2", "hy3", "deepseek-v4", "glm", "qwen3", "olmo3", "granite-3"), "")
_DESCRIBED |= {"qwen3.5": "<parameter=", "glm": "<arg_key>"}
# In these formats, a call begins with a token that only this family has.
_BY_TOKEN = ("lfm2", "olmo3")


class KnownModels:
    """The models that the package `renderers` knows by name, compared with the model in one folder."""

    def __init__(self, organisation: str, name: str) -> None:
        self._name = name
        bases = {model: model.rpartition("/")[2].lower() for model in MODEL_RENDERER_MAP}
        self._shared = {model: _common(base, name.lower()) for model, base in bases.items()}
        whole = f"{organisation}/{name}".lower()
        self.exact = [model for model in bases if model.lower() == whole] or [
            model for model, base in bases.items() if base == name.lower()
        ]
        self._prefixes = [model for model, base in bases.items() if name.lower().startswith(f"{base}-")]

    def closeness(self, renderer: str) -> int:
        """Return the length of the longest common prefix of the model's name and a known model of this renderer."""
        found = (
            n + (model in self.exact) for model, n in self._shared.items() if MODEL_RENDERER_MAP[model] == renderer
        )
        return max(found, default=0)

    def renderer(self, why: str) -> str:
        """Return the renderer of the known model of this name, or of its original. Raises ConfigError."""
        longest = max((self._shared[model] for model in self._prefixes), default=0)
        found = self.exact or [model for model in self._prefixes if self._shared[model] == longest]
        names = sorted({str(MODEL_RENDERER_MAP[model]) for model in found})
        if len(names) > 1:
            raise ConfigError(
                f"model.renderer: the folder's name {self._name} fits {', '.join(sorted(found))}, and {why}; set one "
                f"of {', '.join(names)}"
            )
        if not names:
            raise ConfigError(
                f"model.renderer: no renderer is known for {self._name}, and {why}: set model.renderer to the "
                "renderer of this model's family"
            )
        return names[0]
