"""Interrupts, errors of the machine, packages that are missing, and output to pipes."""

import errno
import os
import signal
import subprocess
import sys
from urllib.request import proxy_bypass_environment

import pytest
import typer

from builders import run_config
from rollout_backend import RolloutManager
from rollout_backend.base.local_keys import bypass_proxies
from rollout_backend.cli import main
from rollout_backend.cli.common import errors, exit_codes, load_settings, make_console
from rollout_backend.workbench.deploy import target as target_module
from rollout_backend.workbench.deploy.target import Network, Target

STUBBORN = """
import asyncio
from rollout_backend.cli.common import exit_codes, run_async

async def work():
    print("up", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(600)

with exit_codes():
    run_async(work())
"""


def test_a_second_interrupt_exits_at_once_without_a_traceback():
    argv = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline().startswith("interrupted: stopping what was started")
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=240)[1]
        finally:
            process.kill()
    assert rest == "interrupted again: exiting at once; the run's janitor stops its sessions\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "runs/logs: No space left on device. Free space on that disk, or set output_dir"),
        (errno.EACCES, "runs/logs: Permission denied. Change the permissions, or set output_dir"),
        (errno.ENOTDIR, "runs/logs: Not a directory. Correct the path, or the setting that names it"),
    ],
)
def test_an_error_of_the_machine_is_one_line_on_stderr(capsys, number, words):
    with pytest.raises(typer.Exit) as ended, exit_codes():
        raise OSError(number, os.strerror(number), "runs/logs")
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {words}")
    assert err.count("\n") == 1


def test_other_errors_of_the_system_are_bugs_and_keep_their_traceback():
    with pytest.raises(ConnectionResetError), exit_codes():
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_a_bad_log_level_is_named(monkeypatch, capsys):
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", "loud")
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("error: ROLLOUT_LOG_LEVEL=LOUD is none of DEBUG, INFO")


def test_a_character_that_the_output_cannot_encode_is_escaped(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rollout_backend", "init", "größe"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"gr\xf6\xdfe holds an agent")


def test_a_pipe_gets_whole_lines_as_they_are(capsys):
    line = "/".join(["agent.py:100: word"] * 20)
    make_console().print(line)
    assert capsys.readouterr().out == f"{line}\n"
    assert errors.stderr


async def test_an_override_wins_over_the_stack(tmp_path, monkeypatch):
    arn = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789"
    network = Network("my-network", ("subnet-1",), ("sg-1",), "https://rollouts.example.com/s/{shard}")
    deployed = Target("us-east-1", "stacks-bucket", "my_agent", arn=arn, network=network)

    async def found(_: object) -> Target:
        return deployed

    monkeypatch.setattr(target_module, "read_stack", found)
    monkeypatch.setattr(target_module, "find_deployed", found)
    file = tmp_path / "base.yaml"
    file.write_text("{model: {path: /m}, storage: {bucket: mine}, gateway: {port: 9000}}")
    settings = await load_settings(file, ["gateway.port=9001"], "my-agent")
    assert (settings.storage.bucket, settings.gateway.port) == ("stacks-bucket", 9001)


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("typer", "", "trainer"),
        ("typer", "relay", "relay"),
        ("inspect_ai", "export run --to inspect", "inspect"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(missing, command, extra, tmp_path):
    (tmp_path / "run").mkdir()
    code = f"import sys; sys.modules[{missing!r}] = None; from rollout_backend.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    name = f"rollout {command.partition(' ')[0]}".strip()
    install = f"install the extra {extra} from a checkout: pip install '.[{extra}]'"
    assert done.stderr == f"error: {name} needs {missing}: {install}\n"
    assert done.returncode == 2


def test_an_interrupt_while_the_command_is_imported_has_no_traceback():
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, *_): raise KeyboardInterrupt\n"
        "from rollout_backend.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupt()); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "ls"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_missing_module_of_the_user_is_not_explained(tmp_path):
    code = (
        "import rollout_backend.cli as cli, rollout_backend.__main__ as command\n"
        "def main(): import no_such_module\n"
        "cli.main = main; command.main()"
    )
    argv = [sys.executable, "-c", code, "ls"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"no_proxy": "corp, localhost"}, "corp,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_this_machine_is_reached_without_the_users_proxy(given, hosts, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    os.environ.update(given)
    bypass_proxies()
    assert os.environ["NO_PROXY"] == os.environ.get("no_proxy", "*") == hosts
    assert proxy_bypass_environment("127.0.0.1")


async def test_a_manager_in_any_trainer_reaches_this_machine_without_the_users_proxy(monkeypatch):
    """verl and scripts use no command of ours."""

    class Started(Exception):
        pass

    async def start(*_):
        raise Started(os.environ.get("NO_PROXY"))

    for name in ("NO_PROXY", "no_proxy"):
        # Restored after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("rollout_backend.run.services.RunServices.start", start)
    with pytest.raises(Started, match=r"127\.0\.0\.1,localhost"):
        await RolloutManager(run_config()).__aenter__()
