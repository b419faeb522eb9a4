"""The lines that show a running step: pure functions of a snapshot."""

from typing import Any

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.model.serving.model_serving import RunPhase
from rollout_backend.run.accounts.findings import FailureCount
from rollout_backend.run.accounts.progress import LastResult, Progress
from rollout_backend.run.accounts.step_report import CallRate
from rollout_backend.views.terminal.live_view import History, Snapshot, frame, plain_line

RUNNING = {RunPhase.CHECK: 1.2, RunPhase.ENGINES: 27.0, RunPhase.GATEWAY: 3.0, RunPhase.ROLLOUTS: 40.0}
HOSTILE = "[red]\x1b[2J\nline\u202e two\x07 \N{CJK UNIFIED IDEOGRAPH-4E2D}" * 9


def progress(
    outcomes: dict[Outcome, int] | None = None, *, running=0, planned=0, dispatching=0, **more: Any
) -> Progress:
    outcomes = outcomes or {}
    phases = {
        Phase.PLANNED: planned,
        Phase.DISPATCHING: dispatching,
        Phase.RUNNING: running,
        Phase.SETTLED: sum(outcomes.values()),
    }
    return Progress(phases, outcomes, running, **{"gateway": None, **more})


def snapshot(progress: Progress | None = None, history: History | None = None, **more: Any) -> Snapshot:
    fields = {
        "run_id": "run-1",
        "what": "agent.py on Qwen3-4B",
        "phases": RUNNING,
        "limit_s": 600.0,
    }
    return Snapshot(progress=progress, history=history or History(), **{**fields, **more})


def text(shown: Snapshot, width: int = 80) -> list[str]:
    return [line.plain.rstrip() for line in frame(shown, width)]


SERVERS = (
    ServerState("router", "http://r", True, 0),
    ServerState("engine-0", "http://e0", True, 1),
    ServerState("engine-1", "http://e1", False, 2),
)
BUSY = progress(
    {Outcome.COMPLETED: 229, Outcome.AGENT_ERROR: 4, Outcome.INFRA_ERROR: 8},
    running=96,
    planned=47,
    gateway=GatewayStats(
        sampled_tokens=9000,
        prompt_tokens=100,
        cached_tokens=88,
        calls=7,
        calls_in_flight=3,
        errors={"rate_limit_exceeded": 1204},
        engine_running={"http://e0": 48},
        engine_waiting={"http://e0": 3},
    ),
    servers=SERVERS,
    rewards=229,
    mean_reward=0.557,
    groups=39,
    groups_with_spread=34,
    turns=100,
    cut_replies=17,
    slowest="buy-9-fig.3",
    slowest_s=64.0,
    slowest_left_s=176.0,
    p95_s=41.0,
    failures=(FailureCount(Outcome.INFRA_ERROR, "throttled", 8, "buy-1.0", "429"),),
    last=(LastResult("buy-4-melon.2", 0.2, 37.0, 693, "Let me think. " * 20 + "The answer is 13."),),
    invoke_rate=CallRate(refused=37, seconds=12.0, granted_per_s=6.0),
)


def test_a_frame_of_a_busy_step():
    lines = text(snapshot(BUSY), 100)
    for line in (
        f" rollout  run-1   agent.py on Qwen3-4B{'00:01:11':>62}",
        " ✓ check 1.2 s  ✓ engines 27 s  ✓ gateway 3.0 s  ● rollouts  ○ stop",
        " done 229   agent error 4   lost 8   timed out 0   at work 96   waiting 47",
        " reward   0.557    rewards differ in 34 of 39 whole groups",
        " tokens   0/s    cache 88%   3 calls in flight, 1,204 refused (429)",
        " engines  0: 48 running, 3 queued, 1 restart    1: not serving, 2 restarts",
        " slowest  buy-9-fig.3, 64 s of at most 4 min   (95 % took under 41 s)",
        " ! 8 of 384 rollouts lost to the infrastructure, most often throttled (8) (rollout show buy-1.0)",
        "   has no effect",
    ):
        assert line in lines
    [bar] = [line for line in lines if "█" in line]
    assert "▒░" in bar
    assert bar.endswith("241/384     ~24 s")
    assert lines[-1].startswith(' last   buy-4-melon.2    0.2    37 s     693 tok   "...')
    assert lines[-1].endswith('The answer is 13."')
    lines = text(snapshot(BUSY, keys=True, failures=True))
    assert lines[-1] == " d details   f failures   q stop and clean up"
    assert "     8 infra_error, throttled   first buy-1.0: 429" in lines
    assert " no rollout has failed" in text(snapshot(progress(running=1), failures=True))


def test_before_the_first_result_a_frame_says_what_is_waited_for():
    for shown, words in (
        (progress(planned=8), "8 rollouts wait for their agents to start (40 s)"),
        (progress(running=8), "8 agents at work, none has called the model yet (40 s)"),
        (progress(running=8, gateway=GatewayStats(calls=5)), "8 agents at work, 5 model calls, no result yet (40 s)"),
    ):
        assert f" {words}" in text(snapshot(shown))
        assert plain_line(snapshot(shown)) == words


def test_the_time_left_is_estimated_once_a_tenth_has_ended():
    """Rollouts start together: after the first of 64, their pace promised six minutes for thirty seconds."""
    early, later = (progress({Outcome.COMPLETED: done}, planned=64 - done) for done in (6, 7))
    assert (snapshot(early).left_s, snapshot(later).left_s is None) == (None, False)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_or_breaks(width):
    many = dict.fromkeys(Outcome, 123_456)
    hostile = progress(
        many,
        running=16_384,
        planned=16_384,
        warning=HOSTILE,
        gateway=GatewayStats(sampled_tokens=10**9, calls=1, errors={HOSTILE: 10**9}),
        servers=tuple(ServerState(f"engine-{i}", f"http://e{i}", True, 10**6) for i in range(100)),
        rewards=1,
        mean_reward=-1234.5,
        groups=10**6,
        slowest=HOSTILE,
        failures=(FailureCount(Outcome.AGENT_ERROR, HOSTILE, 3, HOSTILE, HOSTILE),),
        last=tuple(LastResult(HOSTILE, 1e-9, None, 10**6, HOSTILE) for _ in range(2)),
    )
    lines = frame(snapshot(hostile, what=HOSTILE, keys=True), width)
    assert len(lines) <= 24
    lines += frame(snapshot(hostile, what=HOSTILE, details=True, failures=True), width)
    assert all(line.cell_len <= width for line in lines)
    assert all(line.plain.isprintable() for line in lines)
    assert plain_line(snapshot(hostile)).isprintable()


def test_a_restarted_or_silent_gateway_gives_no_negative_rate():
    history = History()
    assert history.tokens_per_s == 0
    for second, tokens in enumerate((0, 1000, None, 0, 500)):
        counts = None if tokens is None else GatewayStats(sampled_tokens=tokens)
        history.add(100.0 + second, progress(gateway=counts))
    assert [point.tokens for point in history.points] == [0, 1000, 1000, 1000, 1500]
