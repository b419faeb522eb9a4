"""The emulator, called by a real `bedrock-agentcore` client."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest
from botocore.exceptions import ClientError

from builders import eventually, is_running, session_id

BOTH_SPAWNERS = pytest.mark.parametrize("preload", [None, ()], ids=["command", "prefork"])


async def refused(call, status: int, code: str, match: str | None = None) -> None:
    """Check that the call fails with this status and error code, and a message that matches."""
    with pytest.raises(ClientError, match=match) as raised:
        await call
    response = raised.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (status, code)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@BOTH_SPAWNERS
async def test_one_fresh_process_per_session(start_runtime, app, preload):
    runtime = await start_runtime(preload=preload)
    answer = await runtime.invoke("a", b'{"x": 1}', contentType="application/json", accept="application/json")
    assert answer["statusCode"] == 200
    assert answer["contentType"] == "application/json"
    assert answer["runtimeSessionId"] == session_id("a")
    first = json.loads(answer["body"])
    again = await runtime.seen("a")
    other = await runtime.seen("b")
    assert (first["calls"], again["calls"], other["calls"]) == (1, 2, 1)
    assert first["pid"] == again["pid"] != other["pid"]
    assert os.getpgid(first["pid"]) == first["pid"]
    assert (parent_of(first["pid"]) == os.getpid()) == (preload is None)
    assert first["main"] == "__main__"
    assert first["argv"] == [str(app)]
    assert first["cwd"] == os.getcwd()  # main() of the program changes to `cwd`
    assert first["env"]["GREETING"] == "hello"
    assert first["env"]["HOST"] == "127.0.0.1"
    assert runtime.open == [session_id("a"), session_id("b")]
    assert runtime.counters["started"] == runtime.counters["peak"] == 2


async def test_headers_and_answers_pass_through_as_on_aws(start_runtime):
    runtime = await start_runtime()

    def add(request, **_):
        request.headers["X-Amzn-Bedrock-AgentCore-Runtime-Custom-Task"] = "t1"
        request.headers["X-Mine"] = "no"

    runtime.client.meta.events.register("before-sign.bedrock-agentcore.InvokeAgentRuntime", add)
    seen = (await runtime.seen("a", contentType="application/json"))["headers"]
    seen = {name.lower(): value for name, value in seen.items()}
    assert seen["x-amzn-bedrock-agentcore-runtime-session-id"] == session_id("a")
    assert seen["x-amzn-bedrock-agentcore-runtime-custom-task"] == "t1"
    assert seen["content-type"] == "application/json"
    assert not {"x-mine", "authorization"} & seen.keys()
    answer = await runtime.invoke("a", b'{"do": "stream"}')
    assert (answer["contentType"], answer["body"]) == ("text/event-stream", b"data: 1\n\ndata: 2\n\n")
    await refused(runtime.invoke("a", b'{"do": "fail"}'), 424, "RuntimeClientError", r"422.*no such task")
    assert runtime.open == [session_id("a")]


@BOTH_SPAWNERS
async def test_stop_ends_the_process_and_the_id_stays_valid(start_runtime, tmp_path, preload):
    runtime = await start_runtime(preload=preload)
    first = (await runtime.seen("a"))["pid"]
    stopped = await runtime.stop("a")
    assert stopped["statusCode"] == 200
    assert stopped["runtimeSessionId"] == session_id("a")
    assert runtime.open == []
    await eventually(lambda: not is_running(first))
    assert "got SIGTERM" in (tmp_path / f"{session_id('a')}.log").read_text()
    await refused(runtime.stop("a"), 404, "ResourceNotFoundException")
    second = await runtime.seen("a")
    assert second["pid"] != first
    assert second["calls"] == 1
    assert runtime.counters["started"] == 2
    assert runtime.counters["stopped"] == 1


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(start_runtime):
    runtime = await start_runtime(env={"STUBBORN": "1"}, grace_s=0.3)
    child = await runtime.seen("a", b'{"do": "child"}')
    pid = (await runtime.seen("a"))["pid"]
    await runtime.stop("a")
    await eventually(lambda: not is_running(pid) and not is_running(child))


async def test_unknown_runtimes_and_invalid_ids_are_refused(start_runtime):
    runtime = await start_runtime()
    await refused(runtime.stop("never-started"), 404, "ResourceNotFoundException")
    await refused(
        runtime.client.invoke_agent_runtime(
            agentRuntimeArn=runtime.arn.replace("local", "other"), runtimeSessionId=session_id("a"), payload=b"{}"
        ),
        404,
        "ResourceNotFoundException",
    )
    url = f"{runtime.url}/runtimes/{runtime.arn}/invocations"
    signed = {"authorization": "AWS4-HMAC-SHA256 Credential=x"}
    header = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
    async with aiohttp.ClientSession() as http:
        async with http.post(url, json={}, headers={header: session_id("a")}) as answer:
            assert answer.status == 403
            assert answer.headers["x-amzn-errortype"] == "MissingAuthenticationTokenException"
        async with http.post(url, json={}, headers={header: "short", **signed}) as answer:
            assert answer.status == 400
            assert answer.headers["x-amzn-errortype"] == "ValidationException"
            assert "33" in (await answer.json())["message"]
        async with http.post(url, json={}, headers=signed) as answer:  # the service creates one
            assert len(answer.headers[header]) == 36
    assert len(runtime.open) == 1


async def test_calls_above_the_rate_are_throttled(start_runtime):
    runtime = await start_runtime(new_sessions_per_s=1e-6)
    await runtime.invoke("a")
    await refused(runtime.invoke("b"), 429, "ThrottlingException", "new sessions")
    runtime = await start_runtime(invoke_per_s=1e-6, stop_per_s=1e-6)
    await runtime.invoke("a")
    await refused(runtime.invoke("a"), 429, "ThrottlingException")
    await runtime.stop("a")
    await refused(runtime.stop("a"), 429, "ThrottlingException")
    assert runtime.counters["throttled"] == 2


async def test_a_session_that_waits_long_to_start_is_refused_and_leaves_nothing(start_runtime):
    runtime = await start_runtime(parallel_starts=1, start_wait_s=1e-6, env={"MUTE": "1"})
    first = asyncio.create_task(runtime.invoke("a"))
    await eventually(lambda: runtime.open)
    await refused(runtime.invoke("b"), 429, "ThrottlingException", "are starting")
    assert runtime.open == [session_id("a")]
    await runtime.stop("a")
    with pytest.raises(ClientError):
        await first


@BOTH_SPAWNERS
async def test_the_end_of_a_session_is_listed_with_its_code_and_its_last_lines(start_runtime, preload):
    runtime = await start_runtime(preload=preload)
    pids = {name: (await runtime.seen(name))["pid"] for name in ("killed", "stopped", "idle")}
    await runtime.stop("stopped")
    await refused(runtime.invoke("exits", b'{"do": "die"}'), 424, "RuntimeClientError", "dying")
    await eventually(lambda: runtime.counters["died"] == 1)
    os.kill(pids["killed"], signal.SIGKILL)
    await eventually(lambda: runtime.open == [session_id("idle")])
    runtime.pass_time(901)
    await eventually(lambda: runtime.open == [])

    async def listed(after: int) -> list[dict[str, object]]:
        async with aiohttp.ClientSession() as http, http.get(f"{runtime.url}/_local/ends?after={after}") as answer:
            return list(await answer.json())

    exits, killed, idle = await listed(0)
    assert (exits["id"], exits["final"], exits["number"]) == (session_id("exits"), True, 1)
    assert re.search(r"exited with code 3 without a result\. Its log, .*, ends:\n    dying", exits["message"])
    assert (killed["id"], killed["final"], "killed by SIGKILL" in killed["message"]) == (
        session_id("killed"),
        False,
        True,
    )
    assert (idle["id"], idle["final"], "ended as idle" in idle["message"]) == (session_id("idle"), False, True)
    assert await listed(1) == [killed, idle]
    assert (await runtime.seen("exits"))["calls"] == 1  # the next invoke starts a process


async def test_an_agent_that_crashes_at_its_start_returns_424_with_its_log(start_runtime, app):
    app.write_text("raise SystemExit('no licence')")
    runtime = await start_runtime(preload=())
    await refused(runtime.invoke("a"), 424, "RuntimeClientError", "no licence")
    assert (runtime.open, runtime.counters["failed"], runtime.counters["started"]) == ([], 1, 0)


async def test_libraries_with_threads_are_not_preloaded(start_runtime, app, tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    app.write_text("import threaded\n" + app.read_text())
    runtime = await start_runtime(env={"PYTHONPATH": str(tmp_path)}, preload=())
    pid = (await runtime.seen("a"))["pid"]
    assert parent_of(pid) == os.getpid()


async def test_an_agent_that_answers_no_ping_returns_424_and_can_be_stopped(start_runtime):
    runtime = await start_runtime(env={"MUTE": "1"})
    invoke = asyncio.create_task(runtime.invoke("a"))
    await eventually(lambda: runtime.open == [session_id("a")])
    await runtime.stop("a")
    with pytest.raises(ClientError, match="stopped while it was starting"):
        await invoke
    await eventually(lambda: runtime.plane.pool.snapshot()["ending"] == 0)
    invoke = asyncio.create_task(runtime.invoke("a"))
    await eventually(lambda: [each["pid"] for each in runtime.plane.pool.snapshot()["sessions"]] not in ([], [None]))
    runtime.pass_time(121)
    await refused(invoke, 424, "RuntimeClientError", "initialization time exceeded")
    assert runtime.open == []


async def test_idle_sessions_end_and_busy_ones_do_not(start_runtime):
    runtime = await start_runtime()
    await asyncio.gather(
        runtime.invoke("busy", b'{"do": "busy"}'),
        runtime.invoke("idle"),
        runtime.invoke("forgetful", b'{"do": "busy, without its time"}'),
    )
    waiting = asyncio.create_task(runtime.invoke("waits", b'{"do": "wait"}'))  # a request in flight is not idle
    idle, busy, waits = ("Healthy", 0), ("HealthyBusy", 0), ("Healthy", 1)
    states = {
        session_id("busy"): busy,
        session_id("idle"): idle,
        session_id("forgetful"): busy,
        session_id("waits"): waits,
    }
    await eventually(lambda: runtime.states == states)
    runtime.pass_time(901)
    await eventually(lambda: runtime.open == [session_id("busy"), session_id("waits")])
    assert runtime.counters["idle"] == 2
    await runtime.stop("waits")
    with pytest.raises(ClientError, match="did not answer"):
        await waiting
    runtime.pass_time(28_801)  # the maximum lifetime of a session
    await eventually(lambda: runtime.open == [])
    assert runtime.counters["expired"] == 1


async def test_sessions_end_with_a_killed_prefork_process(start_runtime):
    runtime = await start_runtime(preload=())
    pid = (await runtime.seen("a"))["pid"]
    os.kill(parent_of(pid), signal.SIGKILL)
    await eventually(lambda: not is_running(pid) and runtime.open == [])
    await runtime.invoke("b")  # new sessions run the command
