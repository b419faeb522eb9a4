"""Render ChatML with Hermes-style tools: SmolLM2, Qwen2 and its derivatives, and the byte-level model of the tests.

Invariants:

- Without tools, the rendering equals the model's own chat template token for token, with its default system message.
- `bridge_to_next_turn` keeps every sampled token and only appends.
- Special-token names in a message's content are encoded as text, so no content can end or forge a turn.
- A tool call that cannot be parsed stays in the reply's content, so that the agent sees what the model wrote.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from renderers import (
    BaseRendererConfig,
    ParsedResponse,
    RenderedTokens,
    reject_assistant_in_extension,
    trim_to_turn_close,
)

from rollout_backend.model.rendering.token_bytes import decode
from rollout_backend.model.rendering.tool_call_reader import HERMES, read_calls

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_START, _END = "<|im_start|>", "<|im_end|>"
_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc]
    name: Literal["chatml"] = "chatml"


class ChatMLRenderer:
    """Implements the `renderers.Renderer` protocol for ChatML.

    The tokens have no masks or messages, because the trajectory records which tokens were sampled.
    """

    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        self.config = config or ChatMLConfig()
        self._tokenizer = tokenizer
        self._start = self._special(_START)
        self._end = self._special(_END)
        self._default_system = _default_system(tokenizer)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        system, turns = self._default_system, messages
        if messages[0]["role"] == "system":
            system, turns = _text(messages[0]), messages[1:]
        if tools:
            listed = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            system = f"{system}\n\n{listed}" if system is not None else listed
        ids = [] if system is None else self._turn("system", system)
        ids += self._turns(turns)
        return RenderedTokens(token_ids=ids + self._generation_prompt() if add_generation_prompt else ids)

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        ids: list[int] = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids
        return ids

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Sequence[Tool] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Parse a reply. Search its text for tool calls, as some vocabularies have no token for `<tool_call>`."""
        ids = list(token_ids)
        if self._end in ids:
            ids = ids[: ids.index(self._end)]
        before, start, rest = decode(self._tokenizer, ids).partition(HERMES.start)
        said, calls = read_calls(HERMES, start + rest)
        content = before + said
        if calls:
            # Strip the text around the calls, except before the first one, because a stream has already sent it.
            content = content.rstrip() if before.strip() else content.strip()
        return ParsedResponse(content=content, tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
    ) -> RenderedTokens | None:
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(list(new_messages)):
            return None
        # A turn that was cut off at the token limit has no end token. Add one, which the model did not sample.
        ids = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self._end}, synthesize_close=self._end
        )
        new = [*self._newline, *self._turns(new_messages), *self._generation_prompt()]
        return RenderedTokens(token_ids=[*ids, *new])

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        """Return the turns of the messages. Consecutive tool results form one user turn."""
        ids: list[int] = []
        for role, group in groupby(messages, key=lambda message: message["role"]):
            if role == "tool":
                results = (f"<tool_response>\n{_text(message)}\n</tool_response>" for message in group)
                ids += self._turn("user", "\n".join(results))
                continue
            for message in group:
                ids += self._turn(role, _assistant_text(message) if role == "assistant" else _text(message))
        return ids

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._start, *self._encode(f"{role}\n{text}"), self._end, *self._newline]

    def _generation_prompt(self) -> list[int]:
        return [self._start, *self._reply_header]

    @cached_property
    def _newline(self) -> Sequence[int]:
        return self._encode("\n")

    @cached_property
    def _reply_header(self) -> Sequence[int]:
        return self._encode("assistant\n")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def _special(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        if found is None or self._tokenizer.convert_ids_to_tokens(found) != token:
            raise ValueError(f"the tokenizer has no token {token}: this is not a ChatML model")
        return int(found)


def _default_system(tokenizer: Any) -> str | None:
    """Return the system message that the model's template adds to a conversation without one."""
    if not tokenizer.chat_template:
        return None
    probe = tokenizer.apply_chat_template([{"role": "user", "content": "."}], tokenize=False)
    match = re.match(rf"{re.escape(_START)}system\n(.*?){re.escape(_END)}", probe, re.DOTALL)
    return match[1] if match else None


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _assistant_text(message: Message) -> str:
    pieces = [_text(message)] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        pieces.append(f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>')
    return "\n".join(pieces)
