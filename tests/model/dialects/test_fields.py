"""Compare what the gateway does with each field of the SDKs' own types with the list in `field_claims.py`.

A field that an SDK's next version adds fails here until it is listed. Most claims are send with the byte model,
which takes no images, and whose template shows neither reasoning, names nor the ids of calls.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_message_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params as legacy_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

import field_claims as claims
from field_claims import Claim, Harmless, Honoured, Ignored, Refused, Trainers, Type
from gateway_server import GatewayServer


@dataclass(frozen=True)
class Api:
    path: str
    base: dict[str, Any]
    types: dict[str, Type]
    roots: tuple[Any, ...]


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        claims.CHAT,
        claims.CHAT_TYPES,
        (completion_create_params.CompletionCreateParamsStreaming,),
    ),
    "completions": Api(
        "/v1/completions",
        claims.COMPLETIONS,
        claims.COMPLETIONS_TYPES,
        (legacy_create_params.CompletionCreateParamsStreaming,),
    ),
    "responses": Api(
        "/v1/responses",
        claims.RESPONSES,
        claims.RESPONSES_TYPES,
        (response_create_params.ResponseCreateParamsStreaming,),
    ),
    "messages": Api(
        "/v1/messages",
        claims.MESSAGES,
        claims.MESSAGES_TYPES,
        (message_create_params.MessageCreateParamsStreaming, beta_message_create_params.MessageCreateParamsStreaming),
    ),
}


# --- the SDKs' types --------------------------------------------------------------------------------------


def name_of(kind: Any) -> str:
    # Anthropic's newest SDK has a type for each role's messages.
    name = kind.__name__.removeprefix("Beta")
    return re.sub("^(User|Assistant|System)MessageParam$", "MessageParam", name)


def typed_dicts(hint: Any) -> Iterator[Any]:
    """Yield those that a field may hold."""
    if typing_extensions.is_typeddict(hint):
        yield hint
        return
    for inner in typing.get_args(hint):
        if not isinstance(inner, (str, int, type(None))):
            yield from typed_dicts(inner)


def tags(kind: Any) -> dict[str, str]:
    """Return the values of a type's discriminating fields."""
    hints = typing_extensions.get_type_hints(kind)
    return {name: value for name in ("role", "type") if name in hints for value in literals(hints[name])[:1]}


def literals(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for inner in typing.get_args(hint) if inner is not type(None) for value in literals(inner)]


@dataclass(frozen=True)
class Walked:
    fields: dict[str, set[str]]  # of each listed type
    cases: list[tuple[str, Type, str, Claim]]
    unlisted: list[tuple[str, Type, str, Any]]  # where the SDK allows a type that is not listed


def walk(api: Api) -> Walked:
    found = Walked({}, [], [])
    todo, done = list(api.roots), set()
    while todo:
        kind = todo.pop()
        if kind in done:
            continue
        done.add(kind)
        name = name_of(kind)
        claimed = api.types[name]
        hints = typing_extensions.get_type_hints(kind)
        fresh = hints.keys() - found.fields.setdefault(name, set())
        found.fields[name] |= fresh
        for field in sorted(fresh & claimed.fields.keys()):
            found.cases.append((name, claimed, field, claimed.fields[field]))
        for field in sorted(hints.keys() & claimed.fields.keys()):
            if isinstance(claimed.fields[field], Honoured):
                for inner in typed_dicts(hints[field]):
                    if name_of(inner) in api.types:
                        todo.append(inner)
                    else:
                        found.unlisted.append((name, claimed, field, inner))
    return found


WALKED = {name: walk(api) for name, api in APIS.items()}


@pytest.mark.parametrize("name", APIS)
def test_every_documented_field_is_listed(name):
    api, found = APIS[name], WALKED[name]
    unclaimed = {kind: found.fields[kind] - api.types[kind].fields.keys() for kind in found.fields}
    assert {kind: fields for kind, fields in unclaimed.items() if fields} == {}
    assert api.types.keys() == found.fields.keys(), "claims of types that no request can hold"


def test_counting_tokens_accepts_the_fields_of_a_call():
    known = claims.MESSAGES_TYPES["MessageCreateParamsStreaming"].fields.keys()
    for counted in (message_count_tokens_params, beta_message_count_tokens_params):
        assert typing_extensions.get_type_hints(counted.MessageCountTokensParams).keys() <= known


# --- the claims, one by one -------------------------------------------------------------------------------


class Sender:
    """Send requests to the shared gateway, each in a new session."""

    def __init__(self, gateway: GatewayServer, http: httpx.Client) -> None:
        self._gateway, self._http = gateway, http
        self._sessions = 0

    def __call__(self, path: str, body: dict[str, Any], reply: str = "5") -> tuple[httpx.Response, list[Any], str]:
        """Return the answer, what the engine was asked, and the answer's text without what differs between calls."""
        self._sessions += 1
        engine = self._gateway.engine
        engine.replies = lambda _: reply
        before = len(engine.requests)
        answer = self._http.post(path, json=body, headers=self._gateway.headers(f"s{self._sessions}"))
        asked = [{**request, "rid": None} for request in engine.requests[before:]]
        text = re.sub(r"[0-9a-f]{24,}|\"created(_at)?\": ?\d+", "", answer.text)
        return answer, asked, text

    def counted(self, field: str) -> tuple[int, int]:
        """Return how many settings were overridden, and how often this field was ignored."""
        stats = self._http.get("/control/stats", headers=self._gateway.control).json()
        return sum(stats["overridden"].values()), stats["ignored"].get(field, 0)


@pytest.fixture(scope="module")
def send(shared_gateway):
    with httpx.Client(base_url=shared_gateway.url, timeout=60) as http:
        yield Sender(shared_gateway.view(()), http)


def put(body: Any, at: tuple[str | int, ...], value: Any) -> Any:
    """Return the body with `value` at this place; a list's other entries stay."""
    if not at:
        return value
    first, *rest = at
    inner = body[first] if isinstance(first, int) or first in body else {}
    changed = copy.copy(body)
    changed[first] = put(inner, tuple(rest), value)
    return changed


def get(body: Any, at: tuple[str | int, ...]) -> Any:
    for step in at:
        body = body[step]
    return body


def with_type(api: Api, kind: Type) -> dict[str, Any]:
    """Return the base request with an object of this type in it."""
    return api.base if kind.given is None else put(api.base, kind.given_at or kind.at, kind.given)


CASES = [
    pytest.param(api, claimed, field, claim, id=f"{api}-{kind}-{field}")
    for api, found in WALKED.items()
    for kind, claimed, field, claim in found.cases
]


@pytest.mark.parametrize(("name", "claimed", "field", "claim"), CASES)
def test_a_field_is_handled_as_listed(send, name, claimed, field, claim):
    api = APIS[name]
    base = with_type(api, claimed)
    without = put(base, claimed.at, {**get(base, claimed.at), **claim.also})
    body = put(without, (*claimed.at, field), claim.value)
    if isinstance(claim, Refused):
        answer, asked, _ = send(api.path, body)
        assert answer.status_code == (404 if field == "model" else 400), answer.text
        assert asked == []
        says = json.loads(answer.text)["error"]["message"]
        assert field in says or any(str(step) in says for step in claimed.at[-1:]), says
        return
    _, asked_without, text_without = send(api.path, without, claim.reply)
    overridden, ignored = send.counted(field)
    answer, asked, text = send(api.path, body, claim.reply)
    assert answer.status_code == 200, answer.text
    if isinstance(claim, Honoured):
        assert (asked, text) != (asked_without, text_without)
        return
    assert isinstance(claim, (Harmless, Trainers))
    assert asked == asked_without
    now_overridden, now_ignored = send.counted(field)
    assert (now_overridden > overridden) == isinstance(claim, Trainers)
    assert now_ignored == ignored + isinstance(claim, Ignored)


@pytest.mark.parametrize("name", APIS)
def test_an_unlisted_type_is_refused_and_a_hosted_tool_left_out(send, name):
    api = APIS[name]
    assert WALKED[name].unlisted or name == "completions"
    for kind, claimed, field, unlisted in WALKED[name].unlisted:
        base = with_type(api, claimed)
        at = (*claimed.at, field)
        value = {**tags(unlisted), "name": "x", "content": "x"}
        assert tags(unlisted), f"{kind}.{field} may be a {unlisted.__name__}, which nothing tells apart"
        listed = isinstance(get(base, claimed.at).get(field), list)
        if field == "tools" and name != "chat":
            body = {**base, "tools": [*base["tools"], value]}
            before, (_, without, _) = send.counted(value["type"])[1], send(api.path, base)
            answer, asked, _ = send(api.path, body)
            assert (answer.status_code, asked) == (200, without), (unlisted.__name__, answer.text)
            assert send.counted(value["type"])[1] == before + 1
            continue
        answer, asked, _ = send(api.path, put(base, (*at, 0) if listed else at, value))
        assert (answer.status_code, asked) == (400, []), (unlisted.__name__, answer.text)
        assert field in answer.json()["error"]["message"]


# --- fields that the SDKs do not document -----------------------------------------------------------------

EXTENSIONS = {
    "continue_final_message": True,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 3,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "what_comes_next": {"a": 1},
    "add_special_tokens": True,
}


HONOURED = [("completions", "skip_special_tokens"), ("completions", "add_special_tokens")]


@pytest.mark.parametrize(
    ("name", "field"), [each for each in itertools.product(APIS, EXTENSIONS) if each not in HONOURED]
)
def test_an_unknown_field_is_refused_by_name(send, name, field):
    api = APIS[name]
    answer, asked, _ = send(api.path, {**api.base, field: EXTENSIONS[field]})
    assert (answer.status_code, asked) == (400, [])
    unknown = "Unrecognized request argument" if field in ("return_token_ids", "what_comes_next") else ""
    assert answer.json()["error"]["message"].startswith(f"{field}: {unknown}")


@pytest.mark.parametrize("name", APIS)
def test_an_unknown_field_with_its_default_is_ignored(send, name):
    nothing = {
        **dict.fromkeys(EXTENSIONS),
        "continue_final_message": False,
        "add_generation_prompt": True,
        "chat_template_kwargs": {},
        "stop_token_ids": [],
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "return_token_ids": False,
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": 1,
        "add_special_tokens": name == "completions",
        "n": 1,
        "top_logprobs": 0.0,
        "safe_prompt": False,
        "logprobs": None if name == "completions" else False,
        "what_comes_next": {},
        "plugins": [],
        "user": "a",
        **{name: {"a": "b"} for name in ("client_metadata", "session_id", "provider", "trace", "usage")},
    }
    api = APIS[name]
    _, without, _ = send(api.path, api.base)
    answer, asked, _ = send(api.path, {**api.base, **nothing})
    assert (answer.status_code, asked) == (200, without)


@pytest.mark.parametrize("name", APIS)
def test_sampling_and_reasoning_are_the_trainers_by_each_name_in_every_api(send, name):
    fields = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"), 0.5),
        "logit_bias": {"5": 1},
        "top_k": 20,
        "seed": 7.0,  # a whole number, as some languages write it
        **dict.fromkeys(("enable_thinking", "thinking_budget"), 0),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    api = APIS[name]
    _, without, _ = send(api.path, api.base)
    before, ignored = send.counted("enable_thinking")
    answer, asked, _ = send(api.path, {**api.base, **fields})
    assert (answer.status_code, asked) == (200, without), answer.text
    assert send.counted("enable_thinking") == (before + len(fields), ignored)


def test_a_name_in_a_text_is_no_ignored_field(send):
    ask = 'Set {"defer_loading": true}.'
    _, before = send.counted("defer_loading")
    off = [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": False}]
    said = [{"role": "user", "content": ask}]
    answer, *_ = send("/v1/messages", {**claims.MESSAGES, "tools": off, "messages": said})
    assert (answer.status_code, send.counted("defer_loading")[1]) == (200, before)
