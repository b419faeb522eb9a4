"""The end of a run has at most twelve lines."""

from pathlib import Path

from agent_wrapper.contract import Outcome
from rollout_backend.results.cost import Prices
from rollout_backend.results.findings import judge
from rollout_backend.results.terminal.run_view import RunSummary, print_summary
from rollout_backend.serving.model_serving import RunPhase
from run_folders import make_step

REASONS = {
    Outcome.INFRA_ERROR: "throttled",
    Outcome.AGENT_ERROR: "agent_exception",
    Outcome.TIMED_OUT: "agent_deadline",
    Outcome.CANCELLED: "step_over",
}


def summary(*ends: float | Outcome, **more: object) -> RunSummary:
    """Return the summary of one group; a number is a reward."""
    reasons = {f"task-a.{i}": (end, REASONS[end], "why") if end in REASONS else end for i, end in enumerate(ends)}
    result = make_step(reasons, deadline_reached=True)
    verdict = judge(result.report, result.records)
    seconds = {RunPhase.CHECK: 1.0, RunPhase.ROLLOUTS: 22.0}
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
