"""Fixtures of the verl tests. They need verl's environment, and are not collected elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from agent_wrapper.contract import Rollout
from builders import processes_with
from rollout_backend.base.local_keys import client_keys
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from rollout_backend.workbench.local.tiny_model import make_tiny_model
from trainings import verl_settings
from verl_cpu.environment import environment, overrides

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["*.py"]
else:
    yaml.SafeLoader = yaml.CSafeLoader  # with which Hydra reads verl's 30 files of settings in half the time
    # Before verl is imported anywhere, because it detects its platform once.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(environment(threads=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of verl and its dependencies; ours are errors
        import ray  # noqa: F401
        import verl.trainer.ppo.v1
        import verl.workers.rollout.replica  # noqa: F401

HERE = Path(__file__).parent
GROUP = 4
TIMEOUTS = {"model_call_s": 60, "agent_s": 200, "publish_grace_s": 60, "collection_s": 900, "session_key_s": 1200}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

Task = dict[str, Any]


class Training:
    """One run of verl in its own folder, from which tests read its logs, metrics and results."""

    def __init__(
        self,
        work: Path,
        cloud: LocalCloud,
        tasks: list[Task],
        prompts: int,
        more: Iterable[str],
        rollout_devices: int = 0,
        timeouts: dict[str, float] | None = None,
        backend: dict[str, Any] | None = None,
    ) -> None:
        self.work, self.cloud = work, cloud
        self.seen, self.metrics_file, self.spy_file = work / "seen", work / "metrics.jsonl", work / "spy.jsonl"
        self.run_dir = work / "runs" / "tests-trainer"
        self.rows = work / "tasks.jsonl"
        columns = [{"payload": task, **task.pop("columns", {})} for task in tasks]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in columns))
        self.own = work / "rollout_backend.yaml"
        tree = {
            **cloud.settings(),
            "output_dir": str(work / "runs"),
            "timeouts": timeouts or TIMEOUTS,
            "janitor": {"grace_s": 0.5},
            "queue": {"wait_s": 2},
            **(backend or {}),
        }
        self.own.write_text(yaml.safe_dump(tree))
        self.settings = [  # verl's overrides
            *overrides(rollout_devices=rollout_devices),
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
            f"+{ROLLOUT}.engine_kwargs.sglang_cpu={{threads: 1, log_dir: {work}}}",
            f"+{ROLLOUT}.agent.agent_loop_manager_class=rollout_backend.verl.CloudAgentLoopManager",
            f"+{ROLLOUT}.custom.rollout_backend={self.own}",
            f"{ACTOR}.ppo_mini_batch_size={prompts}",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={GROUP}",
            f"{ACTOR}.optim.lr=3e-3",  # large enough that old weights show in the logprobs
            "trainer.v1.trainer_mode=sync",
            "trainer.v1.sampler.custom_sampler.path=pkg://rollout_backend.verl.sampler",
            "trainer.v1.sampler.custom_sampler.name=RolloutSampler",
            f"trainer.total_training_steps={len(tasks) // prompts}",
            "trainer.project_name=tests",
            "trainer.experiment_name=trainer",
            "trainer.logger=[console,file]",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={work / 'checkpoints'}",
            "trainer.resume_mode=disable",
            *more,
        ]
        self._marker = f"{work}:{time.time_ns()}"
        self.environ = {
            **environment(threads=1),
            **cloud.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "SPY_FILE": str(self.spy_file),
            "VERL_FILE_LOGGER_PATH": str(self.metrics_file),
            "TEST_TRAINING": self._marker,  # identifies the run's processes
        }
        self.verl = self._made()

    def _made(self, *more: str) -> ServerProcess:
        hydra = [f"hydra.run.dir={self.work}", "hydra.output_subdir=null"]
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *self.settings, *more, *hydra]
        return ServerProcess("verl", command, self.work / "verl.log", self.environ)

    def config(self, *more: str) -> Any:
        """Return verl's whole tree of settings."""
        return verl_settings(*more, base=tuple(self.settings))

    async def start(self) -> None:
        await self.verl.start()

    async def start_again(self, *more: str) -> None:
        """Start a run again that has ended or was killed. The log continues in the same file."""
        self.verl = self._made(*more)
        await self.verl.start()

    async def kill(self) -> None:
        """Kill all processes of the run except the janitor, as the kernel does if the memory is full."""
        while victims := [
            pid for pid, command in self.processes().items() if "rollout_backend.run.janitor" not in command
        ]:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        await self.verl.wait()

    async def stop(self) -> None:
        await self.verl.stop(grace_s=20)
        for pid in self.processes():  # verl's daemons have their own process sessions
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return self.verl.log.read_text(errors="replace")

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line)["data"] for line in self.metrics_file.read_text().splitlines()]

    def steps_done(self) -> int:
        """Return the number of logged steps. verl logs a step after its weights are distributed."""
        return self.metrics_file.read_text().count("\n") if self.metrics_file.exists() else 0

    def reports(self) -> list[StepReport]:
        files = sorted((self.run_dir / "steps").glob("*.json"))
        return [StepReport.model_validate_json(file.read_text()) for file in files]

    def say(self, *names: str) -> None:
        """Let agents continue that wait for these names."""
        for name in names:
            (self.seen / name).touch()

    def begun(self) -> dict[str, str]:
        """Return the rollouts whose agents have started, each with the name of its group."""
        return {file.name: file.read_text() for file in self.seen.iterdir() if "." in file.name}

    def forget(self) -> None:
        """Forget the names that agents may wait for, and which rollouts have started."""
        for file in self.seen.iterdir():
            file.unlink()

    def groups(self) -> dict[str, str]:
        """Return the group name of each task, as the agents saw it."""
        return {rollout_id.partition(".s")[0].rpartition(".")[0]: name for rollout_id, name in self.begun().items()}

    def gradient(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of an actor update by the name of their group, without verl's padding."""
        rows = defaultdict(list)
        for row in json.loads(self.spy_file.read_text().splitlines()[step - 1]):
            name = row["group"]
            if name is None:
                assert row["trained"] == 0, "a padding row has trained tokens"
            else:
                rows[name].append(row)
        return dict(rows)

    def finished(self) -> list[str]:
        """Return the ids of all rollouts that were collected."""
        return [file.name for file in (self.run_dir / "rollouts").glob("*/[!.]*")]

    def rollouts(self, step: int) -> list[Rollout]:
        """Return the collected rollouts of the first batch of verl's step. verl counts steps from 1."""
        return [Rollout.decode(file.read_bytes()) for file in self._of_step("rollouts", step).glob("[!.]*")]

    def report(self, step: int) -> StepReport:
        """Return the report of the first batch of verl's step."""
        return StepReport.model_validate_json(self._of_step("steps", step).with_suffix(".json").read_text())

    def _of_step(self, what: str, step: int) -> Path:
        from rollout_backend.verl.async_batches import StepNumbers  # needs verl

        number, _ = StepNumbers(resumes=False).next(step, validate=False)
        return self.run_dir / what / f"{number:08d}"

    def versions(self, step: int) -> set[str]:
        """Return the weight versions that sampled verl's step."""
        turns = [turn for rollout in self.rollouts(step) for segment in rollout.segments for turn in segment.turns]
        return {span.version for turn in turns for span in turn.weight_versions}

    def processes(self, name: str = "") -> dict[int, str]:
        """Return the run's live processes whose command contains `name`."""
        return {pid: command for pid, command in processes_with(self._marker).items() if name in command}

    async def until(self, condition: Callable[[], object], what: str, within_s: float = 600) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.verl.running, f"verl ended before {what}. {self.verl.log_tail()}"
            assert time.monotonic() < deadline, f"not {what} within {within_s:g} s. {self.verl.log_tail()}"
            await asyncio.sleep(0.2)

    async def ends(self, within_s: float = 600) -> int:
        return await asyncio.wait_for(self.verl.wait(), within_s)

    async def leaves_nothing(self) -> None:
        for report in self.reports():
            assert report.balanced
            assert report.sessions_open == 0
            assert report.planned == sum(report.outcomes.values())
        # The janitor of a killed trainer waits for the next one, in some tests for 300 s.
        deadline = time.monotonic() + 420
        while left := self.processes():
            assert time.monotonic() < deadline, f"processes are left: {left}"
            await asyncio.sleep(0.2)
        sessions = await self.cloud.sessions()
        assert not sessions["sessions"], f"sessions are left: {sessions}"
        url = self.cloud.storage.endpoint_url
        queues = boto3.client("sqs", region_name="us-east-1", endpoint_url=url, **client_keys(url)).list_queues()
        assert "QueueUrls" not in queues, f"queues are left: {queues['QueueUrls']}"


@contextlib.asynccontextmanager
async def training_in(work: Path, tasks: list[Task], prompts: int, *more: str, **how: Any) -> AsyncIterator[Training]:
    """Prepare a run; `more` overrides verl's settings."""
    seen = work / "seen"
    seen.mkdir()
    agent, env, limits = HERE / "trainer_agent.py", {"SEEN": str(seen)}, EmulatorLimits(grace_s=2.0)
    async with LocalCloud(agent, run_dir=work / "cloud", env=env, limits=limits) as cloud:
        run = Training(work, cloud, tasks, prompts, more, **how)
        try:
            yield run
        finally:
            await run.stop()


@pytest.fixture(scope="session")
def training() -> Any:
    """Return a context manager: `training(work, tasks, prompts, *overrides)` prepares a run of verl's trainer."""
    return training_in


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run whose settings are valid, and that is not started."""
    tasks = [{"name": "task", "rewards": [0.0] * GROUP} for _ in range(64)]
    would_start = training_in(tmp_path_factory.mktemp("ready"), tasks, 1)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(would_start) as run:
        yield run
