"""The display of a running step."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.observe import live_view as module
from rollout_backend.observe.live_view import show_progress
from rollout_backend.observe.progress import Progress

FIELDS = {
    name: {} if field.annotation not in (int, "int") else 0 for name, field in GatewayStats.model_fields.items()
}


def progress(
    outcomes: dict[str, int] | None = None,
    tokens: int | None = None,
    rewards: tuple[float, ...] = (),
    sessions: int = 0,
    **phases: int,
) -> Progress:
    outcomes = outcomes or {}
    settled = {Phase.SETTLED: sum(outcomes.values())}
    gateway = None if tokens is None else GatewayStats.model_validate({**FIELDS, "sampled_tokens": tokens})
    return Progress({**dict.fromkeys(Phase, 0), **settled, **phases}, outcomes, sessions, rewards, gateway)


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def display(clock: Clock) -> Any:
    return module._Display(limit_s=100.0)


# --- one line ---------------------------------------------------------------------------------------------


def test_a_line_before_anything_is_settled(display, clock):
    clock.now += 30
    line = display.line(progress(running=3, planned=1))
    assert line == "0/4 settled (none yet), 3 running, 0 tok/s, at most 70 s left"


def test_a_warning_ends_the_line(display):
    warned = dataclasses.replace(progress(running=1), warning="no model call has arrived")
    assert display.line(warned).endswith("; no model call has arrived")


def test_settled_rollouts_are_counted_by_class(display, clock):
    clock.now += 10
    outcomes = {Outcome.COMPLETED: 3, Outcome.AGENT_ERROR: 1, Outcome.TIMED_OUT: 0}
    line = display.line(progress(outcomes, running=4))
    assert line == "4/8 settled (3 completed, 1 agent_error), 4 running, 0 tok/s, about 10 s left"


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(40, "about 60 s left"), (99, "about 1 s left"), (100, "about 0 s left"), (500, "about 0 s left")],
)
def test_the_time_left_is_at_most_the_steps_limit(display, clock, seconds, left):
    clock.now += seconds
    assert display.line(progress({Outcome.COMPLETED: 1}, running=9)).endswith(left)


def test_no_time_is_left_when_all_is_settled(display, clock):
    clock.now += 50
    assert display.line(progress({Outcome.COMPLETED: 2})).endswith("about 0 s left")


# --- tokens per second ------------------------------------------------------------------------------------


def rates(display, clock, *counts: int | None, every: float = 1.0) -> list[float]:
    found = []
    for count in counts:
        found.append(display._tokens_per_s(progress(tokens=count)))
        clock.now += every
    return found


def test_the_token_rate_is_smoothed(display, clock):
    found = rates(display, clock, *range(0, 4000, 100))
    assert found[0] == 0
    assert found[1] == pytest.approx(30)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(100, rel=0.01)


def test_the_token_rate_is_per_second(display, clock):
    assert rates(display, clock, 0, 100, every=0.5)[1] == pytest.approx(60)


def test_a_restarted_gateway_gives_no_negative_rate(display, clock):
    found = rates(display, clock, 0, 1000, 0, 1000)
    assert found == pytest.approx([0, 300, 210, 447])


def test_without_a_gateway_the_rate_is_0(display, clock):
    assert rates(display, clock, None, None) == [0, 0]


def test_two_samples_at_the_same_time_do_not_divide_by_zero(display, clock):
    assert rates(display, clock, 0, 100, every=0.0) == [0, 0]


# --- on a terminal and without one ------------------------------------------------------------------------


def test_a_panel_shows_classes_phases_sessions_and_rewards(display, clock, screen):
    clock.now += 10
    outcomes = {Outcome.COMPLETED: 2, Outcome.INFRA_ERROR: 1}
    screen.console.print(
        display.panel(progress(outcomes, rewards=(1.0, 0.5), sessions=4, running=1, dispatching=2, planned=3))
    )
    for words in (
        "2 completed",
        "0 agent_error",
        "1 infra_error",
        "0 timed_out",
        "0 cancelled",
        "1 running",
        "2 dispatching",
        "3 planned",
        "3/9 settled   4 sessions open   0 tok/s   mean reward 0.750   about 20 s left",
    ):
        assert words in screen.text


def test_a_panel_of_an_empty_step(display, screen):
    screen.console.print(display.panel(progress()))
    assert "0/0 settled" in screen.text
    assert "no reward yet" in screen.text


@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_is_shown_until_cancelled(make_screen, monkeypatch, terminal):
    monkeypatch.setattr(module, "_TERMINAL_S", 0.001)
    monkeypatch.setattr(module, "_LINES_S", 0.001)
    screen = make_screen(terminal)
    looks = 0
    enough = asyncio.Event()

    async def look() -> Progress:
        nonlocal looks
        looks += 1
        if looks == 4:
            enough.set()
        return progress({Outcome.COMPLETED: looks}, running=1)

    showing = asyncio.create_task(show_progress(look, 60.0, screen.console))
    async with asyncio.timeout(20):
        await enough.wait()
    showing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await showing
    assert "1/2 settled" in screen.text
    assert "3/4 settled" in screen.text
