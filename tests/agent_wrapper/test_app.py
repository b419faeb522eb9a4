"""The container as its callers see it, over HTTP, with S3 and SQS behind it."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy
import pytest

from agent_wrapper import RolloutApp
from agent_wrapper.app import _ARTIFACTS, _FETCH, _PUBLISH, _UNWIND, SESSION_HEADER, _Job, reseed
from agent_wrapper.contract import Outcome, Rollout, RolloutRequest, unpack_artifacts
from agent_wrapper.errors import EntrypointError
from builders import eventually, until
from stub_server import HANG_UP
from wrapper_containers import CUT, make_trajectory

CLOSED = b'{"error": {"message": "the session is closed"}}'
STARTED = "with open(context.payload['started'], 'w') as pipe:\n    pipe.write('!')\n"


def test_a_returned_number_is_the_reward_and_the_rollout_is_identified(container, gateway):
    block = container.request()
    before = time.time()
    rollout = container.play("return 0.25", block)
    assert (rollout.outcome, rollout.reward, rollout.failure) == (Outcome.COMPLETED, 0.25, None)
    assert (rollout.run_id, rollout.step, rollout.task_id, rollout.attempt) == ("run", 3, "task", 2)
    assert rollout.rollout_id == block["rollout_id"]
    assert rollout.session_id == "session-of-the-block"
    assert rollout.model == "the-model"
    assert rollout.sampled_tokens == 2
    assert before - 1 < rollout.started_at <= rollout.finished_at < time.time() + 1
    assert gateway.requests.count((f"/{block['rollout_id']}/trajectory", f"Bearer key-of-{block['rollout_id']}")) == 1


def test_a_clock_that_is_set_while_the_agent_runs_does_not_lengthen_the_rollout(start_container):
    """A session that wakes from a snapshot has an old time at first."""
    container = start_container("sync")
    body = """
right = time.time
time.time = lambda: right() + 3600
return 1.0"""
    rollout = container.play(f"import time\n{body}", container.request())
    assert rollout.finished_at > time.time() + 3000
    assert rollout.finished_at - rollout.started_at < 3000


def test_artifacts_are_written_once_beside_the_result_that_lists_them(container, cloud):
    block = container.request()
    body = """
def write(*args):  # while a thread that the agent has left adds another one
    del publisher.write
    context.artifacts.add("late.txt", "")
    return publisher.write(*args)

import __main__
publisher = __main__.app._publisher
publisher.write = write
context.artifacts.add("patch.diff", b"+1")
context.artifacts.add("log.txt", "done")
return 0.5
"""
    rollout = container.play(body, block)
    assert [(each.name, each.size) for each in rollout.artifacts] == [("patch.diff", 2), ("log.txt", 4)]
    data = cloud.get(f"p/runs/run/artifacts/00000003/{block['rollout_id']}~2")
    assert unpack_artifacts(data, rollout.artifacts) == {"patch.diff": b"+1", "log.txt": b"done"}


def test_lost_artifacts_end_the_attempt_and_not_the_rollout(sync_container, cloud, gateway):
    gateway.answers["/artifacts"] = [(403, b"<Code>AccessDenied</Code>")]
    urls = {"artifacts": f"{gateway.url}/artifacts"}
    block = sync_container.request()
    place = {"Bucket": cloud.bucket, "ContentType": "application/octet-stream", "IfNoneMatch": "*"}
    for name, suffix in (("result", ""), ("failure_marker", "~2")):
        key = f"p/runs/run/steps/00000003/{block['rollout_id']}{suffix}"
        urls[name] = cloud.s3.generate_presigned_url("put_object", Params={**place, "Key": key})
    block["result"] |= {"urls": urls}
    block["session_id"] = "session-without-artifacts"
    sync_container.invoke("context.artifacts.add('a', 'x')\nreturn 0.5", block)
    until(lambda: ("/artifacts", None) in gateway.requests, what="the artifacts are refused")
    # Otherwise it tries for a minute: the refusal may pass.
    sync_container.stop_session("session-without-artifacts")
    until(lambda: marker_of(cloud, block), what="the failure marker is written")
    marker = marker_of(cloud, block)
    assert (marker.outcome, marker.reward, marker.failure.reason) == (Outcome.INFRA_ERROR, None, "artifact_lost")
    assert "cannot write s3://" in marker.failure.message


def marker_of(cloud, block) -> Rollout | None:
    try:
        return cloud.read(f"p/runs/run/steps/00000003/{block['rollout_id']}~2")
    except cloud.s3.exceptions.NoSuchKey:
        return None


def test_a_failure_of_the_wrapper_ends_the_attempt_and_says_where(sync_container, cloud):
    body = """
class Address:
    def __str__(self):
        raise KeyError("no address")

error = OSError("the agent's")
error.status, error.url = 503, Address()
raise error
"""
    block = sync_container.request()
    sync_container.invoke(body, block)
    sync_container.await_idle()
    failure = marker_of(cloud, block).failure
    assert (failure.reason, failure.message) == ("wrapper_failed", "the wrapper failed: KeyError: 'no address'")
    assert "outcome.py" in failure.traceback
    assert sync_container.invoke("", block).json() == {
        "status": "finished",
        "rollout_id": block["rollout_id"],
        "outcome": "infra_error",
        "reason": "wrapper_failed",
    }


@pytest.mark.parametrize("levels", [191, 5000])
def test_too_deep_nesting_is_the_agents_error(sync_container, levels):
    body = f"value = 1\nfor _ in range({levels}):\n    value = [value]\nreturn {{'reward': 1, 'deep': value}}"
    rollout = sync_container.play(body)
    assert (rollout.outcome, rollout.failure.reason, rollout.reward) == (Outcome.AGENT_ERROR, "bad_extras", None)
    assert "cannot be stored as JSON" in rollout.failure.message


def test_extras_with_which_the_result_is_too_large_are_the_agents_error(sync_container):
    rollout = sync_container.play("return {'reward': 1, 'note': 'x', 'log': 'y' * 5_000_000}")
    assert (rollout.outcome, rollout.failure.reason, rollout.extras) == (Outcome.AGENT_ERROR, "bad_extras", {})
    assert "max_result_bytes=4194304, and 5000005 of them are 'log'; return less" in rollout.failure.message
    assert rollout.segments


def test_no_agent_meets_a_half_imported_http_client(start_container):
    """openai 3 looks httpx up among the loaded modules, and fails if another thread is importing it."""
    rollout = start_container("sync").play(
        "return {'reward': 1, 'whole': hasattr(sys.modules.get('httpx'), 'Client')}"
    )
    assert rollout.extras == {"whole": True}


def test_the_context_holds_the_task_and_the_endpoint(container):
    block = container.request()
    rollout = container.play(
        """return {
            'reward': 0, 'payload': {k: v for k, v in context.payload.items() if k != 'body'},
            'kwargs': context.openai_kwargs(), 'model': context.model, 'left': context.remaining_s,
            'temperature': context.sampling.temperature, 'training': context.training,
            'rollout_id': context.rollout_id,
            'backwards': [context.api_key[::-1], repr(context)[::-1]],  # the key itself is in no result
        }""",
        block,
        question="why?",
    )
    extras = rollout.extras
    assert extras["payload"] == {"question": "why?"}
    assert extras["kwargs"]["base_url"] == block["endpoint"]["base_url"]
    assert extras["kwargs"]["api_key"] == "[session key]"
    key, shown = extras["backwards"]
    assert key == block["endpoint"]["api_key"][::-1]
    assert key not in shown
    assert 300 < extras["left"] <= extras["kwargs"]["timeout"] <= 600
    assert (extras["model"], extras["temperature"], extras["training"]) == ("the-model", 0.7, True)
    assert extras["rollout_id"] == block["rollout_id"]


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("raise KeyError('colour')", "agent_exception", "KeyError: 'colour'"),
        ("sys.exit(3)", "agent_exception", "SystemExit: 3"),
        ("raise asyncio.CancelledError", "agent_exception", "CancelledError"),
    ],
)
def test_the_agents_own_failures(container, body, reason, words):
    rollout = container.play(body)
    assert rollout.outcome is Outcome.AGENT_ERROR
    assert rollout.failure.reason == reason
    assert words in rollout.failure.message
    assert rollout.reward is None
    assert not rollout.trainable
    assert rollout.sampled_tokens == 2, "a failure carries what was sampled before it"


def test_an_exit_in_a_task_of_an_agent_ends_that_agent_alone(async_container):
    body = "async def tool():\n    sys.exit(3)\nawait asyncio.gather(tool(), asyncio.sleep(0))"
    failure = async_container.play(body).failure
    assert (failure.reason, failure.message) == ("agent_exception", "SystemExit: 3")
    assert async_container.play("asyncio.get_running_loop().stop()\nawait asyncio.sleep(0)\nreturn 1").reward == 1


def test_a_failure_has_the_agents_score_and_a_traceback_that_ends_in_the_agents_line(container):
    rollout = container.play("x = 1\nraise AgentFailure('gave up', reward=-1)")
    assert (rollout.outcome, rollout.reward, rollout.trainable) == (Outcome.AGENT_ERROR, -1.0, True)
    assert "runner.py" not in rollout.failure.traceback
    assert rollout.failure.traceback.endswith("in body\nagent_wrapper.errors.AgentFailure: gave up\n")


def test_a_reward_waits_for_an_absent_gateway_until_the_agents_deadline_and_a_failure_does_not(sync_container):
    later = [(503, b"later"), (429, b"later"), (503, b"later")]
    block = sync_container.request([*later, (200, make_trajectory().encode())], publish_grace_s=1, remaining_s=600)
    assert sync_container.play("return 1.0", block).outcome is Outcome.COMPLETED
    block = sync_container.request([(503, b"later")], publish_grace_s=1, remaining_s=600)
    assert sync_container.play("raise KeyError('colour')", block).failure.reason == "agent_exception"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b'{"error": {"message": "no such session"}}', "no such session"),
        (200, b"junk", "neither a zstd frame nor a JSON object"),
    ],
)
def test_without_a_trajectory_there_is_no_reward(sync_container, gateway, status, body, words):
    block = sync_container.request([(status, body)])
    rollout = sync_container.play("return 1.0", block)
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert rollout.failure.reason == "trajectory_unavailable"
    assert words in rollout.failure.message
    requested = [path for path, _ in gateway.requests]
    assert requested.count(f"/{block['rollout_id']}/trajectory") == 1, "a refused request is not retried"


def test_a_failure_keeps_its_reason_without_a_trajectory(sync_container):
    rollout = sync_container.play("raise KeyError('colour')", sync_container.request([(404, b"gone")]))
    assert rollout.failure.reason == "agent_exception"
    assert "404: gone" in rollout.failure.message


@pytest.mark.parametrize(
    ("kind", "body", "where"),
    [
        ("sync", "time.sleep(600)", "in body"),
        ("async", "await asyncio.sleep(600)", "in sleep"),
        ("async", "try:\n    await asyncio.sleep(600)\nexcept asyncio.CancelledError:\n    return 1.0", ""),
    ],
)
def test_the_deadline_ends_an_agent(request, kind, body, where):
    container = request.getfixturevalue(f"{kind}_container")
    rollout = container.play(f"pass_time(600)\n{body}")
    assert (rollout.outcome, rollout.reward) == (Outcome.TIMED_OUT, None)
    assert rollout.failure.reason == "agent_deadline"
    assert where in (rollout.failure.traceback or "")
    assert rollout.sampled_tokens == 2


LEFT = "{'left': context.remaining_s, 'by_the_clock': context.deadline - time.time()}"


@pytest.mark.parametrize("off_s", [-6000, 6000])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_container_whose_clock_is_off_has_the_time_it_was_given(start_container, kind, off_s):
    container = start_container(kind)
    before = container.request(deadline=time.time() - off_s, remaining_s=1000)
    rollout = container.play(f"set_clock({off_s})\nreturn {{'reward': 1, **{LEFT}}}", before)
    assert all(700 < left <= 1000 for left in rollout.extras.values()), "the clock was set after the invoke"
    after = container.request(remaining_s=1000)
    assert all(
        700 < left <= 1000 for left in container.play(f"return {{'reward': 1, **{LEFT}}}", after).extras.values()
    )
    ended = container.request(remaining_s=1000)
    wait = "time.sleep(600)" if kind == "sync" else "await asyncio.sleep(600)"
    assert container.play(f"pass_time(1000)\n{wait}", ended).failure.reason == "agent_deadline"


def test_past_its_deadline_an_agent_is_not_started(container, tmp_path):
    mark = tmp_path / "ran"
    rollout = container.play(f"open({str(mark)!r}, 'w')", container.request(remaining_s=0))
    assert rollout.failure.reason == "agent_deadline"
    assert not mark.exists()


def test_an_agent_that_blocks_its_loop_holds_up_neither_ping_nor_deadline(start_container, fifo):
    container = start_container("async")
    block = container.request()
    container.invoke(f"open({str(fifo)!r}).read()\npass_time(600)\ntime.sleep(600)", block)
    assert container.ping()["status"] == "HealthyBusy"
    fifo.open("w").close()
    rollout = container.await_result(block)
    assert rollout.failure.reason == "agent_deadline"
    assert "in body" in rollout.failure.traceback


def test_an_invoke_sent_again_is_answered_from_memory(container, tmp_path, fifo):
    log = tmp_path / "log"
    body = f"open({str(log)!r}, 'a').write('x')\nopen({str(fifo)!r}).read()\nreturn 0.5"
    block = container.request()
    with ThreadPoolExecutor(8) as pool:
        answers = [a.json()["status"] for a in pool.map(lambda _: container.invoke(body, block), range(8))]
    assert sorted(answers) == ["accepted"] + ["running"] * 7
    fifo.open("w").close()
    container.await_result(block)
    container.await_idle()
    again = container.invoke(body, {**block, "attempt": 3}).json()
    assert again == {"status": "finished", "rollout_id": block["rollout_id"], "outcome": "completed"}
    assert log.read_text() == "x"
    assert container.cloud.receive(block["result"]["queue_url"], wait_s=0) == []
    other_run = container.request(rollout_id=block["rollout_id"], run_id="other")
    assert container.play("return 1", other_run).reward == 1


def test_the_next_attempt_at_a_lost_rollout_runs(container, tmp_path):
    log = tmp_path / "log"
    body = f"""
open({str(log)!r}, 'a').write(context.api_key + ' ')
if context.api_key == 'key-1':
    raise type('APIConnectionError', (Exception,), {{'__module__': 'sdk'}})('the gateway is gone')
return 1.0
"""
    first = container.request(session_id="session-1", attempt=1, endpoint__api_key="key-1")
    lost = container.play(body, first)
    assert lost.failure.reason == "model_unavailable", lost.failure.message
    container.await_idle()
    second = {**first, "session_id": "session-2", "attempt": 2, "endpoint": {**first["endpoint"], "api_key": "key-2"}}
    assert container.invoke(body, second).json()["status"] == "accepted"
    assert container.await_result(second).reward == 1.0
    assert log.read_text() == "key-1 key-2 "
    container.await_idle()
    assert container.invoke(body, first).json()["reason"] == "model_unavailable", "each attempt is remembered"
    assert container.invoke(body, second).json()["outcome"] == "completed"


@pytest.mark.parametrize(("kind", "body"), [("async", "await asyncio.sleep(600)"), ("sync", "time.sleep(600)")])
def test_a_session_that_is_stopped_ends_alone(request, make_signal, kind, body, tmp_path):
    container = request.getfixturevalue(f"{kind}_container")
    cleaned = tmp_path / "cleaned"
    body = f"{STARTED}\ntry:\n    {body}\nfinally:\n    open({str(cleaned)!r}, 'w')"
    blocks = [container.request(session_id=f"session-{n}") for n in range(2)]
    for block in blocks:
        started = make_signal()
        container.invoke(body, block, started=started.path)
        started.wait()
    assert container.stop_session("session-0").status_code == 200
    rollout = container.await_result(blocks[0])
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, "terminated")
    assert "the session was stopped" in rollout.failure.message
    assert cleaned.exists() == (kind == "async"), "a sync agent cannot be stopped; its key opens nothing any more"
    assert container.invoke(body, blocks[1]).json()["status"] == "running"
    container.stop_session("session-1")
    container.await_idle()


async def test_a_server_with_a_token_serves_only_callers_that_have_it(monkeypatch):
    monkeypatch.setenv("ROLLOUT_AGENT_TOKEN", "the token of this server")
    app = RolloutApp()
    app.entrypoint(lambda context: 1)
    headers = {SESSION_HEADER: "session"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://agent") as client:
        assert (await client.get("/ping")).status_code == 200
        for wrong in ({}, {"Authorization": "Bearer another token"}, {"Authorization": "Basic eHg6eHg="}):
            for path in ("/invocations", "/stop"):
                answer = await client.post(path, json={}, headers={**headers, **wrong})
                assert (answer.status_code, answer.json()["error"]) == (401, "Unauthorized")
        right = headers | {"Authorization": "Bearer the token of this server"}
        assert (await client.post("/invocations", json={}, headers=right)).json() == 1
        assert (await client.post("/stop", headers=right)).status_code == 404


def beats(gateway, block) -> int:
    return gateway.requests.count(("/beat", f"Bearer {block['endpoint']['api_key']}"))


async def test_heartbeats_are_sent_while_the_agent_runs_even_if_the_gateway_fails(
    sync_container, cloud, gateway, monkeypatch
):
    gateway.answers["/beat"] = [(503, b""), (CUT, b"cut"), (204, b"")]
    block = sync_container.request(heartbeat_s=0.05, endpoint__heartbeat_url=f"{gateway.url}/beat")
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    app, stream, calls = RolloutApp(), httpx.AsyncClient.stream, itertools.count()

    def fail_once(*args: object, **more: object) -> object:
        # The first call is the probe's.
        if next(calls) == 1:
            raise RuntimeError("can't start new thread")
        return stream(*args, **more)

    monkeypatch.setattr(httpx.AsyncClient, "stream", fail_once)

    @app.entrypoint
    async def agent(context: object) -> int:
        await eventually(lambda: beats(gateway, block) >= 6)
        return 1

    assert await app.run_payload({"_rollout": block})
    assert sync_container.await_result(block).reward == 1
    async with asyncio.timeout(60):  # none is sent any more
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


def test_an_agent_is_stopped_once_the_gateway_has_closed_its_session(async_container, gateway):
    gateway.answers["/beat"] = [(204, b""), (410, CLOSED)]
    block = async_container.request(heartbeat_s=0.05, endpoint__heartbeat_url=f"{gateway.url}/beat")
    async_container.invoke("await asyncio.sleep(600)", block)
    assert async_container.await_result(block).failure.reason == "terminated"


def test_the_first_heartbeat_is_the_probe_and_ends_a_closed_session(sync_container, gateway, tmp_path):
    mark = tmp_path / "ran"
    gateway.answers |= {"/beat": [(204, b"")], "/closed": [(410, CLOSED)]}
    open_block, closed_block = (
        sync_container.request(heartbeat_s=600, endpoint__heartbeat_url=f"{gateway.url}/{name}")
        for name in ("beat", "closed")
    )
    assert sync_container.play("return 1", open_block).reward == 1
    assert beats(gateway, open_block) == 1
    assert not gateway.requests.count(("/v1/models", f"Bearer {open_block['endpoint']['api_key']}"))
    assert sync_container.play(f"open({str(mark)!r}, 'w')", closed_block).failure.reason == "terminated"
    assert not mark.exists()


def test_ping_is_busy_until_the_result_is_published(sync_container, fifo):
    container = sync_container
    idle = container.await_idle()
    block = container.request()
    until(lambda: int(time.time()) > idle["time_of_last_update"])  # so that a change shows in whole seconds
    container.invoke(f"open({str(fifo)!r}).read()\nreturn 1", block)
    busy = container.ping()
    assert busy["status"] == "HealthyBusy"
    assert isinstance(busy["time_of_last_update"], int)
    assert idle["time_of_last_update"] < busy["time_of_last_update"] <= time.time()
    until(lambda: int(time.time()) > busy["time_of_last_update"])
    assert container.ping() == busy, "the time changes with the status only"
    fifo.open("w").close()
    container.await_result(block)
    assert container.await_idle()["time_of_last_update"] > busy["time_of_last_update"]


def test_a_broken_request_is_refused_by_field(container):
    block = container.request()
    del block["endpoint"]["api_key"]
    answer = container.invoke("return 1", block)
    assert answer.status_code == 400
    assert answer.json()["field"] == "_rollout.endpoint.api_key"
    assert container.invoke("return 1", container.request(schema_version=2)).status_code == 400
    assert container.invoke("return 1", None).json()["field"].startswith("_rollout")


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(sync_container, body):
    answer = sync_container.client.post("/invocations", content=body)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["message"]


def test_without_the_block_it_is_an_ordinary_service(start_container):
    env = {"OPENAI_BASE_URL": "http://model/v1", "OPENAI_API_KEY": "k", "ROLLOUT_MODEL": "m"}
    container = start_container("async", **env)
    body = "return [context.base_url, context.api_key, context.model, context.training, context.payload['x']]"
    answer = container.client.post("/invocations", json={"body": body, "x": 7})
    assert (answer.status_code, answer.json()) == (200, ["http://model/v1", "k", "m", False, 7])
    assert container.ping()["status"] == "Healthy"


def test_an_ordinary_service_answers_with_numpys_numbers(container):
    body = "import numpy\nreturn {'reward': numpy.float32(0.5), 'passed': numpy.bool_(True)}"
    answer = container.client.post("/invocations", json={"body": body})
    assert answer.json() == {"reward": 0.5, "passed": True}


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("raise KeyError('colour')", "KeyError", "colour"),
        ("return object()", "TypeError", "not JSON"),
    ],
)
def test_an_ordinary_service_reports_errors(container, body, error, words):
    answer = container.client.post("/invocations", json={"body": body})
    assert answer.status_code == 500
    assert answer.json()["error"] == error
    assert words in answer.json()["message"]


def test_a_result_that_cannot_be_written_is_reported(sync_container, cloud):
    block = sync_container.request(result__bucket="no-such-bucket", session_id="session-without-bucket")
    sync_container.invoke("return 1", block)
    sync_container.stop_session("session-without-bucket")  # otherwise it tries for a minute
    sync_container.await_idle()
    answer = sync_container.invoke("return 1", block).json()
    assert answer["status"] == "unpublished"
    assert "NoSuchBucket" in answer["reason"]
    assert cloud.receive(block["result"]["queue_url"], wait_s=0) == []


# --- whether the model's endpoint can be reached ------------------------------------------------------------


@pytest.mark.parametrize("problem", ["ConnectionRefusedError: [Errno 111]", "it answered 404: no such page"])
def test_a_wrong_address_of_the_model_is_reported_before_the_agent_runs(
    sync_container, gateway, dead_url, tmp_path, problem
):
    gateway.answers["/elsewhere/models"] = [(404, b"no such page")]
    mark, url = tmp_path / "ran", dead_url if "Refused" in problem else f"{gateway.url}/elsewhere"
    block = sync_container.request(endpoint__base_url=url, remaining_s=5)
    rollout = sync_container.play(f"open({str(mark)!r}, 'w')", block)
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, "model_unreachable")
    assert f"could not reach the model endpoint at {url} within 5 s ({problem}" in rollout.failure.message
    assert "gateway.public_url" in rollout.failure.message
    assert not mark.exists()


def test_a_session_that_is_stopped_while_it_waits_for_the_gateway_starts_no_agent(sync_container, gateway, tmp_path):
    gateway.answers["/down/models"] = [(503, b"")]
    mark = tmp_path / "ran"
    block = sync_container.request(endpoint__base_url=f"{gateway.url}/down", session_id="session-waits")
    sync_container.invoke(f"open({str(mark)!r}, 'w')", block)
    until(lambda: gateway.requests.count(("/down/models", f"Bearer {block['endpoint']['api_key']}")))
    sync_container.stop_session("session-waits")
    assert sync_container.await_result(block).failure.reason == "terminated"
    assert not mark.exists()


# --- what the model's endpoint does to an agent, seen through the real SDK --------------------------------

CALL = """
from openai import OpenAI
client = OpenAI(**{**context.openai_kwargs(), 'max_retries': 1, **context.payload.get('kwargs', {})})
stream = context.payload.get('stream', False)
answer = client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}], stream=stream)
list(answer)
"""


@pytest.mark.parametrize(
    ("answer", "stream", "words"),
    [
        ((HANG_UP, b""), False, "APIConnectionError"),
        ((CUT, b'data: {"id": "x", "choices": []}\n\n'), True, "Error"),
        ((200, b'data: {"error": {"message": "the engine died"}}\n\n'), True, "the engine died"),
    ],
    ids=["no answer", "a stream that is cut", "an error inside a stream"],
)
def test_a_failing_model_endpoint_is_not_the_agents_fault(sync_container, gateway, answer, stream, words):
    gateway.answers["/v1/chat/completions"] = [answer]
    rollout = sync_container.play(CALL, stream=stream)
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, "model_unavailable")
    assert words in rollout.failure.message


# --- the end of the process -------------------------------------------------------------------------------


POOL = "import concurrent.futures as c\nc.ThreadPoolExecutor().submit(time.sleep, 600).result()"


@pytest.mark.parametrize(
    ("number", "kind", "body", "where"),
    [
        (signal.SIGINT, "sync", POOL, ""),
        (signal.SIGTERM, "async", "await asyncio.to_thread(time.sleep, 600)", "to_thread"),
    ],
)
def test_a_signal_publishes_running_rollouts_and_waits_for_no_thread(
    start_container, make_signal, number, kind, body, where
):
    container = start_container(kind)
    block = container.request()
    started = make_signal()
    container.invoke(STARTED + body, block, started=started.path)
    started.wait()
    container.stop(number)
    assert number != signal.SIGINT or container.process.returncode == 0
    rollout = container.await_result(block)
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, "terminated")
    assert where in rollout.failure.traceback
    assert rollout.sampled_tokens == 2


@pytest.mark.parametrize("grace_s", [1.0, 60.0, 1000.0])
def test_the_wrappers_waits_after_the_deadline_fit_the_backends(sync_container, grace_s):
    request = RolloutRequest.parse(sync_container.request(publish_grace_s=grace_s))
    job = _Job(request)
    limits = [job.limit_s(*each) for each in (_UNWIND, _FETCH, _ARTIFACTS, _PUBLISH)]
    assert sum(limits) < grace_s
    assert grace_s < 120 or limits == [2.0, 20.0, 15.0, 60.0]
    left_s = job.publish_by - time.monotonic()
    assert left_s == pytest.approx(request.remaining_s + grace_s, abs=300), "a result has the rest"


def test_sigterm_publishes_every_rollout_even_without_a_gateway(start_container, gateway, dead_url, make_signal):
    container = start_container("sync")
    earned = container.request([(503, b"")])
    container.invoke("return 1", earned)
    asked = f"/{earned['rollout_id']}/trajectory", f"Bearer {earned['endpoint']['api_key']}"
    until(lambda: gateway.requests.count(asked))
    assert container.ping()["status"] == "HealthyBusy"
    blocks = [container.request(endpoint__trajectory_url=f"{dead_url}/trajectory") for _ in range(3)]
    for block in blocks:
        started = make_signal()
        container.invoke(STARTED + "time.sleep(600)", block, started=started.path)
        started.wait()
    container.stop()
    assert container.await_result(earned).failure.reason == "trajectory_unavailable"
    for block in blocks:
        rollout = container.await_result(block)
        assert rollout.failure.reason == "terminated"
        assert rollout.segments == ()


# --- what the author sees ---------------------------------------------------------------------------------


def test_importing_the_wrapper_loads_nothing_that_takes_long():
    code = "import sys, agent_wrapper; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "agent_wrapper.contract" in loaded
    heavy = {"PIL", "aiohttp", "boto3", "httpx", "numpy", "openai", "ray", "rollout_backend", "starlette", "torch"}
    assert not heavy.intersection(loaded)


def test_an_app_has_one_entrypoint():
    app = RolloutApp()
    with pytest.raises(EntrypointError, match=r"put @app\.entrypoint above"):
        app.run()
    app.entrypoint(lambda context: 1)
    with pytest.raises(EntrypointError, match="has its entrypoint already"):
        app.entrypoint(lambda context: 2)


def yields(context: object):
    yield 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1, "exactly one argument"),
        (yields, "must return its reward once"),
        (3, "must be a function"),
    ],
)
def test_a_wrong_entrypoint_is_refused(function, words):
    with pytest.raises(EntrypointError, match=words):
        RolloutApp().entrypoint(function)


def test_processes_of_one_snapshot_draw_different_numbers() -> None:
    state, numpy_state = random.getstate(), numpy.random.get_state()
    drawn = set()
    try:
        for _ in range(3):
            random.seed(7)
            numpy.random.seed(7)
            reseed("session")
            drawn.add((random.random(), numpy.random.random()))
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)
    assert len({first for first, _ in drawn}) == len({second for _, second in drawn}) == 3


def test_sessions_differ_even_if_the_kernels_generator_was_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
    drawn = set()
    for session in ("a", "b"):
        reseed(session)
        drawn.add(random.random())
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("host", "listens"), [("", "0.0.0.0"), ("::1", "::1"), ("::", ["::", "0.0.0.0"])], ids=["unset", "one", "all"]
)
def test_an_agent_listens_where_its_container_is_reached(host, listens, monkeypatch):
    monkeypatch.setattr("uvicorn.run", lambda app, host, **options: listening.append(host))
    monkeypatch.setenv("HOST", host)
    app, listening = RolloutApp(), []
    app.entrypoint(lambda context: 1.0)
    app.run()
    assert listening == [listens]
