"""Build the page of one step: all values that its template shows."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from agent_wrapper.contract import Outcome
from rollout_backend.core.reasons import documented_at, what_to_do
from rollout_backend.results.comparison import shown_comparison
from rollout_backend.results.page import charts
from rollout_backend.results.page.conversations import embedded
from rollout_backend.results.page.token_text import TokenText
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.run_data import RunData, StepData, changed_settings
from rollout_backend.results.summary import PHASES, StepSummary, duration, mean, seconds_of, span

_SLOWEST = 5
_MAX_MESSAGE = 2000
OUTCOMES: tuple[Outcome | None, ...] = (*Outcome, None)


def step_context(
    run: RunData,
    step: StepData,
    *,
    against: RunData | None = None,
    text: TokenText | None = None,
    steps_link: str = "",
) -> dict[str, Any]:
    """Return the values for `step.html`. `steps_link` is the link to the page of all steps."""
    records = step.records
    summary = step.summary
    place = {record.rollout_id: number for number, record in enumerate(records)}
    talks = embedded(run, records, summary.tasks, text)
    throughput = charts.throughput(records)
    other = matching_step(against, step) if against is not None else None
    began = span(records)[0]
    return {
        "run": run,
        "step": step,
        "report": step.report,
        "began": datetime.fromtimestamp(began, UTC),
        "steps_link": steps_link,
        "summary": summary,
        "cost": step.cost(run.prices),
        "findings": step.findings,
        "heatmap": charts.heatmap(summary.tasks, place),
        "timeline": charts.timeline(records, place),
        "phases": summary.spent.parts,
        "slowest": _slowest(records),
        "activity": charts.activity(records),
        "throughput": throughput,
        "peak": max(value or 0.0 for value in throughput.lines[0].values),
        "durations": charts.histogram(charts.durations(records)),
        "lengths": charts.histogram([each.result.sampled_tokens for each in records if each.result]),
        "scatter": charts.scatter(records),
        "turns": mean([each.result.turns for each in records if each.result]),
        "rows": mean([each.result.segments for each in records if each.result]),
        "failures": step.failures,
        "what_to_do": what_to_do,
        "documented_at": documented_at,
        "other_step": other,
        **shown_comparison(run, records, against, other.records if other is not None else ()),
        "settings": [*changed_settings(run.config)] if run.config is not None else None,
        "outcomes": OUTCOMES,
        "with_text": text is not None,
        "embedded": len(talks),
        "data": _data(run, records, summary, talks, began),
    }


def matching_step(run: RunData, step: StepData) -> StepData:
    """Return the step of another run with the same number, or else its last step."""
    return next((each for each in run.steps if each.step == step.step), run.steps[-1])


def _slowest(
    records: Sequence[RolloutRecord],
) -> list[tuple[RolloutRecord, float, list[tuple[str, str, float, float]]]]:
    timed = [(record, duration(record) or 0.0) for record in records]
    found = sorted(timed, key=lambda each: -each[1])[:_SLOWEST]
    return [(record, seconds, seconds_of(record).parts) for record, seconds in found if seconds > 0]


class _Numbers:
    """Numbers values in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, value: str) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[str]:
        return list(self._numbers)


def _data(
    run: RunData, records: Sequence[RolloutRecord], summary: StepSummary, talks: dict[str, Any], began: float
) -> dict[str, Any]:
    """Return the page's data: one column of values per field, and each repeated value once."""
    tasks, reasons, messages = _Numbers(), _Numbers(), _Numbers()
    spent = [seconds_of(record) for record in records]
    times = [duration(record) for record in records]
    results = [record.result for record in records]
    return {
        "runDir": str(run.run_dir),
        "outcomes": [str(outcome or "not settled") for outcome in OUTCOMES],
        "id": [record.rollout_id for record in records],
        "task": [tasks.of(record.task_id) for record in records],
        "outcome": [OUTCOMES.index(record.outcome) for record in records],
        "reason": [reasons.of(record.reason) for record in records],
        "message": [messages.of(record.message[:_MAX_MESSAGE]) for record in records],
        "reward": [record.reward for record in records],
        "seconds": [None if seconds is None else round(seconds, 1) for seconds in times],
        "tokens": [result.sampled_tokens if result else None for result in results],
        "turns": [result.turns if result else None for result in results],
        "segments": [result.segments if result else None for result in results],
        "attempts": [record.attempts for record in records],
        "trained": [int(record.trained) for record in records],
        "phases": list(PHASES.values()),
        "spent": [[round(seconds, 1) for seconds in vars(each).values()] for each in spent],
        "logs": {
            record.rollout_id: [record.log or "", ", ".join(record.session_ids)]
            for record in records
            if record.failed or record.rollout_id in talks
        },
        "tasks": tasks.values(),
        "reasons": reasons.values(),
        "messages": messages.values(),
        "advice": {reason: what_to_do(reason) for reason in reasons.values() if reason},
        "documented": {reason: documented_at(reason) for reason in reasons.values() if reason},
        "talks": talks,
    }
