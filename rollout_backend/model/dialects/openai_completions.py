"""Speak OpenAI's legacy Completions API: `POST /v1/completions`, with text or token ids. Pure.

Invariants:

- The model sees exactly the prompt: no chat template, no tools, and reasoning is not separated from the text. As in
  vLLM and SGLang, the text has the names of special tokens only with `skip_special_tokens` false.
- A prompt that starts with an earlier prompt, as text or as token ids, and with the beginning of its reply extends
  that row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rollout_backend.model.dialects import base
from rollout_backend.model.dialects.base import Dialect, EventStream, ignored, refuse, refused
from rollout_backend.model.dialects.openai_chat import ChatEvents, CompletionFields, usage
from rollout_backend.model.model_call import Answer, Delta, ModelCall

# The default of this API and of the engines.
_MAX_TOKENS = 16


def _one_prompt(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError(f"holds {len(value)} prompts; send one per call")
        (value,) = value
    if isinstance(value, list) and all(type(token) is int for token in value):
        value = tuple(value)
    if not isinstance(value, (str, tuple)):
        raise ValueError("must be a string or a list of token ids")  # noqa: TRY004  what pydantic reports
    if not value:
        raise ValueError("is empty; there is nothing to continue")
    return value


class _Request(CompletionFields):
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_one_prompt)]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: Annotated[Any, refuse("only the logprobs of sampled tokens are available; ask for 0", 0)] = None
    best_of: int | None = None
    # vLLM's and SGLang's APIs have this field.
    skip_special_tokens: bool | None = None
    echo: Annotated[Any, refuse("only what was sampled is returned; leave it out", False)] = None
    add_special_tokens: Annotated[Any, refuse("the tokenizer adds them to text; send token ids", True)] = None
    suffix: Annotated[Any, refuse("text cannot be inserted before a suffix; leave it out", "")] = None


class OpenAICompletions(Dialect):
    """The dialect of `POST /v1/completions`."""

    name = "openai_completions"
    path = "/completions"

    def parse(self, body: bytes) -> ModelCall:
        request = base.read(_Request, body)
        choices = request.n or 1
        if request.best_of not in (None, choices):
            raise refused("best_of", "all choices are returned; set n instead")
        prompt = request.prompt
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        return ModelCall(
            model=request.model,
            messages=[{"role": "user", "content": text}],
            prompt=prompt,
            shows_special_tokens=request.skip_special_tokens is False,
            max_new_tokens=request.max_tokens or _MAX_TOKENS,
            stop=request.stop or (),
            n=choices,
            logprobs=request.logprobs is not None,
            stream=bool(request.stream),
            sampling=base.sampling_of(request),
            ignored=ignored(body, request.model_extra),
            dialect_data=bool(request.stream_options and request.stream_options.include_usage),
        )

    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choices = [
            _choice(i, choice.message.get("content") or "", choice.finish_reason, _logprobs(choice.logprobs))
            for i, choice in enumerate(answer.choices)
        ]
        return {**_head(answer.id, answer.created, answer.model), "choices": choices, "usage": usage(answer)}

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        return _Events(call, _head(answer_id, created, model))


def _head(answer_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{answer_id}", "object": "text_completion", "created": created, "model": model}


def _choice(index: int, text: str, reason: str | None, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(entries: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    if not entries:
        return None
    tokens, offsets, at = [entry["token"] for entry in entries], [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    logprobs = [entry["logprob"] for entry in entries]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


class _Events(ChatEvents):
    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        yield from ()

    def delta(self, delta: Delta) -> Iterator[bytes]:
        yield self._chunk(delta.choice, delta.text, delta.logprobs)

    def _chunk(
        self, i: int, said: Any, logprobs: Sequence[Mapping[str, Any]] = (), reason: str | None = None
    ) -> bytes:
        self._given[i] += len(logprobs)
        choice = _choice(i, said or "", reason, _logprobs(logprobs))
        return base.data_event({**self._head, "choices": [choice]})
