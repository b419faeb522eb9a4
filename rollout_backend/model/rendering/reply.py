"""Build the assistant's message from the tokens of a reply, whole or while it is sampled. Pure.

Invariants:

- No sampled text is lost. A malformed tool call is returned as text, and so is any call if no tools were offered.
- With `parallel_tool_calls` false, the agent gets only the first call. The other calls were sampled, so they are
  counted and stay in the tokens that are trained and that the conversation continues from.
- The deltas of a stream add up to the recorded message. A sent delta is final.
- Text is held back while its meaning may change: an incomplete character, trailing whitespace, the start of a marker
  (of a tool call or of reasoning), and a tool call until no later text can belong to it. The caller does not add
  tokens that may start a stop string.
- The message of a stream therefore equals the parse of the whole reply. The exception is a parser that reads a prefix
  differently from the whole (whitespace before reasoning that is closed later, an unknown grammar): the sent deltas
  then remain, and the rest of the whole reply follows at the end.
- The work is linear in the reply's length: at most `_PARSES` times its tokens are parsed.

The renderer's parser accepts only whole replies. To find out which part of the reply the next token belongs to,
`StreamingParser` parses the tokens so far followed by a probe, and looks for the probe in the result. Text up to the
next marker then goes to that part without another parse.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from renderers import ParsedResponse

from rollout_backend.base.names import random_name
from rollout_backend.model.model_call import Choice, Delta, Message, ModelCall
from rollout_backend.model.rendering.guarded_renderer import CALL_START, RendererBundle
from rollout_backend.model.rendering.reasoning import OTHER_MARKERS
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.tool_call_reader import FORMATS, USABLE

logger = logging.getLogger(__name__)

# No reply contains this text.
PROBE = "zqxj"
_PARSES, _FREE_TOKENS = 16, 4096
_SEARCHES = 64
# No character has this many tokens.
_UNREAD_TOKENS = 64
# Mistral's templates accept only ids of this many characters.
_MISTRAL_ID = 9
# Calls of these renderers have no marker: any text that starts with a brace is one.
_BARE_JSON = frozenset({"llama-3"})
# Markers that are plain text in some vocabularies. In the others, an added token identifies them.
_MARKERS = (
    *("<think>", "</think>", "</tool_call>", "<tool_calls>", "</tool_calls>", "</function>", "<invoke", "</invoke>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>", "</TOOLCALL>"),
    *("</function_calls>", "<\uff5cDSML\uff5c", "</\uff5cDSML\uff5c"),
    *(form.start for form in FORMATS.values()),
    *(marker for pair in OTHER_MARKERS for marker in pair),
)
# Renderers whose grammars these markers and the added tokens cover. Replies of others are sent at the end.
_KNOWN = frozenset(
    {
        *("chatml", "default", "deepseek-r1", "deepseek-v3", "deepseek-v4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        *("gpt-oss", "hy3", "kimi-k2", "kimi-k2.5", "llama-3", "minimax-m2"),
        *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        *("prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"),
    }
)
_LONGEST = max(map(len, _MARKERS))
_ANY_MARKER = re.compile("|".join(map(re.escape, sorted(_MARKERS, key=len, reverse=True))))

Channel = Literal["reasoning", "text"]
_BEGIN, _END = ("|".join(map(re.escape, markers)) for markers in zip(*OTHER_MARKERS, strict=True))
# Remains of reasoning markup in the text.
_CLOSED_REASONING = re.compile(rf"\A\s*(?:(?:<think[^<>\s]*>|{_BEGIN})\s*)?(?:</think[^<>\s]*>|{_END})\s*")


# --- whole replies --------------------------------------------------------------------------------------------


def read_tokens(
    bundle: RendererBundle, call: ModelCall, prompt_ids: Sequence[int], completion: Completion
) -> tuple[Choice, Exception | None]:
    """Return the sampled message. A reply that the renderer cannot parse is returned as text, with the error."""
    ids, text, failure = completion.token_ids, "", None
    parsed: ParsedResponse | None = None
    try:
        parsed = bundle.renderer.parse_response(list(ids), tools=call.tools, prompt_ids=prompt_ids)
    except Exception as error:
        failure = error
    if parsed is None or not call.offers_tools:
        text = bundle.decode(ids[:-1] if bundle.ends_turn(ids) else ids)
    earlier_ids = call.call_ids if parsed is not None and parsed.tool_calls else ()
    return read_reply(parsed or ParsedResponse(content=text), text, call, completion, earlier_ids), failure


def read_reply(
    parsed: Any, text: str, call: ModelCall, completion: Completion, earlier_ids: Collection[str] = ()
) -> Choice:
    """Build the message from a `renderers.ParsedResponse`.

    `text` is the whole completion without its end token. It is not read if tools were offered. `earlier_ids` are
    those of the conversation's calls.
    """
    content, reasoning = content_and_reasoning(parsed, text, call.offers_tools)
    usable, malformed = [], 0
    # The malformed calls that the parser dropped from the content.
    missing: list[str] = []
    at = 0
    for found in parsed.tool_calls if call.offers_tools else ():
        if found.status in USABLE:
            usable.append(found)
        else:
            malformed += 1
            raw = found.raw.strip()
            # A parser drops all calls of a kind or none, so a limited number of searches keeps the work linear.
            begin = content.find(raw, at) if len(missing) < _SEARCHES else -1
            if begin < 0:
                missing.append(found.raw)
            else:
                at = begin + len(raw)
    if parsed.reasoning_complete is False and call.offers_tools and completion.finish_reason == "stop":
        # The model meant to call a tool, and did not close its reasoning.
        malformed += CALL_START.search(reasoning) is not None
    calls = _tool_calls(usable, earlier_ids)
    content = "\n".join([content, *missing] if content else missing)
    if completion.matched is not None:
        if content:
            content = _before(completion.matched, content)
        elif not calls:
            # The stop string ended the reasoning.
            reasoning = _before(completion.matched, reasoning)
    kept = calls if call.parallel_tool_calls else calls[:1]
    reason: Any = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    return Choice(
        message(content, reasoning, kept),
        reason,
        len(completion.token_ids),
        completion.matched,
        malformed_tool_calls=malformed,
        extra_tool_calls=len(calls) - len(kept),
    )


def message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    made: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = calls
    return made


def content_and_reasoning(parsed: Any, text: str, tools_offered: bool) -> tuple[str, str]:
    """Return content and reasoning, before stop strings and malformed calls are applied."""
    reasoning: str = parsed.reasoning_content or ""
    calls = parsed.tool_calls
    if tools_offered or not calls:
        return parsed.content, reasoning
    if parsed.reasoning_content is None:
        return text, reasoning
    text = text.partition(reasoning)[2] if reasoning else text
    begin = text.find(parsed.content) if parsed.content else -1
    if 0 <= begin < text.find(calls[0].raw):
        return text[begin:], reasoning
    return _CLOSED_REASONING.sub("", text), reasoning


def _before(stop: str, text: str) -> str:
    """Return `text` without the stop string that ended it. The parser may have stripped whitespace from either."""
    if stop in text:
        return text.partition(stop)[0]
    if text == stop.strip() or (stop.strip() and text.startswith(stop.lstrip())):
        return ""
    return text.removesuffix(stop.rstrip())


def _tool_calls(parsed: Sequence[Any], earlier_ids: Collection[str]) -> list[dict[str, Any]]:
    """Return the calls of a reply, with ids that are unique in the conversation: agents look results up by id."""
    calls: list[dict[str, Any]] = []
    taken, numbers = set(earlier_ids), count(len(earlier_ids))
    for each in parsed:
        arguments = each.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_id = _unused_id(each.id, taken, numbers) if each.id else f"call_{random_name()[:24]}"
        taken.add(call_id)
        function = {"name": each.name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _unused_id(sampled: str, taken: Collection[str], numbers: Iterator[int]) -> str:
    """Return the sampled id, or an unused one in its format: templates print ids, and refuse other formats. `numbers`
    are those that may be unused."""
    if sampled not in taken:
        return sampled
    name, _, number = sampled.rpartition(":")
    if name and number.isdigit():
        # Kimi numbers the calls of a conversation.
        return next(each for n in numbers if (each := f"{name}:{n}") not in taken)
    return random_name()[:_MISTRAL_ID]


def logprob_entry(token: bytes, logprob: float | None) -> Mapping[str, Any]:
    """Return one token in the format of OpenAI's chat API. A token may be only part of a character."""
    known = logprob is not None and math.isfinite(logprob)
    return {
        "token": token.decode(errors="replace"),
        "logprob": logprob if known else None,
        "bytes": list(token),
        "top_logprobs": [],
    }


# --- streams ------------------------------------------------------------------------------------------------


class StreamingParser:
    """Parses one choice of a call. Use it in one thread at a time."""

    def __init__(self, bundle: RendererBundle, prompt_ids: Sequence[int], call: ModelCall, choice: int = 0) -> None:
        self._bundle = bundle
        self._prompt_ids = prompt_ids
        self._call = call
        self._choice = choice
        self._text = _GrowingText(bundle.decode)
        self._added = bundle.added_token_ids
        # Names of the added tokens that were sampled.
        self._names: set[str] = set()
        self._probe_ids = bundle.marker_ids(PROBE)
        self._close_ids = bundle.marker_ids(bundle.renderer.reasoning_close)
        self._closed = False
        # The end of the text so far, which may contain the start of a marker.
        self._tail = ""
        # The part that ordinary text belongs to; None in a tool call, or if unknown.
        self._channel: Channel | None = None
        # Whether `_channel` must be determined again, and whether the latest tokens caused that.
        self._stale = True
        self._marked = False
        # Text of the channel that is not sent yet.
        self._held = ""
        self._sent: dict[Channel, str] = {"reasoning": "", "text": ""}
        self._calls: list[dict[str, Any]] = []
        # Whether the rest is sent only at the end.
        self._silent = bundle.name not in _KNOWN
        self._bare_json = call.offers_tools and bundle.name in _BARE_JSON
        self._parsed_tokens = 0

    @property
    def tokens_to_parse(self) -> int:
        """The number of tokens that `parse` would parse to find more deltas; 0 if it would find none."""
        read, added = self._text.read, len(self._probe_ids) + len(self._close_ids)
        may_parse = self._parsed_tokens + read <= _PARSES * read + _FREE_TOKENS
        return read + added if self._marked and may_parse else 0

    def add(self, ids: Sequence[int]) -> list[Delta]:
        """Return the deltas that can be sent after these new ids, without work proportional to the whole reply.

        If `tokens_to_parse` is positive afterwards, `parse` returns the deltas.
        """
        self._marked = False
        if self._silent:
            return []
        text = self._text.add(ids)
        self._silent = self._text.unread > _UNREAD_TOKENS
        if not text:
            return []
        added = self._added.intersection(self._text.last)
        self._names |= {self._bundle.decode([token]) for token in added}
        marked = (found.end() > len(self._tail) for found in _ANY_MARKER.finditer(self._tail + text))
        self._stale |= bool(added) or any(marked)
        self._tail = (self._tail + text)[-_LONGEST + 1 :]
        self._marked = self._stale
        if self._stale or self._channel is None:
            return []
        self._held += text
        return self._release(self._channel)

    def emitted(self, token_bytes: Mapping[int, bytes]) -> int:
        """Return how many of the tokens so far were emitted: all except those of held text."""
        ids = self._text.ids()
        held = len(self._held.encode()) if self._channel is not None else 0
        while held > 0 and ids:
            held -= len(token_bytes.get(ids.pop(), b""))
        return len(ids)

    def end(self, reply: Choice) -> tuple[list[Delta], Choice]:
        """Return the remaining deltas of `reply`, the parsed whole, and the reply that all deltas add up to."""
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

    def parse(self) -> list[Delta]:
        """Parse the tokens so far, return what can be sent, and determine which part later text belongs to."""
        parsed = self._parse(self._text.ids(), self._probe_ids)
        if parsed is None:
            return []
        text, reasoning, calls = parsed
        self._stale = False
        if calls and PROBE in calls[-1].raw:
            self._channel, calls = None, calls[:-1]
        elif text.endswith(PROBE):
            self._channel, text = "text", text.removesuffix(PROBE)
        elif reasoning.endswith(PROBE):
            self._channel, reasoning = "reasoning", reasoning.removesuffix(PROBE)
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
            # A probe within the text shows that a call is open.
            if PROBE not in text:
                deltas += self._take("text", text)
                # A call is sent only after the text before it.
                if not self._silent:
                    usable = [call for call in calls if call.status in USABLE]
                    deltas += self._send_calls(_tool_calls(usable, self._call.call_ids))
        if self._channel is not None and not (self._sent[self._channel] or self._held.strip()):
            # Some parsers drop whitespace before the first word, so parse again when a word arrives.
            self._stale = True
        return deltas

    def _parse(self, ids: Sequence[int], more: Sequence[int]) -> tuple[str, str, list[Any]] | None:
        """Return text, reasoning and tool calls; None if the parser fails."""
        ids = [*ids, *more]
        self._parsed_tokens += len(ids)
        try:
            parsed = self._bundle.renderer.parse_beginning(ids, tools=self._call.tools, prompt_ids=self._prompt_ids)
        except Exception:
            # Parsers expect whole replies, so parsing the whole may still succeed.
            logger.debug("the renderer cannot parse an incomplete reply", exc_info=True)
            return None
        if self._call.offers_tools:
            return *content_and_reasoning(parsed, "", tools_offered=True), parsed.tool_calls
        return *content_and_reasoning(parsed, self._bundle.decode(ids), tools_offered=False), []

    def _reasoning_is_over(self, reasoning: str, calls: bool) -> bool:
        """Return whether the reasoning cannot continue.

        If a tool call ends the reasoning, some parsers move the call into the reasoning when an end marker follows.
        """
        if not self._closed and (reasoning or calls):
            closed = self._parse(self._text.ids(), self._close_ids)
            self._closed = closed is not None and closed[1].strip() == reasoning.strip()
            return self._closed
        return True

    def _take(self, channel: Channel, now: str) -> list[Delta]:
        """Update a channel, whose whole text so far is `now`."""
        rest = _rest(self._sent[channel], now)
        if rest is None:
            # The parser now reads the text differently, so send the rest at the end.
            self._silent = True
            return []
        self._held = rest
        return self._release(channel)

    def _release(self, channel: Channel) -> list[Delta]:
        """Send the part of the held text whose meaning can no longer change."""
        held = self._held
        if channel == "text" and self._bare_json and (self._sent["text"] + held).lstrip().startswith("{"):
            return []
        safe = len(held)
        # A special token starts markup, which the following tokens complete.
        for name in self._names:
            found = held.find(name)
            # DeepSeek V4's marker follows a bracket.
            found -= held[found - 1 : found] == "<"
            safe = min(safe, found if found >= 0 else safe)
        safe = min(safe, _open_marker(held))
        safe = len(held[:safe].rstrip())
        self._held = held[safe:]
        return self._send(channel, held[:safe])

    def _send(self, channel: Channel, text: str) -> list[Delta]:
        if not text:
            return []
        self._sent[channel] += text
        return [Delta(channel, text, choice=self._choice)]

    def _send_calls(self, calls: list[dict[str, Any]]) -> list[Delta]:
        """Send new calls. `calls` are all calls so far."""
        more = (calls if self._call.parallel_tool_calls else calls[:1])[len(self._calls) :]
        self._calls += more
        return [Delta("tool_call", tool_call=call, choice=self._choice) for call in more]


class _GrowingText:
    """Decodes a growing sequence of token ids into whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # The start of the last piece, because some tokens decode differently at the start of a string.
        self._before = 0
        # The number of tokens whose text was returned, and the tokens of the last piece.
        self.read = 0
        self.last: Sequence[int] = ()

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


def _open_marker(text: str) -> int:
    """Return where an incomplete marker starts at the end of `text`; the length of `text` if nowhere.

    A marker has a bracket that opens only at its start.
    """
    at = max(text.rfind("<"), text.rfind("["))
    begun = at >= 0 and any(len(marker) > len(text) - at and marker.startswith(text[at:]) for marker in _MARKERS)
    return at if begun else len(text)


def _rest(sent: str, now: str) -> str | None:
    """Return the part of `now` after `sent`; None if `now` does not start with `sent`.

    Leading whitespace is not compared, because some parsers drop it once text follows.
    """
    if now.startswith(sent):
        return now[len(sent) :]
    now, sent = now.lstrip(), sent.lstrip()
    return now[len(sent) :] if now.startswith(sent) else None


def _beyond(sent: str, whole: str) -> str:
    """Return the part of `whole` that was not sent, even if `whole` does not start with `sent`."""
    rest = _rest(sent, whole)
    if rest is not None:
        return rest
    if whole.strip() in sent:
        return ""
    differs = (i for i, (one, other) in enumerate(zip(sent, whole, strict=False)) if one != other)
    return whole[next(differs, len(sent)) :]
