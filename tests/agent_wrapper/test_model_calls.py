"""Which requests of clients that were made before their rollout go to its endpoint."""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agent_wrapper.context import CURRENT, RolloutContext
from agent_wrapper.model_calls import _redirect_http, _refuse_langchain_aws
from rollout_backend.model.dialects.registry import DIALECTS

ENDPOINT = "http://gateway/v1"
CONTEXT = RolloutContext(payload={}, base_url=ENDPOINT, api_key="session", model="org/the-model")


class Client(httpx.Client):
    """A client whose class is redirected, and no other."""


@pytest.fixture(scope="module", autouse=True)
def redirected() -> None:
    class AsyncClient(httpx.AsyncClient):
        pass

    _redirect_http(SimpleNamespace(Client=Client, AsyncClient=AsyncClient, ConnectError=httpx.ConnectError))


@pytest.fixture
def sent():
    token = CURRENT.set(CONTEXT)
    requests: list[httpx.Request] = []

    failures: list[int | Exception] = []

    def record(request: httpx.Request) -> httpx.Response:
        requests.append(type(request)(request.method, request.url, headers=request.headers, content=request.content))
        failure = failures.pop(0) if failures else 200
        if isinstance(failure, Exception):
            raise failure
        return httpx.Response(failure, json={"data": [], "id": "x"})

    with Client(transport=httpx.MockTransport(record)) as client:
        yield SimpleNamespace(client=client, requests=requests, failures=failures)
    CURRENT.reset(token)


def summary(request: httpx.Request) -> tuple[str, str | None, Any]:
    model = json.loads(request.content)["model"] if request.content else None
    return str(request.url), request.headers.get("authorization"), model


@pytest.mark.parametrize("path", [p for each in DIALECTS for p in (each.path, each.count_path) if p is not None])
def test_every_call_that_the_gateway_serves_goes_there(sent, path):
    sent.client.post(f"https://provider/api/v1{path}", json={"model": "gpt"}, headers={"x-api-key": "users"})
    assert [summary(each) for each in sent.requests] == [(ENDPOINT + path, "Bearer session", "org/the-model")]
    assert "x-api-key" not in sent.requests[0].headers


def test_an_sdks_lookups_of_models_go_there(sent):
    clients: list[Any] = [openai.OpenAI(api_key="users", http_client=sent.client)]
    clients += [anthropic.Anthropic(api_key="users", http_client=sent.client)]
    for client in clients:
        client.models.list()
        client.models.retrieve("some-model")
    asked = [(ENDPOINT + path, "Bearer session", None) for path in ("/models", "/models/org/the-model")]
    assert [summary(each) for each in sent.requests] == [*asked, *asked]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/models", None),
        ("GET", "/chat/completions", None),
        ("POST", "/embeddings", {"model": "e"}),
        ("POST", "/messages", {"text": "to a chat of people"}),
    ],
)
def test_other_requests_are_sent_unchanged(sent, method, path, body):
    sent.client.request(method, f"https://service{path}", json=body)
    assert str(sent.requests[0].url) == f"https://service{path}"


@pytest.mark.parametrize("first", [0, 2])
def test_only_attempts_that_may_have_arrived_are_counted(sent, monkeypatch, first):
    """Otherwise the gateway answers one of several equal questions with the answer of another."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    sent.failures += [httpx.ConnectError("refused"), 503, httpx.ConnectError("refused"), 502]
    headers = {"x-stainless-retry-count": str(first)}
    sent.client.post("https://provider/chat/completions", json={"model": "gpt"}, headers=headers)
    counts = [int(each.headers["x-stainless-retry-count"]) for each in sent.requests]
    assert [count - counts[0] for count in counts] == [0, 0, 1, 1, 2]
    assert counts[0] == 41 * first, "the last count of the client's own attempt before was lower"


def test_langchains_clients_of_bedrock_name_the_client_to_use(monkeypatch):
    class ChatBedrock:
        def _generate(self) -> str:
            return "from Bedrock"

        _stream = _generate

    kinds = [type(name, (ChatBedrock,), {}) for name in ("ChatBedrockConverse", "ChatBedrock")]
    monkeypatch.setitem(sys.modules, "langchain_aws", SimpleNamespace(**{kind.__name__: kind for kind in kinds}))
    _refuse_langchain_aws()
    for kind in kinds:
        assert kind()._generate() == kind()._stream() == "from Bedrock"
        token = CURRENT.set(CONTEXT)
        with pytest.raises(RuntimeError, match=f"{kind.__name__} calls Bedrock.*ChatOpenAI"):
            kind()._generate()
        with pytest.raises(RuntimeError, match="calls Bedrock"):
            kind()._stream()
        CURRENT.reset(token)
