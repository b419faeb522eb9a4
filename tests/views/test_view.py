"""Printed reports and rollouts are complete, and nothing in them can break the terminal."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from agent_wrapper.contract import Failure, Outcome, Rollout, Segment
from rollout_backend.run.accounts.findings import findings_of
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.accounts.summary import summarize
from rollout_backend.views.terminal.view import (
    TaskView,
    print_record,
    print_rollout,
    print_step,
    print_words,
    print_wrapped,
)
from rollout_backend.views.words import WORDS
from rollouts import make_rollout, make_segment
from run_folders import make_record, make_step


@pytest.fixture
def show(screen):
    """Print a step or a rollout, and return all that was printed."""

    def show(what: StepResult | Rollout) -> str:
        if isinstance(what, Rollout):
            print_rollout(screen.console, what, str(what.step))
        else:
            print_step(screen.console, what, Path("/where/it/is"))
        return screen.text

    return show


def with_text(text: str) -> Segment:
    """Return a segment with this text wherever the agent can put one."""
    segment = make_segment()
    turn = dataclasses.replace(segment.turns[0], finish_reason=text)
    message = {"role": text, "content": text}
    return segment.model_copy(update={"split_reason": text, "turns": (turn,), "messages": (message,)})


def lines_of(text: str) -> list[str]:
    return [re.sub(r"[│┃\s]+", " ", line).strip() for line in text.splitlines()]


# --- a step -----------------------------------------------------------------------------------------------


def test_a_step_shows_why_rows_opened_and_which_calls_could_not_be_read(show):
    opened = [make_segment().model_copy(update={"split_reason": why}) for why in ("first_call", "branched", "evil\n")]
    result = make_step({"task-a.0": make_rollout("task-a.0", segments=opened)})
    assert result.report.split_reasons == {"branched": 1, "other": 1}
    counts = {
        "malformed_tool_calls": {"qwen3.5": 2},
        "unknown_tool_calls": {"a": 1, "b": 3},
        "undelivered_replies": 1,
        "given_up_calls": {"calls": 3, "prompt_tokens": 1200, "sampled_tokens": 34, "limit_tokens": 50},
        "left_out_replies": 2,
        "unjournaled_sessions": 3,
        "dropped_log_lines": 1234,
        "runaways": {"task-a.0": 1_000_000},
        "heard_after_stop": {"session-1": 9, "session-2": 1},
    }
    report = result.report.model_copy(update=counts)
    found = findings_of(report, summarize([]))
    texts = [finding.text for finding in found]
    assert "2 tool calls of qwen3.5 could not be read, and became text" in texts
    assert "conversations opened 2 more rows: 1 branched, 1 other" in texts
    assert "4 calls of tools that were not offered: b (3), a (1)" in texts
    assert "1 call given up before the reply arrived, and not trained" in texts
    tokens = "1,200 prompt tokens, 34 sampled, up to 50 sampled of calls that the service could end"
    assert f"clients hung up 3 calls that the training service may bill: {tokens}" in texts
    assert "2 model calls left out of training" in texts
    assert "the gateways' logs lost 1,234 lines" in texts
    assert "3 sessions ran without a journal: a restart of the gateway would have repeated their rollouts" in texts
    assert "task-a.0 sampled 1,000,000 tokens and was refused more" in texts
    assert "1 session ran on after the stop, and may be billed: session-1" in texts


def test_a_step_shows_its_ledger_rewards_and_failures(show):
    rollouts = {
        "task-a.0": 1.0,
        "task-a.1": 0.0,
        "task-b.0": (Outcome.TIMED_OUT, "no_result", "nothing was published"),
        "task-b.1": make_rollout("task-b.1", Outcome.AGENT_ERROR),
    }
    timing = {"seconds": 2.0, "closing_s": 0.5, "deadline_reached": True}
    lines = lines_of(show(make_step(rollouts, step=3, delays=[0.1], refused=3, **timing)))
    for line in (
        "run run, step 3",
        "planned 4",
        "completed 2",
        "agent_error 1",
        "infra_error 0",
        "timed_out 1",
        "refused 3",
        "task-a 1 0 0.500 yes",
        "task-b no",
        "all 2 rollouts 0.500",
        "task-b.0: timed_out, no_result: nothing was published (session session-task-b.0, attempts 1)",
        "task-b.1: agent_error, agent_exception: boom (session session-task-b.1, attempts 1)",
        "tokens: 6 sampled, 9 given; 3 sampled per second",
        "from the agent's end to buffer: p50 0.100 s, p99 0.100 s",
        "the step took 2.0 s: to its deadline, 0.5 s after the last outcome",
        "rollouts, reports and logs: /where/it/is",
        "the ledger reconciles; 0 sessions open",
    ):
        assert line in lines


# --- a rollout --------------------------------------------------------------------------------------------


def test_a_rollout_is_shown_completely(show):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "größe"}}
    messages = (
        {"role": "user", "content": "2 +\r\n2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "vier größen"}]},
    )
    more = {"extras": {"größe": 3}, "model": "the-model", "started_at": 1e9, "finished_at": 1e9 + 5}
    text = show(make_rollout(segments=[make_segment().model_copy(update={"messages": messages})], **more))
    for words in (
        "task-a.0",
        "completed, reward 1, attempt 1, session session-task-a.0",
        "2001-09-09 01:46:40 UTC, took 5.0 s, model the-model",
        'extras: {"größe": 3}',
        "segment 0 (first_call): 5 tokens, 2 sampled",
        "2 +\n2?",
        '"name": "add", "arguments": "größe"',
        "vier größen",
        "turn 0: 2 tokens in 0.00 s, finish stop, mean logprob -0.500, weights 7, unknown prompt tokens cached",
    ):
        assert words in text


TRICK = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e\u2066 [/nothing] [red]x[/red]"
"""Writes the clipboard, clears the screen, shows text reversed, and is markup of Rich."""


def test_agent_output_cannot_control_the_terminal(show, screen):
    failure = Failure(reason="agent_exception", message=TRICK, traceback=TRICK)
    names = {"session_id": TRICK, "model": TRICK, "extras": {"x": TRICK}}
    rollout = make_rollout("task-a.0", Outcome.AGENT_ERROR, failure=failure, segments=[with_text(TRICK)], **names)
    show(rollout)
    show(make_step({"task-a.0": rollout}))
    hostile = RECORD.model_copy(update={"message": TRICK, "session_ids": (TRICK,), "log": TRICK})
    print_record(screen.console, hostile, "3", with_outcome=True)
    assert screen.text.count("ZXZpbA") == screen.text.count("[red]x[/red]") > 8
    assert [letter for letter in screen.text if letter in "\x1b\x07\x9b\u202e\u2066"] == []


# --- a record ---------------------------------------------------------------------------------------------

RECORD = make_record(
    "task-a.0", step=3, group_usable=False, outcome=Outcome.TIMED_OUT, reason="no_result",
    message="nothing was published", attempts=2, session_ids=("s1", "s2"), log="CloudWatch, /aws/a-group, session s2",
    planned_at=1e9, invoked_at=1e9 + 1.5, accepted_at=None, result_at=None, settled_at=1e9 + 60,
)  # fmt: skip


def test_a_rollout_without_a_result_is_shown_by_its_record(screen):
    print_record(screen.console, RECORD, "3", with_outcome=True)
    for words in (
        "task-a.0  step 3, task task-a",
        "timed_out, no result was stored",
        "no_result",
        "nothing was published",
        "attempts 2, group not usable",
        "sessions: s1, s2",
        "log: CloudWatch, /aws/a-group, session s2",
        "planned 2001-09-09 01:46:40 UTC, invoked +1.5 s, settled +60.0 s",
    ):
        assert words in screen.text


def test_words_of_this_project_are_explained_where_they_are_met(screen, show):
    """A rollout, a record and a step's ledger print words that a reader cannot know."""
    show(make_rollout(segments=[make_segment()]))
    doomed = RECORD.model_copy(update={"reason": "group_doomed"})
    print_record(screen.console, doomed, "3", with_outcome=True)
    assert screen.text.count("group_doomed: ") == 1
    TaskView("run", 3, "3", "task-a", None, (doomed, doomed)).print(screen.console)
    assert screen.text.count("group_doomed: the rollout was cancelled") == 2
    show(make_step({"task-a.0": make_rollout()}))
    text = " ".join(screen.text.split())
    for word in ("segment", "weights", "group_doomed", "reconciles"):
        assert f"{word}: {WORDS[word]}" in text


def test_at_80_columns_lines_break_at_words_and_begin_at_the_left():
    file = io.StringIO()
    console = Console(file=file, width=80, color_system=None, force_terminal=True)
    print_wrapped(console, Text(), Text("run a  ended"))
    print_words(console, *WORDS)
    lines = file.getvalue().splitlines()
    assert lines[0] == "run a  ended"
    assert max(map(len, lines)) <= 80
    assert {*" ".join(WORDS.values()).split()} <= {*file.getvalue().split()}
