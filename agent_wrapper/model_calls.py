"""Send a rollout's model calls to the model being trained, whichever endpoint the agent's client is configured with.

Clients are often created when the agent's module is imported, before any rollout is known. This module therefore
changes each request as it is sent:

- with httpx, which the SDKs of OpenAI and Anthropic use, a POST of a JSON object with `model` to a path of their APIs
  gets the endpoint, the key and the model's name of its rollout, and so does an SDK's lookup of models;
- with Strands, a call of `BedrockModel`, whose API only Bedrock has, is made through `OpenAIModel`;
- with LangChain, a call of `ChatBedrockConverse` or `ChatBedrock` fails and names the client to use instead.

Invariants:

- Outside a rollout, requests are sent unchanged.
- A request belongs to the rollout in whose context (`contextvars`) it is sent. In a thread without that context it
  belongs to the only rollout of this process; if there are several, it fails.
"""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from agent_wrapper.context import CURRENT, MAX_RETRIES, RUNNING, RolloutContext, rollout_of_this_code

# openai 3 uses httpx2.
_HTTP_CLIENTS = ("httpx", "httpx2")
_CALLS = re.compile(r"/(?:(?:chat/)?completions|messages(?:/count_tokens)?|responses(?:/input_tokens)?)$")
_MODELS = re.compile(r"/models(/.+)?$")
# OpenAI's and Anthropic's clients send this header. Other services have models, too.
_SDK = "x-stainless-lang"
_RETRY_COUNT = "x-stainless-retry-count"
_REPLACED = frozenset({"authorization", "x-api-key", "api-key", "host", "content-length", _RETRY_COUNT})
_RETRIED = frozenset({429, 502, 503, 504})
_MAX_ASKED_PAUSE_S = 60
# Parameters of OpenAI's API, and the settings of a BedrockModel.
_PARAMS = {"max_tokens": "max_tokens", "stop": "stop_sequences", "temperature": "temperature", "top_p": "top_p"}
# The SDKs create no client without a key. Each request is later sent with the key of its rollout.
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")

_installing = threading.Lock()
_installed: set[str] = set()


def leave_unchanged() -> None:
    """Leave later requests in this context unchanged."""
    CURRENT.set(None)


@contextlib.contextmanager
def redirected(context: RolloutContext) -> Iterator[None]:
    """Send the model calls made in this context to the endpoint of a rollout."""
    _install()
    token = CURRENT.set(context)
    RUNNING.append(context)
    try:
        yield
    finally:
        RUNNING.remove(context)
        CURRENT.reset(token)


def _install() -> None:
    with _installing:
        for name in _KEYS:
            os.environ.setdefault(name, "rollout")
        for name in _HTTP_CLIENTS:
            if name not in _installed and importlib.util.find_spec(name) is not None:
                _redirect_http(importlib.import_module(name))
                _installed.add(name)
        if "strands" not in _installed and importlib.util.find_spec("strands") is not None:
            _redirect_strands()
            _installed.add("strands")
        if "langchain_aws" not in _installed and importlib.util.find_spec("langchain_aws") is not None:
            _refuse_langchain_aws()
            _installed.add("langchain_aws")


def _redirect_http(module: Any) -> None:
    send, async_send = module.Client.send, module.AsyncClient.send

    @functools.wraps(send)
    def redirected_send(client: Any, request: Any, *args: Any, **more: Any) -> Any:
        context = _context_of(request)
        if context is None:
            return send(client, request, *args, **more)
        request, pauses = _redirect(request, context), _pauses(context)
        while True:
            pause_s = next(pauses)
            try:
                response = send(client, request, *args, **more)
            except module.ConnectError:
                if pause_s is None:
                    raise
            else:
                if pause_s is None or response.status_code not in _RETRIED:
                    return response
                pause_s = max(pause_s, _asked_pause(response))
                response.close()
                _count_attempt(request)
            time.sleep(pause_s)

    @functools.wraps(async_send)
    async def redirected_async_send(client: Any, request: Any, *args: Any, **more: Any) -> Any:
        context = _context_of(request)
        if context is None:
            return await async_send(client, request, *args, **more)
        request, pauses = _redirect(request, context), _pauses(context)
        while True:
            pause_s = next(pauses)
            try:
                response = await async_send(client, request, *args, **more)
            except module.ConnectError:
                if pause_s is None:
                    raise
            else:
                if pause_s is None or response.status_code not in _RETRIED:
                    return response
                pause_s = max(pause_s, _asked_pause(response))
                await response.aclose()
                _count_attempt(request)
            await asyncio.sleep(pause_s)

    module.Client.send, module.AsyncClient.send = redirected_send, redirected_async_send


def _context_of(request: Any) -> RolloutContext | None:
    """Return the rollout to whose endpoint the request is redirected; None to send it unchanged."""
    is_call = request.method == "POST" and _CALLS.search(request.url.path)
    is_lookup = request.method == "GET" and _SDK in request.headers and _MODELS.search(request.url.path)
    if not (is_call or is_lookup) or (context := rollout_of_this_code()) is None:
        return None
    if is_call and not _names_model(request):
        return None
    key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    # A client created by an earlier rollout has the same address, but its own key.
    return None if str(request.url).startswith(context.base_url) and key == context.api_key else context


def _names_model(request: Any) -> bool:
    try:
        body = json.loads(request.content)
    except (ValueError, RuntimeError):
        # The body is not JSON, or is a stream, which no SDK sends.
        return False
    return isinstance(body, dict) and isinstance(body.get("model"), str)


def _redirect(request: Any, context: RolloutContext) -> Any:
    """Return the redirected request."""
    if request.method == "GET":
        content, path = b"", "/models" if request.url.path.endswith("/models") else f"/models/{context.model}"
    else:
        content = json.dumps({**json.loads(request.content), "model": context.model}).encode()
        (path,) = _CALLS.findall(request.url.path)
    headers = [(name, value) for name, value in request.headers.multi_items() if name.lower() not in _REPLACED]
    # A call that the client gives up and repeats is sampled twice.
    left_s = None if math.isinf(context.remaining_s) else max(1.0, context.remaining_s)
    timeout = {**request.extensions.get("timeout", {}), "read": left_s}
    # Leave room for our retries between a client's counts, so that the count only grows.
    attempt = _attempt(request) * (MAX_RETRIES + 1)
    return type(request)(
        request.method,
        context.base_url + path,
        headers=[*headers, ("Authorization", f"Bearer {context.api_key}"), (_RETRY_COUNT, str(attempt))],
        content=content,
        extensions={**request.extensions, "timeout": timeout},
    )


def _pauses(context: RolloutContext) -> Iterator[float | None]:
    """Yield the pause after each attempt at the request, and None for the last one.

    Clients make few retries by default, but a rollout must outlast a restart of the training side and a full gateway.
    """
    for number in range(MAX_RETRIES):
        pause_s = min(0.5 * 2**number, 8.0)
        if pause_s >= context.remaining_s:
            break
        yield pause_s
    yield None


def _count_attempt(request: Any) -> None:
    """Mark the request as a retry. One that got no connection is not counted: the gateway would take the next
    attempt for a retry of another client's equal call."""
    request.headers[_RETRY_COUNT] = str(_attempt(request) + 1)


def _attempt(request: Any) -> int:
    count = request.headers.get(_RETRY_COUNT, "")
    return int(count[:9]) if count.isdecimal() else 0


def _asked_pause(response: Any) -> int:
    """Return the seconds that a busy gateway asks for."""
    asked = response.headers.get("retry-after", "")
    return min(int(asked[:9]), _MAX_ASKED_PAUSE_S) if asked.isdecimal() else 0


def _redirect_strands() -> None:
    from strands.models.bedrock import BedrockModel

    def substitute(model: Any) -> Any:
        if (context := rollout_of_this_code()) is None:
            return None
        # An agent for Bedrock may not have OpenAI's dependencies.
        from strands.models.openai import OpenAIModel

        params = {name: model.config[key] for name, key in _PARAMS.items() if model.config.get(key) is not None}
        return OpenAIModel(client_args=context.openai_kwargs(), model_id=context.model, params=params)

    def redirected(method: Any) -> Any:
        @functools.wraps(method)
        def call(model: Any, *args: Any, **more: Any) -> Any:
            other = substitute(model)
            return method(model, *args, **more) if other is None else getattr(other, method.__name__)(*args, **more)

        return call

    BedrockModel.stream = redirected(BedrockModel.stream)
    BedrockModel.structured_output = redirected(BedrockModel.structured_output)


def _refuse_langchain_aws() -> None:
    import langchain_aws

    def refused(method: Any) -> Any:
        @functools.wraps(method)
        def call(model: Any, *args: Any, **more: Any) -> Any:
            if rollout_of_this_code() is not None:
                raise RuntimeError(
                    f"{type(model).__name__} calls Bedrock, not the model that is trained. In a rollout, create "
                    "langchain_openai.ChatOpenAI(**context.openai_kwargs(), model=context.model) instead"
                )
            return method(model, *args, **more)

        return call

    for kind in (langchain_aws.ChatBedrockConverse, langchain_aws.ChatBedrock):
        kind._generate, kind._stream = refused(kind._generate), refused(kind._stream)
