"""The simulator: production code in a world of virtual time; and the proof that its checks have no holes."""

import asyncio
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rollout_backend import cli
from rollout_backend.sim.chaos import play
from rollout_backend.sim.clock import Deadlock, VirtualLoop
from rollout_backend.sim.faults import Faults
from rollout_backend.sim.mutants import MUTANTS
from rollout_backend.sim.run import simulate

SEEDS = range(100)


def run(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_no_time_passes_but_what_is_waited_for():
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


def test_when_nobody_can_act_it_says_so():
    async def work():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(work())


def test_a_quiet_world_completes_everything():
    verdict = simulate(3, Faults())
    assert verdict.broken is None
    assert verdict.lives == 1
    assert set(verdict.outcomes) - {"completed", "cancelled"} == {"agent_error", "infra_error", "timed_out"}
    assert not any(verdict.outcomes[kind] for kind in ("agent_error", "infra_error", "timed_out"))


@pytest.mark.parametrize("seed", [0, 7, 22, 34])
def test_a_seed_is_one_history_whichever_process_plays_it(seed):
    code = f"from rollout_backend.sim.run import simulate; print('\\n'.join(simulate({seed}).history))"
    told = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in "ab"]
    assert told[0].stdout == told[1].stdout
    assert told[0].stdout.strip() == "\n".join(simulate(seed).history).strip()


@pytest.mark.parametrize("seed", [22, 25, 39])
def test_a_seed_is_one_history_whatever_was_played_before(seed):
    assert simulate(seed).history == simulate(seed).history


def test_no_promise_is_broken():
    verdicts = [play(seed) for seed in SEEDS]
    assert {verdict.seed: verdict.broken for verdict in verdicts if verdict.broken} == {}
    assert sum(verdict.reattached for verdict in verdicts) > 30  # or little is said of agents that outlive a trainer


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_variant_that_breaks_a_promise_is_caught(mutant):
    assert any(play(seed, mutant).broken for seed in range(1000)), f"{mutant} passes: the checks have a hole"
    assert play(0).broken is None  # and the code is whole again


def test_the_command_tells_the_seed_that_fails_and_how_to_play_it_again():
    runner = CliRunner()
    found = runner.invoke(cli.app, ["chaos", "--seeds", "8", "--mutant", "reward_zero_on_failure"])
    assert found.exit_code == 1
    seed = found.output.partition("seed ")[2].partition(":")[0]
    again = runner.invoke(cli.app, ["chaos", "--seed", seed, "--mutant", "reward_zero_on_failure"])
    assert again.exit_code == 1
    assert "trainer 1 starts" in again.output
    assert runner.invoke(cli.app, ["chaos", "--seeds", "8"]).exit_code == 0
    assert runner.invoke(cli.app, ["chaos", "--mutant", "nonsense"]).exit_code == 2
