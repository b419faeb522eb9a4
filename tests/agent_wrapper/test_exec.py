"""Any command as an agent: how it gets the task, how it is scored, and how it ends."""

import asyncio
import base64
import gc
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper import AgentFailure, CommandError, CommandNotStarted, RolloutContext
from agent_wrapper.contract import Outcome, unpack_artifacts
from agent_wrapper.errors import RewardError
from agent_wrapper.exec import parse_arguments
from agent_wrapper.outcome import classify
from agent_wrapper.runner import Raised
from agent_wrapper.shared.workspace import WORKSPACE, pack_folder, unpack_folder

PAYLOAD = {"question": "2 + 2?", "answer": 4, "tests": [{"name": "a b"}], "quote": "'\"; $(touch x) {payload.answer}"}


def context(payload=PAYLOAD, rollout_id="r") -> RolloutContext:
    return RolloutContext(payload, "http://model/v1", "secret", "m", rollout_id=rollout_id)


def run(*arguments: str, payload=PAYLOAD, rollout_id="r"):
    return asyncio.run(parse_arguments(arguments).run(context(payload, rollout_id)))


def ending(*arguments: str):
    """Return the outcome and the reason of a rollout that fails, and the message."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  its class is what is tested
        run(*arguments)
    result = classify(Raised(caught.value), "http://model/v1")
    assert result.reward is None
    return (result.outcome, result.failure.reason), result.failure.message


# --- a home for each rollout ------------------------------------------------------------------------------

# It keeps its endpoint's key in its home, as command-line agents do, and reads it once another agent has done so too.
CONFIGURED = """
touch $HOME/there && touch $XDG_CONFIG_HOME/there $TMPDIR/there
echo $OPENAI_API_KEY > $HOME/.agent
touch $2/$1
while [ $(ls $2 | wc -l) -lt 2 ]; do sleep 0.02; done
echo '{"reward": 1, "key": "'$(cat $HOME/.agent)'", "home": "'$HOME'", "file": "'$ROLLOUT_PAYLOAD_FILE'"}'
"""


async def run_two(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    met = tmp_path / "met"
    met.mkdir()
    command = ["sh", "-c", CONFIGURED, "-", "{payload.name}", str(met)]
    agent = parse_arguments([*options, "--reward", "stdout", "--", *command])
    rollouts = [
        RolloutContext({"name": name}, "http://model/v1", f"key-{name}", "m", rollout_id=name) for name in "ab"
    ]
    async with asyncio.timeout(60):
        return await asyncio.gather(*(agent.run(rollout) for rollout in rollouts))


async def test_two_agents_that_write_their_configuration_keep_their_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = await run_two(tmp_path)
    assert [each["key"] for each in found] == ["key-a", "key-b"]
    homes = {each["home"] for each in found}
    assert len(homes | {str(tmp_path)}) == 3
    gc.collect()
    assert not [home for home in homes if os.path.exists(home)]  # noqa: ASYNC240


@pytest.mark.parametrize("how", ["--keep-home", "one rollout per container"])
async def test_the_real_home_can_be_kept(tmp_path, monkeypatch, how):
    for name, value in {"HOME": tmp_path, "XDG_CONFIG_HOME": tmp_path, "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    options = [how]
    if how != "--keep-home":
        monkeypatch.setenv("ROLLOUT_PAYLOAD_FILE", "/payload")
        options = []
    found = await run_two(tmp_path, *options)
    assert {(each["home"], each["file"]) for each in found} == {(str(tmp_path), "")}


def test_a_verifier_does_not_get_the_home_of_the_command(tmp_path):
    verifier = "test ! -e $HOME/.agent && echo 1"
    assert run("--reward", "stdout", "--verifier", f"sh -c '{verifier}'", "--", "sh", "-c", "touch $HOME/.agent")


# --- the task ---------------------------------------------------------------------------------------------


def test_placeholders_give_the_task_and_no_shell_sees_it(tmp_path):
    show = "import json, sys, os; print(json.dumps({'reward': 1, 'argv': sys.argv[1:], 'cwd': os.getcwd()}))"
    arguments = [
        "{payload.question}",
        "n={payload.answer}",
        "{payload.tests.0.name}",
        "{payload.tests}",
        "{payload.quote}",
        "{model} {base_url}",
        '{"json": {}} {other}',
    ]
    result = run("--reward", "stdout", "--cwd", str(tmp_path), "--", sys.executable, "-c", show, *arguments)
    assert result["argv"] == [
        "2 + 2?",
        "n=4",
        "a b",
        '[{"name": "a b"}]',
        PAYLOAD["quote"],
        "m http://model/v1",
        '{"json": {}} {other}',
    ]
    assert Path(result["cwd"]) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_stdin_and_file_hold_the_same_payload():
    script = "import json, os, sys; a = json.load(sys.stdin); b = json.load(open(os.environ['ROLLOUT_TASK_FILE']))"
    script += "; print(json.dumps({'reward': a == b, 'payload': a, 'here': sys.argv[1]}))"
    command = [sys.executable, "-c", script, "{task_file}"]
    result = run("--reward", "stdout", "--stdin", "{payload}", "--", *command)
    assert (result["reward"], result["payload"]) == (1.0, PAYLOAD)
    assert not Path(result["here"]).exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{payload.prompt}", "payload has no field 'prompt' (it has: answer, nul, question, quote, tests)"),
        ("{payload.question.x}", "payload.question has no field 'x' (it has: a str)"),
        ("{payload.nul}", "NUL"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_in_is_named(template, words):
    with pytest.raises(AgentFailure) as failed:
        run("--reward", "stdout", "--", "echo", template, payload={**PAYLOAD, "nul": "\0"})
    assert words in str(failed.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "stdout"], "no command"),
        (["--", "true"], "--reward"),
        (["--reward", "exit-code", "--verifier", "true", "--", "true"], "a verifier that crashes exits with 1 too"),
        (["--reward", "exit-code", "--score-failures", "--", "true"], "the code is the score"),
        (["--reward", "stdout", "--", "sh", "-c", "solve {payload.q}"], "a task could run any command"),
        (["--reward", "stdout", "--verifier", "bash -ec 'test {payload.q}'", "--", "true"], "could run any command"),
    ],
)
def test_an_invalid_command_line_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


# --- the reward -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "script", "result"),
    [
        ("stdout", "echo noise; echo .5; echo", {"reward": 0.5}),
        ("stdout", """echo '{"reward": true, "steps": 3}'""", {"reward": 1.0, "steps": 3}),
        ("file", 'echo 0.25 > "$ROLLOUT_REWARD_FILE"; echo 7', {"reward": 0.25}),
        ("file", r"""printf '\357\273\2770.25\r\n' > "$ROLLOUT_REWARD_FILE" """, {"reward": 0.25}),
        ("file", r"""printf '\377\3761\000.\0005\000' > "$ROLLOUT_REWARD_FILE" """, {"reward": 1.5}),
        ("stdout", r"printf '\357\273\2770.25\r\n'", {"reward": 0.25}),
        ("exit-code", "exit 0", {"reward": 1.0}),
        ("exit-code", "exit 1", {"reward": 0.0}),
    ],
)
def test_the_command_reports_its_reward(reward, script, result):
    assert run("--reward", reward, "--", "sh", "-c", script) == result


@pytest.mark.parametrize(
    ("reward", "script", "message"),
    [
        ("file", "echo 1", "no file at $ROLLOUT_REWARD_FILE"),
        ("file", 'mkfifo "$ROLLOUT_REWARD_FILE"', "$ROLLOUT_REWARD_FILE is not a regular file"),
        ("file", 'ln -s /dev/zero "$ROLLOUT_REWARD_FILE"', "$ROLLOUT_REWARD_FILE is not a regular file"),
        ("stdout", "echo right", "is 'right', neither a number nor a JSON object"),
        ("stdout", """echo '{"score": 1}'""", "without 'reward'"),
    ],
)
def test_a_command_without_a_valid_reward_is_an_agent_error(reward, script, message):
    outcome, found = ending("--reward", reward, "--", "sh", "-c", script)
    assert outcome == (Outcome.AGENT_ERROR, "bad_reward")
    assert message in found


def test_a_failed_command_is_scored_only_if_asked_for():
    with pytest.raises(CommandError, match=r"sh exited with code 3: no licence \(its stdout ends with: 1\)"):
        run("--reward", "exit-code", "--", "sh", "-c", "echo 1; echo no licence >&2; exit 3")
    assert run("--reward", "stdout", "--score-failures", "--", "sh", "-c", "echo 1; exit 3") == {"reward": 1.0}
    with pytest.raises(RewardError, match="exited with code 3"):
        run("--reward", "stdout", "--score-failures", "--", "sh", "-c", "exit 3")


def test_a_command_that_takes_too_long_is_killed_and_may_be_scored():
    slow = ["--", "sh", "-c", "exec sleep 600"]
    with pytest.raises(CommandError, match=r"sh did not end within 0.05 s \(--timeout\)"):
        run("--reward", "stdout", "--timeout", "0.05", *slow)
    verifier = ["--verifier", "echo 0.5", "--score-failures"]
    assert run("--reward", "stdout", "--timeout", "0.05", *verifier, *slow) == {"reward": 0.5}


def test_a_command_that_is_scored_ends_before_the_agents_deadline(caplog):
    class Late(RolloutContext):
        remaining_s = 0.5

    arguments = ["--reward", "none", "--score-failures", "--", "sleep", "600"]
    with caplog.at_level("INFO"):
        assert asyncio.run(parse_arguments(arguments).run(Late({}, "", "", "m", rollout_id="r"))) == {"reward": 0.0}
    assert "sleep was killed after 0.45 s" in caplog.text


@pytest.mark.parametrize(
    ("remaining_s", "limits", "command_s"),
    [
        (1800.0, [], 1490.0),
        (400.0, [], 190.0),
        (600.0, ["--verifier-timeout", "60"], 530.0),
        (40.0, ["--verifier-timeout", "15"], 21.0),
        (600.0, ["--verifier-timeout", "60", "--timeout", "100"], 100.0),
    ],
)
def test_a_command_that_is_scored_leaves_its_verifiers_limit(remaining_s, limits, command_s):
    class At(RolloutContext):
        pass

    At.remaining_s = remaining_s
    arguments = ["--reward", "stdout", "--score-failures", "--verifier", "true", *limits, "--", "true"]
    agent = parse_arguments(arguments)
    assert agent._timeout_s(At({}, "", "", "m", rollout_id="r")) == command_s


def test_a_command_that_cannot_start_is_an_infrastructure_failure():
    outcome, message = ending("--reward", "stdout", "--", "no-such-program", "x")
    assert outcome == (Outcome.INFRA_ERROR, "command_not_started")
    assert "'no-such-program' cannot be started: [Errno 2] No such file or directory" in message
    with pytest.raises(CommandNotStarted, match="Argument list too long"):
        run("--reward", "stdout", "--", "echo", "{payload.a}", payload={"a": "x" * 200_000})


def test_outside_training_the_output_is_the_answer():
    assert run("--reward", "file", "--verifier", "false", "--", "echo", "hi", rollout_id=None) == {"output": "hi\n"}
    with pytest.raises(CommandError):
        run("--reward", "file", "--", "false", rollout_id=None)


@pytest.mark.parametrize("reward", ["stdout", "exit-code"])
def test_files_that_the_command_left_are_published_as_it_left_them(tmp_path, reward):
    given = context()
    artifacts = ["--artifact", "patch.diff", "--artifact", "notes/{payload.answer}.txt", "--artifact", "missing"]
    arguments = ["--reward", reward, "--cwd", str(tmp_path), *artifacts]
    if reward == "stdout":
        arguments += ["--verifier", "sh -c 'echo altered > patch.diff; echo 1'"]
    script = "printf x > patch.diff; mkdir notes; printf y > notes/4.txt"
    asyncio.run(parse_arguments([*arguments, "--", "sh", "-c", script]).run(given))
    packed, listed = given.artifacts.pack()
    assert [(each.name, each.size) for each in listed] == [("patch.diff", 1), ("4.txt", 1)]
    assert b"altered" not in packed


def test_a_workspace_is_unpacked_for_the_command_and_published_when_it_has_ended(tmp_path):
    (tmp_path / "sum.py").write_text("print(1)")
    given = context({"files": base64.b64encode(pack_folder(tmp_path)).decode()})
    command = ["sh", "-c", "cat sum.py > copy; mkdir notes; exit 3"]
    arguments = ["--reward", "none", "--workspace", "{payload.files}", "--score-failures", "--", *command]
    assert asyncio.run(parse_arguments(arguments).run(given)) == {"reward": 0.0}
    files = unpack_artifacts(*given.artifacts.pack())
    assert [*files] == [WORKSPACE]
    unpack_folder(files[WORKSPACE], tmp_path / "left")
    assert sorted(path.name for path in (tmp_path / "left").iterdir()) == ["copy", "notes", "sum.py"]
    assert (tmp_path / "left" / "copy").read_text() == "print(1)"


def test_a_workspace_can_be_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "sum.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    given = context({"environment": "."})
    arguments = ["--reward", "none", "--workspace", "{payload.environment}", "--", "sh", "-c", "mv sum.py moved.py"]
    assert asyncio.run(parse_arguments(arguments).run(given)) == {"reward": 0.0}
    unpack_folder(unpack_artifacts(*given.artifacts.pack())[WORKSPACE], tmp_path / "left")
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["moved.py"]
    monkeypatch.chdir("/")
    with pytest.raises(AgentFailure, match="working directory is /: set WORKDIR"):
        asyncio.run(parse_arguments(arguments).run(given))


@pytest.mark.parametrize("field", ["question", "answer"])
def test_a_workspace_that_is_no_archive_is_a_failure_of_the_agent(field):
    place, message = ending("--reward", "none", "--workspace", f"{{payload.{field}}}", "--", "true")
    assert place == (Outcome.AGENT_ERROR, "agent_failure")
    assert f"--workspace {{payload.{field}}}: " in message


# --- the verifier -----------------------------------------------------------------------------------------


def verify(script: str, *command: str, more: tuple[str, ...] = ()):
    verifier = f"sh -c {shlex.quote(script)} - {{payload.answer}} {{dir}}"
    return ["--reward", "stdout", *more, "--verifier", verifier, "--", *(command or ("true",))]


def test_a_verifier_scores_the_output_and_the_folder_without_the_models_key():
    check = 'test "$(cat "$ROLLOUT_OUTPUT_FILE" work "$2/work")" = "$1$1$1" && test -z "$OPENAI_API_KEY" && echo 0.75'
    command = ("sh", "-c", 'printf 4 | tee work; echo 1 > "$ROLLOUT_REWARD_FILE"')
    assert run(*verify(check, *command, more=("--cwd", "{dir}"))) == {"reward": 0.75}


def test_the_command_cannot_alter_what_the_verifier_reads_and_writes():
    command = ("sh", "-c", 'echo {} > "$ROLLOUT_TASK_FILE"; echo 1 > "$ROLLOUT_REWARD_FILE"')
    script = 'grep -q question "$ROLLOUT_TASK_FILE" && test ! -e "$ROLLOUT_REWARD_FILE" && echo 0'
    assert run(*verify(script, *command)) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("sh -c 'echo 1; echo oops >&2; exit 1'", "the verifier failed: sh exited with code 1: oops"),
        ("sh -c 'echo 1; kill -9 $$'", "was killed by SIGKILL"),
        ("no-such-verifier", "cannot be started: [Errno 2]"),
        ("sleep 600", "did not end within 0.05 s (--verifier-timeout)"),
    ],
)
def test_a_verifier_that_fails_is_an_infrastructure_failure(verifier, message):
    timeout = ["--verifier-timeout", "0.05" if "sleep" in verifier else "60"]
    outcome, found = ending("--reward", "stdout", *timeout, "--verifier", verifier, "--", "true")
    assert outcome == (Outcome.INFRA_ERROR, "verifier_failed")
    assert message in found
