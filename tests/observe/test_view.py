"""Printed reports and rollouts are complete, and nothing in them can break the terminal."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper.contract import Failure, Outcome, Rollout
from rollout_backend.core.ledger import Ledger, PlannedRollout
from rollout_backend.core.report import CallRate, GroupResult, StepResult, failures_of, make_report
from rollout_backend.core.tasks import Task
from rollout_backend.observe.view import print_rollout, print_step

TALK = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
MARKUP = "[/nothing] [red]x[/red] \\"


def step_result(rollouts: dict[str, Rollout | str], **more: Any) -> StepResult:
    """A step's result; `rollouts` maps rollout ids to a result or to the reason of a timeout."""
    ledger = Ledger(3)
    arrived: list[Rollout] = []
    tasks: dict[str, list[Rollout]] = {}
    for number, (rollout_id, found) in enumerate(rollouts.items()):
        task_id = rollout_id.rpartition(".")[0]
        ledger.plan([PlannedRollout(rollout_id, task_id)])
        ledger.start_attempt(rollout_id, f"session-{number}", 100.0)
        ledger.session_closed(f"session-{number}")
        tasks.setdefault(task_id, [])
        if isinstance(found, str):
            ledger.settle(rollout_id, Outcome.TIMED_OUT, "no_result", found)
            continue
        failure = found.failure
        reason = failure.reason if failure else "messages_only" if found.messages_only else ""
        ledger.record_result(
            rollout_id, found.outcome, reason, failure.message if failure else "", trainable=found.trainable
        )
        arrived.append(found)
        tasks[task_id].append(found)
    for session_id, why in more.pop("unclosed", {}).items():
        ledger.session_unclosed(session_id, why)
    groups = [
        GroupResult(
            Task(task_id, {}),
            tuple(rollout for rollout in found if rollout.trainable),
            usable=any(rollout.trainable for rollout in found),
            planned=len(found),
            messages_only=tuple(rollout for rollout in found if rollout.messages_only),
        )
        for task_id, found in tasks.items()
    ]
    timing = {"refused": 0, "seconds": 2.0, "deadline_reached": False, **more}
    report = make_report("a-run", ledger, groups, arrived, [0.01, 0.02], [0.1], **timing)
    return StepResult(3, tuple(arrived), tuple(groups), failures_of(ledger), report)


def lines_of(text: str) -> list[str]:
    return [re.sub(r"[│┃\s]+", " ", line).strip() for line in text.splitlines()]


# --- a step -----------------------------------------------------------------------------------------------


def test_a_step_shows_its_ledger_rewards_and_failures(screen, make_rollout):
    result = step_result(
        {
            "task-a.0": make_rollout("task-a.0", reward=1.0),
            "task-a.1": make_rollout("task-a.1", reward=0.0),
            "task-b.0": "nothing was published",
            "task-b.1": make_rollout("task-b.1", Outcome.AGENT_ERROR),
        },
        refused=3,
    )
    print_step(screen.console, result, Path("/where/it/is"))
    lines = lines_of(screen.text)
    for line in (
        "run a-run, step 3",
        "planned 4",
        "completed 2",
        "agent_error 1",
        "infra_error 0",
        "timed_out 1",
        "refused 3",
        "task-a 1 0 0.500 yes",
        "task-b no",
        "all 2 rollouts 0.500",
        "task-b.0: timed_out, no_result: nothing was published (session session-2, attempts 1)",
        "task-b.1: agent_error, agent_exception: boom (session session-3, attempts 1)",
        "tokens: 6 sampled, 9 given; 3 sampled per second",
        "from the agent's end to buffer: p50 0.100 s, p99 0.100 s",
        "the step took 2.0 s",
        "rollouts, reports and logs: /where/it/is",
        "the ledger reconciles; 0 sessions open",
    ):
        assert line in lines


def test_an_empty_step_is_shown(screen):
    result = step_result({"task-a.0": "lost"}, deadline_reached=True, seconds=0.0)
    print_step(screen.console, result, Path("x"))
    assert "the step took 0.0 s, to its deadline" in screen.text
    assert "rollouts carry" not in screen.text


def test_the_rate_that_the_runtime_granted_is_shown(screen):
    result = step_result({})
    throttled = {
        "invoke_rate": CallRate(refused=37, seconds=12.0, granted_per_s=7.64),
        "stop_rate": CallRate(refused=2, seconds=0.2, granted_per_s=None),
    }
    report = result.report.model_copy(update=throttled)
    print_step(screen.console, dataclasses.replace(result, report=report), Path("/where/it/is"))
    invokes = "the runtime refused 37 invokes in 12 s and granted 7.6 per second; a higher"
    assert invokes in screen.text.replace("\n", " ")
    assert "the runtime refused 2 stops in 0 s; they were retried" in screen.text


def test_an_unclosed_session_is_shown(screen, make_rollout):
    result = step_result({"task-a.0": make_rollout()}, unclosed={"session-x": f"409 {MARKUP}"})
    print_step(screen.console, result, Path("x"))
    assert f"session session-x could not be closed: 409 {MARKUP}" in screen.text
    assert "the ledger reconciles; 0 sessions open" in screen.text
    assert not result.report.balanced


def test_ten_failures_are_shown_and_the_others_counted(screen):
    print_step(screen.console, step_result({f"task-a.{i}": "lost" for i in range(13)}), Path("x"))
    assert screen.text.count("timed_out, no_result: lost") == 10
    assert "... and 3 more" in screen.text


def test_results_that_could_not_be_archived_are_counted(screen, make_rollout):
    result = step_result({"task-a.0": make_rollout()}, unarchived=3)
    print_step(screen.console, result, Path("x"))
    assert "3 results could not be written there; they are in S3" in screen.text


def test_rewards_of_messages_only_rollouts_are_shown_as_not_trained(screen, make_rollout):
    rollouts = [
        make_rollout(f"task-a.{i}", segments=[], conversations=[TALK], reward=reward)
        for i, reward in enumerate([1.0, 0.0])
    ]
    print_step(screen.console, step_result({rollout.rollout_id: rollout for rollout in rollouts}), Path("x"))
    lines = lines_of(screen.text)
    assert "task-a 1 0 0.500 no" in lines
    assert "2 rollouts carry only messages: their rewards count, but they are not trained" in lines


def test_retokenized_rollouts_are_counted(screen, make_rollout, guessed):
    print_step(screen.console, step_result({"task-a.0": guessed}), Path("x"))
    assert "1 rollouts carried only messages: their tokens are re-tokenized, a guess" in screen.text
    assert "tokens: 0 sampled, 0 given" in screen.text


def test_a_failure_message_is_not_markup(screen, make_rollout):
    failure = Failure(reason="agent_exception", message=MARKUP)
    rollout = make_rollout("task-a.0", Outcome.AGENT_ERROR, failure=failure)
    print_step(screen.console, step_result({"task-a.0": rollout}), Path("x"))
    assert f"agent_exception: {MARKUP}" in screen.text


# --- a rollout --------------------------------------------------------------------------------------------


@pytest.fixture
def guessed(make_rollout) -> Rollout:
    segment = make_rollout().segments[0].model_dump()
    segment["turns"] = [{**turn, "weight_versions": []} for turn in segment["turns"]]
    guess = {**segment, "logprobs": [None] * 5, "retokenized": True, "messages": TALK["messages"]}
    return make_rollout(segments=[guess], conversations=[TALK])


def test_a_rollout_is_shown_completely(screen, make_rollout, make_segment):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "four"}]},
    ]
    segment = make_segment().model_copy(update={"messages": tuple(messages)})
    rollout = make_rollout(
        segments=[segment], extras={"passed": 3}, model="the-model", started_at=1e9, finished_at=1e9 + 5
    )
    print_rollout(screen.console, rollout)
    for words in (
        "task-a.0",
        "completed, reward 1, attempt 1, session session-task-a.0",
        "2001-09-09 01:46:40 UTC, took 5.0 s, model the-model",
        'extras: {"passed": 3}',
        "segment 0 (first_call): 5 tokens, 2 sampled",
        "2 + 2?",
        '"name": "add"',
        "four",
        "turn 0: 2 tokens in 0.00 s, finish stop, mean logprob -0.500, weights 7, 0 prompt tokens cached",
    ):
        assert words in screen.text


def test_a_failure_is_shown_with_its_traceback(screen, make_rollout):
    failure = Failure(reason="agent_exception", message=f"boom {MARKUP}", traceback=f'File "agent.py" {MARKUP}')
    print_rollout(screen.console, make_rollout("task-a.0", Outcome.AGENT_ERROR, failure=failure))
    assert "agent_error, reward none" in screen.text
    assert f"boom {MARKUP}" in screen.text
    assert f'File "agent.py" {MARKUP}' in screen.text


def test_a_messages_only_rollout_is_shown(screen, make_rollout):
    print_rollout(screen.console, make_rollout(segments=[], conversations=[TALK, TALK], session_id=""))
    assert screen.text.count("2 messages, 1 by the model, tokens unknown") == 2
    assert "conversation 1" in screen.text
    assert "2 + 2?" in screen.text
    assert "session unknown" in screen.text


def test_a_retokenized_segment_is_shown_once_and_marked(screen, guessed):
    print_rollout(screen.console, guessed)
    assert "5 tokens, 2 re-tokenized" in screen.text
    assert "mean logprob unknown, weights unknown" in screen.text
    assert screen.text.count("2 + 2?") == 1


def test_no_text_of_a_result_is_markup(screen, make_rollout, make_segment):
    segment = make_segment()
    turn = segment.turns[0].model_copy(update={"finish_reason": MARKUP})
    segment = segment.model_copy(
        update={"split_reason": MARKUP, "turns": (turn,), "messages": ({"role": MARKUP, "content": MARKUP},)}
    )
    rollout = make_rollout(segments=[segment], session_id=MARKUP, model=MARKUP, extras={"x": "[/nothing]"})
    print_rollout(screen.console, rollout)
    assert screen.text.count("[/nothing] [red]x[/red] \\") == 6
    print_rollout(screen.console, make_rollout(segments=[], conversations=[{"messages": [
        {"role": MARKUP, "content": MARKUP}, *TALK["messages"]]}]))  # fmt: skip
    assert screen.text.count("[/nothing] [red]x[/red] \\") == 8


@pytest.mark.parametrize(("started", "finished"), [(0.0, 0.0), (1e300, 0.0), (1e12, 1e13)])
def test_an_invalid_time_is_shown_as_unknown(screen, make_rollout, started, finished):
    print_rollout(screen.console, make_rollout(started_at=started, finished_at=finished))
    assert "start unknown, took " in screen.text
    assert "took -" not in screen.text


def test_agent_output_cannot_control_the_terminal(screen, make_rollout, make_segment):
    trick = "\x1b]52;c;ZXZpbA==\x07\x9b2J"  # writes the clipboard, clears the screen
    failure = Failure(reason="agent_exception", message=trick, traceback=trick)
    segment = make_segment()
    turn = segment.turns[0].model_copy(update={"finish_reason": trick})
    update = {"split_reason": trick, "turns": (turn,), "messages": ({"role": trick, "content": trick},)}
    rollout = make_rollout(
        "task-a.0",
        Outcome.AGENT_ERROR,
        failure=failure,
        segments=[segment.model_copy(update=update)],
        session_id=trick,
        model=trick,
        extras={"x": trick},
    )
    print_rollout(screen.console, rollout)
    print_step(screen.console, step_result({"task-a.0": rollout}), Path("x"))
    assert "ZXZpbA" in screen.text
    assert [letter for letter in screen.text if letter in "\x1b\x07\x9b"] == []
