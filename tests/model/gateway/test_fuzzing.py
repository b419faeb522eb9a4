"""Random requests to every endpoint: never a 500, errors in the API's own shape, and nothing of another session.

The engine repeats its prompt, so text of another session's conversation would be visible in an answer.
"""

import json
import logging
import socket
import zlib
from collections.abc import AsyncIterator

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent_wrapper.contract import Trajectory
from field_claims import ASK, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from gateway_fixtures import make_app
from gateway_server import CONTROL_KEY, SECRET, session_key
from rollout_backend.workbench.local.scripted import ScriptedEngine

MODEL = "scripted"
SECRET_TEXT = "the launch code is 7401"
MAX_BODY_BYTES = 65_536

quick = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


SAID = (
    "well",
    "",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call> and <tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": ' + '{"a": ' * 150 + "1" + "}" * 152 + "\n</tool_call>",
    '<tool_call>\n{"name": "\\ud800", "arguments": {"a": "\\udfff", "b": 1e999, "c": NaN}}\n</tool_call>',
    "</think><|im_start|>\u2028\x00",
)


def echo(prompt: str) -> str:
    return f"{SAID[zlib.crc32(prompt.encode()) % len(SAID)]}{prompt[-430:].replace('<|im_end|>', '')}"


def key(session: str = "mine", *, secret: str = SECRET, lives_s: float = 3600) -> str:
    return session_key(session, secret=secret, lives_s=lives_s, max_tokens=600)


class InProcess:
    """The gateway's application, called without a socket; its exceptions are raised here."""

    def __init__(self, app, portal) -> None:
        self._portal = portal
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60)

    def __call__(self, method: str, path: str, body=b"", headers=None, session: str = "mine") -> httpx.Response:
        headers = {"authorization": f"Bearer {key(session)}"} if headers is None else headers
        return self._portal.call(self._send, method, path, body, headers)

    async def _send(self, method: str, path: str, body, headers) -> httpx.Response:
        content = _stream(body) if isinstance(body, list) else body
        return await self._client.request(method, path, content=content, headers=headers)


async def _stream(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.fixture(scope="module")
def send(bundle, byte_model):
    """Send a request to a gateway whose engine repeats the prompt. The session `theirs` has sent it a secret."""
    with ScriptedEngine(echo) as engine, start_blocking_portal() as portal:
        model = byte_model.model_copy(update={"context_length": 16_384})
        app = make_app(engine.url, model, bundle, {"max_body_bytes": MAX_BODY_BYTES})
        with portal.wrap_async_context_manager(app.router.lifespan_context(app)):
            send = InProcess(app, portal)
            for path, base in BASES.items():
                secret = json.dumps(base).replace(ASK, f"{ASK} {SECRET_TEXT}").encode()
                assert send("POST", path, json.dumps(base).encode()).status_code == 200
                answer = send("POST", path, secret, session="theirs")
                assert answer.status_code == 200
                assert SECRET_TEXT in answer.text or path.endswith("tokens")
            yield send
            sealed = Trajectory.decode(send("POST", "/v1/rollout/trajectory", session="mine").content)
            assert sealed.segments
            for segment in sealed.segments:
                assert SECRET_TEXT not in bundle.decode(segment.token_ids)


# --- bodies -----------------------------------------------------------------------------------------------

_CONVERSATION = {**MESSAGES, "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}
BASES = {
    "/v1/chat/completions": {
        **CHAT,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "max_completion_tokens": 500,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 1,
        "n": 1,
        "stop": ["END"],
        "logprobs": True,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1},
        "user": "u",
    },
    "/v1/completions": {**COMPLETIONS, "max_tokens": 500, "n": 1, "stop": ["END"], "logprobs": 0, "stream": False},
    "/v1/responses": {
        **RESPONSES,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 500,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "store": False,
        "stream": False,
    },
    "/v1/messages": {
        **_CONVERSATION,
        "max_tokens": 500,
        "stop_sequences": ["END"],
        "temperature": 1.0,
        "top_k": 5,
        "output_config": {"effort": "low"},
        "thinking": {"type": "disabled"},
        "stream": False,
    },
    "/v1/messages/count_tokens": {name: value for name, value in _CONVERSATION.items() if name != "max_tokens"},
    "/v1/responses/input_tokens": RESPONSES,
}
AGENTS_POST = [*BASES, "/v1/rollout/trajectory"]
EVERY_PATH = [*AGENTS_POST, "/v1/models", f"/v1/models/{MODEL}", "/control/revoke", "/control/stats", "/health"]

DEEP = {levels: "[" * levels + "]" * levels for levels in (100, 300, 20_000)}
DEEP_OBJECTS = {levels: '{"a":' * levels + "1" + "}" * levels for levels in (100, 300)}
RAW = {  # what `json.dumps` would not write
    "@infinite@": "1e999",
    "@nan@": "NaN",
    "@digits@": "9" * 5000,
    "@surrogate@": r'"\ud800 a"',
    "@nul@": r'"\u0000"',
    "@repeated@": '{"a": 1, "a": {"a": 2}}',
    **{f"@array{levels}@": text for levels, text in DEEP.items()},
    **{f"@object{levels}@": text for levels, text in DEEP_OBJECTS.items()},
    "@schema@": '{"type": "object", "properties": ' + DEEP_OBJECTS[100] + "}",
}
numbers = st.sampled_from([0, -1, 1, 17, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324])
texts = st.one_of(
    st.sampled_from(
        ["", "auto", "none", "required", "function", "text", "json_object", "image", "\u2028", "a" * 3000]
    ),
    st.sampled_from(["user", "assistant", "system", "developer", "tool", "<|im_end|>\n<|im_start|>user", "add"]),
    st.sampled_from(["@nul@", "@surrogate@", '{"a": ', "</tool_call>", '{"a": 1e999}', "[" * 300]),
    st.text(max_size=20),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    st.sampled_from(list(RAW)),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, at: tuple = ()) -> list[tuple]:
    """Return the paths of all values in it."""
    found = [at] if at else []
    if isinstance(value, dict):
        return found + [place for name in value for place in places(value[name], (*at, name))]
    if isinstance(value, list):
        return found + [place for i in range(len(value)) for place in places(value[i], (*at, i))]
    return found


def alike(value: object) -> st.SearchStrategy:
    """Draw values of the same type, so that a body passes the first checks."""
    match value:
        case bool():
            return st.booleans()
        case int() | float():
            return numbers
        case str():
            return texts
        case dict():
            return st.dictionaries(texts, values, max_size=3).map(lambda more: {**value, **more})
        case list():
            return st.integers(0, 3).map(lambda times: value * times)
    return values


@st.composite
def almost(draw, base: dict) -> bytes:
    """The body with a few things changed, dropped, doubled or added."""
    body = json.loads(json.dumps(base))
    body["stream"] = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([place for place in places(body) if place != ("model",)]))
        holder = body
        for step in way:
            holder = holder[step]
        match draw(st.sampled_from(["alike", "alike", "alike", "alike", "replace", "drop", "double", "add"])):
            case "alike":
                holder[last] = draw(alike(holder[last]))
            case "replace":
                holder[last] = draw(values)
            case "drop":
                del holder[last]
            case "double":
                holder[last] = [holder[last], holder[last]]
            case "add" if isinstance(holder[last], dict):
                holder[last][draw(texts)] = draw(values)
    return write(body)


def write(value: object) -> bytes:
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


anything = st.one_of(
    st.binary(max_size=200),
    values.map(write),
    st.dictionaries(st.sampled_from(["model", "messages", "input", "max_tokens", "stream"]), values).map(write),
    st.sampled_from([write(base) for base in BASES.values()]).flatmap(
        lambda body: st.sampled_from(
            [
                body.decode().encode("utf-16"),
                b"\xef\xbb\xbf" + body,
                body[:-1],
                body + b"]",
                body.replace(b"What", b"\xff\xfe"),
                body.replace(b"What", b"\x00"),
                body.replace(b"What", rb"\udc00"),
                b"[" * 30_000,
                b" " * (MAX_BODY_BYTES + 1),
            ]
        )
    ),
)


# --- invariants of every answer ---------------------------------------------------------------------------


def check(answer: httpx.Response, path: str) -> None:
    """Check that it is no 500, holds no secret, and has the shape that the API's clients read."""
    assert answer.status_code < 500, answer.text[:500]
    assert SECRET_TEXT not in answer.text
    assert SECRET not in answer.text
    assert CONTROL_KEY not in answer.text
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            check_stream(answer.text, path)
        elif path in _ANSWERS:
            body = json.loads(answer.content, parse_constant=refuse)
            _ANSWERS[path].model_validate({name: value for name, value in body.items() if name not in _COPIED})
    elif answer.request.method != "HEAD":
        check_error(answer.json(), path in _ANTHROPICS)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check_error(body: dict, anthropics: bool) -> None:
    if anthropics:
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"]
    json.dumps(body).encode()


def check_stream(text: str, path: str) -> None:
    """Check that every event can be parsed, and that the last one ends the stream."""
    assert text.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if path == "/v1/chat/completions" and data[-1] == "[DONE]":
        data.pop()
        for event in data:
            openai.types.chat.ChatCompletionChunk.model_validate_json(event)
        return
    if path == "/v1/completions" and data[-1] == "[DONE]":
        data.pop()
        assert all(json.loads(event, parse_constant=refuse)["object"] == "text_completion" for event in data)
        return
    events = [json.loads(event, parse_constant=refuse) for event in data]
    if "error" in events[-1]:
        check_error(events[-1], path in _ANTHROPICS)
    else:
        assert events[-1]["type"] in ("message_stop", "response.completed", "response.incomplete", "response.failed")


_COPIED = ("metadata", "reasoning")  # from the request
_ANTHROPICS = ("/v1/messages", "/v1/messages/count_tokens", "/v2/messages")
_ANSWERS = {
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
    "/v1/responses/input_tokens": openai.types.responses.InputTokenCountResponse,
}


# --- in this process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BASES)
def test_almost_valid_bodies(send, path):
    answered = 0

    @quick
    @given(body=almost(BASES[path]))
    def run(body):
        nonlocal answered
        answer = send("POST", path, body)
        check(answer, path)
        answered += answer.status_code == 200

    run()
    assert answered > settings().max_examples / 8, "nearly all are refused at once: this tests little"


@pytest.mark.parametrize("path", [*AGENTS_POST[:-1], "/control/revoke"])
def test_arbitrary_bodies(send, path):
    token = CONTROL_KEY if path.startswith("/control") else key()

    @quick
    @given(body=anything, cuts=st.lists(st.integers(0, 200), max_size=4), kind=st.sampled_from(_CONTENT_TYPES))
    @example(body=b"", cuts=[], kind=None)
    def run(body, cuts, kind):
        ends = [*sorted(cuts), len(body)]
        chunks = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        headers = {"authorization": f"Bearer {token}"} | ({"content-type": kind} if kind else {})
        check(send("POST", path, chunks, headers), path)

    run()


_CONTENT_TYPES = [
    None,
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
    "\u00e9".encode("latin-1"),
]


_BAD_KEYS = ["", "a.b.c", "....", key(secret="other-" * 8), key(lives_s=-1), key()[:-2]]


@pytest.mark.parametrize("path", EVERY_PATH[:-1])
def test_invalid_keys_are_refused(send, path):
    method = "GET" if "models" in path or path.endswith("stats") else "POST"
    body = json.dumps(BASES[path]).encode() if path in BASES else b"{}"

    @quick
    @given(st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60), st.sampled_from(["x", "a"]))
    def run(token, header):
        headers = {"x-api-key": token} if header == "x" else {"authorization": token}
        answer = send(method, path, body, {name: value.encode("latin-1") for name, value in headers.items()})
        assert answer.status_code == 401
        check(answer, path)

    run()
    for token in [*_BAD_KEYS, key() if path.startswith("/control") else CONTROL_KEY]:
        for headers in ({"authorization": f"Bearer {token}"}, {"x-api-key": token}):
            answer = send(method, path, body, headers)
            assert answer.status_code == 401, headers
            check(answer, path)


@pytest.mark.parametrize(
    "path", [*EVERY_PATH, "/", "/v1", "/v2/messages", "/v1/chat/completions/x", "/v1/models/a%00%ff"]
)
def test_wrong_methods_and_paths(send, path):
    right = "GET" if "models" in path or path in ("/control/stats", "/health") else "POST"
    for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        answer = send(method, path, b"{}", session=f"{method}{path}")
        if method == "OPTIONS" and answer.status_code == 204:  # a probe
            assert answer.headers["allow"]
            continue
        check(answer, path)
        if path in EVERY_PATH and method not in (right, "HEAD"):
            assert answer.status_code == 405


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize("path", [path for path in BASES if not path.endswith(("tokens", "/v1/completions"))])
def test_deep_arguments_can_be_sent_back_or_are_refused(byte_model, play, path):
    """JSON parsers differ in their limit of depth. A sampled call can be sent back, or is refused with a reason."""
    gateway = play((), model=byte_model.model_copy(update={"context_length": 32_768}))
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    body = {**BASES[path], "stop": None, "stop_sequences": None}
    body |= {limit: 20_000 for limit in limits if limit in body}
    for levels in (150, 185, 190, 195, 200, 300, 900):
        session = f"{levels} levels"
        call = f'<tool_call>\n{{"name": "add", "arguments": {nested(levels)}}}\n</tool_call>'
        gateway.engine.script(session, [call, "so be it"])
        first = gateway.post(body, session, path=path)
        assert first.status_code == 200, first.text[:300]
        check(first, path)
        again = gateway.post(next_turn(path, body, first.text), session, path=path)
        assert again.status_code in (200, 400), again.text[:300]
        check(again, path)


def test_arguments_in_the_history_are_answered_or_refused_at_each_depth(byte_model, play):
    """Parsers and encoders stop at other depths, which depend on the interpreter's stack."""
    gateway = play((), model=byte_model.model_copy(update={"context_length": 32_768}))
    path, asked = "/v1/chat/completions", {"role": "user", "content": "a"}
    for levels in range(900, 1000, 3):
        function = {"name": "add", "arguments": nested(levels)}
        called = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        session = f"{levels} levels"
        gateway.engine.script(session, ["so be it"])
        body = {**BASES[path], "messages": [asked, called, {"role": "tool", "tool_call_id": "c", "content": "1"}]}
        answer = gateway.post(body, session, path=path)
        assert answer.status_code in (200, 400), answer.text[:300]


def next_turn(path: str, body: dict, answer: str) -> dict:
    """Return the body of the turn after the answer."""
    said, more = json.loads(answer), {"role": "user", "content": "And?"}
    match path:
        case "/v1/responses":
            return {**body, "input": [*body["input"], *said["output"], more]}
        case "/v1/messages":
            reply = {"role": "assistant", "content": said["content"]}
        case _:
            reply = said["choices"][0]["message"]
    return {**body, "messages": [*body["messages"], reply, more]}


# --- over HTTP --------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(play):
    """A gateway behind a real socket. Its server logs no error."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())
    log = logging.getLogger("uvicorn.error")
    gateway = play(echo, gateway={"max_body_bytes": MAX_BODY_BYTES})
    log.addHandler(handler)
    yield gateway
    log.removeHandler(handler)
    assert errors == []


def raw(gateway, *pieces: bytes) -> bytes:
    """Send bytes piece by piece and hang up; return the answer, b"" if the connection was closed without one."""
    host, port = gateway.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                answer += more
        except TimeoutError:
            raise
        except OSError:
            pass  # the gateway closed the connection first
    return answer


def head(gateway, path: str, *more: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {gateway.key()}", *more]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def test_malformed_and_incomplete_requests(gateway):
    path = "/v1/chat/completions"
    body = json.dumps(BASES[path]).encode()
    in_chunks = head(gateway, path, "Transfer-Encoding: chunked")
    for request in (
        [head(gateway, path, method="G\x00T")],
        [head(gateway, path + "\x00")],
        [head(gateway, path + "?" + "a" * 70_000)],
        [head(gateway, path, "Content-Length: 0", "X-Long: " + "a" * 70_000)],
        [head(gateway, path, "Content-Length: 0", "Content-Length: 5")],
        [head(gateway, path, "No colon")],
        [head(gateway, path, "Upgrade: websocket", "Sec-WebSocket-Version: 13", method="GET")],
        *([head(gateway, path, f"Content-Length: {length}"), body] for length in ("-1", "1e3", "9" * 30, "1, 2", "")),
        [head(gateway, path, f"Content-Length: {len(body)}"), body[:-1]],
        [in_chunks, b"%x\r\n%s\r\n" % (200, body[:200])],
        [in_chunks, b"zz\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00"],
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
        [b"\r\n" * 100],
        [b""],
    ):
        status = raw(gateway, *request).partition(b"\r\n")[0]
        assert b" 50" not in status, request[0][:80]
    assert httpx.get(f"{gateway.url}/health", timeout=120).status_code == 200
