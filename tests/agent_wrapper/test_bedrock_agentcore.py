"""An app of the real bedrock-agentcore SDK, with its import line changed, in containers and over HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_wrapper.app import SESSION_HEADER
from agent_wrapper.contract import Outcome, Rollout
from builders import until
from stub_server import Request, StubServer
from wrapper_containers import Cloud, Container, Gateway, make_trajectory

AGENT = Path(__file__).with_name("bedrock_agent.py")
CHAT = "/v1/chat/completions"
DEPLOYED = {"OPENAI_API_KEY": "the-users", "ANTHROPIC_API_KEY": "the-users"}
ENTRYPOINTS = ("sync_agent", "async_agent", "sync_generator", "async_generator", "payload_only", "partial")


def completion(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()


class Models:
    """Answers model calls with their key, backwards: no result has a key."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []  # path, key and body
        self.url = ""
        self.failures: list[int] = []  # statuses of the next answers
        self.meet: threading.Barrier | None = None

    def handle(self, request: Request) -> tuple[int, bytes]:
        if request.path.endswith("/trajectory"):
            return 200, make_trajectory().encode()
        if request.path.endswith("/models"):
            return 200, b"{}"
        body = json.loads(request.body)
        key = request.headers.get("Authorization") or request.headers.get("x-api-key", "")
        self.calls.append((request.path, key, body))
        if self.meet is not None:
            self.meet.wait(60)
        if self.failures:
            return self.failures.pop(0), b'{"error": {"message": "no engine"}}'
        reply = key[::-1]
        if request.path.endswith("/messages"):
            text = {"type": "text", "text": reply}
            return 200, json.dumps({"type": "message", "role": "assistant", "content": [text]}).encode()
        if body.get("stream"):
            delta = {"index": 0, "delta": {"role": "assistant", "content": reply}, "finish_reason": None}
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            chunks = [{"id": "1", "created": 1, "model": "m", "choices": [choice]} for choice in (delta, end)]
            return 200, b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in chunks) + b"data: [DONE]\n\n"
        return 200, completion(reply)


@pytest.fixture(scope="module")
def model_server() -> Iterator[Models]:
    models = Models()
    with StubServer(models.handle) as server:
        models.url = server.url
        yield models


@pytest.fixture
def models(model_server: Models) -> Models:
    model_server.calls.clear()
    model_server.failures, model_server.meet = [], None
    return model_server


@pytest.fixture(scope="module")
def start(
    cloud: Cloud, model_server: Models, agentcore_python: Path, repository: Path
) -> Iterator[Callable[..., Container]]:
    gateway = Gateway()
    gateway.url = model_server.url
    with ExitStack() as stack:

        def start(**env: str) -> Container:
            env = {"OPENAI_BASE_URL": f"{gateway.url}/deployed/v1", **DEPLOYED, "PYTHONPATH": str(repository), **env}
            env["PYTHONHASHSEED"] = "0"  # the order of `Allow`
            container = Container(cloud, gateway, [str(agentcore_python), str(AGENT)], env)
            stack.callback(container.close)
            return container

        yield start


@pytest.fixture(scope="module")
def of_the_sdk(start: Callable[..., Container]) -> Container:
    return start()


@pytest.fixture(scope="module")
def served(start: Callable[..., Container]) -> Container:
    return start(ROLLOUTS="1", CLIENTS="1")


@pytest.fixture
def use(served: Container) -> Callable[[str], Container]:
    """Let the container serve another entrypoint."""

    def use(entrypoint: str) -> Container:
        assert served.client.get(f"/use/{entrypoint}").status_code == 200
        return served

    return use


def raw(container: Container, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
    """Return the status, the headers and the body of an answer, without times and addresses."""
    url = container.client.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=120)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    shown = [(name, value) for name, value in answer.getheaders() if name != "date"]
    return answer.status, answer.reason, shown, re.sub(rb"\d{10}|0x[0-9a-f]+", b"...", found)


def requests(entrypoint: str) -> Iterator[tuple[str, str, bytes | None, dict[str, str]]]:
    session = {SESSION_HEADER: "session-of-the-caller", "WorkloadAccessToken": "t", "X-Mine": "1"}
    acts: list[Any] = [{"prompt": "Hi ü"}, {"do": "fail"}, {"do": "refuse"}, {"do": "respond"}, {"do": "object"}]
    acts += [{"do": "return", "value": value} for value in (None, "ü", 1.5, [1], {"reward": 1}, float("nan"))]
    acts += [[1], "text", None, {"rollout": {}}, {"_agent_core_app_action": "job_status", "n": 1}]
    for payload in acts:
        yield "POST", "/invocations", json.dumps(payload).encode(), session
    for body in (b"", b"{", b"\xff", b'{"_rollout": ', b"[" * 3 + b"]" * 3):
        yield "POST", "/invocations", body, {}
    yield "GET", "/ping", None, {}
    if "agent" in entrypoint:
        for act in ("begin", "complete", "complete"):
            yield "POST", "/invocations", json.dumps({"do": act}).encode(), {}
            yield "GET", "/ping", None, {}
    for action in ("force_busy", "ping_status", "clear_forced_status", "unknown"):
        yield "POST", "/invocations", json.dumps({"_agent_core_app_action": action}).encode(), {}
    for method, path in (
        ("GET", "/invocations"),
        ("POST", "/ping"),
        ("POST", "/stop"),
        ("GET", "/stop"),
        ("GET", "/"),
    ):
        yield method, path, None, {}
    yield "POST", "/stop/", b"{}", {}


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS)
def test_without_the_block_every_answer_is_that_of_the_sdk(use, of_the_sdk, entrypoint):
    ours = use(entrypoint)
    of_the_sdk.client.get(f"/use/{entrypoint}")
    for request in requests(entrypoint):
        method, path, body, headers = request
        assert raw(ours, method, path, body, **headers) == raw(of_the_sdk, method, path, body, **headers), request


def invoke(container: Container, block: dict[str, Any] | None, **payload: Any) -> httpx.Response:
    payload |= {"_rollout": block} if block is not None else {}
    headers = {SESSION_HEADER: "s", "WorkloadAccessToken": "token", "X-Mine": "1"}
    return container.client.post("/invocations", json=payload, headers=headers)


def play(container: Container, **payload: Any) -> Rollout:
    block = container.request()
    assert invoke(container, block, **payload).json() == {"status": "accepted", "rollout_id": block["rollout_id"]}
    rollout = container.await_result(block)
    until(lambda: container.ping()["status"] == "Healthy", what="the app is idle")
    return rollout


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS[:4])
def test_a_rollout_has_the_task_and_the_sdks_context(use, entrypoint):
    """It returns no reward, so what it returned waits for a scorer."""
    rollout = play(use(entrypoint), prompt="Hi")
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.AGENT_ERROR, "no_reward")
    assert rollout.reward is None
    assert rollout.can_be_scored
    assert rollout.sampled_tokens
    context = {"session": ["s", "s"], "token": "token", "headers": {"x-mine": "1"}}
    assert rollout.extras == {"payload": {"prompt": "Hi"}, **context}


@pytest.mark.parametrize("entrypoint", ENTRYPOINTS[4:])
def test_an_entrypoint_without_context_runs(use, entrypoint):
    rollout = play(use(entrypoint), prompt="Hi")
    assert rollout.extras["given"] == {"prompt": "Hi"}


@pytest.mark.parametrize("do", ["context", "thread_context"])
def test_an_entrypoint_finds_the_context_of_its_rollout(use, do):
    container = use("sync_agent")
    rollout = play(container, do=do)
    assert rollout.extras == {"training": True, "model": "the-model"}
    assert [artifact.name for artifact in rollout.artifacts] == ["log.txt"]
    assert invoke(container, None, do="context").json() == {"training": False, "model": ""}


def test_what_a_rollout_returns_or_raises_is_its_result(use):
    container = use("sync_agent")
    value = {"reward": 0.5, "turn_rewards": [], "steps": [1]}
    rollout = play(container, do="return", value=value)
    assert (rollout.outcome, rollout.reward, rollout.extras) == (Outcome.COMPLETED, 0.5, {"steps": [1]})
    assert play(container, do="return", value="done").extras == {"result": "done"}
    found = {}
    for act in ({"do": "fail"}, {"do": "refuse"}, {"do": "respond"}, {"do": "return", "value": {"reward": "high"}}):
        rollout = play(container, **act)
        found[rollout.failure.reason] = rollout.failure.message
        assert rollout.reward is None
    assert found.keys() == {"agent_exception", "agent_failure", "bad_reward"}
    assert found["agent_failure"] == 'the agent returned HTTP 404: {"error":"not found"}'
    odd = play(container, do="object").extras
    assert (odd["made"], odd["other"], odd["score"]) == ([1, 2], "<class 'object'>", 0.5)


@pytest.mark.parametrize(
    ("entrypoint", "act"),
    [
        ("sync_agent", "ask"),
        ("sync_agent", "thread"),
        ("async_agent", "ask"),
        ("async_agent", "anthropic"),
        ("async_generator", "ask"),
    ],
)
def test_a_client_made_at_import_calls_the_model_being_trained(use, models, entrypoint, act):
    container = use(entrypoint)
    block = container.request()
    invoke(container, block, do=act)
    rollout = container.await_result(block)
    key = f"Bearer {block['endpoint']['api_key']}"
    assert rollout.extras["replies"] == [key[::-1]]
    [(path, used, body)] = models.calls
    assert path == (CHAT if act != "anthropic" else "/v1/messages")
    assert (used, body["model"]) == (key, "the-model")


def test_a_client_that_an_earlier_rollout_made_calls_with_the_key_of_its_own(use, models):
    container = use("sync_agent")
    blocks = [container.request() for _ in range(2)]
    for block in blocks:
        invoke(container, block, do="kept")
        container.await_result(block)
    assert [key for _, key, _ in models.calls] == [f"Bearer {block['endpoint']['api_key']}" for block in blocks]


def test_a_strands_agent_of_bedrock_calls_the_model_being_trained(use, models):
    container = use("sync_agent")
    rollout = play(container, do="strands")
    assert rollout.extras["result"]["role"] == "assistant"
    [(path, _, body)] = models.calls
    assert (path, body["model"], body["stream"]) == (CHAT, "the-model", True)
    assert (body["max_tokens"], body["stop"], "temperature" in body) == (77, ["END"], False)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add"]


def test_a_deployed_call_goes_where_its_client_was_made_for(use, models):
    """Also while a rollout runs in the same process."""
    models.meet = threading.Barrier(3)
    container = use("sync_agent")
    with ThreadPoolExecutor() as pool:
        blocks = [container.request() for _ in range(2)]
        for block in blocks:
            invoke(container, block, do="ask")
        deployed = pool.submit(invoke, container, None, do="ask").result()
        rollouts = [container.await_result(block) for block in blocks]
    assert deployed.json() == {"reward": 0.5, "replies": ["Bearer the-users"[::-1]]}
    keys = [f"Bearer {block['endpoint']['api_key']}" for block in blocks]
    assert [rollout.extras["replies"] for rollout in rollouts] == [[key[::-1]] for key in keys]
    calls = {key: (path, body["model"]) for path, key, body in models.calls}
    assert calls == {**dict.fromkeys(keys, (CHAT, "the-model")), "Bearer the-users": (f"/deployed{CHAT}", "gpt-5")}


def test_a_call_that_could_belong_to_several_rollouts_is_not_made(use, models, make_signal, tmp_path):
    container = use("sync_agent")
    started = make_signal()
    block = container.request()
    invoke(container, block, do="wait", started=started.path, go=str(tmp_path / "go"))
    started.wait()
    other = container.request()
    invoke(container, other, do="thread")
    assert container.await_result(other).failure.reason == "agent_exception"
    assert models.calls == []
    (tmp_path / "go").touch()
    container.await_result(block)


@pytest.mark.parametrize(("entrypoint", "act"), [("sync_agent", "ask"), ("async_agent", "anthropic")])
def test_a_restart_of_the_training_side_or_a_full_gateway_ends_no_rollout(use, models, entrypoint, act):
    """The clients themselves make no retry."""
    models.failures = [503, 502, 429]
    assert play(use(entrypoint), do=act).reward == 0.5


def test_a_model_endpoint_that_fails_is_no_error_of_the_agent(use, models):
    models.failures = [500]
    container = use("sync_agent")
    block = container.request()
    invoke(container, block, do="ask")
    until(lambda: container.ping()["status"] == "Healthy", what="the rollout has ended")
    marker = container.cloud.read(f"p/runs/run/steps/00000003/{block['rollout_id']}~2")
    assert (marker.outcome, marker.failure.reason) == (Outcome.INFRA_ERROR, "model_unavailable")


@pytest.mark.parametrize("entrypoint", ["sync_agent", "async_agent"])
def test_a_rollout_lasts_until_its_background_tasks_are_complete(use, models, entrypoint, tmp_path, make_signal):
    container = use(entrypoint)
    started = make_signal()
    block = container.request()
    invoke(container, block, do="background", started=started.path, go=str(tmp_path / "go"))
    started.wait()
    assert container.ping()["status"] == "HealthyBusy"
    assert container.cloud.receive(block["result"]["queue_url"], 0) == []
    (tmp_path / "go").touch()
    rollout = container.await_result(block)
    assert rollout.extras == {"status": "processing"}
    assert len(models.calls) == 1


def test_a_status_of_the_agents_own_is_busy_while_a_rollout_runs_and_a_stop_publishes_it(start, make_signal):
    container = start(ROLLOUTS="1", IDLE="1")
    container.client.get("/use/async_agent")
    blocks = [container.request() for _ in range(2)]
    for block in blocks:
        assert container.ping()["status"] == "Healthy"
        started = make_signal()
        invoke(container, block, do="wait", started=started.path)
        started.wait()
        assert container.ping()["status"] == "HealthyBusy"
        if block is blocks[0]:
            assert container.stop_session(block["session_id"]).json() == {"status": "stopping"}
            until(lambda: container.ping()["status"] == "Healthy", what="the rollout has ended")
            assert container.stop_session(block["session_id"]).json()["error"] == "SessionNotFound"
    container.stop(signal.SIGTERM)
    for block in blocks:
        marker = container.cloud.read(f"p/runs/run/steps/00000003/{block['rollout_id']}~2")
        assert (marker.outcome, marker.failure.reason) == (Outcome.INFRA_ERROR, "terminated")


@pytest.mark.slow
def test_a_payload_in_a_file_is_run_once(use, tmp_path):
    container = use("sync_agent")  # only its stubs
    file = tmp_path / "payload.json"
    block = container.request()
    file.write_text(json.dumps({"_rollout": block, "do": "ask"}))
    env = {**os.environ, **container.cloud.env, **DEPLOYED, "PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {"ROLLOUTS": "1", "CLIENTS": "1", "PORT": "0", "ROLLOUT_PAYLOAD_FILE": str(file)}
    subprocess.run(container.process.args, env=env, check=True, timeout=120)
    assert container.await_result(block).reward == 0.5
