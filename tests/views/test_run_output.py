"""What a run prints on a terminal, in a pipe and as JSON, and its end of at most twelve lines."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.model.serving.supervisor import ServingEvent
from rollout_backend.run.accounts.cost import Prices
from rollout_backend.run.accounts.findings import judge
from rollout_backend.run.accounts.progress import Progress
from rollout_backend.run.accounts.summary import FailureCount, summarize
from rollout_backend.views.terminal.run_output import RunOutput, Style
from rollout_backend.views.terminal.run_view import RunSummary, print_summary
from run_folders import make_step

LOST = FailureCount(Outcome.INFRA_ERROR, "throttled", 2, "task-a.0", "429\n[red]\x1b[2Jslow down")


def progress(settled: int) -> Progress:
    phases = {**dict.fromkeys(Phase, 0), Phase.RUNNING: 1, Phase.SETTLED: settled}
    return Progress(phases, {Outcome.COMPLETED: settled}, 1, None, failures=(LOST,))


async def show(output: RunOutput) -> None:
    """Watch a run until its progress was read a few times."""
    reads = 0
    enough = asyncio.Event()

    async def read() -> Progress:
        nonlocal reads
        reads += 1
        if reads == 5:
            enough.set()
        return progress(reads)

    output.status("a status")
    async with asyncio.timeout(120), output.watch(read):
        output.phase(RunPhase.CHECK)
        output.serving(ServingEvent(1.0, "engine-0", "died", "out of memory"))
        output.phase(RunPhase.ROLLOUTS)
        await enough.wait()
        output.phase(RunPhase.STOP)


@pytest.fixture
def shown(make_screen):
    async def shown(style: Style, terminal: bool = False) -> str:
        screen = make_screen(terminal)
        await show(RunOutput(screen.console, style, read_s=0.001, lines_s=0.0))
        return screen.text

    return shown


async def test_lines_in_a_pipe(shown):
    lines = (await shown("normal")).splitlines()
    failure = "task-a.0: infra_error, throttled: 429 (see docs/troubleshooting.md#throttled)"
    assert lines[:6] == [
        "a status",
        "checking this machine, bucket, runtime and queue",
        "engine-0: died out of memory",
        "running the rollouts",
        failure,
        "    [red]\N{REPLACEMENT CHARACTER}[2Jslow down",
    ]
    assert lines.count(failure) == 1
    assert lines[6].startswith("1 of 2 ended (1 done), 1 at work, 0 waiting")
    assert lines[-1] == "stopping what was started"


async def test_a_terminal_shows_a_frame_and_keeps_what_matters_above_it(shown):
    text = await shown("normal", terminal=True)
    assert "● rollouts" in text
    assert "✓ rollouts" in text
    assert "1 at work" not in text
    assert text.count("task-a.0: infra_error, throttled") == 1
    assert "\x1b[2Jslow" not in text
    assert "checking this machine" not in text
    assert "checking this machine" in await shown("verbose", terminal=True)


async def test_json_prints_one_object_per_event(shown):
    events = [json.loads(line) for line in (await shown("json", terminal=True)).splitlines()]
    assert all(event["time"] > 0 for event in events)
    kinds = [event["event"] for event in events]
    assert kinds[:5] == ["status", "phase", "serving", "phase", "failure"]
    assert kinds.count("failure") == 1
    assert kinds[-1] == "phase"
    assert events[2] | {"server": "engine-0", "kind": "died", "detail": "out of memory"} == events[2]
    assert events[4]["message"] == LOST.message
    assert list(events[-1]["seconds"]) == ["check", "rollouts"]
    first = events[5]
    assert (first["planned"], first["settled"], first["at_work"]) == (2, 1, 1)
    assert first["findings"][0]["level"] == "bad"


async def test_a_display_that_fails_does_not_end_a_run(make_screen, caplog):
    failed = asyncio.Event()

    async def fail() -> Progress:
        failed.set()
        raise ValueError("a bug")

    output = RunOutput(make_screen().console)
    output.phase(RunPhase.ROLLOUTS)
    async with output.watch(fail):
        await failed.wait()
    assert "the progress of the run could not be shown" in caplog.text


@pytest.mark.parametrize(("why", "terminal"), [("No space left on device", False), ("Broken pipe", True)])
async def test_a_console_that_cannot_be_written_ends_the_output_and_not_the_run(why, terminal, monkeypatch, caplog):
    if why == "Broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)  # Rich redirects it when a pipe is closed
        console = Console(file=file, force_terminal=terminal)
        await show(RunOutput(console, read_s=0.001))
        RunOutput(console).unfinished([], Path("/runs/x"), None, None)
    assert [why in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("style", ["normal", "json"])
def test_an_unfinished_run_says_how_to_resume(make_screen, style):
    screen = make_screen()
    RunOutput(screen.console, style).unfinished([], Path("/runs/x"), Path("/runs/x/report.html"), "rollout run ...")
    if style == "json":
        event = json.loads(screen.text)
        assert (event["event"], event["resume"], event["results"]) == ("unfinished", "rollout run ...", 0)
    else:
        assert "0 of 0 rollouts have a result (none was planned)" in screen.text
        assert "resume it with: rollout run ..." in screen.text


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
    verdict = judge(result.report, summarize(result.records))
    seconds = {RunPhase.CHECK: 1.0, RunPhase.ROLLOUTS: 22.0}
    return RunSummary(result, verdict, 0 if verdict.passed else 3, seconds, **more)  # type: ignore[arg-type]


def test_a_good_run(screen):
    print_summary(screen.console, summary(0.0, 1.0, report=Path("runs/x/report.html"), again="rollout run ..."))
    assert screen.text.splitlines() == [
        "✓ 2 of 2 rollouts completed, 1 of 1 groups usable",
        "  ! the step ended at its deadline (timeouts.collection_s: raise it)",
        "  ledger   2 = 2 completed; it reconciles (each rollout ended once); 0 sessions open",
        "  reward   0.500; rewards differ in 1 of 1 groups",
        "  time     check 1.0 s, rollouts 0.0 s",
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
