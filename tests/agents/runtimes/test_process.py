"""Agents as processes: their limits, their environment, and how their ends are reported."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from builders import background, eventually, run_config
from rollout_backend.agents.runtimes.process.control import send_stop
from rollout_backend.agents.runtimes.process.runtime import ProcessRuntime
from rollout_backend.agents.runtimes.process.supervisor import LOG_BYTES, _kill_all
from rollout_backend.base.child_process import last_lines
from rollout_backend.config import ProcessConfig
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import ConfigError, InvokeRejected, PreflightError
from rollout_backend.testing.runtime_contract import new_session

OpenRuntime = Callable[..., Awaitable[ProcessRuntime]]
MIB = 1 << 20
FOREVER = "sleep 600"


@pytest.fixture
async def open_runtime(tmp_path: Path) -> AsyncIterator[OpenRuntime]:
    """Open a runtime of `sh` with this script. Its sessions end with the test."""
    async with AsyncExitStack() as stack:

        async def open_(script: str, **settings: object) -> ProcessRuntime:
            command = {} if "app" in settings else {"command": ["sh", "-c", script]}
            folders = {"working_dir": tmp_path, "session_logs": tmp_path / "sessions"}
            config = ProcessConfig.model_validate({**command, **folders, "grace_s": 0.3, **settings})
            runtime = await ProcessRuntime.open(config)
            stack.push_async_callback(runtime.aclose)
            return runtime

        yield open_
        for pipe in (tmp_path / "sessions").glob("*.stop"):
            send_stop(pipe)


async def end_of(runtime: ProcessRuntime, session: str = "") -> SessionEnd:
    """Start a session unless it is named, and return how it is reported to end."""
    if not session:
        session = new_session()
        await runtime.invoke(session, b"{}")
    [end] = await ends_of(runtime, session)
    return end


async def ends_of(runtime: ProcessRuntime, *sessions: str) -> list[SessionEnd]:
    ends: asyncio.Queue[SessionEnd] = asyncio.Queue()
    async with asyncio.timeout(120), background(runtime.watch_sessions("run", ends.put_nowait)):
        found = [await ends.get() for _ in sessions]
    assert {end.session_id for end in found} == {*sessions}
    return found


def log_of(runtime: ProcessRuntime, session: str) -> str:
    return Path(runtime.log_location(session)).read_text()


# --- ends that are reported at once -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason", "message"),
    [
        ("echo no such model >&2; exit 3", "container_lost", "exited with code 3: no such model"),
        ("kill -SEGV $$", "container_lost", "killed by SIGSEGV"),
        ("kill -36 $$", "container_lost", "killed by signal 36"),  # a real-time signal, which has no name
        ("truncate -s 100G /proc/self/fd/1; echo; echo full; exit 1", "container_lost", "exited with code 1: full"),
        ("kill -KILL $$", "container_lost", "killed by SIGKILL, "),
        ("echo MemoryError; exit 1", "out_of_memory", "exited with code 1: MemoryError"),
    ],
)
async def test_a_session_that_ends_by_itself_is_reported_with_its_cause(open_runtime, script, reason, message):
    end = await end_of(await open_runtime(script))
    assert end.reason == reason
    assert message in end.message
    assert ".log" in end.message


async def test_a_session_ends_at_its_maximum_lifetime(open_runtime):
    end = await end_of(await open_runtime("trap '' TERM; while true; do sleep 0.1; done", max_lifetime_s=0.2))
    assert "ran for 0.2 s, its maximum" in end.message


async def test_the_end_of_an_earlier_trainers_session_is_reported(open_runtime):
    first, session = await open_runtime(FOREVER), new_session()
    await first.invoke(session, b"{}")
    await first.aclose()
    second = await open_runtime(FOREVER)
    watching = asyncio.create_task(end_of(second, session))
    await first.stop(session)
    assert "of an earlier trainer" in (await watching).message


@pytest.mark.skipif(sys.platform != "linux", reason="a process ends with its supervisor on Linux only")
async def test_a_session_whose_supervisor_is_killed_ends_and_is_reported(open_runtime):
    runtime, session = await open_runtime(f"echo $PPID $$; exec {FOREVER}"), new_session()
    await runtime.invoke(session, b"{}")
    await eventually(lambda: log_of(runtime, session).endswith("\n"))
    supervisor, agent = map(int, log_of(runtime, session).split())
    os.kill(supervisor, signal.SIGKILL)
    assert "its supervisor was killed" in (await end_of(runtime, session)).message
    await eventually(lambda: not Path(f"/proc/{agent}").exists())
    await runtime.stop(session)


# --- limits and environment -------------------------------------------------------------------------------


def test_a_process_of_another_user_that_is_left_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    sleep = ["sleep", "600"]
    with subprocess.Popen("cat", stdin=subprocess.PIPE), subprocess.Popen(sleep, process_group=0) as agent:
        _kill_all(agent)
        assert agent.returncode == -signal.SIGKILL


async def test_a_session_gets_its_payload_and_leaves_no_file_of_it(open_runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT__GATEWAY__SECRET", "s3cret")
    script = 'stat -c %a "$TMPDIR"; echo "$TMPDIR"; cat "$ROLLOUT_PAYLOAD_FILE"; echo; pwd; nice; env'
    runtime, session = await open_runtime(script, nice=5, environment={"GREETING": "hello"}), new_session()
    await runtime.invoke(session, b'{"a": 1}')
    await end_of(runtime, session)
    rights, scratch, payload, folder, nice, *env = log_of(runtime, session).splitlines()
    assert (rights, json.loads(payload), folder) == ("700", {"a": 1}, str(tmp_path))
    assert int(nice) == min(19, os.nice(0) + 5)
    assert "GREETING=hello" in env
    assert "s3cret" not in "".join(env)
    assert not os.path.exists(scratch)  # noqa: ASYNC240
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == [f"{session}.log"]


@pytest.mark.parametrize("keep_home", [False, True])
async def test_two_sessions_that_write_their_configuration_keep_it(open_runtime, monkeypatch, tmp_path, keep_home):
    home, met = tmp_path / "real", tmp_path / "met"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "config").write_text("profile")
    met.mkdir()
    monkeypatch.setenv("HOME", str(home))
    script = (
        f"cp $ROLLOUT_PAYLOAD_FILE $HOME/.agent; touch {met}/$$; "
        f"while [ $(ls {met} | wc -l) -lt 2 ]; do sleep 0.02; done; "
        "cat $HOME/.agent; echo; cat $HOME/.aws/config; echo; echo $XDG_CONFIG_HOME; echo $HOME"
    )
    runtime = await open_runtime(script, keep_home=keep_home, environment={"XDG_CONFIG_HOME": "/set"})
    sessions = {new_session(): payload for payload in ("1", "2")}
    await asyncio.gather(*(runtime.invoke(session, payload.encode()) for session, payload in sessions.items()))
    await ends_of(runtime, *sessions)
    logs = {payload: log_of(runtime, session).splitlines() for session, payload in sessions.items()}
    assert all(lines[1:3] == ["profile", "/set"] for lines in logs.values())
    if keep_home:
        assert {lines[3] for lines in logs.values()} == {str(home)}
    else:
        assert {payload: lines[0] for payload, lines in logs.items()} == {"1": "1", "2": "2"}
        assert len({lines[3] for lines in logs.values()} | {str(home)}) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are refused")
async def test_a_session_above_its_memory_is_killed_and_says_so(open_runtime, tmp_path):
    runtime = await open_runtime(
        f"{sys.executable} -c 'import time; data = bytearray({128 * MIB}); time.sleep(600)' & {FOREVER}",
        memory_bytes=64 * MIB,
    )
    await runtime.check()
    end = await end_of(runtime)
    assert end.reason == "out_of_memory"
    assert f"used more than {64 * MIB} bytes (runtime.memory_bytes)" in end.message
    with pytest.raises(PreflightError, match=r"runtime\.memory_bytes: .* is more than this machine has"):
        await (await open_runtime(FOREVER, memory_bytes=1 << 60)).check()


async def test_the_log_of_an_agent_that_prints_without_end_is_shortened(open_runtime):
    runtime = await open_runtime(f"head -c {3 * LOG_BYTES} /dev/zero; echo; echo the end; {FOREVER}")
    session = new_session()
    await runtime.invoke(session, b"{}")
    log = Path(runtime.log_location(session))
    await eventually(lambda: LOG_BYTES < log.stat().st_size < LOG_BYTES + MIB)
    await eventually(lambda: last_lines(log, 1) == ["the end"])


async def test_an_app_is_imported_before_the_run(open_runtime, tmp_path):
    (tmp_path / "agents.py").write_text("class good:\n    run = 1\nraise_ = None\n")
    await (await open_runtime("", app="agents:good")).check()
    with pytest.raises(PreflightError, match=r"agents:bad cannot be imported .*cannot import name 'bad'"):
        await (await open_runtime("", app="agents:bad")).check()
    assert not (tmp_path / "sessions").exists()


async def test_a_program_that_cannot_be_run_starts_no_session(open_runtime):
    runtime = await open_runtime("", command=["no-such-program"])
    with pytest.raises(InvokeRejected, match="no-such-program") as caught:
        await runtime.invoke(new_session(), b"{}")
    assert caught.value.reason == "container_error"
    with pytest.raises(InvokeRejected, match="no file name"):
        await runtime.invoke("../escape", b"{}")
    await runtime.stop("../escape")


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({}, "exactly one of the two is needed"),
        ({"app": "agent.py"}, r"runtime\.app: must be MODULE:NAME"),
        ({"command": "sh", "python": "/usr/bin/python3"}, "python belongs to app"),
        ({"command": "sh", "max_lifetime_s": 60}, r"runtime\.max_lifetime_s \(60\) ends sessions before"),
    ],
)
def test_settings_that_cannot_work_are_refused(runtime, message):
    with pytest.raises(ConfigError, match=message):
        run_config(runtime={"kind": "process", **runtime})


def test_a_run_gives_its_agents_a_folder_for_logs_and_the_endpoint_of_its_storage(tmp_path):
    runtime = {"kind": "process", "command": "python agent.py --fast", "environment": {"A": "b"}}
    aws = {"endpoint_url": "http://127.0.0.1:9000", "sqs_endpoint_url": "http://127.0.0.1:9001"}
    config = run_config(runtime=runtime, aws=aws, output_dir=str(tmp_path), run_id="r").run_runtime
    assert isinstance(config, ProcessConfig)
    assert config.argv == ["python", "agent.py", "--fast"]
    assert config.session_logs == tmp_path / "r" / "logs" / "sessions"
    endpoints = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ENDPOINT_URL_SQS": "http://127.0.0.1:9001"}
    assert config.environment == {"A": "b", **endpoints}
