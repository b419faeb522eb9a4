"""The end of a run has at most twelve lines."""

from pathlib import Path

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import PlannedRollout
from rollout_backend.core.tasks import Task
from rollout_backend.results.cost import Prices
from rollout_backend.results.findings import judge
from rollout_backend.results.records import records_of
from rollout_backend.results.step_report import GroupResult, StepResult, make_report
from rollout_backend.results.terminal.run_view import RunSummary, print_summary
from rollout_backend.serving.model_serving import RunPhase
from rollouts import make_ledger, make_rollout

REASONS = {
    Outcome.INFRA_ERROR: "throttled",
    Outcome.AGENT_ERROR: "agent_exception",
    Outcome.TIMED_OUT: "agent_deadline",
    Outcome.CANCELLED: "step_over",
}


def summary(*ends: float | Outcome, **more: object) -> RunSummary:
    """Return the summary of one group; a number is a reward."""
    ledger, arrived = make_ledger(0), list[Rollout]()
    for i, end in enumerate(ends):
        rollout_id = f"task-a.{i}"
        ledger.plan([PlannedRollout(rollout_id, "task-a")])
        if isinstance(end, Outcome):
            ledger.entries[rollout_id].settle(end, REASONS[end], "why")
        else:
            arrived.append(make_rollout(rollout_id, reward=end))
            ledger.entries[rollout_id].deliver(Outcome.COMPLETED, trainable=True)
    groups = (GroupResult(Task("task-a", {}), tuple(arrived), usable=bool(arrived), planned=len(ends)),)
    report = make_report("run", ledger, groups, arrived, [], [], refused=0, seconds=1.0, deadline_reached=True)
    records = tuple(records_of(ledger, lambda entry: "", arrived))
    verdict = judge(report, records)
    seconds = {RunPhase.CHECK: 1.0, RunPhase.ROLLOUTS: 22.0}
    result = StepResult(0, tuple(arrived), groups, (), report, records)
    return RunSummary(result, verdict, 0 if verdict.passed else 3, seconds, **more)  # type: ignore[arg-type]


def test_a_good_run(screen):
    print_summary(screen.console, summary(0.0, 1.0, report=Path("runs/x/report.html"), again="rollout run ..."))
    assert screen.text.splitlines() == [
        "✓ 2 of 2 rollouts completed, 1 of 1 groups usable",
        "  ! the step ended at its deadline (timeouts.collection_s: raise it)",
        "  ledger   2 = 2 completed; it reconciles; 0 sessions open",
        "  reward   0.500, 1 of 1 groups have a spread",
        "  time     check 1.0 s, rollouts 22 s",
        "  tokens   4 sampled (4/s), 6 prompt, cache unknown",
        "  read     rollout show task-a.0   (the longest)",
        "  report   runs/x/report.html",
        "  again    rollout run ...",
    ]


def test_a_run_with_everything_in_it_has_twelve_lines(screen):
    prices = Prices(session_s=0.0, own_s=0.0, result=0.01, step_s=0.0)
    for more, last in ({}, 4), ({"prices": prices}, 3):
        worst = summary(0.0, 0.0, *REASONS, report=Path("report.html"), again="again", **more)
        print_summary(screen.console, worst)
        lines = screen.text.splitlines()[-12:]
        assert lines[0].startswith("✗ nothing to train on: ")
        assert lines[last].endswith(" more in the report")
    assert len(screen.text.splitlines()) == 24
    assert "  cost     about $0.02 (S3 and SQS $0.02), $0.00 of it wasted (estimate)" in lines
    assert worst.fields()["cost"]["total"] == 0.02
