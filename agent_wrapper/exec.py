"""Run any command as an agent, without a line of Python.

    python -m agent_wrapper.exec --reward stdout --verifier 'python check.py' -- claude -p '{payload.prompt}'

The app serves invokes like any other, and runs the command once per rollout. It replaces placeholders in the command,
in the verifier and in `--stdin`, `--cwd` and `--workspace`:

    {payload}        the payload as JSON
    {payload.NAME}   a field of it, verbatim if a string, otherwise as JSON; {payload.NAME.0.OTHER} is inside it
    {task_file}      the path of a file with the payload as JSON, which is also $ROLLOUT_TASK_FILE
    {dir}            an empty folder of this rollout, the same for both, deleted afterwards
    {model}, {base_url}

The reward is a number, or a JSON object with the number under `reward`; its other fields become extras.

With `--workspace`, the command works on files from the payload or in the container's working directory, and the files
that it leaves are published for a scorer.

Invariants:

- No shell sees the payload. A value is one argument or a part of one, whatever characters it contains.
- A failing verifier is an infrastructure failure, never a reward. It starts after all processes of the command were
  killed, gets a fresh copy of the task, and reports to a file that the command does not know.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from agent_wrapper.app import RolloutApp
from agent_wrapper.command import CommandResult, run_to_end
from agent_wrapper.context import RolloutContext, own_home
from agent_wrapper.errors import AgentFailure, CommandError, CommandNotStarted, RewardError, VerifierError
from agent_wrapper.shared.json_values import decode_text, finite_number
from agent_wrapper.shared.workspace import WORKSPACE, pack_folder, unpack_folder

logger = logging.getLogger("agent_wrapper")

_PLACEHOLDER = re.compile(r"\{(payload(?:\.[^{}]+)?|task_file|dir|model|base_url)\}")
_SHELLS = frozenset({"ash", "bash", "dash", "fish", "ksh", "sh", "zsh"})
_MAX_REWARD_BYTES = 4 * 1024 * 1024
# Before the agent's deadline, this time is reserved to publish the command's files.
_PUBLISH_S = 10.0


@dataclass(frozen=True)
class CommandAgent:
    """A command and how its rollouts are scored, as the options of the command line say."""

    command: Sequence[str]
    reward: Literal["file", "stdout", "exit-code", "none"]
    verifier: Sequence[str]
    stdin: str
    cwd: str | None
    workspace: str
    timeout_s: float | None
    verifier_timeout_s: float
    score_failures: bool
    artifacts: Sequence[str]
    keep_home: bool

    async def run(self, context: RolloutContext) -> dict[str, Any]:
        """Run one rollout. Outside training, return the command's stdout without scoring it."""
        with _folder(context) as folder:
            if self.workspace:
                await asyncio.to_thread(folder.unpack, self.workspace)
            timeout_s = self._timeout_s(context)
            result = await self._run_command(folder, timeout_s)
            if result is None:
                limit = "--timeout" if timeout_s == self.timeout_s else "the agent's deadline"
                failure: str | None = f"{self.command[0]} did not end within {timeout_s:.3g} s ({limit})"
            else:
                failure = result.failure
            if not context.training:
                if failure is not None:
                    raise CommandError(failure)
                assert result is not None
                return {"output": result.stdout}
            if self.reward == "exit-code" and result is not None and result.exit_code in (0, 1):
                await asyncio.to_thread(self._add_artifacts, folder)
                return {"reward": 1.0 - result.exit_code}
            if failure is not None and not self.score_failures:
                raise CommandError(failure)
            await asyncio.to_thread(self._add_artifacts, folder)
            if self.reward == "none":
                return {"reward": 0.0}
            output = result.stdout if result is not None else ""
            if self.verifier:
                return await self._verify(folder, output)
            try:
                return folder.read_reward(self.reward, output)
            except ValueError as error:
                note = f" ({failure})" if failure else ""
                raise RewardError(f"the command {self.command[0]!r} reported no reward: {error}{note}") from None

    def _timeout_s(self, context: RolloutContext) -> float | None:
        """Return the seconds after which the command is killed. If its failures are scored, the verifier's limit, at
        most half of the time, is left before the agent's deadline, after which only a failure can be published."""
        if not self.score_failures or not context.training:
            return self.timeout_s
        left_s = context.remaining_s - min(_PUBLISH_S, context.remaining_s / 10)
        if self.verifier:
            left_s -= min(self.verifier_timeout_s, context.remaining_s / 2)
        return left_s if self.timeout_s is None else min(left_s, self.timeout_s)

    async def _run_command(self, folder: _Folder, timeout_s: float | None) -> CommandResult | None:
        """Run the command. Return None if it did not end in time."""
        command = [folder.fill(each) for each in self.command]
        environ = {**folder.context.environ(keep_home=self.keep_home), **folder.environ()}
        stdin, cwd = folder.fill(self.stdin), folder.cwd(self.cwd)
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                result = await run_to_end(command, env=environ, input=stdin, cwd=cwd, log_stdout=True)
        except TimeoutError:
            logger.info("%s was killed after %g s", self.command[0], timeout_s)
            return None
        logger.info("%s ended with code %d after %.1f s", self.command[0], result.exit_code, time.monotonic() - began)
        return result

    def _add_artifacts(self, folder: _Folder) -> None:
        """Publish the files that the command left, before a verifier can change them."""
        if self.workspace:
            folder.context.artifacts.add(WORKSPACE, pack_folder(folder.work))
        for template in self.artifacts:
            path = Path(folder.cwd(self.cwd) or ".", folder.fill(template))
            if path.is_file():
                folder.context.artifacts.add(path.name, path)

    async def _verify(self, command: _Folder, output: str) -> dict[str, Any]:
        cwd = command.cwd(self.cwd)
        with _folder(command.context) as folder:
            # `{dir}` names the same folder in the verifier.
            folder.work = command.work
            verifier = [folder.fill(each) for each in self.verifier]
            output_file = folder.path / "output"
            output_file.write_text(output)
            own = own_home(folder.path, self.keep_home)
            environ = {**own, **folder.environ(), "ROLLOUT_OUTPUT_FILE": str(output_file)}
            try:
                async with asyncio.timeout(self.verifier_timeout_s):
                    result = await run_to_end(verifier, env=environ, cwd=cwd, log_stdout=True)
                if result.failure is not None:
                    raise VerifierError(f"the verifier failed: {result.failure}")
                return folder.read_reward(self.reward, result.stdout)
            except TimeoutError:
                message = f"the verifier {verifier[0]!r} did not end within {self.verifier_timeout_s:g} s"
                raise VerifierError(f"{message} (--verifier-timeout)") from None
            except CommandNotStarted as error:
                raise VerifierError(f"the verifier cannot be started: {error.__cause__}") from None
            except ValueError as error:
                raise VerifierError(f"the verifier {verifier[0]!r} reported no reward: {error}") from None


class _Folder:
    """The folder and placeholders of one process of a rollout."""

    def __init__(self, context: RolloutContext, path: Path) -> None:
        self.context = context
        self.path = path
        self._task_file = path / "task.json"
        self._task_file.write_text(json.dumps(context.payload))
        self._reward_file = path / "reward"
        self.work = path / "work"
        self.work.mkdir()

    def environ(self) -> dict[str, str]:
        return {"ROLLOUT_TASK_FILE": str(self._task_file), "ROLLOUT_REWARD_FILE": str(self._reward_file)}

    def cwd(self, template: str | None) -> str | None:
        return None if template is None else self.fill(template)

    def unpack(self, template: str) -> None:
        """Write the files of an archive in the payload to the work folder. "." makes this process's working directory
        that folder; an absolute path makes it the folder with that name.

        Raises:
            AgentFailure: the value is not an archive, or the working directory is the root.
        """
        filled = self.fill(template)
        if filled == "." or filled.startswith("/"):
            # No base64-encoded archive begins with a slash.
            self.work = Path(filled).resolve()
            if self.work == Path(self.work.anchor):
                raise AgentFailure(f"--workspace {template}: the container's working directory is /: set WORKDIR")
            if not self.work.is_dir():
                raise AgentFailure(f"--workspace {template}: the container has no folder {filled}")
            return
        try:
            unpack_folder(base64.b64decode(filled, validate=True), self.work)
        except ValueError as error:
            raise AgentFailure(f"--workspace {template}: {error}") from None

    def fill(self, template: str) -> str:
        """Replace the placeholders.

        Raises:
            AgentFailure: the payload lacks a field that a placeholder names.
        """
        filled = _PLACEHOLDER.sub(lambda match: self._value(match[1]), template)
        if "\0" in filled:
            raise AgentFailure(f"the payload has a NUL character, which no argument can hold, for {template!r}")
        return filled

    def _value(self, name: str) -> str:
        context = self.context
        if name.startswith("payload"):
            value = _field(context.payload, name)
            return value if isinstance(value, str) else json.dumps(value)
        return {
            "task_file": str(self._task_file),
            "dir": str(self.work),
            "model": context.model,
            "base_url": context.base_url,
        }[name]

    def read_reward(self, source: str, output: str) -> dict[str, Any]:
        """Return the reward and the extras that a process reported. Raises ValueError."""
        if source == "stdout":
            lines = output.split("\n")
            text = next((line for line in reversed(lines) if line.strip()), "")
            return _parse_reward(text, "the last line of stdout")
        if not self._reward_file.exists():
            raise ValueError("there is no file at $ROLLOUT_REWARD_FILE")
        # To open a named pipe would wait for its writer.
        if not self._reward_file.is_file():
            raise ValueError("$ROLLOUT_REWARD_FILE is not a regular file")
        with self._reward_file.open("rb") as file:
            data = file.read(_MAX_REWARD_BYTES + 1)
        if len(data) > _MAX_REWARD_BYTES:
            raise ValueError(f"the reward file is larger than {_MAX_REWARD_BYTES} bytes")
        return _parse_reward(decode_text(data), "the reward file")


@contextlib.contextmanager
def _folder(context: RolloutContext) -> Iterator[_Folder]:
    with TemporaryDirectory(prefix="rollout-", ignore_cleanup_errors=True) as path:
        yield _Folder(context, Path(path))


def _field(payload: dict[str, Any], name: str) -> Any:
    """Return the field that a placeholder such as `payload.tests.0` names. Raises AgentFailure."""
    value: Any = payload
    where = "payload"
    for part in name.split(".")[1:]:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            has = ", ".join(sorted(value)) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise AgentFailure(
                f"the command needs {{{name}}}, and {where} has no field {part!r} (it has: {has or 'no fields'})"
            ) from None
        where = f"{where}.{part}"
    return value


def _parse_reward(text: str, where: str) -> dict[str, Any]:
    text = text.strip().removeprefix("\ufeff")
    try:
        value: object = float(text)
    except ValueError:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            shown = text if len(text) <= 100 else f"{text[:100]}..."
            raise ValueError(f"{where} is {shown!r}, neither a number nor a JSON object") from None
    fields = value if isinstance(value, dict) else {"reward": value}
    if "reward" not in fields:
        raise ValueError(f"{where} is a JSON object without 'reward' (it has {sorted(fields)})")
    return {**fields, "reward": finite_number(fields["reward"])}


def make_app(agent: CommandAgent) -> RolloutApp:
    """Return the app that runs this command for each rollout."""
    app = RolloutApp()
    app.entrypoint(agent.run)
    return app


def parse_arguments(arguments: Sequence[str]) -> CommandAgent:
    """Parse a command line. Exit with a message if it is not valid."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_wrapper.exec",
        usage="%(prog)s --reward {file,stdout,exit-code,none} [OPTIONS] -- COMMAND [ARGUMENT ...]",
        description="Run any command as an agent. {payload.NAME} in an argument is replaced by a field of the task.",
    )
    parser.add_argument(
        "--reward",
        required=True,
        choices=("file", "stdout", "exit-code", "none"),
        help="where the command, or the verifier, reports: $ROLLOUT_REWARD_FILE, the last line of stdout, or its "
        "exit code (0 is 1, 1 is 0, and any other is a failure); none: a scorer of the training side decides",
    )
    parser.add_argument("--verifier", metavar="COMMAND", type=shlex.split, default=[], help="scores what was done")
    parser.add_argument("--stdin", metavar="TEMPLATE", default="", help="the command's stdin, such as {payload}")
    parser.add_argument("--cwd", metavar="TEMPLATE", help="the folder in which both run, such as {dir}")
    parser.add_argument(
        "--workspace",
        metavar="TEMPLATE",
        default="",
        help="a .tar.gz in base64, such as {payload.environment}, that is unpacked into {dir}, where the command "
        "runs; if it is '.', {dir} is the container's working directory. What the command leaves there is published "
        f"as the artifact {WORKSPACE}",
    )
    parser.add_argument(
        "--timeout", dest="timeout_s", metavar="S", type=_seconds, help="kill the command after this many seconds"
    )
    parser.add_argument(
        "--verifier-timeout",
        dest="verifier_timeout_s",
        metavar="S",
        type=_seconds,
        default=300.0,
        help="kill the verifier after this many seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--score-failures",
        action="store_true",
        help="score the command also if it fails or reaches --timeout or the agent's deadline",
    )
    parser.add_argument(
        "--artifact",
        dest="artifacts",
        metavar="FILE",
        action="append",
        default=[],
        help="publish this file for a scorer on the training side, if the command has left it; can be repeated",
    )
    parser.add_argument(
        "--keep-home",
        action="store_true",
        help="leave HOME, XDG_* and TMPDIR unchanged, which all rollouts of a server share; by default command and "
        "verifier get folders of their rollout",
    )
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    command = list(arguments[split + 1 :])
    options = parser.parse_args(arguments[:split])
    if not command:
        parser.error("no command: put it behind --, for example: -- claude -p '{payload.prompt}'")
    if options.reward == "exit-code" and options.verifier:
        parser.error(
            "--reward exit-code does not go with --verifier: a verifier that crashes exits with 1 too, which would "
            "be a reward of 0. Let it print its reward (--reward stdout)"
        )
    if options.reward == "none" and options.verifier:
        parser.error("--reward none does not go with --verifier: a scorer of the training side computes the reward")
    if options.reward == "exit-code" and options.score_failures:
        parser.error("--score-failures does not go with --reward exit-code, where the code is the score")
    for words in (command, options.verifier):
        _refuse_script(parser, words)
    options.cwd = options.cwd or ("{dir}" if options.workspace else None)
    return CommandAgent(command, **vars(options))


def _seconds(text: str) -> float:
    value = finite_number(float(text))
    if value <= 0:
        raise ValueError(text)
    return value


def _refuse_script(parser: argparse.ArgumentParser, command: Sequence[str]) -> None:
    """Refuse a placeholder inside a shell script, where a payload could run commands."""
    if not command or Path(command[0]).name not in _SHELLS:
        return
    for flag, script in itertools.pairwise(command[1:]):
        if re.fullmatch(r"-[a-z]*c", flag) and (found := _PLACEHOLDER.search(script)):
            parser.error(
                f"{found[0]} is in the script of {command[0]} -c, where a task could run any command. Give it as an "
                f"argument: {command[0]} -c 'solve \"$1\"' - '{found[0]}'"
            )


def main() -> None:
    make_app(parse_arguments(sys.argv[1:])).run()


if __name__ == "__main__":
    main()
