"""Commands as agents: their environment, output, failures and end."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from agent_wrapper import CommandError, CommandNotStarted, RolloutContext, command, run_command
from agent_wrapper.shared.child_output import LOGGED_BYTES
from builders import eventually, is_running

CONTEXT = RolloutContext(payload={}, base_url="http://model/v1", api_key="secret", model="m")


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


async def test_a_command_gets_the_endpoint_its_input_and_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOUR", "green")
    source = "import json, os, sys; print(json.dumps([sys.stdin.read(), os.getcwd(), dict(os.environ)]))"
    out = await run_command(CONTEXT, python(source), input="2 + 2?", cwd=tmp_path, env={"SIZE": "4"})
    said, folder, environ = json.loads(out)
    assert (said, Path(folder)) == ("2 + 2?", tmp_path)
    wanted = {
        "OPENAI_BASE_URL": "http://model/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://model/v1",
        "ANTHROPIC_API_KEY": "secret",
        "ROLLOUT_MODEL": "m",
        "COLOUR": "green",
        "SIZE": "4",
    }
    assert wanted.items() <= environ.items()


async def test_a_command_that_fails_raises_with_the_end_of_its_stderr(capfd):
    with pytest.raises(CommandError) as failed:
        await run_command(CONTEXT, python("import sys; print('x' * 2000, file=sys.stderr); sys.exit('no licence')"))
    assert "exited with code 1: xxx" in str(failed.value)
    assert str(failed.value).endswith("no licence")
    assert len(str(failed.value)) < 1200
    assert len(capfd.readouterr().err) > 2000
    with pytest.raises(CommandError, match="exited with code 3: it wrote nothing to stderr"):
        await run_command(CONTEXT, python("import os; os._exit(3)"))
    with pytest.raises(CommandNotStarted, match=r"'no-such-program' cannot be started: \[Errno 2\]"):
        await run_command(CONTEXT, ["no-such-program"])


async def test_log_and_memory_are_bounded(capfd):
    source = "import sys; [(sys.stderr.write('e' * 10 ** 6), print('o' * 10 ** 6)) for _ in range(20)]; print('end')"
    result = await command.run_to_end(python(source), env={}, cwd=None, log_stdout=True)
    assert (result.exit_code, len(result.stdout), result.truncated) == (0, command.KEPT_BYTES, True)
    assert result.stdout.endswith("end\n")
    logged = capfd.readouterr()
    for text in (logged.out, logged.err):
        assert len(text) < LOGGED_BYTES + 2 * 65_536
        assert text.endswith("more than 16777216 bytes; the rest is not logged]\n")
    with pytest.raises(CommandError, match="wrote more than 16777216 bytes to stdout"):
        await run_command(CONTEXT, python(source))


async def test_a_process_of_another_user_that_is_left_fails_no_command(monkeypatch):
    monkeypatch.setattr("os.killpg", Mock(side_effect=PermissionError))
    assert await run_command(CONTEXT, ["echo", "done"]) == "done\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_a_child_that_left_the_process_group_is_killed():
    child = "import signal; signal.pause()"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    source = f"import subprocess, sys; print({start}.pid)"
    async with asyncio.timeout(60):
        pid = int(await run_command(CONTEXT, python(source)))
        await eventually(lambda: not is_running(pid))  # a signal is delivered in the background


async def test_a_cancelled_command_ends_with_its_children_and_its_stderr_is_logged(tmp_path, capfd):
    child = "import sys; sys.stdin.read()"
    source = f"""
import os, subprocess, sys
print("working", file=sys.stderr, flush=True)
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE)
open("new", "w").write(str(child.pid))
os.rename("new", "pid")
child.wait()
"""
    running = asyncio.create_task(run_command(CONTEXT, python(source), cwd=tmp_path))
    async with asyncio.timeout(60):
        await eventually((tmp_path / "pid").exists)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert capfd.readouterr().err == "working\n"
        pid = int((tmp_path / "pid").read_text())
        await eventually(lambda: not is_running(pid))  # a signal is delivered in the background
