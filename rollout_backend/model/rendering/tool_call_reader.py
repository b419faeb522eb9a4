"""Parse tool calls strictly from the text of a reply. Pure.

Invariants:

- A call is parsed completely or is malformed. Leftover text, a duplicate parameter, and a tag that opens but does not
  close inside a value make it malformed.
- A closing tag ends a value only if the next parameter or the end of the call follows. Others belong to the value.
- Strings are returned verbatim. Other values are JSON, or text that the tool has to refuse.
- Of several calls between one pair of tags, either all are well-formed or none.
- The work is linear in the length of the text.

The parsers of the package `renderers` strip values, drop what they do not recognise, and end a call at the first
closing tag. This module takes only the position of the first call from their result.
"""

import ast
import json
import math
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from renderers import ParsedToolCall, ToolCallParseStatus

Tools = Sequence[Mapping[str, Any]] | None

# A call of an unknown tool is usable, because the agent reports that the tool does not exist.
USABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
# Histories represent a call without arguments by one of these.
NOTHING = (None, "")
_UNIONS = ("anyOf", "oneOf", "allOf")
# An agent's schema may refer to itself from any number of branches.
_MAX_PARTS = 1000
# Parts and values of schemas that are examined for one reply.
_MAX_WORK = 50_000
_TYPED = frozenset({"type", "enum", "const"})
# The templates of Qwen3.5 and Nemotron 3 print these.
_LITERALS = {"True": True, "False": False, "None": None}
# Any other name must be declared.
_PLAIN_NAME = re.compile(r"[^\s<>\"'{}]+")
# These fields of a JSON call have no effect.
_LABELS = frozenset({"id", "type"})
# Tokens of calls in Python's syntax: strings, unclosed quotes, JSON's constants, names of tools and arguments.
_PYTHON = re.compile(
    r"""(?P<prefix>\b[A-Za-z]{1,2})?(?P<string>"{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}"""
    r"""|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<quote>["'])"""
    r"""|(?P<constant>\b(?:true|false|null)\b)|(?P<name>(?<![\w.-])[^\W\d][\w.-]*+)(?=\(|\s*=(?!=))""",
    re.DOTALL,
)
_PARSING = threading.Lock()
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
# Python's string literals cannot contain these characters.
_IN_STRINGS = {"\n": r"\n", "\r": r"\r", "\0": r"\x00"}
_ESCAPED = "\\'\"\nabfnrtvxNuU01234567"
# A reply that is read as Python must not write warnings about its code to the log.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")
_Read = tuple[list[ParsedToolCall], int]


@dataclass(frozen=True)
class CallFormat:
    """Delimiters of a call. `start` and `stop` are prefixes of `begin` and `end`.

    `frame` matches the tags around a list of calls. The arguments are JSON. If `begin` has no group `name`, they are
    in a JSON object with the name. `is_list`: the format has a list of such objects.
    """

    start: str
    begin: re.Pattern[str]
    end: re.Pattern[str]
    stop: str
    frame: re.Pattern[str]
    is_list: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class PythonFormat(CallFormat):
    """Format with calls in Python's syntax: a list of them, or one in each line."""


@dataclass(frozen=True)
class TaggedFormat(CallFormat):
    """Format with a tag around each argument.

    The group of `close` is the layout between two arguments. `tag` matches any tag, and its group `opens` an opening
    tag.
    """

    parameter: re.Pattern[str]
    close: re.Pattern[str]
    tag: re.Pattern[str]


def _json(
    start: str, end: str, stop: str, begin: str = "", frame: str = r"(?!)", *, is_list: bool = False
) -> CallFormat:
    patterns = (re.compile(re.escape(start) + begin + r"\s*"), re.compile(r"\s*" + end), stop, re.compile(frame))
    return CallFormat(start, *patterns, is_list=is_list)


def _python(start: str, stop: str) -> PythonFormat:
    return PythonFormat(start, re.compile(re.escape(start)), re.compile(re.escape(stop)), stop, re.compile(r"(?!)"))


def _tagged(
    start: str, begin: str, parameter: str, close: str, end: str, *, stop: str, names: str, frame: str = r"(?!)"
) -> TaggedFormat:
    """Create a format. `names` matches the names of the tags."""
    tag = rf"(?P<opens><(?:{names})(?:>|=|\sname=\"[^\"\n]+\"(?: string=\"\w+\")?>))|</(?:{names})>"
    head = re.compile(start + begin), re.compile(end)
    return TaggedFormat(
        start, *head, stop, re.compile(frame), *map(re.compile, (parameter, close + r"(?=(\s*))", tag))
    )


def _functions(frame: str, layout: str = r"\n?") -> TaggedFormat:
    return _tagged(
        "<function=",
        r"(?P<name>[^<>\n]+)>\s*",
        rf"<parameter=(?P<key>[^<>\n]+)>{layout}",
        rf"{layout}</parameter>",
        rf"</function>(?:\s*</{frame}>)?",
        stop="</function>",
        names="function|parameter",
        frame=f"<{frame}>",
    )


HERMES = _json("<tool_call>", r"(?:</tool_call>|\Z)", "</tool_call>")
# Qwen3-Coder often omits `<tool_call>`, mostly after text. Engines parse the function anyway.
_QWEN = _functions("tool_call")
_SEED = _functions("seed:tool_call", layout="")
_GLM = _tagged(
    "<tool_call>",
    r"(?P<name>[^<>]+)(?=<arg_key>|</tool_call>)",
    r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>",
    "</arg_value>",
    "</tool_call>",
    stop="</tool_call>",
    names="tool_call|arg_key|arg_value",
)
_MINIMAX = _tagged(
    "<invoke ",
    r'name="(?P<name>[^"\n]+)">\s*',
    r'<parameter name="(?P<key>[^"\n]+)">',
    "</parameter>",
    "</invoke>",
    stop="</invoke>",
    names="invoke|parameter",
    frame="</?minimax:tool_call>",
)
_HUNYUAN = _tagged(
    "<tool_call:opensource>",
    r"(?P<name>[^<>]+)<tool_sep:opensource>\s*",
    r"<arg_key:opensource>(?P<key>[^<>]+)</arg_key:opensource>\s*<arg_value:opensource>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
    stop="</tool_call:opensource>",
    names="(?:tool_call|arg_key|arg_value):opensource",
    frame="</?tool_calls:opensource>",
)
_DSML = _tagged(
    "<\uff5cDSML\uff5cinvoke ",
    r'name="(?P<name>[^"\n]+)">\s*',
    '<\uff5cDSML\uff5cparameter name="(?P<key>[^"\n]+)" string="(?P<string>true|false)">',
    "</\uff5cDSML\uff5cparameter>",
    "</\uff5cDSML\uff5cinvoke>",
    stop="</\uff5cDSML\uff5cinvoke>",
    names="\uff5cDSML\uff5c(?:invoke|parameter)",
    frame="</?\uff5cDSML\uff5c(?:tool|function)(?:_?calls)?>",
)
_DEEPSEEK = _json(
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "```\\s*<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "\\w*<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n<>]+)\n```(?:json)?",
    "<\uff5ctool\u2581calls\u2581(?:begin|end)\uff5c>",
)

_DEEPSEEK_31 = _json(
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "(?P<name>[^\n<>]+)<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581calls\u2581(?:begin|end)\uff5c>",
)
_KIMI = _json(
    "<|tool_call_begin|>",
    r"<\|tool_call_end\|>",
    "<|tool_call_end|>",
    r"\s*(?P<id>(?P<name>[^\s<>]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_calls_section_(?:begin|end)\|>",
)
# No tag closes a call: it ends with its arguments, and a malformed call ends with the reply.
_MISTRAL = CallFormat(
    "[TOOL_CALLS]",
    re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*(?=\{)"),
    re.compile(r"\s*(?!\{)"),
    "</s>",
    re.compile(r"(?!)"),
)

# Keyed by renderer, or by tool parser of the renderer `default`.
FORMATS: Mapping[str, CallFormat] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), HERMES),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), _QWEN),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _QWEN),
    **dict.fromkeys(("glm", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _GLM),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), _DEEPSEEK),
    "deepseek-v3.1": _DEEPSEEK_31,
    "deepseek-v4": _DSML,
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), _KIMI),
    "minimax-m2": _MINIMAX,
    "hy3": _HUNYUAN,
    "mistral": _MISTRAL,
    "seed-oss": _SEED,
    "nemotron-nano-v2": _json("<TOOLCALL>", "</TOOLCALL>", "</TOOLCALL>", is_list=True),
    "hunyuan-a13b": _json("<tool_calls>", "</tool_calls>", "</tool_calls>", is_list=True),
    "granite-3": _json("<|tool_call|>", r"\Z", "<|end_of_text|>", is_list=True),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>"),
}


class _Unlocated(str):
    """A string for which JSON errors have no line number, because counting the lines before each error is slow."""

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


def read_calls(
    form: CallFormat, text: str, tools: Tools = None, *, whole: bool = True
) -> tuple[str, list[ParsedToolCall]]:
    """Return the text that belongs to no usable call, and all calls.

    Unless `text` is the `whole` reply, text whose meaning may still change counts as an unclosed call.
    """
    text, types = _Unlocated(text), ArgumentTypes(tools)
    said: list[str] = []
    calls: list[ParsedToolCall] = []
    read: Any = _READERS[type(form)]
    at = 0
    while (begin := text.find(form.start, at)) >= 0:
        said.append(form.frame.sub("", text[at:begin]))
        found, at = read(form, text, begin, types, whole)
        calls += found
        if found[0].status != ToolCallParseStatus.OK and (whole or at < len(text)):
            said.append(text[begin:at])
    rest = form.frame.sub("", text[at:])
    if isinstance(form, TaggedFormat) and not whole and rest.strip():
        calls.append(ParsedToolCall(raw=rest, status=ToolCallParseStatus.UNCLOSED_BLOCK))
        rest = ""
    return "".join([*said, rest]), calls


def _read_json(form: CallFormat, text: str, at: int, types: "ArgumentTypes", whole: bool) -> _Read:
    begin = form.begin.match(text, at)
    if begin is None:
        return _malformed(form, text, at)
    named = "name" in form.begin.groupindex
    try:
        value, after = _DECODER.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        value, after = None, begin.end()
        if not named or form.end.match(text, after) is None:
            return _malformed(form, text, at, ToolCallParseStatus.INVALID_JSON)
    end = form.end.match(text, after)
    if named:
        name = begin["name"].strip()
        value = {"name": _without_namespace(name, types.schemas) if form is _KIMI else name, "arguments": value}
    entries = value if form.is_list and isinstance(value, list) else [value]
    if end is None or not entries or not all(isinstance(entry, dict) for entry in entries):
        return _malformed(form, text, at)
    calls = [_json_call(text[at : end.end()], entry) for entry in entries]
    if "id" in form.begin.groupindex:
        # The template prints the id again, and accepts no id in another format.
        calls = [replace(call, id=begin["id"]) for call in calls]
    broken = [call for call in calls if call.status != ToolCallParseStatus.OK]
    return broken[:1] or calls, end.end()


def _without_namespace(name: str, declared: Collection[str]) -> str:
    """Return the name of the tool that Kimi calls. A declared name may have dots itself."""
    plain = name.removeprefix("functions.")
    return next((each for each in (name, plain, name.partition(".")[2]) if each in declared), plain)


def _json_call(raw: str, call: dict[str, Any]) -> ParsedToolCall:
    name, arguments = call.get("name"), call.get("arguments")
    if arguments in NOTHING:
        arguments = {}
    elif isinstance(arguments, str):
        # OpenAI's API encodes arguments as a JSON string.
        with suppress(ValueError, RecursionError):
            arguments = loads(arguments)
    status = ToolCallParseStatus.OK
    if not isinstance(name, str) or not name:
        status, name = ToolCallParseStatus.MISSING_NAME, None
    elif not isinstance(arguments, dict) or call.keys() - _LABELS - {"name", "arguments"}:
        status = ToolCallParseStatus.MALFORMED_STRUCTURE
    return ParsedToolCall(raw=raw, name=name, arguments=arguments, status=status)


def _read_python(form: PythonFormat, text: str, at: int, types: "ArgumentTypes", whole: bool) -> _Read:
    begin = at + len(form.start)
    stop = text.find(form.stop, begin)
    try:
        called = _python_calls(text[begin:stop]) if stop >= 0 else []
    except (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError):
        called = []
    if not called:
        return _malformed(form, text, at)
    end = stop + len(form.stop)
    return [ParsedToolCall(raw=text[at:end], name=name, arguments=given) for name, given in called], end


def _python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse the calls in `text`. Raises an error if it holds anything but calls with literal keyword arguments."""
    names: list[str] = []

    def plain(found: re.Match[str]) -> str:
        if found["quote"]:
            raise ValueError("a string is not closed")
        if found["string"]:
            return found[0] if found["prefix"] else _python_string(found["string"])
        if found["constant"]:
            return _CONSTANTS[found[0]]
        # A name may contain a hyphen or be a Python keyword.
        names.append(found[0])
        return f"_{len(names) - 1}"

    lines = _PYTHON.sub(plain, text).strip().split("\n")
    calls = []
    for statement in _parse("\n".join(line.strip() for line in lines), "exec").body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for call in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError("this is no call with named arguments")
            given = [(word.arg or "", loads(json.dumps(ast.literal_eval(word.value)))) for word in call.keywords]
            arguments = _object([(names[int(key[1:])], value) for key, value in given])
            calls.append((names[int(call.func.id[1:])], arguments))
    return calls


def _parse(text: str, mode: str) -> Any:
    # Python 3.11 raises SystemError if another thread parses at the same time: python/cpython#106905.
    with _PARSING:
        return ast.parse(text, mode=mode)


def _python_string(literal: str) -> str:
    """Rewrite a string that has line breaks, or backslashes that escape nothing, as a Python literal."""

    def spelled(found: re.Match[str]) -> str:
        if found[1] is None:
            return _IN_STRINGS[found[0]]
        return found[0] if found[1] in _ESCAPED else f"\\{found[0]}"

    return re.sub(r"\\(.)|[\n\r\0]", spelled, literal, flags=re.DOTALL)


def _read_tagged(form: TaggedFormat, text: str, at: int, types: "ArgumentTypes", whole: bool) -> _Read:
    begin = form.begin.match(text, at)
    if begin is None:
        return _malformed(form, text, at)
    name = begin["name"].strip()
    schema = types.schemas.get(name)
    well_formed = schema is not None or _PLAIN_NAME.fullmatch(name) is not None
    after = begin.end()
    arguments: dict[str, Any] = {}
    while (end := form.end.match(text, after)) is None:
        parameter = form.parameter.match(text, after)
        if parameter is None:
            return _malformed(form, text, at)
        close = _close(form, text, parameter.end(), whole)
        if close is None:
            return _unclosed(text, at)
        key, value = parameter["key"].strip(), text[parameter.end() : close.start()]
        declared = types.property(schema, key, schema)
        well_formed &= key not in arguments and not _opens(form, value)
        well_formed &= declared is not None or _PLAIN_NAME.fullmatch(key) is not None
        if "string" not in form.parameter.groupindex:
            arguments[key] = types.typed(value, declared, schema)
        else:
            arguments[key] = value if parameter["string"] == "true" else _json_or_text(value)
        after = close.end(1)
    if not _may_follow(form, text, end.end(), whole):
        return _unclosed(text, at)
    status = ToolCallParseStatus.OK if well_formed else ToolCallParseStatus.MALFORMED_STRUCTURE
    return [ParsedToolCall(raw=text[at : end.end()], name=name, arguments=arguments, status=status)], end.end()


def _malformed(
    form: CallFormat, text: str, at: int, status: ToolCallParseStatus = ToolCallParseStatus.MALFORMED_STRUCTURE
) -> _Read:
    """Return a malformed call, up to its closing tag. A call that opens before that tag may be part of this one."""
    stop = text.find(form.stop, at)
    if stop < 0 or text.find(form.start, at + 1, stop) >= 0:
        return _unclosed(text, at)
    end = stop + len(form.stop)
    return [ParsedToolCall(raw=text[at:end], status=status)], end


def _unclosed(text: str, at: int) -> _Read:
    return [ParsedToolCall(raw=text[at:], status=ToolCallParseStatus.UNCLOSED_BLOCK)], len(text)


_READERS = {CallFormat: _read_json, PythonFormat: _read_python, TaggedFormat: _read_tagged}


def _close(form: TaggedFormat, text: str, at: int, whole: bool) -> re.Match[str] | None:
    """Return the tag that ends the value at `at`."""
    for close in form.close.finditer(text, at):
        if form.parameter.match(text, close.end(1)):
            return close
        end = form.end.match(text, close.end(1))
        if end is not None and _may_follow(form, text, end.end(), whole):
            return close
    return None


def _may_follow(form: TaggedFormat, text: str, at: int, whole: bool) -> bool:
    """Return whether a call may have ended at `at`: the next tag opens another call, or there is none."""
    tag = form.tag.search(text, at)
    return whole if tag is None else text.startswith(form.start, tag.start())


def _opens(form: TaggedFormat, value: str) -> bool:
    """Return whether a tag opens inside the value and is not closed there."""
    depth = 0
    for tag in form.tag.finditer(value):
        depth = depth + 1 if tag["opens"] else max(depth - 1, 0)
    return depth > 0


# --- types --------------------------------------------------------------------------------------------------


class _Type(NamedTuple):
    """What a schema allows: these strings, values of these kinds, and items with this schema."""

    strings: frozenset[str]
    kinds: frozenset[str]
    items: Any


class ArgumentTypes:
    """What a call's tools declare about their arguments. Use a new object for each reply.

    A reply may have thousands of arguments, so each schema is examined once, and at most `_MAX_WORK` parts and values
    are examined in all. Further arguments count as undeclared.
    """

    def __init__(self, tools: Tools = None) -> None:
        self.schemas: dict[str, Any] = {}
        """The schema of each tool's arguments, by the tool's name."""
        for tool in tools or ():
            self.schemas.setdefault(tool["function"]["name"], tool["function"].get("parameters"))
        self._left = _MAX_WORK
        # By the ids of a schema and its root, which exist as long as the tools.
        self._types: dict[tuple[int, int], _Type] = {}
        self._properties: dict[tuple[int, int], tuple[dict[str, Any], Any]] = {}

    def typed(self, text: str, schema: Any, root: Any) -> Any:
        """Convert `text` to a value according to its JSON schema. `root` resolves the schema's references.

        If the schema allows strings, the text is converted only if it is valid for another allowed type. As in
        engines, `null` is null if that is allowed.

        An object or array may be written in Python's syntax. Other text stays text, even if the schema allows no
        string: as in engines, the tool refuses it, and the model can correct its call.
        """
        strings, kinds, _ = self._type(schema, root)
        if text in strings:
            return text
        value = _LITERALS[text] if text in _LITERALS and "string" not in kinds and kinds else _json_or_text(text)
        if not kinds:
            return text if isinstance(value, str) else value
        if value is text and "string" not in kinds:
            literal = _python_literal(text)
            return literal if kinds & _kinds_of(literal) else text
        return value if "string" not in kinds or kinds & _kinds_of(value) - {"string"} else text

    def typed_literals(self, value: Any, kind: type[str], schema: Any, root: Any) -> Any:
        """Convert the strings of type `kind` within `value` as `typed` does."""
        if isinstance(value, kind):
            return self.typed(str(value), schema, root)
        if isinstance(value, dict):
            return {
                key: self.typed_literals(item, kind, self.property(schema, key, root), root)
                for key, item in value.items()
            }
        if isinstance(value, list):
            items = self._type(schema, root).items
            return [self.typed_literals(item, kind, items, root) for item in value]
        return value

    def property(self, schema: Any, key: str, root: Any) -> Any:
        """Return the schema of an argument, or None."""
        if (id(schema), id(root)) not in self._properties:
            named: dict[str, Any] = {}
            others: Any = None
            for part in self._parts(schema, root):
                properties, more = part.get("properties"), part.get("additionalProperties")
                if isinstance(properties, Mapping):
                    self._left -= len(properties)
                    for name, value in properties.items():
                        named.setdefault(name, value)
                others = more if others is None and isinstance(more, Mapping) else others
            self._properties[id(schema), id(root)] = named, others
        named, others = self._properties[id(schema), id(root)]
        return named.get(key, others)

    def _type(self, schema: Any, root: Any) -> _Type:
        if (id(schema), id(root)) not in self._types:
            branches = list(self._branches(schema, root))
            members = [member for branch in branches for member in _members(branch)]
            self._left -= len(members)
            self._types[id(schema), id(root)] = _Type(
                frozenset(member for member in members if isinstance(member, str)),
                frozenset(kind for branch in branches for kind in _kinds(branch)),
                next((branch["items"] for branch in branches if "items" in branch), None),
            )
        return self._types[id(schema), id(root)]

    def _branches(self, schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the alternative schemas that name types or values, without references."""
        for part in self._parts(schema, root, lambda part: "$ref" in part or _TYPED.isdisjoint(part)):
            if part.get("nullable") is True:
                yield {"type": "null"}
            if "$ref" not in part and not _TYPED.isdisjoint(part):
                yield part

    def _parts(
        self, schema: Any, root: Any, has_parts: Callable[[Mapping[str, Any]], bool] = lambda part: True
    ) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and the schemas of its references and unions, each once, at most `_MAX_PARTS`. `has_parts`
        returns whether to continue with the references and unions of a schema."""
        rest, seen = [schema], set[int]()
        for _ in range(_MAX_PARTS):
            if not rest or self._left <= 0:
                return
            part = rest.pop()
            self._left -= 1
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if has_parts(part):
                below = [branch for union in _UNIONS for branch in _listed(part.get(union))[:_MAX_PARTS]]
                self._left -= len(below)
                rest += reversed(below)
                rest += [_resolved(part["$ref"], root)] if "$ref" in part else []


def _json_or_text(text: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return text


def _python_literal(text: str) -> Any:
    """Parse an object or array that some models write with Python's quotes and names. Return other text unchanged."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    with suppress(ValueError, RecursionError):
        json.loads(text)
        # `loads` refused this JSON.
        return text
    try:
        return loads(json.dumps(ast.literal_eval(_parse(text.strip(), "eval"))))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def loads(text: str) -> Any:
    """Parse JSON. Raises ValueError also for NaN, infinities and duplicate keys."""
    return _DECODER.decode(text)


def _resolved(reference: object, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#") or len(reference) > _MAX_PARTS:
        return {}
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _members(schema: Mapping[str, Any]) -> Sequence[Any]:
    return [schema["const"]] if "const" in schema else _listed(schema.get("enum"))


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of the types that a schema allows; empty if it allows all."""
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else {kind for kind in _listed(declared) if isinstance(kind, str)}
    for member in () if kinds else _members(schema):
        kinds |= _kinds_of(member)
    return kinds


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value == int(value) else {"number"}
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return {names[type(value)]}


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_number, object_pairs_hook=_object)
