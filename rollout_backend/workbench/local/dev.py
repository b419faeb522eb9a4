"""Run an agent again after each change of its source files, and show what it does.

Invariants:

- At most one run is in progress. A change cancels it.
- A failed run does not end the loop, even if the agent cannot be imported.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import watchfiles
from rich.console import Console
from rich.text import Text

from agent_wrapper.contract import Outcome, Rollout, readable
from rollout_backend.base.formats import count
from rollout_backend.config import RolloutConfig
from rollout_backend.core.harbor import VERIFIER
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.sessions.conversations import RecordedTurn
from rollout_backend.model.model_call import Message, ModelCall
from rollout_backend.run.scoring.scorer import ScoringError, configured_scorer, load_scorer
from rollout_backend.views.terminal.view import print_text
from rollout_backend.workbench.local.harness import AgentHarness, AgentRunError, Watcher

SOURCES = (".py", ".js", ".mjs", ".ts", ".sh", ".go", ".rs", ".yaml", ".yml", ".toml")
"""Suffixes of source files. Agents may write other files to their folder."""
_ROLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
_ROLE_WIDTH = 10
_SERVER_LINE = re.compile(
    r"^INFO:     .*|\d{4}-\d\d-\d\d \S+ [A-Z]+ agent_wrapper: .*"
    r'|\{"timestamp": "[^"]*", "level": "INFO", .*"logger": "bedrock_agentcore\.app".*'
)
"""Prefix of the lines that the app's server writes, perhaps after an unfinished line of the agent."""
_RAISED = "agent_wrapper: the agent raised"
"""The line before the traceback, which the result also contains."""
_FRAME = re.compile(r'  File "(?P<file>.+?)", line \d+')
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of|During handling of the above exception, another).*\n\n"
)


async def source_changes(folder: Path, tasks: Path) -> AsyncIterator[str]:
    """Yield the name of a changed file after each change of the sources or the `tasks` in an absolute folder."""
    is_watched = watchfiles.DefaultFilter()

    def is_source(change: watchfiles.Change, path: str) -> bool:
        return path == str(tasks) or (path.endswith(SOURCES) and is_watched(change, path))

    async for changes in watchfiles.awatch(folder, watch_filter=is_source, debounce=400):
        yield Path(min(path for _, path in changes)).name


async def run_after_changes(
    run: Callable[[], Coroutine[Any, Any, None]], changes: AsyncIterator[str], echo: Callable[[str], object]
) -> None:
    """Call `run` immediately and after each change, until cancelled. Raises what `run` raises."""
    changed: asyncio.Future[str] = asyncio.ensure_future(anext(changes))
    running: asyncio.Task[None] | None = None
    try:
        while True:
            running = asyncio.create_task(run())
            both: set[asyncio.Future[Any]] = {running, changed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
                echo("waiting for a change of the source; Ctrl-C ends")
                await asyncio.wait({changed})
            else:
                await _cancel(running)
            echo(f"{await changed} has changed")
            changed = asyncio.ensure_future(anext(changes))
    finally:
        if running is not None:
            await _cancel(running)
        await _cancel(changed)


async def _cancel(pending: asyncio.Future[Any]) -> None:
    pending.cancel()
    await asyncio.wait({pending})


class DevRunner:
    """Runs an agent's file on a task. Prints each model call, then the reward or the error."""

    def __init__(
        self, harness: AgentHarness, agent: Path, console: Console, config: RolloutConfig, *, quiet_s: float = 15.0
    ) -> None:
        """`config` has the sampling settings and the agent's time limit. After every `quiet_s` without activity, a
        line says what the run waits for."""
        self._quiet_s = quiet_s
        self._harness = harness
        self._agent = agent
        self._console = console
        self._config = config
        self._folder = agent.absolute().parent

    async def run(self, task: Task) -> None:
        """Run one rollout of the task."""
        began = time.monotonic()
        self._print(Text(f"task {task.task_id}", "bold"))
        printer = CallPrinter(self._console)
        waiting = asyncio.create_task(self._report_waits(printer, began))
        try:
            rollout = await self._harness.run(
                self._agent,
                task.payload,
                None,
                sampling=self._config.sampling,
                timeout_s=self._config.timeouts.agent_s,
                watcher=printer.watcher,
            )
        except AgentRunError as error:
            self._print_run_error(error)
            return
        except ConfigError as error:
            self._print(Text(str(error), "red"))
            return
        finally:
            waiting.cancel()
        took_s = time.monotonic() - began
        is_harbor = "harbor" in (task.private or {})
        if is_harbor or self._config.scoring.enabled:
            try:
                settings = self._config.scoring.model_dump()
                scorer = load_scorer(VERIFIER) if is_harbor else configured_scorer(settings)
                rollout = await self._harness.score(rollout, scorer, task.payload, task.private)
            except (ConfigError, ScoringError) as error:
                what = "the task's tests" if is_harbor else "the scorer"
                self._print(Text(f"{what} failed: {readable(str(error))}", "red"))
                return
        self._print_result(rollout, took_s)

    async def _report_waits(self, printer: CallPrinter, began: float) -> None:
        limit_s = self._config.timeouts.agent_s
        while True:
            await asyncio.sleep(max(0.0, printer.printed_at + self._quiet_s - time.monotonic()))
            if time.monotonic() >= printer.printed_at + self._quiet_s:
                took_s = time.monotonic() - began
                text = f"{took_s:.0f} s: {printer.waits_for()}; its limit is {limit_s:g} s (timeouts.agent_s)"
                printer.print(Text(text, "yellow"))

    def _print_result(self, rollout: Rollout, seconds: float) -> None:
        turns = sum(len(segment.turns) for segment in rollout.segments)
        note = f"  ({seconds:.1f} s, {count(turns, 'model call')}, {rollout.sampled_tokens} sampled tokens)"
        if rollout.reward is not None:
            style = "bold green" if rollout.outcome is Outcome.COMPLETED else "bold red"
            self._print(Text.assemble((f"reward {rollout.reward:g}", style), (note, "dim")))
        if rollout.extras:
            self._print(Text(f"extras {readable(json.dumps(rollout.extras, ensure_ascii=False))}", "dim"))
        if (failure := rollout.failure) is not None:
            self._print(Text(f"{rollout.outcome}, {failure.reason}: {failure.message}", "red"))
            if failure.traceback:
                self._print(Text(agent_traceback(failure.traceback, self._folder)))

    def _print_run_error(self, error: AgentRunError) -> None:
        log = ""
        # A process that did not start wrote no log.
        if error.log is not None and error.log.is_file():
            log = readable(error.log.read_text(errors="replace"))
        _, found, after = log.partition(_TRACEBACK)
        if not found:
            self._print(Text(str(error), "red"))
            return
        self._print(Text(str(error).partition(" Its log")[0], "red"))
        self._print(Text(agent_traceback(found + after, self._folder)))

    def _print(self, text: Text) -> None:
        print_text(self._console, text)


class CallPrinter:
    """Prints the model calls of one rollout (new messages when a call starts, the reply when it ends), and the output
    of the agent's process."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The messages of each call.
        self._shown: list[list[Message]] = []
        self._calls = self._in_flight = 0
        self._raised = False
        self.printed_at = time.monotonic()
        self.watcher = Watcher(self._started, self._ended, self._output)

    def waits_for(self) -> str:
        """Describe what the rollout waits for."""
        if self._in_flight:
            return f"the model has not answered the agent's call {self._calls} yet"
        if not self._calls:
            return "the agent has not called the model yet"
        return f"the agent has made {count(self._calls, 'model call')}, and has not ended since the last reply"

    def print(self, text: Text) -> None:
        print_text(self._console, text)
        self.printed_at = time.monotonic()

    def _output(self, line: str) -> None:
        self._raised |= _RAISED in line
        line = _SERVER_LINE.sub("", line)
        if line and not self._raised:
            self.print(Text.assemble((f"{'output':{_ROLE_WIDTH}}", "magenta"), readable(line)))

    def _started(self, call: ModelCall) -> None:
        self._calls, self._in_flight = self._calls + 1, self._in_flight + 1
        messages = list(call.messages)
        known = max((len(shown) for shown in self._shown if messages[: len(shown)] == shown), default=0)
        new = messages[known:]
        if known and new and new[0]["role"] == "assistant":
            # The reply was already printed.
            del new[0]
        for message in new:
            self._print_message(message)
        self._shown.append(messages)

    def _ended(self, turns: Sequence[RecordedTurn], error: str) -> None:
        # `_started` was not called for a call that could not be parsed.
        self._in_flight = max(0, self._in_flight - 1)
        if error:
            self.print(Text(f"the call failed: {readable(error)}", "red"))
        for turn in turns:
            if turn.opened not in (None, "first_call"):
                self.print(Text(f"this call started a new training row: {turn.opened}", "dim"))
            completion = turn.completion
            cut = ", cut at the limit of tokens" if completion.finish_reason == "length" else ""
            known = [each for each in completion.logprobs if each is not None and math.isfinite(each)]
            forced = "" if known or not completion.token_ids else ", not trained: its format was forced"
            note = f"  ({len(completion.token_ids)} tokens, {completion.seconds:.2f} s{cut}{forced})"
            self._print_message(turn.messages[-1], note)

    def _print_message(self, message: Mapping[str, Any], note: str = "") -> None:
        role, content = str(message.get("role")), message.get("content") or ""
        parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        parts += [f"{function['name']}({function['arguments']})" for function in functions]
        text = readable("\n".join(filter(None, parts))).replace("\n", "\n" + " " * _ROLE_WIDTH)
        who = (f"{readable(role):{_ROLE_WIDTH}}", _ROLES.get(role, "none"))
        self.print(Text.assemble(who, text, (note, "dim")))


def agent_traceback(traceback: str, folder: Path) -> str:
    """Return a traceback with only the frames in the agent's folder.

    Exceptions of a chain that have no such frame are left out, except the last one.
    """
    *causes, last = _CHAINED.split(traceback.strip())
    shown = [own for cause in causes if (own := _own_frames(cause, folder)) is not None]
    return "\n\n".join([*shown, _own_frames(last, folder) or last])


def _own_frames(traceback: str, folder: Path) -> str | None:
    """Return a traceback without the frames outside the folder; None if no frame remains."""
    lines, found, shown = [], False, True
    for line in traceback.splitlines():
        if match := _FRAME.match(line):
            path = Path(match["file"])
            shown = path.is_relative_to(folder) and "site-packages" not in path.parts
            found |= shown
        elif not line.startswith("    "):
            # The line is neither the code of a frame nor the marks below it.
            shown = True
        if shown:
            lines.append(line)
    return "\n".join(lines) if found else None
