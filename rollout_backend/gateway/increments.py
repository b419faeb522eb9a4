"""A reply while it is sampled: growing token ids in, deltas out. Pure.

What must always hold:

- The deltas put together are the message that is recorded. What was sent stands: it is never taken back.
- Nothing is sent that may yet turn out to be something else. Held back are the bytes of half a character, whitespace
  at the end, what may become a marker (of a tool call, of reasoning) or a stop string, and a tool call until text
  that followed it would no longer be part of it.
- So the message is the one that the whole reply reads as. Only where a parser reads a beginning otherwise than the
  whole (whitespace before a reasoning that is closed later, a grammar that nobody told us of), what was sent stands,
  and what the whole has beyond it comes at the end.
- The work is linear in the reply's length: at most `_PARSES` times its tokens are parsed.

How it knows what the next token will be part of, with a parser that knows whole replies only: it parses what is there
with a probe behind it, and looks where the probe went. Ordinary text then goes the same way, without a parse, until
the next marker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rollout_backend.gateway.call import Delta, Message
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.reply import Reply, is_whole, message, spoken, tool_call

logger = logging.getLogger(__name__)

_PROBE = "zqxj"  # ordinary text that nobody says
_CLOSE = "</think>"
_PARSES, _FREE_TOKENS = 16, 4096
_UNREAD_TOKENS = 64  # no character has so many
_BARE_JSON = frozenset({"llama-3"})  # a call without any marker: all of a text that begins with a brace
# Markers that are plain text in some vocabulary; those with a token of their own are found by it.
_MARKERS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "<function=",
        "</function>",
    ),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke",
        "</invoke>",
        "<\uff5cDSML\uff5c",
        "</\uff5cDSML\uff5c",
    ),
)
# Renderers whose grammars these markers and the added tokens cover. Replies of any other come whole, at the end.
_KNOWN = frozenset(
    {
        *("chatml", "default", "deepseek-r1", "deepseek-v3", "deepseek-v4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        *("gpt-oss", "hy3", "kimi-k2", "kimi-k2.5", "llama-3", "minimax-m2"),
        *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        *("prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"),
    }
)
_LONGEST = max(map(len, _MARKERS))

Channel = Literal["reasoning", "text"]


def at_once(said: Message, choice: int = 0) -> list[Delta]:
    """A whole message."""
    texts: list[tuple[Channel, Any]] = [("reasoning", said.get("reasoning_content")), ("text", said.get("content"))]
    return [
        *(Delta(channel, text, choice=choice) for channel, text in texts if text),
        *(Delta("tool_call", tool_call=call, choice=choice) for call in said.get("tool_calls") or ()),
    ]


class Increments:
    """One choice of one call. Not to be used by two threads at once."""

    def __init__(
        self,
        bundle: RendererBundle,
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tools_offered: bool = False,
        stop: Sequence[str] = (),
        parallel: bool = True,
        choice: int = 0,
    ) -> None:
        self._bundle = bundle
        self._prompt_ids = list(prompt_ids)
        self._tools = tools
        self._tools_offered = tools_offered
        self._stop = tuple(stop)
        self._parallel = parallel
        self._choice = choice
        self._text = _GrowingText(bundle.decode)
        self._added = frozenset(bundle.tokenizer.added_tokens_decoder)
        self._names: set[str] = set()  # of the added tokens that were sampled
        self._probe_ids = list(bundle.tokenizer.encode(_PROBE, add_special_tokens=False))
        self._close_ids = list(bundle.tokenizer.encode(_CLOSE, add_special_tokens=False))
        self._closed = False  # whether the reasoning is known to be over
        self._tail = ""  # of the text so far: a marker may have begun in it
        self._channel: Channel | None = None  # where ordinary text goes; None: into a tool call, or it is not known
        self._stale = True  # whether that must be asked again
        self._held = ""  # what the channel has beyond what was sent
        self._sent: dict[Channel, str] = {"reasoning": "", "text": ""}
        self._calls: list[dict[str, Any]] = []  # sent
        self._silent = bundle.name not in _KNOWN  # whether nothing more is sent before the end
        self._parsed_tokens = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What `ids`, sampled since the last call, let be sent."""
        if self._silent:
            return []
        text = self._text.add(ids)
        self._silent = self._text.unread > _UNREAD_TOKENS
        if not text:
            return []
        added = self._added.intersection(self._text.last)
        self._names |= {self._bundle.decode([token]) for token in added}
        self._stale |= bool(added) or _has_marker(self._tail, text)
        self._tail = (self._tail + text)[-_LONGEST + 1 :]
        if self._stale:
            return self._ask() if self._may_parse() else []
        if self._channel is None:
            return []
        self._held += text
        return self._release(self._channel)

    def end(self, reply: Reply) -> tuple[list[Delta], Reply]:
        """What is left to send of `reply`, the reading of the whole, and the reply as all deltas together make it."""
        self._silent = True
        said = reply.message
        deltas = [
            *self._send("reasoning", _beyond(self._sent["reasoning"], said.get("reasoning_content") or "")),
            *self._send("text", _beyond(self._sent["text"], said.get("content") or "")),
            *self._send_calls(said.get("tool_calls") or []),
        ]
        whole = message(self._sent["text"], self._sent["reasoning"], self._calls)
        reason = "tool_calls" if self._calls and reply.finish_reason == "stop" else reply.finish_reason
        return deltas, replace(reply, message=whole, finish_reason=reason)

    def _may_parse(self) -> bool:
        tokens = self._text.read
        return self._parsed_tokens + tokens <= _PARSES * tokens + _FREE_TOKENS

    def _ask(self) -> list[Delta]:
        """Parses what is there, sends what that lets be sent, and finds out where ordinary text would go."""
        parsed = self._parse(self._text.ids(), self._probe_ids)
        if parsed is None:
            return []
        text, reasoning, calls = parsed
        self._stale = False
        if calls and _PROBE in calls[-1].raw:
            self._channel, calls = None, calls[:-1]
        elif text.endswith(_PROBE):
            self._channel, text = "text", text.removesuffix(_PROBE)
        elif reasoning.endswith(_PROBE):
            self._channel, reasoning = "reasoning", reasoning.removesuffix(_PROBE)
        else:
            self._channel = None
        deltas: list[Delta] = []
        if self._channel == "reasoning":
            deltas += self._take("reasoning", reasoning)
        elif not self._reasoning_is_over(reasoning, bool(parsed[2])):
            self._channel = None
            return []
        else:
            deltas += self._send("reasoning", _beyond(self._sent["reasoning"], reasoning))
            if _PROBE not in text:  # else an open call stands in it
                deltas += self._take("text", text)
        deltas += self._send_calls([tool_call(call) for call in calls if is_whole(call)])
        if self._channel is not None and not (self._sent[self._channel] or self._held.strip()):
            self._stale = True  # some parsers drop whitespace before the first word: ask again when it comes
        return deltas

    def _parse(self, ids: Sequence[int], more: Sequence[int]) -> tuple[str, str, list[Any]] | None:
        """Text, reasoning and tool calls; None where the parser fails."""
        ids = [*ids, *more]
        self._parsed_tokens += len(ids)
        try:
            parsed = self._bundle.renderer.parse_beginning(ids, tools=self._tools, prompt_ids=self._prompt_ids)
        except Exception:  # a beginning is not what parsers are made for; the whole may still be read
            logger.debug("the renderer cannot parse the beginning of a reply", exc_info=True)
            return None
        text, reasoning = spoken(parsed, self._bundle.decode(ids), self._tools_offered)
        return text, reasoning, parsed.tool_calls if self._tools_offered else []

    def _reasoning_is_over(self, reasoning: str, calls: bool) -> bool:
        """False while an end of the reasoning may still come. Where a tool call ends it, some parsers make the call
        a part of the reasoning once such an end comes after it."""
        if not self._closed and (reasoning or calls):
            closed = self._parse(self._text.ids(), self._close_ids)
            self._closed = closed is not None and closed[1].strip() == reasoning.strip()
            return self._closed
        return True

    def _take(self, channel: Channel, now: str) -> list[Delta]:
        """`now` is all that the channel has."""
        rest = _rest(self._sent[channel], now)
        if rest is None:
            self._silent = True  # the parser changed its mind: the end will tell
            return []
        self._held = rest
        return self._release(channel)

    def _release(self, channel: Channel) -> list[Delta]:
        """Sends of what is held what cannot become something else."""
        held = self._held
        bare_json = self._tools_offered and self._bundle.name in _BARE_JSON
        if channel == "text" and bare_json and (self._sent["text"] + held).lstrip().startswith("{"):
            return []
        safe = len(held)
        for name in (
            *self._stop,
            *self._names,
        ):  # a token that is no text frames something, as the next ones will tell
            found = held.find(name)
            safe = min(safe, found if found >= 0 else safe)
        safe = min(safe, *(_may_begin(held, string) for string in (*_MARKERS, *self._stop)))
        safe = len(held[:safe].rstrip())
        self._held = held[safe:]
        return self._send(channel, held[:safe])

    def _send(self, channel: Channel, text: str) -> list[Delta]:
        if not text:
            return []
        self._sent[channel] += text
        return [Delta(channel, text, choice=self._choice)]

    def _send_calls(self, calls: list[dict[str, Any]]) -> list[Delta]:
        """`calls` are all that there are."""
        more = calls[len(self._calls) :] if self._parallel or not self._calls else []
        more = more if self._parallel else more[:1]
        self._calls += more
        return [Delta("tool_call", tool_call=call, choice=self._choice) for call in more]


class _GrowingText:
    """Text of growing token ids, whole characters only."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._before = 0  # where the last piece began: some tokens read otherwise at the very beginning
        self.read = 0  # tokens whose text was returned
        self.last: Sequence[int] = ()  # those of the last piece

    @property
    def unread(self) -> int:
        return len(self._ids) - self.read

    def ids(self) -> list[int]:
        return self._ids[: self.read]

    def add(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decode(self._ids[self._before :])
        if text.endswith("\ufffd"):
            return ""
        known = self._decode(self._ids[self._before : self.read])
        self.last = self._ids[self.read :]
        self._before, self.read = self.read, len(self._ids)
        return text[len(known) :]


def _has_marker(tail: str, text: str) -> bool:
    """Whether a marker ends in `text`, that follows `tail`."""
    around = tail + text
    return any(around.find(marker, max(0, len(tail) - len(marker) + 1)) >= 0 for marker in _MARKERS)


def _may_begin(text: str, string: str) -> int:
    """Where in `text` a `string` may begin that is not all there yet; else the text's length."""
    for n in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:n]):
            return len(text) - n
    return len(text)


def _rest(sent: str, now: str) -> str | None:
    """What `now` has after what was sent; None if it says otherwise. Some parsers drop whitespace at the beginning
    once there is more after it."""
    if now.startswith(sent):
        return now[len(sent) :]
    now, sent = now.lstrip(), sent.lstrip()
    return now[len(sent) :] if now.startswith(sent) else None


def _beyond(sent: str, whole: str) -> str:
    """What is left to send of `whole`, whatever it says."""
    rest = _rest(sent, whole)
    if rest is not None:
        return rest
    if whole.strip() in sent:
        return ""
    common = next(n for n in range(len(sent) + 1) if n == len(sent) or not whole.startswith(sent[: n + 1]))
    return whole[common:]
