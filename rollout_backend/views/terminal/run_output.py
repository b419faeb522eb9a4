"""Print the progress of a run: a live view on a terminal, otherwise lines or JSON objects.

Invariant: if the console cannot be written, only the output ends, never the run.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live

from agent_wrapper.contract import Outcome
from rollout_backend.base.formats import count
from rollout_backend.config import RolloutConfig
from rollout_backend.core.reasons import documented_at
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.cost import Prices
from rollout_backend.run.accounts.progress import Progress
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.summary import FailureCount
from rollout_backend.views.terminal.keys import Keys
from rollout_backend.views.terminal.live_view import (
    Snapshot,
    frame,
    load_of,
    one_line,
    plain_line,
    refused_calls,
)
from rollout_backend.views.terminal.run_view import RunSummary, print_summary

log = logging.getLogger(__name__)

Style = Literal["normal", "quiet", "verbose", "json"]

_FAILURES_SHOWN = 10
# Limit for a failure's message, which is often the end of a log.
_MESSAGE_LINES = 15
_DESCRIPTIONS = {
    RunPhase.CHECK: "checking this machine, bucket, runtime and queue",
    RunPhase.ENGINES: "starting engines and router",
    RunPhase.GATEWAY: "starting the gateway",
    RunPhase.ROLLOUTS: "running the rollouts",
    RunPhase.STOP: "stopping what was started",
}


class RunOutput:
    """Prints one run to a console. Pass its methods to a manager, and show the manager's progress with `watch`."""

    def __init__(
        self, console: Console, style: Style = "normal", *, read_s: float = 0.5, lines_s: float = 15.0
    ) -> None:
        """`read_s` and `lines_s` are the seconds between two reads of the progress, and between two of its lines."""
        self._read_s = read_s
        self._lines_s = lines_s
        self.console = console
        self.style = style
        self._live: Live | None = None
        self._keys = Keys(self._on_key)
        self._stopping = False
        self._began: dict[RunPhase, float] = {}
        # `_snapshot` adds the phases.
        self._shown = Snapshot()
        self._failures: set[tuple[Outcome, str]] = set()

    def begin(self, config: RolloutConfig, *, tasks: int, rollouts: int, agent: Mapping[str, str] | None) -> None:
        """Print what will be run."""
        path = Path((agent or {}).get("path", ""))
        what = f"{path.name} on {config.model.path.name}" if path.name else config.model.path.name
        limit_s, prices = config.timeouts.collection_s, Prices.of(config)
        self._shown = Snapshot(config.run_id, what, limit_s=limit_s, prices=prices)
        line = f"run {config.run_id}: {count(tasks, 'task')}, {count(rollouts, 'rollout')}"
        fields = {"run_id": config.run_id, "folder": str(config.run_dir), "tasks": tasks, "rollouts": rollouts}
        self._print("run", line, **fields)

    def started(self, config: RolloutConfig) -> None:
        """Use the settings with which the run has started, because they include the runtime's prices."""
        self._shown = replace(self._shown, prices=Prices.of(config))

    # --- what a run reports -------------------------------------------------------------------------------

    def status(self, text: str) -> None:
        self._print("status", text, text=text)

    def phase(self, phase: RunPhase) -> None:
        self._began[phase] = time.monotonic()
        done = {str(each): round(took, 3) for each, took in self.seconds().items() if each is not phase}
        if self._live is not None and self.style == "normal":
            self._refresh()
        else:
            self._print("phase", _DESCRIPTIONS[phase], phase=phase, seconds=done)

    def serving(self, event: ServingEvent) -> None:
        text = f"{event.server}: {event.kind} {event.detail}".rstrip()
        self._print("serving", text, server=event.server, kind=event.kind, detail=event.detail)

    def failures(self, failures: Sequence[FailureCount]) -> None:
        """Print the first failure of each reason, unless it was already printed."""
        for failure in failures:
            key = failure.outcome, failure.reason
            if key in self._failures or len(self._failures) == _FAILURES_SHOWN:
                continue
            if failure.outcome is Outcome.CANCELLED:
                continue
            self._failures.add(key)
            found = {"rollout": failure.first, "outcome": failure.outcome, "reason": failure.reason}
            first, *rest = failure.message.splitlines() or [""]
            line = one_line(f"{failure.first}: {failure.outcome}, {failure.reason}: {first}")
            lines = [f"{line} (see {documented_at(failure.reason)})", *map(one_line, rest[-_MESSAGE_LINES:])]
            line = "\n    ".join(lines)
            self._print("failure", line, "red", **found, message=failure.message)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Print a JSON object, if the output is JSON."""
        if self.style == "json":
            line = json.dumps({"event": kind, "time": round(time.time(), 3), **fields})
            self._write(line)

    def seconds(self) -> Mapping[RunPhase, float]:
        """Return the seconds of each phase that has begun, in order."""
        ends = [*self._began.values(), time.monotonic()][1:]
        return {phase: end - began for (phase, began), end in zip(self._began.items(), ends, strict=True)}

    def _print(self, kind: str, line: str, style: str = "dim", /, **fields: Any) -> None:
        self.event(kind, **fields)
        if self.style in ("normal", "verbose"):
            self._write(line, style=style)

    def _write(self, text: str, style: str | None = None) -> None:
        with self._writing():
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """End the output, but not the run, if it cannot be written: a full disk, a closed terminal or pipe."""
        try:
            yield
        except (OSError, SystemExit) as error:
            # Rich exits when a pipe is closed.
            self.console.quiet = True
            # Flushing the buffer must not fail again.
            with suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.console.file.fileno())
            cause = error.__context__ if isinstance(error, SystemExit) else error
            log.warning("the run goes on without output, which cannot be written: %s", cause)

    # --- while it runs ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def watch(self, read: Callable[[], Awaitable[Progress]]) -> AsyncIterator[None]:
        """Show the progress of a run within this context."""
        if self.style in ("normal", "verbose") and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            with self._writing():
                self._live.start()
            self._keys.start()
        showing = asyncio.create_task(self._show(read))
        try:
            yield
        finally:
            showing.cancel()
            try:
                await showing
            except asyncio.CancelledError:
                pass
            except Exception:
                # A display must never end a run.
                log.warning("the progress of the run could not be shown", exc_info=True)
            self._keys.stop()
            if self._live is not None:
                with self._writing():
                    self._live.stop()
                self._live = None

    async def _show(self, read: Callable[[], Awaitable[Progress]]) -> None:
        next_line = 0.0
        while True:
            if [*self._began][-1:] == [RunPhase.ROLLOUTS]:
                progress = await read()
                # `planned` is 0 before and after a step.
                if progress.planned:
                    now = time.monotonic()
                    self._shown = replace(self._shown, progress=progress)
                    self._shown.history.add(now, progress)
                    self.failures(progress.failures)
                    next_line = next_line or now + self._lines_s
                    if now >= next_line:
                        next_line = now + self._lines_s
                        snapshot = self._snapshot()
                        self.event("progress", **_fields(snapshot, progress))
                        if self._live is None and self.style in ("normal", "verbose"):
                            self._write(plain_line(snapshot))
            self._refresh()
            await asyncio.sleep(self._read_s)

    def _on_key(self, key: str) -> None:
        if key == "d":
            self._shown = replace(self._shown, details=not self._shown.details)
        elif key == "f":
            self._shown = replace(self._shown, failures=not self._shown.failures)
        elif key == "q" and not self._stopping:
            # A second interrupt would skip the clean-up.
            self._stopping = True
            os.kill(os.getpid(), signal.SIGINT)
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            lines = frame(self._snapshot(), self.console.width)
            with self._writing():
                self._live.update(Group(*lines), refresh=True)

    def _snapshot(self) -> Snapshot:
        return replace(self._shown, phases=dict(self.seconds()), keys=self._keys.reading)

    # --- its end ------------------------------------------------------------------------------------------

    def end(self, summary: RunSummary) -> None:
        """Print the summary of a run that has ended."""
        self.event("end", **summary.fields())
        if self.style != "json":
            with self._writing():
                print_summary(self.console, summary)

    def unfinished(
        self, records: Sequence[RolloutRecord], folder: Path, report: Path | None, resume: str | None
    ) -> None:
        """Print what a run finished before it was interrupted or failed. `records` has all planned rollouts."""
        counts = Counter(str(record.outcome or "not settled") for record in records)
        kept = sum(record.result_at is not None for record in records)
        self.event("unfinished", results=kept, outcomes=counts, folder=str(folder), resume=resume)
        if self.style == "json":
            return
        ended = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none was planned"
        lines = [f"{kept} of {len(records)} rollouts have a result ({ended})"]
        lines.append(f"rollouts, records and logs: {folder}")
        if report is not None:
            lines.append(f"report: {report}")
        if resume is not None:
            lines.append(f"resume it with: {resume}")
        self._write("\n".join(lines))


def _fields(snapshot: Snapshot, progress: Progress) -> dict[str, Any]:
    return {
        "planned": progress.planned,
        "settled": progress.settled,
        "outcomes": progress.outcomes,
        "at_work": progress.at_work,
        "waiting": progress.waiting,
        "mean_reward": progress.mean_reward,
        "groups": progress.groups,
        "groups_with_spread": progress.groups_with_spread,
        "tokens_per_s": snapshot.history.tokens_per_s,
        "cache_hit": progress.gateway.cache_hit if progress.gateway is not None else None,
        "turns": progress.turns,
        "cut_replies": progress.cut_replies,
        "slowest": progress.slowest or None,
        "slowest_s": progress.slowest_s,
        "slowest_left_s": progress.slowest_left_s,
        "left_s": snapshot.left_s,
        "cost": snapshot.cost and snapshot.cost.fields(),
        "calls_in_flight": progress.gateway.calls_in_flight if progress.gateway is not None else None,
        "refused_calls": refused_calls(progress),
        "servers": [
            asdict(server) | dict(zip(("running", "queued"), load_of(server, progress) or (None, None), strict=True))
            for server in progress.servers
        ],
        "findings": [finding.fields() for finding in progress.findings()],
    }
