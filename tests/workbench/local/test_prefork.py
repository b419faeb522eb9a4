import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader

from agent_wrapper.publish import _loader, new_session
from rollout_backend.workbench.local import prefork
from rollout_backend.workbench.local.spawner import PreforkSpawner, _Forked

SCRIPT = """
import os, sys
preloaded = "colorsys" in sys.modules
import colorsys
import helper
import random
import numpy
print(os.getpid(), helper.PID, preloaded, __name__, sys.argv, sys.path[0], os.environ["WHO"], sys.stdin.read() == "")
print(numpy.random.random(), random.random())
raise SystemExit(int(os.environ["CODE"]))
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "helper.py").write_text("import os\nPID = os.getpid()\n")
    (folder / "agent.py").write_text(SCRIPT)
    return folder / "agent.py"


def started(folder: Path, **env: str) -> subprocess.Popen[str]:
    argv, env = [sys.executable, prefork.__file__], {**os.environ, **env}
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=env)


def send(process: subprocess.Popen[str], message: dict) -> None:
    print(json.dumps(message), file=process.stdin, flush=True)


def test_preloaded_modules(agent):
    agent.write_text("import os.path\nfrom a.b import c\nimport helper\nfrom . import x\ndef f():\n    import late\n")
    assert prefork.imported_by(agent) == ["os.path", "a.b"]
    agent.write_text("this is no Python")
    assert prefork.imported_by(agent) == []


def test_each_session_is_a_fresh_run_of_the_script(agent, tmp_path):
    with started(tmp_path) as process:
        send(process, {"script": str(agent), "preload": ["no_such_module"]})
        assert json.loads(process.stdout.readline()) == {"ready": True}
        for who, code in (("a", 0), ("b", 3)):
            send(process, {"id": who, "env": {"WHO": who, "CODE": str(code)}, "log": str(tmp_path / f"{who}.log")})
        said = [json.loads(process.stdout.readline()) for _ in range(4)]
        pids = {message["id"]: message["pid"] for message in said if "id" in message}
        codes = {message["pid"]: message["code"] for message in said if "code" in message}
        assert codes == {pids["a"]: 0, pids["b"]: 3}
        process.stdin.close()
        assert process.wait(60) == 0
    drawn = set()
    for who, pid in pids.items():
        first, draws = (tmp_path / f"{who}.log").read_text().splitlines()
        assert first == f"{pid} {pid} True __main__ {[str(agent)]} {agent.parent} {who} True"
        drawn |= set(draws.split())
    assert len(drawn) == 4
    assert os.getpid() not in pids.values()


def test_sessions_from_a_snapshot_draw_the_same_at_their_start(agent, tmp_path):
    with started(tmp_path, **{prefork.SNAPSHOT: "1"}) as process:
        send(process, {"script": str(agent), "preload": []})
        assert json.loads(process.stdout.readline()) == {"ready": True}
        for who in "ab":
            send(process, {"id": who, "env": {"WHO": who, "CODE": "0"}, "log": str(tmp_path / f"{who}.log")})
        said = [json.loads(process.stdout.readline()) for _ in range(4)]
        assert sum("code" in message for message in said) == 2
        process.stdin.close()
    one, other = ((tmp_path / f"{who}.log").read_text().splitlines()[1] for who in "ab")
    assert one == other


@pytest.mark.parametrize(("set_after_s", "hours_late"), [("0", 0), ("600", 1)])
def test_a_session_from_a_snapshot_has_its_time_until_the_clock_is_set(tmp_path, set_after_s, hours_late):
    agent = tmp_path / "agent.py"
    agent.write_text("import time\nprint(round((time.clock_gettime(time.CLOCK_REALTIME) - time.time()) / 3600))")
    with started(tmp_path, **{prefork.SNAPSHOT: set_after_s}) as process:
        send(process, {"script": str(agent), "preload": []})
        assert json.loads(process.stdout.readline()) == {"ready": True}
        send(process, {"id": "a", "env": {}, "log": str(tmp_path / "a.log")})
        said = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.close()
    assert said[1]["code"] == 0
    assert (tmp_path / "a.log").read_text() == f"{hours_late}\n"


def test_late_imports_of_the_first_session_are_preloaded_for_later_sessions(tmp_path):
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "agent.py").write_text(
        "import os, sys\n"
        "print(*(name in sys.modules for name in ('colorsys', 'helper')), flush=True)\n"
        "def work():\n"
        "    import colorsys, helper\n"
        "work()\n"
        "sys.stdin = open(os.environ['GO'])\n"
        "sys.stdin.read()\n"
    )
    go = tmp_path / "go"
    os.mkfifo(go)
    with started(tmp_path) as process:

        def session(i: int) -> str:
            """Run one session to its end, while the first one still runs; return its output."""
            log, own = tmp_path / f"{i}.log", tmp_path / f"go{i}"
            own.touch()
            send(process, {"id": str(i), "env": {"GO": str(own)}, "log": str(log)})
            assert json.loads(process.stdout.readline())["id"] == str(i)
            assert json.loads(process.stdout.readline())["code"] == 0
            return log.read_text()

        send(process, {"script": str(folder / "agent.py"), "preload": []})
        assert json.loads(process.stdout.readline()) == {"ready": True}
        send(process, {"id": "0", "env": {"GO": str(go)}, "log": str(tmp_path / "0.log")})
        assert json.loads(process.stdout.readline())["id"] == "0"
        said = next(text for text in map(session, itertools.count(1)) if text != "False False\n")
        assert said == "True False\n"  # never the agent's own files
        go.write_text("")
        process.stdin.close()
        assert process.wait(60) == 0


def test_service_models_are_read_before_the_sessions(agent, monkeypatch):
    _loader.cache_clear()
    agent.write_text("import agent_wrapper\n")
    prefork.preload(agent, [])
    read, load = [], JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: read.append(path) or load(self, path))
    for service in ("s3", "sqs"):
        new_session("eu-west-1").client(service, aws_access_key_id="-", aws_secret_access_key="-")
    assert not [path for path in read if path.endswith("/service-2")]


async def test_a_session_that_is_forked_as_its_start_is_cancelled_is_killed(tmp_path, monkeypatch):
    spawner = PreforkSpawner(sys.executable, tmp_path / "agent.py", (), {}, tmp_path / "log")
    monkeypatch.setattr(spawner, "_send", lambda order: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        forking = asyncio.create_task(spawner._fork({}, tmp_path / "session.log"))
        await asyncio.sleep(0)
        spawner._forked["1"].set_result(_Forked(process.pid))
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert process.wait(120) == -signal.SIGKILL
