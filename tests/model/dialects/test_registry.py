"""A new dialect is one class: the gateway learns its path and the shape of its errors from it."""

import json
from collections.abc import Iterator

import httpx

from rollout_backend.model.dialects.base import Dialect
from rollout_backend.model.dialects.registry import DIALECTS, dialect_of_client
from rollout_backend.model.model_call import Answer, ApiError, Delta, ModelCall
from rollout_backend.workbench.local.scripted import ScriptedEngine


class ToyEvents:
    def start(self, prompt_tokens: int) -> Iterator[bytes]:
        yield f"prompt={prompt_tokens}\n\n".encode()

    def delta(self, delta: Delta) -> Iterator[bytes]:
        yield f"{delta.text}\n\n".encode()

    def end(self, answer: Answer) -> Iterator[bytes]:
        yield b"end\n\n"

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield f"failed={error.code}\n\n".encode()

    def keepalive(self) -> bytes:
        return b"\n\n"


class Toy(Dialect):
    name = "toy"
    path = "/toy/ask"
    count_path = "/toy/count"
    client_header = "x-toy"

    def parse(self, body: bytes) -> ModelCall:
        asked = json.loads(body)
        if "question" not in asked:
            raise ApiError(400, "no question")
        messages = [{"role": "user", "content": asked["question"]}]
        return ModelCall(asked["model"], messages, max_new_tokens=64, stream=asked.get("stream", False))

    def body(self, call: ModelCall, answer: Answer) -> dict:
        return {"said": answer.choices[0].message["content"], "by": answer.model}

    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> ToyEvents:
        return ToyEvents()

    def error_body(self, error: ApiError) -> dict:
        return {"oops": error.message}

    def count_body(self, prompt_tokens: int) -> dict:
        return {"length": prompt_tokens}


def test_a_gateway_speaks_a_registered_dialect(serve):
    with ScriptedEngine(["hello", "hello"]) as engine:
        gateway = serve(engine.url, dialects=[*DIALECTS, Toy])

        def post(path: str, **body) -> httpx.Response:
            return gateway.post({"model": "scripted", **body}, path=f"/v1/toy{path}")

        answer = post("/ask", question="hi")
        assert (answer.status_code, answer.json()) == (200, {"said": "hello", "by": "scripted"})
        assert post("/count", question="hi").json()["length"] > 2
        start, *pieces, end = post("/ask", question="hi", stream=True).text.split()
        assert start.startswith("prompt=")
        assert ("".join(pieces), end) == ("hello", "end")
        for answer, status, message in (
            (post("/ask"), 400, "no question"),
            (post("/ask", question="hi", model="other"), 404, "there is no model 'other' here, only 'scripted'"),
            (post("/ask/again"), 404, "POST /v1/toy/ask/again: Not Found"),
        ):
            assert (answer.status_code, answer.json()) == (status, {"oops": message})


def test_header_and_path_select_the_dialect_of_a_shared_path():
    dialects = [dialect() for dialect in (*DIALECTS, Toy)]

    def found(path: str, **headers: str) -> str:
        return dialect_of_client(dialects, path, headers).name

    assert found("/v1/models") == "openai_chat"
    assert found("/v1/models", **{"anthropic-version": "2023-06-01"}) == "anthropic_messages"
    assert found("/v1/models", **{"x-toy": ""}) == "toy"
    assert found("/v1/messages/batches") == "anthropic_messages"
    assert found("/v1/responses/resp_1/cancel") == "openai_responses"
