"""Each sentence of a step's verdict, and when the verdict fails."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.run.accounts.findings import Level, Verdict, judge
from rollout_backend.run.accounts.step_report import StepResult, make_report
from rollout_backend.run.accounts.summary import summarize
from rollouts import make_ledger, make_rollout, make_segment
from run_folders import make_step

FORCED = "forced "


def end_of(rollout_id: str, what: Any) -> Any:
    """Return a rollout whose reply was cut, or whose format was forced; anything else is an end already."""
    segment = make_segment()
    if what == "cut":
        turn = replace(segment.turns[0], finish_reason="length")
        return make_rollout(rollout_id, segments=[segment.model_copy(update={"turns": (turn,)})])
    if isinstance(what, str):
        unknown = array("f", [float("nan")] * len(segment.logprobs))
        forced = segment.model_copy(update={"logprobs": unknown})
        return make_rollout(rollout_id, reward=float(what.removeprefix(FORCED)), segments=[forced])
    return what


def step(*groups: list[Any], **more: Any) -> StepResult:
    """Return a step with one group per list: rewards, "cut", or an outcome with its reason."""
    planned = [(f"task-{number}.{i}", what) for number, group in enumerate(groups) for i, what in enumerate(group)]
    return make_step({rollout_id: end_of(rollout_id, what) for rollout_id, what in planned}, **more)


def verdict_on(result: StepResult, min_completed: int = 0) -> Verdict:
    return judge(result.report, summarize(result.records), min_completed)


LOST = (Outcome.INFRA_ERROR, "container_lost")
SILENT = (Outcome.TIMED_OUT, "no_result")
NO_CALL = (Outcome.AGENT_ERROR, "no_model_call")
FAILED = (Outcome.AGENT_ERROR, "agent_exception")
LATE = (Outcome.TIMED_OUT, "agent_deadline")
SPARE = (Outcome.CANCELLED, "target_reached")
DOOMED = (Outcome.CANCELLED, "group_doomed")
SPREAD = [0.0, 1.0]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[LOST, LOST]], "0 of 2 rollouts completed"),
        ([[1.0, LOST], [LOST, LOST]], "0 of 2 groups usable (1 of 4 rollouts trainable)"),
        ([[0.0, 0.0]] * 8, "all rewards equal (8 tasks, all 0)"),
        ([[1.0, 1.0]], "solved, every reward is 1 (1 task)"),
        ([[0.5, 0.5], [1.0, 1.0]], "rewards equal within each group (2 tasks)"),
    ],
)
def test_with_nothing_to_train_on_the_verdict_fails_and_says_why(groups, why):
    verdict = verdict_on(step(*groups, needed=2))
    assert not verdict.passed
    assert verdict.findings[0].text == f"nothing to train on: {why}"
    first = verdict.findings[0]
    assert (first.level, first.advice == "choose harder tasks") == (
        (Level.WARNING, True) if "solved" in why else (Level.BAD, False)
    )


@pytest.mark.parametrize(
    ("groups", "sentences"),
    [
        ([SPREAD], []),
        ([SPREAD, [1.0, 1.0], [2.0]], ["tasks of equal rewards, and teach nothing: 1 of 2"]),
        (
            [SPREAD, [1.0, 1.0], [0.0, 0.0]],
            [f"tasks {which} solved, and teach nothing: 1 of 3" for which in ("never", "always")],
        ),
        ([[1.0], [1.0]], ["all rewards equal (2 tasks, all 1)"]),
        ([[1.0], [0.0]], []),
        ([[1.0]], []),
        ([SPREAD, ["cut", 0.0]], ["replies cut at max_tokens or the end of the context: 1 of 4"]),
        ([[*SPREAD, NO_CALL]], ["no model call made by 1 of 3 rollouts"]),
        (
            [[*SPREAD, LOST, SILENT, LOST]],
            ["3 of 5 rollouts lost to the infrastructure, most often container_lost (2)"],
        ),
        ([[*SPREAD, FAILED]], ["1 of 3 rollouts failed in the agent, most often agent_exception (1)"]),
        ([[*SPREAD, LATE]], ["1 of 3 rollouts timed out, most often agent_deadline (1)"]),
        ([[*SPREAD, SPARE, DOOMED]], ["1 of 4 rollouts cancelled, most often group_doomed (1)"]),
    ],
)
def test_a_verdict_that_passes_names_what_was_lost(groups, sentences):
    verdict = verdict_on(step(*groups))
    assert verdict.passed
    assert "groups usable" in verdict.findings[0].text
    assert [each.text for each in verdict.findings[1:]] == sentences


def test_tasks_that_are_never_and_always_solved_have_their_own_advice():
    verdict = verdict_on(step(SPREAD, [0.0, 0.0], [1.0, 1.0]))
    assert [each.advice for each in verdict.findings[1:]] == [
        "group.size: raise it, so that one of them succeeds; or choose easier tasks",
        "choose harder tasks",
    ]


@pytest.mark.parametrize("rewards", [(0, 1), (0, 0), (1, 1)])
def test_replies_that_all_had_a_forced_format_leave_nothing_to_train_on(rewards):
    """That is said first: other rewards would not help."""
    verdict = verdict_on(step([f"{FORCED}{reward}" for reward in rewards]))
    assert not verdict.passed
    assert verdict.findings[0].text.startswith(
        "nothing to train on: none of 4 sampled tokens has a logprob: every reply"
    )
    assert (verdict.findings[0].level, len(verdict.findings)) == (Level.BAD, 1)
    assert "gateway.forced_tools: as_auto" in verdict.findings[0].advice


@pytest.mark.parametrize(("forced", "level"), [(1, Level.NOTE), (2, Level.WARNING)])
def test_some_replies_with_a_forced_format_are_counted(forced, level):
    verdict = verdict_on(step([*[f"{FORCED}0"] * forced, 1.0]))
    assert verdict.passed
    assert verdict.findings[1].level is level
    assert verdict.findings[1].text.startswith(f"{2 * forced} of {2 * forced + 2} sampled tokens have no logprob")


@pytest.mark.parametrize(
    ("outcome", "reason", "cut"),
    [
        (Outcome.TIMED_OUT, "straggler", True),
        (Outcome.CANCELLED, "target_reached", True),
        (Outcome.CANCELLED, "group_doomed", False),
        (Outcome.CANCELLED, "aborted", False),
        (Outcome.TIMED_OUT, "no_result", False),
    ],
)
def test_only_rollouts_that_took_long_are_cut_off_for_their_length(outcome, reason, cut):
    ledger = make_ledger(0)
    ledger.plan("a.0", "a")
    ledger.entries["a.0"].took = 5.0
    ledger.entries["a.0"].settle(outcome, reason)
    how = {"refused": 0, "seconds": 1.0, "deadline_reached": False}
    bias = make_report("run", ledger, [], [], [], [], **how).length_bias
    assert (bias is not None and bias.reason == reason) is cut


def test_too_few_completed_rollouts_fail():
    assert verdict_on(step([*SPREAD, LOST]), min_completed=2).passed
    assert not verdict_on(step([*SPREAD, LOST]), min_completed=3).passed


def test_sessions_that_could_not_be_closed_fail():
    verdict = verdict_on(step(SPREAD, unclosed=("s0", "s1")))
    assert not verdict.passed
    assert verdict.findings[-1].text == "2 sessions could not be closed"
