"""Render the lines that show a running step. Pure: a snapshot in, lines out.

Invariants:

- no line is wider than the terminal or wraps: text of agents and models is escaped and put on one line;
- warnings follow the rules of the verdict.
"""

import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from agent_wrapper.contract import Outcome
from rollout_backend.base.formats import count, dollars, percent, seconds
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.run.accounts.cost import Cost, Prices
from rollout_backend.run.accounts.findings import Finding, Level
from rollout_backend.run.accounts.progress import LastResult, Progress
from rollout_backend.views.words import WORDS

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_POINTS = 8
_MAX_POINTS = 512
# Period over which the current rate is measured.
_RATE_S = 10.0
_MAX_FINDINGS = 3
# Maximum number of lines for failures, or for engines.
_MAX_LISTED = 12
_NAMES = {
    Outcome.COMPLETED: ("done", "green"),
    Outcome.AGENT_ERROR: ("agent error", "yellow"),
    Outcome.INFRA_ERROR: ("lost", "red"),
    Outcome.TIMED_OUT: ("timed out", "magenta"),
    Outcome.CANCELLED: ("cancelled", "dim"),
}
_LEVELS = {Level.BAD: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}


# --- what is shown ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Totals at one time, in seconds of any monotonic clock."""

    at: float
    tokens: int = 0
    rewards: int = 0
    reward_sum: float = 0.0


class History:
    """The totals of a step over time, in a limited number of points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._gateway_tokens = 0
        self._spacing_s = 0.0

    def add(self, now: float, progress: Progress) -> None:
        tokens = self.points[-1].tokens if self.points else 0
        if progress.gateway is not None:
            sampled = progress.gateway.sampled_tokens
            if self.points:
                # A restarted gateway counts from 0.
                tokens += max(0, sampled - self._gateway_tokens)
            self._gateway_tokens = sampled
        reward_sum = (progress.mean_reward or 0.0) * progress.rewards
        if len(self.points) > 1 and now - self.points[-2].at < self._spacing_s:
            del self.points[-1]
        self.points.append(Point(now, tokens, progress.rewards, reward_sum))
        if len(self.points) > _MAX_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]
            self._spacing_s = 2 * (now - self.points[0].at) / _MAX_POINTS

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens per second over the last seconds."""
        if len(self.points) < 2:
            return 0.0
        last = self.points[-1]
        first = next((point for point in self.points[:-1] if point.at >= last.at - _RATE_S), self.points[-2])
        return (last.tokens - first.tokens) / max(last.at - first.at, 1e-9)

    def tokens(self) -> list[float | None]:
        """Return the tokens sampled in equal parts of the step's time."""
        return [float(end.tokens - start.tokens) for start, end in self._parts()]

    def rewards(self) -> list[float | None]:
        """Return the mean of the rewards that arrived in equal parts of the step's time; None where none arrived."""
        parts = ((end.reward_sum - start.reward_sum, end.rewards - start.rewards) for start, end in self._parts())
        return [total / number if number else None for total, number in parts]

    def _parts(self) -> Iterator[tuple[Point, Point]]:
        if len(self.points) < _CURVE_POINTS:
            return
        first, last = self.points[0].at, self.points[-1].at
        start, times = self.points[0], [point.at for point in self.points]
        for i in range(1, _CURVE_POINTS + 1):
            at = first + (last - first) * i / _CURVE_POINTS
            end = self.points[min(bisect_left(times, at), len(times) - 1)]
            yield start, end
            start = end


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. `phases` maps the phases so far to their seconds; the last one is the current phase."""

    run_id: str = ""
    what: str = ""
    """The agent and the model."""
    phases: dict[RunPhase, float] = field(default_factory=dict)
    progress: Progress | None = None
    history: History = field(default_factory=History)
    limit_s: float = 0.0
    """Time limit of a step."""
    prices: Prices | None = None
    """Prices for the cost estimate; None if the settings have none."""
    keys: bool = False
    """Whether the terminal's keys are read."""
    details: bool = False
    """Whether details of engines and gateways are shown."""
    failures: bool = False
    """Whether failures are shown."""

    @property
    def elapsed_s(self) -> float:
        return sum(self.phases.values())

    @property
    def left_s(self) -> float | None:
        """Estimate the time left from the pace so far, up to the step's time limit; None until a tenth of the
        rollouts has ended.

        Rollouts start together, so the pace of the first ones is far below that of the others."""
        progress, elapsed = self.progress, self.phases.get(RunPhase.ROLLOUTS, 0.0)
        if progress is None or not progress.settled or progress.settled < progress.planned / 10:
            return None
        left = elapsed / progress.settled * (progress.planned - progress.settled)
        return min(left, max(0.0, self.limit_s - elapsed))

    @property
    def cost(self) -> Cost | None:
        """Estimate the cost of the ended rollouts, and of the GPUs so far."""
        if self.prices is None or self.progress is None:
            return None
        seconds = self.phases.get(RunPhase.ROLLOUTS, 0.0)
        return self.prices.cost(self.progress.trainable, self.progress.wasted, seconds)

    @property
    def waits_for(self) -> str:
        """Describe what the first result waits for."""
        progress = self.progress
        if progress is None:
            return ""
        seconds = f"({self.phases.get(RunPhase.ROLLOUTS, 0.0):.0f} s)"
        if not progress.at_work:
            return f"{progress.waiting:,} rollouts wait for their agents to start {seconds}"
        calls = progress.gateway.calls + progress.gateway.calls_in_flight if progress.gateway is not None else 0
        if not calls:
            return f"{progress.at_work:,} agents at work, none has called the model yet {seconds}"
        return f"{progress.at_work:,} agents at work, {calls:,} model calls, no result yet {seconds}"


# --- on a terminal ----------------------------------------------------------------------------------------


def frame(snapshot: Snapshot, width: int) -> list[Text]:
    """Return the lines that show a run on a terminal of this width."""
    lines = [_title(snapshot, width), _ticks(snapshot)]
    progress = snapshot.progress
    if progress is not None and progress.planned:
        lines += [Text(), _bar(snapshot, progress, width), _counts(progress, width), Text()]
        lines += [*_measures(snapshot, progress), *_servers(progress, width)]
        if (cost := snapshot.cost) is not None:
            each = f", {dollars(cost.total / progress.settled)} per session" if progress.settled else ""
            lines.append(Text(f" cost     {cost.sums}{each}"))
        findings = [*_findings(progress, width - 3)]
        lines += [Text(), *findings] if findings else []
        lines += [Text(), *_last(progress.last, width)] if progress.last else []
        lines += [Text(), *_details(progress)] if snapshot.details else []
        lines += [Text(), *_failures(progress)] if snapshot.failures else []
        lines += [Text(), Text(" d details   f failures   q stop and clean up", "dim")] if snapshot.keys else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _title(snapshot: Snapshot, width: int) -> Text:
    elapsed = int(snapshot.elapsed_s)
    clock = f"{elapsed // 3600:02}:{elapsed // 60 % 60:02}:{elapsed % 60:02}"
    left = Text.assemble((" rollout", "bold"), f"  {snapshot.run_id}   {one_line(snapshot.what)}")
    left.truncate(width - len(clock) - 1, overflow="ellipsis", pad=True)
    return left + Text(f" {clock}")


def _ticks(snapshot: Snapshot) -> Text:
    line, begun = Text(), list(snapshot.phases)
    for phase in RunPhase:
        if phase not in snapshot.phases:
            line.append(f" ○ {phase} ", "dim")
        elif phase is begun[-1]:
            line.append(f" ● {phase} ", "bold cyan")
        else:
            line.append(" ✓", "green").append(f" {phase} {seconds(snapshot.phases[phase])} ")
    return line


def _bar(snapshot: Snapshot, progress: Progress, width: int) -> Text:
    count = f"{progress.settled:,}/{progress.planned:,}"
    left = f"~{seconds(snapshot.left_s)}" if snapshot.left_s is not None else ""
    room = max(10, width - len(count) - 14)
    done = room * progress.settled // progress.planned
    open_until = -(-room * (progress.settled + progress.at_work) // progress.planned)
    return Text.assemble(
        " ", ("█" * done, "green"), ("▒" * (open_until - done), "cyan"), ("░" * (room - open_until), "dim"),
        f"  {count}  {left:>8}",
    )  # fmt: skip


def _counts(progress: Progress, width: int) -> Text:
    cells = [(name, progress.outcomes.get(outcome, 0), style) for outcome, (name, style) in _NAMES.items()]
    cells = [each for each in cells if each[0] != "cancelled" or each[1]]
    cells += [("at work", progress.at_work, ""), ("waiting", progress.waiting, "")]
    cells += [("scoring", progress.scoring, "")] if progress.scoring else []
    for gap, chosen in ((3, cells), (2, cells), (2, [cell for cell in cells if cell[1]])):
        parts = [Text(f"{name} {number:,}", style if number else "dim") for name, number, style in chosen]
        line = Text(" ") + Text(" " * gap).join(parts)
        if line.cell_len <= width:
            break
    return line


def _measures(snapshot: Snapshot, progress: Progress) -> Iterator[Text]:
    if progress.mean_reward is not None:
        text = f" reward   {progress.mean_reward:.3f} {sparkline(snapshot.history.rewards())}"
        if progress.groups:
            text += f"   rewards differ in {progress.groups_with_spread:,} of {progress.groups:,} whole groups"
        yield Text(text)
    elif not progress.settled:
        yield Text(f" {snapshot.waits_for}")
    if progress.gateway is not None and progress.gateway.calls:
        text = f" tokens   {snapshot.history.tokens_per_s:,.0f}/s {sparkline(snapshot.history.tokens(), low=0.0)}"
        text += f"   cache {percent(progress.gateway.cache_hit)}"
        text += f"   {progress.gateway.calls_in_flight:,} calls in flight"
        if waiting := progress.gateway.calls_waiting:
            text += f", {waiting:,} waiting"
        refused = refused_calls(progress)
        yield Text(text).append(f", {refused:,} refused (429)" if refused else "", "yellow")
        if largest := progress.gateway.largest:
            rollout_id = max(largest, key=largest.__getitem__)
            yield Text(f" largest  {one_line(rollout_id)}, {largest[rollout_id]:,} tokens sampled")
    if progress.slowest:
        text = f" slowest  {_slowest(progress)}"
        late = progress.p95_s is not None and progress.slowest_s > progress.p95_s
        if progress.p95_s is not None:
            text += f"   (95 % took under {seconds(progress.p95_s)})"
        yield Text(text, "yellow" if late else "")


def _slowest(progress: Progress) -> str:
    """Return the rollout that has been running longest, its time, and its time limit."""
    left = progress.slowest_left_s
    limit = f" of at most {seconds(progress.slowest_s + left)}" if left is not None else ""
    return f"{one_line(progress.slowest)}, {seconds(progress.slowest_s)}{limit}"


def _servers(progress: Progress, width: int) -> Iterator[Text]:
    """Yield the load of each engine, or the totals if the engines do not fit on a line."""
    if not progress.servers:
        return
    router, *engines = progress.servers
    each = [f"{engine.name.removeprefix('engine-')}: {_state(engine, progress)}" for engine in engines]
    line = " engines  " + "    ".join(each)
    if len(line) > width:
        loads = [load for engine in engines if (load := load_of(engine, progress)) is not None]
        running, queued = sum(load[0] for load in loads), sum(load[1] for load in loads)
        line = f" engines  {sum(map(_takes_calls, engines)):,} of {len(engines):,} serve"
        line += f", {running:,} running, {queued:,} queued" if loads else ""
        line += _restarts(sum(engine.restarts for engine in engines))
    if not router.serving or router.restarts:
        line += f"    router: {_state(router, progress)}"
    well = all(map(_takes_calls, engines)) and router.serving
    yield Text(line, "" if well else "yellow")


def _takes_calls(server: ServerState) -> bool:
    return server.serving and not server.paused


def _state(server: ServerState, progress: Progress) -> str:
    load = load_of(server, progress)
    if not server.serving:
        state = "waiting" if server.waiting_for else "not serving"
    elif server.paused:
        state = "paused"
    else:
        state = f"{load[0]:,} running, {load[1]:,} queued" if load is not None else "serves"
    return state + _restarts(server.restarts)


def _restarts(number: int) -> str:
    return f", {count(number, 'restart')}" if number else ""


def load_of(server: ServerState, progress: Progress) -> tuple[int, int] | None:
    """Return the numbers of running and waiting requests of an engine; None if unknown."""
    gateway = progress.gateway
    if gateway is None or server.url not in gateway.engine_running:
        return None
    return gateway.engine_running[server.url], gateway.engine_waiting.get(server.url, 0)


def refused_calls(progress: Progress) -> int:
    """Return the number of model calls that the gateways answered with 429."""
    return progress.gateway.errors.get("rate_limit_exceeded", 0) if progress.gateway is not None else 0


def _details(progress: Progress) -> Iterator[Text]:
    gateway = progress.gateway
    if gateway is None:
        yield Text(" gateway  does not answer", "yellow")
    else:
        errors = ", ".join(f"{code} {number:,}" for code, number in sorted(gateway.errors.items())) or "none"
        yield Text(
            f" gateway  {count(gateway.sessions_open, 'session')} open, {count(gateway.calls, 'call')} answered, "
            f"{gateway.cache_breaks:,} cache breaks"
        )
        if gateway.cache_breaks:
            yield Text(f"          cache breaks: {WORDS['cache breaks']}", "dim")
        renderers = f" ({one_line(', '.join(sorted(gateway.malformed)))})" if gateway.malformed else ""
        malformed = f"{gateway.malformed_tool_calls:,} malformed tool calls{renderers}"
        yield Text(f"          {malformed}; errors: {one_line(errors)}")
        if gateway.unjournaled:
            sessions = count(gateway.unjournaled, "session")
            yield Text(f"          {sessions} without a journal: its disk is full or does not answer", "yellow")
    yield Text(f" agents   {count(progress.open_sessions, 'session')} open")
    for server in progress.servers[:_MAX_LISTED]:
        yield Text(f" {server.name:9}{_state(server, progress)}   {server.url}")
    if more := len(progress.servers[_MAX_LISTED:]):
        yield Text(f" ... and {more:,} engines more", "dim")


def _failures(progress: Progress) -> Iterator[Text]:
    failures = sorted(progress.failures, key=lambda failure: -failure.number)
    if not failures:
        yield Text(" no rollout has failed", "dim")
    for failure in failures[:_MAX_LISTED]:
        style = _NAMES[failure.outcome][1]
        yield Text.assemble(
            (f" {failure.number:>5,} {failure.outcome}, {one_line(failure.reason)}", style),
            f"   first {one_line(f'{failure.first}: {failure.message}')}",
        )


def _findings(progress: Progress, width: int) -> Iterator[Text]:
    for finding in progress.findings()[:_MAX_FINDINGS]:
        for i, part in enumerate(textwrap.wrap(sentence(finding), max(20, width), max_lines=2, placeholder="…")):
            yield Text(" ! " if not i else "   ", _LEVELS[finding.level]).append(part, "none" if i else "")


def _last(results: Sequence[LastResult], width: int) -> Iterator[Text]:
    name_width = min(22, max(len(one_line(result.rollout_id)) for result in results))
    for i, result in enumerate(results[:2]):
        name = Text(one_line(result.rollout_id))
        name.truncate(name_width, overflow="ellipsis", pad=True)
        reward = "no reward" if result.reward is None else f"{result.reward:.3g}"
        took = seconds(result.seconds) if result.seconds is not None else ""
        line = Text(" last   " if not i else "        ") + name
        line.append(f"  {reward:>5}  {took:>6}  {result.sampled_tokens:>6,} tok   ")
        yield line + _end_of(one_line(result.text[-1000:]), width - line.cell_len - 2)


def _end_of(text: str, width: int) -> Text:
    """Return the end of a reply, which usually contains its result, in quotation marks."""
    if not text or width < 8:
        return Text()
    if Text(text).cell_len <= width:
        return Text(f'"{text}"', "dim")
    end = ""
    for character in reversed(text):
        if Text(character + end).cell_len > width - 3:
            break
        end = character + end
    return Text(f'"...{end}"', "dim")


# --- without one ------------------------------------------------------------------------------------------


def plain_line(snapshot: Snapshot) -> str:
    """Describe a step in one line, for a log."""
    progress = snapshot.progress
    if progress is None or not progress.settled:
        parts = [snapshot.waits_for]
    else:
        counts = [
            f"{progress.outcomes[outcome]:,} {name}"
            for outcome, (name, _) in _NAMES.items()
            if progress.outcomes.get(outcome)
        ]
        parts = [f"{progress.settled:,} of {progress.planned:,} ended ({', '.join(counts)})"]
        parts += [f"{progress.at_work:,} at work", f"{progress.waiting:,} waiting"]
        parts += [f"{progress.scoring:,} scoring"] if progress.scoring else []
        if progress.mean_reward is not None:
            parts.append(f"reward {progress.mean_reward:.3f}")
        if progress.groups:
            parts.append(f"rewards differ in {progress.groups_with_spread:,} of {progress.groups:,} whole groups")
        if progress.gateway is not None:
            parts.append(f"{snapshot.history.tokens_per_s:,.0f} tokens/s")
        if snapshot.left_s is not None:
            parts.append(f"about {seconds(snapshot.left_s)} left")
    if progress is not None and progress.slowest:
        parts.append(f"slowest {_slowest(progress)}")
    line = ", ".join(parts)
    if progress is not None:
        line = "; ".join([line, *(sentence(each) for each in progress.findings() if each.level is not Level.NOTE)])
    return line


# --- parts ------------------------------------------------------------------------------------------------


def sentence(finding: Finding) -> str:
    """Return a finding with its advice, unless the text already names the setting."""
    known = not finding.advice or finding.advice in finding.text
    return one_line(finding.text if known else f"{finding.text} ({finding.advice})")


def one_line(text: str) -> str:
    """Return text of an agent or model on one line, without control characters."""
    words = " ".join(text.split())
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in words)


def sparkline(values: Iterable[float | None], low: float | None = None) -> str:
    """Return a curve of block characters, from the lowest value, or `low`, to the highest. None is a space."""
    values = [*values]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    floor = min(known) if low is None else low
    span = max(known) - floor
    last = len(_BARS) - 1
    return "".join(
        " " if value is None else _BARS[round((value - floor) / span * last) if span > 0 else last // 2]
        for value in values
    )
