"""The simulator: virtual time, deterministic histories, and mutants that its checks must catch."""

import asyncio
import subprocess
import sys
from ast import literal_eval

import pytest
from typer.testing import CliRunner

from tests.simulation.__main__ import app
from tests.simulation.chaos import chaos, play
from tests.simulation.clock import Deadlock, VirtualLoop
from tests.simulation.faults import SILENT, Faults
from tests.simulation.mutants import MUTANTS, mutated
from tests.simulation.run import simulate

SEEDS = range(40)


def run(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_the_clock_jumps_to_the_next_timer():
    async def work():
        loop = asyncio.get_running_loop()
        began = loop.time()
        order = []

        async def after(seconds):
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(after(3600), after(60), after(86400))
        return order, loop.time() - began

    order, passed = run(work())
    assert order == [60, 3600, 86400]
    assert passed == pytest.approx(86400)


def test_a_deadlock_is_raised_if_all_tasks_wait_without_a_timer():
    async def work():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(work())


def test_a_quiet_world_completes_everything():
    verdict = simulate(3, Faults())
    assert verdict.violation is None
    assert verdict.trainers == 1
    assert set(verdict.outcomes) - {"completed", "cancelled"} == {"agent_error", "infra_error", "timed_out"}
    assert not any(verdict.outcomes[kind] for kind in ("agent_error", "infra_error", "timed_out"))


@pytest.mark.slow
def test_a_seed_plays_the_same_history_in_each_process():
    seeds = [0, 7, 22, 34]
    code = f"from tests.simulation.run import simulate; print([simulate(s).history for s in {seeds}])"
    played = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in "ab"]
    assert played[0].stdout == played[1].stdout
    for seed, history in zip(seeds, literal_eval(played[0].stdout), strict=True):
        assert history == simulate(seed).history


@pytest.mark.parametrize("seed", [22, 25, 39])
def test_a_seed_plays_the_same_history_twice(seed):
    assert simulate(seed).history == simulate(seed).history


def test_no_seed_violates_an_invariant():
    verdicts = [play(seed) for seed in SEEDS]
    assert {verdict.seed: verdict.violation for verdict in verdicts if verdict.violation} == {}


def test_agents_that_outlive_a_killed_trainer_are_reattached():
    """The random faults of a seed rarely leave an agent running: here nothing fails except the trainer."""
    verdicts = [simulate(seed, Faults(kill=1.0)) for seed in range(20)]
    assert {verdict.seed: verdict.violation for verdict in verdicts if verdict.violation} == {}
    assert sum(verdict.reattached > 0 for verdict in verdicts) > 10


def test_only_one_of_two_managers_holds_the_run():
    """Each history: a second manager on another machine, and often the first one cut off from S3 meanwhile."""
    faults = Faults(rival=1.0, s3_cut_off=1.0)
    verdicts = [simulate(seed, faults) for seed in range(30)]
    assert {verdict.seed: verdict.violation for verdict in verdicts if verdict.violation} == {}
    lines = [line for verdict in verdicts for line in verdict.history]
    assert sum("is refused or has lost the run" in line for line in lines) > 10
    taken = [verdict for verdict in verdicts if sum("holds the run" in line for line in verdict.history) > 1]
    assert len(taken) > 5


@pytest.mark.slow
@pytest.mark.release
def test_no_seed_of_ten_thousand_violates_an_invariant():
    assert chaos(range(10_000)).failed is None


def test_a_silent_service_is_played_and_no_step_waits_for_it():
    """Every kind of silence in each history, and no other fault."""
    faults = Faults(**{name: most / 2 for name, most in SILENT.items()})
    verdicts = [simulate(seed, faults) for seed in range(10)]
    assert {verdict.seed: verdict.violation for verdict in verdicts if verdict.violation} == {}


@pytest.mark.parametrize(("seed", "planned"), [(24, 256), pytest.param(499, 1024, marks=pytest.mark.slow)])
def test_large_steps_complete(seed, planned):
    verdict = simulate(seed, Faults())
    assert verdict.violation is None
    assert verdict.outcomes["completed"] >= planned


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("seed", [24, 49])
def test_a_step_of_4096_rollouts_survives_faults(seed):
    assert simulate(seed, planned=4096).violation is None


# One for each kind of invariant, with the first seed that catches it. Once a change of the code alters the histories,
# another seed may be the first.
QUICK_MUTANTS = {
    "delete_before_store": 0,
    "dedupe_by_message_id": 0,
    "no_sweep": 0,
    "reward_zero_on_failure": 0,
    "unscored_is_zero": 17,
    "artifacts_optional": 27,
    "lost_artifacts_unnoticed": 5,
    "no_manifest": 0,
    "replacements_not_recorded": 4,
    "active_leases_taken_over": 0,
    "retrained_weights_pass_for_the_same": 51,
    "failed_attempts_left_open": 1,
    "stops_not_retried": 1,
    "refusals_are_attempts": 1,
    "results_unchecked": 0,
    "results_expand_without_limit": 1,
    "sessions_unchecked": 0,
    "late_results_accepted": 0,
    "breaker_never_opens": 35,
    "adopted_and_dispatched": 26,
    "sources_not_asked": 4,
    "silent_sources_are_empty": 28,
    "reported_rewards_lost": 2,
    "silent_deaths_unnoticed": 23,
    "priorities_ignored": 0,
    "hung_disks_awaited": 29,
    "unwritten_records_pass_for_complete": 17,
}


RELEASE = (pytest.mark.slow, pytest.mark.release)


def test_the_quick_mutants_exist():
    assert MUTANTS.keys() >= QUICK_MUTANTS.keys()


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=() if name in QUICK_MUTANTS else RELEASE) for name in MUTANTS],
)
def test_mutants_are_caught(mutant):
    seeds = (QUICK_MUTANTS.get(mutant, 0), *range(1000))
    assert any(play(seed, mutant).violation for seed in seeds), f"{mutant} passes: the checks have a hole"


def test_the_patches_of_mutants_are_undone():
    right = play(0)
    assert right.violation is None
    for name in MUTANTS:
        with mutated(name):
            pass
    assert play(0).history == right.history


@pytest.mark.slow
def test_chaos_prints_the_failing_seed_and_how_to_replay_it():
    runner = CliRunner()
    found = runner.invoke(app, ["--seeds", "8", "--mutant", "reward_zero_on_failure"])
    assert found.exit_code == 1
    seed = found.output.partition("seed ")[2].partition(":")[0]
    again = runner.invoke(app, ["--seed", seed, "--mutant", "reward_zero_on_failure"])
    assert again.exit_code == 1
    assert "trainer 1 starts" in again.output
    assert runner.invoke(app, ["--seeds", "8"]).exit_code == 0
    assert runner.invoke(app, ["--mutant", "nonsense"]).exit_code == 2
