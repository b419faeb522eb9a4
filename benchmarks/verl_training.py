"""Trainings of verl with the settings of `examples/train_arithmetic`, on the CPU or on one GPU."""

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, ROOT
from tiny_learner import question
from wrapped_agents import WrappedAgents, backend_settings

from rollout_backend.model.serving.server_process import ServerProcess

sys.path += [str(ROOT / "examples" / folder) for folder in ("train_arithmetic", "train_gpu")]
import qualify

import train as example

PARTS = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
# Ray would run its workers at a lower priority than the agents. One thread each, so that runs can be compared.
COMPARED = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
# For verl's own loop, as the backend's sampler does: the rows of a step are in the order of its questions.
ORDERED = (
    "trainer.v1.sampler.custom_sampler.path=pkg://identity_recorder",
    "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
)


GPU = [
    *qualify.WITHOUT_FLASH_ATTENTION,
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.address=local",
]


@dataclass(frozen=True)
class Training:
    """One training, in a folder. With a checkpoint there, `run` may be repeated after it was stopped."""

    work: Path
    model: Path
    steps: int
    trainer: str = "v1"
    on_gpu: bool = False

    @property
    def tasks(self) -> Path:
        return self.work / "tasks.jsonl"

    async def run(self, own: Sequence[str], env: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return what verl has logged of each step. Raises SystemExit with the end of verl's log."""
        options = Namespace(tiny=True, dtype="float32", trainer=self.trainer, steps=self.steps, work=self.work)
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *example.training_overrides(options, self.model),
            *(GPU if self.on_gpu else example.cpu_overrides(options)),
            *own,
            f"hydra.run.dir={self.work}",
            "hydra.output_subdir=null",
        ]
        settings = dict(os.environ) if self.on_gpu else example.environment()
        env = {
            **settings,
            **env,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), settings.get("PYTHONPATH")))),
            "VERL_FILE_LOGGER_PATH": str(self.work / f"metrics-{len(self.lives):03}.jsonl"),
        }
        verl = ServerProcess("verl", command, self.work / "verl.log", env)
        await verl.start()
        try:
            await verl.wait()
        finally:
            await verl.stop(grace_s=20)
        if verl.returncode:
            raise SystemExit(f"verl ended with code {verl.returncode}. {verl.log_tail()}")
        return self.logged()

    @property
    def lives(self) -> list[Path]:
        """The files of verl's metrics, one for each of its processes that came to log a step."""
        return sorted(self.work.glob("metrics-*.jsonl"))

    def logged(self) -> list[dict[str, Any]]:
        """Return what verl has logged of each step. A step that was trained again counts as it was trained last."""
        steps = {}
        for metrics in self.lives:
            # The last line may be half written.
            for line in metrics.read_text().rpartition("\n")[0].splitlines():
                entry = json.loads(line)
                steps[int(entry["step"])] = entry["data"]
        return [steps[step] for step in sorted(steps)]

    def through_backend(self, settings: Mapping[str, Any]) -> list[str]:
        """Return verl's settings for a training through this backend with these settings."""
        path = self.work / "rollout_backend.json"  # JSON is YAML
        path.write_text(json.dumps(settings))
        return list(example.backend_overrides(self.tasks, path))

    def payloads(self) -> list[Any]:
        return [json.loads(line)["payload"] for line in self.tasks.read_text().splitlines()]

    def through_verls_loop(
        self, asked: Iterable[tuple[str, str, Mapping[str, Any]]] | None = None, reward: str = "arithmetic_reward.py"
    ) -> list[str]:
        """Return verl's settings for a training with its own agent loop on the same questions.

        `asked` has a question, an answer and more of `extra_info` for each task; by default they are sums.
        """
        import pyarrow as pa
        from pyarrow import parquet

        if asked is None:
            asked = ((payload["question"], payload["answer"], {}) for payload in self.payloads())
        rows = [
            {
                "data_source": "benchmark",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"index": number, **more},
            }
            for number, (question, answer, more) in enumerate(asked)
        ]
        questions = self.work / "questions.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), questions)
        return [
            f"data.train_files={questions}",
            f"data.val_files={questions}",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={HERE / reward}",
        ]


def batch_overrides(
    prompts: int, group: int, rows_at_once: int, mini_batch: int, response_tokens: int, learning_rate: float
) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_batch_size={prompts}",
        f"data.max_response_length={response_tokens}",
        f"{rollout}.n={group}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={rows_at_once}",
        f"{actor}.ppo_mini_batch_size={mini_batch}",
        f"{actor}.ppo_micro_batch_size_per_gpu={rows_at_once}",
        f"{actor}.entropy_coeff=0.0",
        f"{actor}.optim.lr={learning_rate}",
    ]


def parts_of(logged: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the seconds of each part of each step, by verl's own timings."""
    found = []
    for data in logged:
        parts = {name: float(data.get(f"timing_s/{name}", 0.0)) for name in PARTS}
        found.append({**parts, "rest": float(data["timing_s/step"]) - sum(parts.values())})
    return found


def averages(average: Any, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the average of each value over the steps. A missing one is 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: round(average(step.get(name, 0.0) for step in steps), 4) for name in names}


@dataclass(frozen=True)
class Sums:
    """Single-digit sums, and how a tiny model learns them."""

    steps: int = 30
    prompts: int = 16
    group: int = 4
    learning_rate: float = 3e-4
    right_at_start: float = 0.2

    def write_tasks(self, path: Path, seed: int) -> None:
        """Write the questions of all steps. The same seed gives the same questions."""
        draw, lines = random.Random(seed), []
        for _ in range(self.prompts * (self.steps + 1)):
            a, b = draw.randint(1, 9), draw.randint(1, 9)
            lines.append(json.dumps({"payload": {"question": question(a, b), "answer": str(a + b)}}) + "\n")
        path.write_text("".join(lines))

    def overrides(self) -> list[str]:
        rows = self.prompts * self.group
        return batch_overrides(self.prompts, self.group, rows, self.prompts, 8, self.learning_rate)

    async def train(
        self, training: Training, agents: WrappedAgents | None, more: Sequence[str] = (), **env: str
    ) -> list[dict[str, Any]]:
        """Train with sessions of these agents, or with verl's own loop. Return what verl has logged of each step."""
        if agents is None:
            own = [*self.overrides(), *training.through_verls_loop(), *ORDERED, *more]
            return await training.run(own, {**COMPARED, **env})
        async with agents.serve() as url:
            own = training.through_backend(backend_settings(url, training.work / "runs"))
            return await training.run([*self.overrides(), *own, *more], {**COMPARED, **env})
