"""Limit the grammars that a call may ask an engine to compile. Pure.

An engine compiles a JSON schema into a grammar in its own process. With SGLang 0.5.23 and xgrammar 0.2.7, 30,000
nested parentheses in a `pattern` end that process, and `^(.{0,30}x){0,30}$` compiles for 13 s. The schemas of agents'
tools stay below the limits. Within them, one pattern or object takes up to 3 s, and a schema that uses the whole
budget takes half a minute, with a vocabulary of 49,000 tokens on one core. The engine keeps sampling for other calls.

Invariant: the work is linear in the size of the format, without recursion.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_MAX_BYTES = 256 * 1024
# Each nested property takes two levels.
_MAX_DEPTH = 64
# The work is quadratic in an object's optional properties, and cubic if their number is limited.
_MAX_PROPERTIES, _MAX_COUNTED = 500, 100
# xgrammar compiles these formats again at each occurrence, for 10 ms per unit.
_FORMATS = {"uri-template": 12, "email": 4, "uri": 3, "uri-reference": 3, "hostname": 1}
_MAX_FORMATS = 250
_MAX_STRING_CHARS = 10_000
_MAX_LENGTHS = 16
_MAX_PATTERN_CHARS, _MAX_PATTERN_DEPTH = 2_000, 16
_MAX_STATES, _MAX_CHOICES = 256, 128
_TOKEN = re.compile(
    r"(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<\w*>))?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<many>[*+])|(?P<maybe>\?)|\{(?P<least>\d+)(?P<comma>,)?(?P<most>\d*)\}",
    re.DOTALL,
)


def check_form(form: Any) -> None:
    """Raise ValueError, naming the limit, if a reply's format may be too expensive for an engine to compile."""
    squares, states, formats = 0, 0, 0
    lengths: set[str] = set()
    for depth, node in _walk(form):
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(node, str) and len(node) > _MAX_STRING_CHARS:
            raise ValueError(f"a string in it has more than {_MAX_STRING_CHARS} characters")
        if not isinstance(node, Mapping):
            continue
        patterned = node.get("patternProperties")
        named = [each for each in (node.get("properties"), patterned) if isinstance(each, Mapping)]
        is_counted = any(isinstance(node.get(name), int) for name in ("minProperties", "maxProperties"))
        most = _MAX_PROPERTIES**2
        squares += sum(most * len(each) ** 3 // _MAX_COUNTED**3 if is_counted else len(each) ** 2 for each in named)
        if squares > most:
            raise ValueError(
                f"it has too many properties; a single object may have {_MAX_PROPERTIES}, or {_MAX_COUNTED} with "
                "minProperties or maxProperties"
            )
        kind = node.get("format")
        formats += _FORMATS.get(kind, 0) if isinstance(kind, str) else 0
        if formats > _MAX_FORMATS:
            raise ValueError("it has too many strings with a format, such as email or uri")
        for pattern in (node.get("pattern"), *(patterned if isinstance(patterned, Mapping) else ())):
            states += _states(pattern) if isinstance(pattern, str) else 0
        if states > _MAX_STATES:
            raise ValueError(
                f"its patterns have more than {_MAX_STATES} characters in all once repetitions are written out"
            )
        limits = {name: node.get(name) for name in ("minLength", "maxLength") if isinstance(node.get(name), int)}
        lengths |= {repr(limits)} if limits else set()
        if len(lengths) > _MAX_LENGTHS:
            raise ValueError(f"it limits the length of strings in more than {_MAX_LENGTHS} different ways")
    if len(json.dumps(form)) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")


def _walk(form: Any) -> Iterator[tuple[int, Any]]:
    """Yield each value and key of a reply's format with its depth."""
    rest = [(0, form)]
    while rest:
        depth, node = rest.pop()
        yield depth, node
        if depth > _MAX_DEPTH:
            continue
        if isinstance(node, Mapping):
            rest += [(depth + 1, each) for pair in node.items() for each in pair]
        elif isinstance(node, (list, tuple)):
            rest += [(depth + 1, each) for each in node]


class _Part(NamedTuple):
    """A part of a pattern, with its repetitions written out."""

    states: int = 0
    quantifiers: int = 0
    """Parts whose length varies up to a limit. An automaton has to track each combination of their lengths."""
    varies: int = 0
    """Characters by which the length of these parts varies."""

    def plus(self, other: "_Part") -> "_Part":
        return _Part(*(one + more for one, more in zip(self, other, strict=True)))

    def repeated(self, least: int, most: int | None) -> "_Part":
        times = max(least, 1) if most is None else most
        part = _Part(*(min(each * times, 10**9) for each in self))
        if most is None or most == least:
            return part
        return part.plus(_Part(0, 1, (most - least) * (self.states - min(self.varies, self.states))))


def _states(pattern: str) -> int:
    """Return the number of characters of a pattern with its repetitions written out. Raises ValueError as
    `check_form` does."""
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern in it has more than {_MAX_PATTERN_CHARS} characters")
    # The branches and the part that precede each open group. A quantifier repeats the `last` part.
    groups: list[tuple[list[_Part], _Part]] = []
    branches: list[_Part] = []
    before, last = _Part(), _Part()
    at = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        at = at + 1 if found is None else found.end()
        kind = None if found is None else found.lastgroup
        if found is None and pattern[at - 1] in "^$":
            continue
        if found is None or kind == "atom":
            before, last = before.plus(last), _Part(1)
        elif kind == "open":
            groups.append((branches, before.plus(last)))
            branches, before, last = [], _Part(), _Part()
            if len(groups) > _MAX_PATTERN_DEPTH:
                raise ValueError(f"a pattern in it has more than {_MAX_PATTERN_DEPTH} groups in each other")
        elif kind == "or":
            branches.append(before.plus(last))
            before, last = _Part(), _Part()
        elif kind == "close":
            group = _alternatives([*branches, before.plus(last)])
            branches, before = groups.pop() if groups else ([], _Part())
            last = group
        elif kind == "many":
            last = last.repeated(0, None)
        elif kind == "maybe":
            last = last.repeated(0, 1)
        else:
            least = int(found["least"][:9])
            most = least if not found["comma"] else int(found["most"][:9]) if found["most"] else None
            last = last.repeated(least, most)
    for outer, start in reversed([([], _Part()), *groups]):
        before = start.plus(_alternatives([*branches, before.plus(last)]))
        branches, last = outer, _Part()
    if before.quantifiers > 1 and before.quantifiers * before.varies > _MAX_CHOICES:
        raise ValueError("a pattern in it has too many parts of varying length, such as a? or a{1,9}")
    return before.states


def _alternatives(branches: list[_Part]) -> _Part:
    """Combine alternatives into one group, whose length varies if theirs differ."""
    whole = _Part()
    for each in branches:
        whole = whole.plus(each)
    differs = max(each.states for each in branches) - min(each.states for each in branches)
    return whole.plus(_Part(0, 1, differs)) if differs else whole
