"""Refuse request fields that this backend does not support, and ignore harmless ones.

Invariants:

- A field that changes the meaning of a call is supported or refused, never dropped. Unknown top-level fields are
  therefore refused, unless they are null.
- A field is harmless if it changes neither the prompt nor the sampling: storage, billing, caching, latency. Such
  fields are counted: see `ignored`.
- The trainer sets sampling and reasoning. The agent's settings are counted as overridden and ignored (see
  `sampling`).
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import AfterValidator

from rollout_backend.core.api_error import ApiError

# Clients send these in addition to the documented fields.
_HARMLESS = frozenset({"cache_salt", "client_metadata", "priority", "request_id", "rid"})
_TEMPLATE = "the chat template and its options are the trainer's (model.renderer_options); leave it out"
_FORM = "ask for a form by a JSON schema in this API's own field for it, or in the prompt"
_END = "a reply ends at the model's own end token, at a stop string or at its limit; leave it out"
_READ = "a reply is always text and reasoning apart, without control tokens; leave it out"
_EXTENSIONS: Mapping[str, tuple[str, tuple[Any, ...]]] = {  # advice, and the values that change nothing
    "add_generation_prompt": ("a reply always starts a new turn; leave it out", (True,)),
    "continue_final_message": ("this model cannot continue a prefilled reply; leave it out", (False,)),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "enable_thinking"), (_TEMPLATE, ({},))),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (_FORM, ())),
    **dict.fromkeys(("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"), (_FORM, ())),
    **dict.fromkeys(("stop_token_ids", "stop_regex"), ("send stop strings instead", ([],))),
    "ignore_eos": (_END, (False,)),
    **dict.fromkeys(
        ("include_reasoning", "separate_reasoning", "stream_reasoning", "skip_special_tokens"), (_READ, (True,))
    ),
    **dict.fromkeys(("no_stop_trim", "return_token_ids"), (_READ, (False,))),
    "min_tokens": (_END, (0,)),
    "stop": ("this API has no stop strings", ([],)),
}
# Fields in parts of a request. Quotes within strings are escaped, so strings never match; nor do disabled values.
_NESTED = {
    name: (f'"{name}"'.encode(), re.compile(rf'"{name}"\s*+:\s*+(?!null\b|false\b)'.encode()))
    for name in ("cache_control", "defer_loading", "eager_input_streaming", "prompt_cache_breakpoint")
}


def refuse(advice: str, *fine: Any) -> AfterValidator:
    """Mark a field as refused with `advice`, unless it is null or one of the `fine` values."""

    def check(value: Any) -> Any:
        if value is not None and value not in fine:
            raise ValueError(advice)
        return value

    return AfterValidator(check)


def refused(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where)


def refuse_unknown(fields: Mapping[str, Any] | None, harmless: Collection[str]) -> None:
    """Refuse request fields that the dialect does not read.

    Raises:
        ApiError: status 400; names the first field that is neither null nor harmless.
    """
    for name, value in (fields or {}).items():
        if value is None or name in harmless or name in _HARMLESS:
            continue
        advice, fine = _EXTENSIONS.get(name, ("is not known here and might change the call; leave it out", ()))
        if value not in fine:
            raise refused(name, advice)


def ignored(body: bytes, fields: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of the harmless fields in a request that `refuse_unknown` accepted."""
    given = {name for name, value in (fields or {}).items() if value is not None and name not in _EXTENSIONS}
    return frozenset(given.union(name for name, (key, on) in _NESTED.items() if key in body and on.search(body)))
