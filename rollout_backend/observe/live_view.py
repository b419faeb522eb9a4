"""Shows a running step: counts by class, tokens per second, time left. A live panel on a terminal, else lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.observe.progress import Progress

_STYLES = {
    Outcome.COMPLETED: "green",
    Outcome.AGENT_ERROR: "yellow",
    Outcome.INFRA_ERROR: "red",
    Outcome.TIMED_OUT: "magenta",
    Outcome.CANCELLED: "dim",
}
_TERMINAL_S, _LINES_S = 0.5, 5.0


async def show_progress(read: Callable[[], Awaitable[Progress]], limit_s: float, console: Console) -> None:
    """Show the run's progress until cancelled. A step takes at most `limit_s` seconds."""
    display = _Display(limit_s)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINES_S)
            console.print(display.line(await read()), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(display.panel(await read()), refresh=True)
            await asyncio.sleep(_TERMINAL_S)


class _Display:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._rate = 0.0
        self._last: tuple[float, int] | None = None

    def line(self, progress: Progress) -> str:
        settled, planned = _settled(progress), _planned(progress)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in progress.outcomes.items() if count)
        return (
            f"{settled}/{planned} settled ({counts or 'none yet'}), {progress.phases[Phase.RUNNING]} running, "
            f"{self._tokens_per_s(progress):.0f} tok/s, {self._left(settled, planned)}"
        ) + (f"; {progress.warning}" if progress.warning else "")

    def panel(self, progress: Progress) -> RenderableType:
        settled, planned = _settled(progress), _planned(progress)
        counts = Table.grid(padding=(0, 2))
        counts.add_row(
            *(Text(f"{progress.outcomes.get(outcome, 0)} {outcome}", style=_STYLES[outcome]) for outcome in Outcome),
            *(f"{progress.phases[phase]} {phase}" for phase in (Phase.RUNNING, Phase.DISPATCHING, Phase.PLANNED)),
        )
        rewards = progress.rewards
        mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward yet"
        facts = (
            f"{settled}/{planned} settled   {progress.open_sessions} sessions open   "
            f"{self._tokens_per_s(progress):.0f} tok/s   {mean}   {self._left(settled, planned)}"
        )
        warning = [Text(progress.warning, style="yellow")] if progress.warning else []
        return Group(ProgressBar(total=max(planned, 1), completed=settled, width=60), counts, Text(facts), *warning)

    def _tokens_per_s(self, progress: Progress) -> float:
        """Return sampled tokens per second, smoothed over the last few samples."""
        if progress.gateway is None:
            return 0.0
        now, tokens = time.monotonic(), progress.gateway.sampled_tokens
        if self._last is not None and now > self._last[0]:
            # A restarted gateway counts from 0.
            self._rate += 0.3 * (max(0, tokens - self._last[1]) / (now - self._last[0]) - self._rate)
        self._last = (now, tokens)
        return self._rate

    def _left(self, settled: int, planned: int) -> str:
        """Estimate the time left from the pace so far; at most the step's remaining time limit."""
        elapsed = time.monotonic() - self._began
        limit = max(0.0, self._limit_s - elapsed)
        if not settled:
            return f"at most {limit:.0f} s left"
        return f"about {min(limit, elapsed / settled * (planned - settled)):.0f} s left"


def _settled(progress: Progress) -> int:
    return sum(progress.outcomes.values())


def _planned(progress: Progress) -> int:
    return sum(progress.phases.values())
