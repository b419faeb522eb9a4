"""verl's real trainers through the whole backend: real weights, a real engine, agents as processes, lost ones too.

A start of a trainer takes most of a minute on two cores, so that each run here shows as much as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from hydra import compose, initialize_config_module

from agent_wrapper.contract import Rollout
from rollout_backend.errors import RolloutBackendError
from rollout_backend.local.cloud import ARN, LocalCloud
from rollout_backend.local.sessions import Limits
from rollout_backend.local.verl_cpu.environment import environment, overrides
from rollout_backend.local.verl_cpu.tiny_model import make_tiny_model
from rollout_backend.process import ServerProcess
from rollout_backend.report import StepReport
from rollout_backend.verl.dataset import PayloadDataset

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

HERE = Path(__file__).parent
GROUP = 4
TIMEOUTS = {"model_call_s": 15, "agent_s": 25, "publish_grace_s": 10, "collection_s": 120, "token_s": 180}
SAME = 1e-4  # the engine's probabilities and the trainer's, both in float32
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

LOCAL_ARN = ARN.format(region="us-east-1")

Task = dict[str, Any]


def normal(name: str) -> Task:
    return {"name": name, "rewards": [0.0, 1.0, 0.25, 0.5]}


class Training:
    """One run of verl in a folder of its own; everything that it leaves is read from there."""

    def __init__(self, work: Path, cloud: LocalCloud, tasks: list[Task], prompts: int, more: Iterable[str]) -> None:
        self.work, self.cloud = work, cloud
        self.seen, self.metrics_file, self.spy_file = work / "seen", work / "metrics.jsonl", work / "spy.jsonl"
        self.run_dir = work / "runs" / "tests-trainer"
        self.rows = work / "tasks.jsonl"
        self.rows.write_text("".join(json.dumps({"payload": task}) + "\n" for task in tasks))
        self.own = work / "rollout_backend.yaml"
        tree = {**cloud.settings(), "output_dir": str(work / "runs"), "timeouts": TIMEOUTS, "queue": {"wait_s": 2}}
        self.own.write_text(yaml.safe_dump(tree))
        self.settings = [
            *overrides(),
            f"actor_rollout_ref.model.path={make_tiny_model(work / 'model')}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            f"data.train_batch_size={prompts}",
            "data.max_prompt_length=96",
            "data.max_response_length=8",
            "data.shuffle=False",
            "data.dataloader_num_workers=0",
            f"data.train_files={self.rows}",
            f"data.val_files={self.rows}",
            "data.custom_cls.path=pkg://gradient_spy",
            "data.custom_cls.name=PayloadDataset",
            "algorithm.adv_estimator=spied",
            f"{ROLLOUT}.n={GROUP}",
            f"{ROLLOUT}.dtype=float32",
            f"{ROLLOUT}.calculate_log_probs=True",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={GROUP}",
            f"+{ROLLOUT}.engine_kwargs.sglang_cpu={{threads: 2, log_dir: {work}}}",
            f"+{ROLLOUT}.agent.agent_loop_manager_class=rollout_backend.verl.CloudAgentLoopManager",
            f"+{ROLLOUT}.custom.rollout_backend={self.own}",
            f"{ACTOR}.ppo_mini_batch_size={prompts}",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={GROUP}",
            f"{ACTOR}.optim.lr=3e-3",  # enough for old weights to be noticed
            "trainer.v1.trainer_mode=sync",
            f"trainer.total_training_steps={len(tasks) // prompts}",
            "trainer.project_name=tests",
            "trainer.experiment_name=trainer",
            "trainer.logger=[console,file]",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            *more,
        ]
        hydra = [f"hydra.run.dir={work}", "hydra.output_subdir=null"]
        self._marker = f"{work}:{time.time_ns()}"
        self.verl = ServerProcess(
            "verl",
            [sys.executable, "-m", "verl.trainer.main_ppo", *self.settings, *hydra],
            work / "verl.log",
            {
                **environment(threads=2),
                **cloud.environ,
                "PYTHONPATH": str(HERE),
                "PYTHONUNBUFFERED": "1",
                "SPY_FILE": str(self.spy_file),
                "VERL_FILE_LOGGER_PATH": str(self.metrics_file),
                "TEST_TRAINING": self._marker,  # by which its processes are known
            },
        )

    def config(self, *more: str) -> Any:
        """verl's whole tree of settings, in this process."""
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", [*self.settings, *more])

    async def start(self) -> None:
        await self.verl.start()

    async def stop(self) -> None:
        await self.verl.stop(grace_s=20)
        for pid in self.processes():  # verl's daemons are in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return self.verl.log.read_text(errors="replace")

    @property
    def engine_started(self) -> bool:
        return any(self.work.glob("sglang_cpu*.log"))

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line)["data"] for line in self.metrics_file.read_text().splitlines()]

    def reports(self) -> list[StepReport]:
        files = sorted((self.run_dir / "steps").glob("*.json"))
        return [StepReport.model_validate_json(file.read_text()) for file in files]

    def groups(self) -> dict[str, str]:
        """The name of each prompt's uid, as the agents saw it."""
        return {file.name.rpartition(".")[0]: file.read_text() for file in self.seen.iterdir()}

    def gradient(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """What the actor was updated by: rows by the name of their group, less verl's own filling."""
        rows = defaultdict(list)
        names = self.groups()
        for row in json.loads(self.spy_file.read_text().splitlines()[step - 1]):
            name = names.get(row["uid"].partition("_")[0])
            if name is None:
                assert row["trained"] == 0, "tokens of nobody's are trained"
            else:
                rows[name].append(row)
        return dict(rows)

    def versions(self, step: int) -> set[str]:
        """Of the weights that sampled the backend's step, which counts from 0."""
        rollouts = [Rollout.decode(file.read_bytes()) for file in self.run_dir.glob(f"rollouts/{step:08d}/*")]
        turns = [turn for rollout in rollouts for segment in rollout.segments for turn in segment.turns]
        return {span.version for turn in turns for span in turn.weight_versions}

    def processes(self, name: str = "") -> dict[int, str]:
        """The run's own that are alive, and whose command has `name` in it."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self._marker.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command and name in command:
                        found[int(folder.name)] = command
            except OSError:
                continue
        return found

    async def until(self, condition: Callable[[], object], what: str, within_s: float = 240) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.verl.running, f"verl ended before {what}. {self.verl.tail()}"
            assert time.monotonic() < deadline, f"not {what} within {within_s:g} s. {self.verl.tail()}"
            await asyncio.sleep(0.2)

    async def ends(self, within_s: float = 300) -> int:
        return await asyncio.wait_for(self.verl.wait(), within_s)

    async def leaves_nothing(self) -> None:
        deadline = time.monotonic() + 30
        while left := self.processes():
            assert time.monotonic() < deadline, f"processes are left: {left}"
            await asyncio.sleep(0.2)
        sessions = await self.cloud.sessions()
        assert not sessions["sessions"], f"sessions are left: {sessions}"


@contextlib.asynccontextmanager
async def training(work: Path, tasks: list[Task], prompts: int, *more: str) -> AsyncIterator[Training]:
    """A run that is ready to start; `more` overrides verl's settings."""
    seen = work / "seen"
    seen.mkdir()
    agent, env, limits = HERE / "trainer_agent.py", {"SEEN": str(seen)}, Limits(grace_s=2.0)
    async with LocalCloud(agent, run_dir=work / "cloud", env=env, limits=limits) as cloud:
        run = Training(work, cloud, tasks, prompts, more)
        try:
            yield run
        finally:
            await run.stop()


def grpo(rewards: list[float]) -> dict[float, float]:
    """The advantage of each reward among these, which must differ from each other."""
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return {reward: (reward - mean) / (deviation + 1e-6) for reward in rewards}


def advantages(rows: list[dict[str, Any]]) -> dict[float, float]:
    """The same, of what was trained; the rows of one reward, a session's, must be at one."""
    found: dict[float, set[float]] = defaultdict(set)
    for row in rows:
        assert row["trained"] > 0
        found[row["reward"]].update(row["advantages"])
    assert all(len(values) == 1 for values in found.values()), found
    return {reward: values.pop() for reward, values in found.items()}


def is_trained_well(metrics: dict[str, float]) -> None:
    assert metrics["training/rollout_probs_diff_max"] < SAME
    assert metrics["actor/grad_norm"] > 0


def is_settled(report: StepReport) -> None:
    assert report.balanced
    assert report.sessions_open == 0
    assert report.planned == sum(report.outcomes.values())


async def test_what_is_lost_does_not_reach_the_gradient(tmp_path: Path) -> None:
    everyone = dict.fromkeys("0123", "die")
    first = [
        normal("normal"),
        {"name": "one-lost", "rewards": [9.0, 0.0, 1.0, 0.25], "do": {"0": "die"}},
        {"name": "all-lost", "rewards": [1.0] * GROUP, "do": everyone},
        {**normal("segments"), "segments": 3},
        {"name": "straggler", "rewards": [0.0, 0.5, 1.0, 9.0], "do": {"3": "never return"}},
    ]
    second = [normal(f"second-{i}") for i in range(len(first))]
    async with training(tmp_path, first + second, len(first)) as run:
        await run.start()
        assert await run.ends() == 0, run.verl.tail()

        rows = run.gradient(step=1)
        assert {name: len(of_group) for name, of_group in rows.items()} == {
            "normal": 4,
            "one-lost": 3,
            "segments": 12,
            "straggler": 3,
        }
        assert advantages(rows["normal"]) == pytest.approx(grpo([0.0, 1.0, 0.25, 0.5]), abs=1e-5)
        assert advantages(rows["segments"]) == pytest.approx(grpo([0.0, 1.0, 0.25, 0.5]), abs=1e-5)
        assert advantages(rows["one-lost"]) == pytest.approx(grpo([0.0, 1.0, 0.25]), abs=1e-5)
        assert advantages(rows["straggler"]) == pytest.approx(grpo([0.0, 0.5, 1.0]), abs=1e-5)
        trained = [value for of_group in rows.values() for row in of_group for value in row["advantages"]]
        lost, whole = run.metrics()
        assert lost["critic/advantages/max"] == pytest.approx(max(trained))
        assert lost["critic/advantages/min"] == pytest.approx(min(trained))

        rows = run.gradient(step=2)
        assert {name: len(of_group) for name, of_group in rows.items()} == dict.fromkeys(
            (task["name"] for task in second), GROUP
        )
        for metrics in (lost, whole):
            is_trained_well(metrics)
        assert [run.versions(step) for step in range(2)] == [{"0"}, {"1"}]

        lossy, clean = run.reports()
        for report in (lossy, clean):
            is_settled(report)
        assert lossy.reasons == {"timed_out: no_result": 5, "timed_out: agent_deadline": 1}
        names = run.groups()
        assert [names[group.task_id] for group in lossy.groups if not group.usable] == ["all-lost"]
        assert clean.trainable == clean.planned == len(second) * GROUP
        await run.leaves_nothing()


async def test_a_step_without_a_rollout_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    everyone = dict.fromkeys("0123", "raise")
    tasks = [{"name": f"broken-{i}", "rewards": [0.0] * GROUP, "do": everyone} for i in range(2)]
    async with training(tmp_path, tasks, 2) as run:
        await run.start()
        assert await run.ends() != 0
        assert "0 of 2 groups usable" in run.log
        assert "agent_error: agent_exception" in run.log
        assert "the tool is broken" in run.log
        [report] = run.reports()
        is_settled(report)
        await run.leaves_nothing()


async def test_an_engine_that_dies_in_mid_step_stops_the_run(tmp_path: Path) -> None:
    everyone = dict.fromkeys("0123", "wait for go")
    tasks = [{**normal(f"task-{i}"), "do": everyone} for i in range(2)]
    async with training(tmp_path, tasks, 2) as run:
        await run.start()
        await run.until(lambda: len(run.groups()) == 2, "at work")
        engine = run.processes("sglang.launch_server")
        assert len(engine) == 1
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        (run.seen / "go").touch()
        assert await run.ends(within_s=sum(TIMEOUTS[key] for key in ("agent_s", "publish_grace_s")) + 60) != 0
        assert "engine-0 died did not answer any more" in run.log
        for report in run.reports():
            is_settled(report)
        await run.leaves_nothing()


async def test_the_legacy_trainer_leaves_a_lost_slot_empty(tmp_path: Path) -> None:
    first = [normal("normal"), {"name": "one-lost", "rewards": [9.0, 0.0, 1.0, 0.25], "do": {"0": "raise"}}]
    second = [normal("second-0"), normal("second-1")]
    async with training(tmp_path, first + second, 2, "trainer.use_v1=False") as run:
        await run.start()
        assert await run.ends() == 0, run.verl.tail()
        names = run.groups()
        rows = defaultdict(list)
        for row in json.loads(run.spy_file.read_text().splitlines()[0]):
            rows[names[row["uid"]]].append(row)
        assert {name: len(of_group) for name, of_group in rows.items()} == {"normal": GROUP, "one-lost": GROUP}
        [missing] = [row for row in rows["one-lost"] if not row["trained"]]
        assert missing["advantages"] == []
        present = [row for row in rows["one-lost"] if row["trained"]]
        assert advantages(present) == pytest.approx(grpo([0.0, 1.0, 0.25]), abs=1e-5)
        assert advantages(rows["normal"]) == pytest.approx(grpo([0.0, 1.0, 0.25, 0.5]), abs=1e-5)
        for metrics in run.metrics():
            is_trained_well(metrics)
        assert [run.versions(step) for step in range(2)] == [{"0"}, {"1"}]
        lossy, clean = run.reports()
        for report in (lossy, clean):
            is_settled(report)
        assert lossy.reasons == {"agent_error: agent_exception": 1}
        assert clean.trainable == clean.planned == 2 * GROUP
        await run.leaves_nothing()


CLASS_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
OWN_KEY = f"{ROLLOUT}.custom.rollout_backend"
WRONG: dict[str, tuple[list[str], Task, list[str]]] = {
    # Overrides of verl's settings, settings of ours, and what the message says.
    "no such class": ([f"{CLASS_KEY}=rollout_backend.verl.Manager"], {}, ["no such class", "CloudAgentLoopManager"]),
    "no such module": ([f"{CLASS_KEY}=nowhere.Manager"], {}, ["cannot be imported", "CloudAgentLoopManager"]),
    "no class": ([f"{CLASS_KEY}=null"], {}, [f"add +{CLASS_KEY}="]),
    "no settings": ([f"{OWN_KEY}=null"], {}, [f"+{OWN_KEY} is missing", "storage.bucket"]),
    "no file of settings": ([f"{OWN_KEY}=/nowhere.yaml"], {}, [OWN_KEY, "/nowhere.yaml", "No such file"]),
    "unknown setting": ([], {"group": {"sice": 3}}, [OWN_KEY, "group.sice: no such setting"]),
    "no runtime": ([], {"runtime": None}, [OWN_KEY, "runtime"]),
    "unknown runtime": ([], {"runtime": {"arn": LOCAL_ARN.replace("local-", "other-")}}, ["runtime", "other-"]),
    "no such bucket": ([], {"storage": {"bucket": "not-there"}}, ["not-there"]),
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run that would start."""
    would_start = training(tmp_path_factory.mktemp("ready"), [normal("task")], 1)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(would_start) as run:
        yield run


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_by_the_dataset(
    case: str, ready: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, own, parts = WRONG[case]
    tree = yaml.safe_load(ready.own.read_text())
    for key, value in own.items():
        tree[key] = {**tree.get(key, {}), **value} if value else value
    settings = tmp_path / "rollout_backend.yaml"
    settings.write_text(yaml.safe_dump(tree))
    for name, value in ready.cloud.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RolloutBackendError) as caught:
        PayloadDataset(str(ready.rows), None, ready.config(f"{OWN_KEY}={settings}", *more).data)
    for part in parts:
        assert part in str(caught.value)


async def test_a_run_that_cannot_start_ends_before_an_engine(tmp_path: Path) -> None:
    """verl makes the dataset first; here it is a row without a payload that stops it, all else being in order."""
    async with training(tmp_path, [normal("task")], 1) as run:
        with run.rows.open("a") as rows:
            rows.write('{"question": "What is 3 + 4?"}\n')
        await run.start()
        assert await run.ends(within_s=120) != 0
        assert "tasks.jsonl, line 2: there is no payload, only ['question']" in run.log
        assert not run.engine_started
        assert not run.run_dir.exists()
        await run.leaves_nothing()
