"""A trainer of the small policy. It may be killed at any time, and resumes from its newest checkpoint.

As on GPUs, no update can be repeated bit by bit: weights that are trained again are other weights.
"""

import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import small_policy
from common import append
from safetensors.numpy import load_file, save_file
from small_policy import ANSWERS, Policy, probabilities, sum_of, true_time, write_model

from agent_wrapper.contract import Rollout
from rollout_backend import StepResult
from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.local_engine import LocalEngine, LocalEngineFactory

LEARNING_RATE, NOISE = 0.5, 1e-4
_START = 2.5  # logit of the right answer, 0 for the others
_ENGINE = "SMALL_POLICY_ENGINE"


class EngineFactory(LocalEngineFactory):
    """Makes engines of the small policy, which the backend starts and supervises like SGLang."""

    def make(self, number: int) -> LocalEngine:
        def command(model: Any, _: object, node: Any) -> tuple[list[str], dict[str, str]]:
            argv = [
                sys.executable,
                small_policy.__file__,
                "--engine",
                str(model.path),
                str(node.port),
                os.environ[_ENGINE],
            ]
            return argv, {**os.environ}

        config, name = self._config, f"engine-{number}"
        return LocalEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", command=command)


def engine_environment(log: Path, answer_s: tuple[float, float]) -> dict[str, str]:
    """Return what a trainer's environment must have for `serving.kind` policy_trainer.EngineFactory."""
    return {_ENGINE: json.dumps([str(log), answer_s])}


Naming = Literal["trainer", "backend", "step"]
"""How weights are named. `trainer`: by the step, as verl's trainer does, which says that only its first step after a
checkpoint has the same weights as before. `backend`: by the backend's count of updates. `step`: by the step alone,
which is wrong, because weights that are trained again get the same name."""


@dataclass(frozen=True)
class Life:
    """What a trainer is started with. The next one may have other tasks and rewards."""

    number: int
    work: str
    steps: int | None
    until: float
    """Unix seconds after which no step begins, except the first."""
    naming: Naming = "trainer"
    save_every: int = 1
    tasks: int = 4
    data: int = 0
    offset: int = 0
    """What is added to a sum to make the right answer."""


def tasks_of(step: int, life: Life) -> list[Task]:
    draw, tasks = random.Random(f"{life.data} {step}"), []
    for nth in range(life.tasks):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        question, answer = f"Step {step}.{nth}: what is {a} + {b}?", str(a + b + life.offset)
        # The ids differ in each process, because a restarted trainer gives its prompts new ids.
        tasks.append(Task(f"s{step}-{os.getpid()}-{nth}", {"question": question, "answer": answer}))
    return tasks


def rows_of(task: Task, rollout: Rollout) -> list[dict[str, Any]]:
    return [
        {
            **task.payload,
            # The agent scores its last answer.
            "reward": rollout.reward if segment is rollout.segments[-1] else None,
            "tokens": list(segment.token_ids),
            "mask": list(segment.response_mask),
            "versions": [[span.version for span in turn.weight_versions] for turn in segment.turns],
        }
        for segment in rollout.segments
    ]


def updated(policy: Policy, result: StepResult) -> Policy:
    """Return the policy after a step of REINFORCE, with the group's mean as its baseline."""
    new = policy + np.random.default_rng().normal(scale=NOISE, size=policy.shape)
    for group in (each for each in result.groups if each.usable):
        rewards = [rollout.reward or 0.0 for rollout in group.rollouts]
        row = sum_of(group.task.payload["question"])
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            sampled = np.zeros(ANSWERS)
            sampled[int(re.findall(r"\d+", str(rollout.extras["reply"]))[-1])] = 1
            new[row] += LEARNING_RATE * (reward - np.mean(rewards)) * (sampled - probabilities(policy[row]))
    return new.astype(np.float32)


async def train(life: Life) -> None:
    """Train from the newest checkpoint until all steps are done. The process may be killed at any time."""
    work = Path(life.work)
    lines, models, checkpoints = work / "trained.jsonl", work / "weights", work / "checkpoints"
    first = step = max(int(each.stem) for each in checkpoints.glob("*.safetensors"))
    policy = load_file(checkpoints / f"{step}.safetensors")["policy"]
    async with RolloutManager(load_config(work / "settings.yaml")) as manager:
        append(lines, {"life": life.number, "ready": true_time()})
        while step == first or true_time() < life.until:
            if life.steps is not None and step >= life.steps:
                break
            model = models / f"{life.number}-{step}"
            digest = write_model(model, policy)
            await manager.update_weights(model)
            for older in models.iterdir():
                if older != model:
                    shutil.rmtree(older)
            result = await manager.collect(
                tasks_of(step, life),
                step=step,
                weights="" if life.naming == "backend" else str(step),
                same_weights=life.naming != "trainer" or step == first,
            )
            report, latency = result.report, result.report.latency
            append(
                lines,
                {
                    "life": life.number,
                    "step": step,
                    "at": true_time(),
                    "weights": digest,
                    "planned": report.planned,
                    "outcomes": {outcome.value: n for outcome, n in report.outcomes.items() if n},
                    "ids": [record.rollout_id for record in result.records],
                    "resumed": report.resumed,
                    "reattached": report.reattached,
                    "latency": latency and [latency.p50, latency.max],
                    "trained": sum(len(group.rollouts) for group in result.groups if group.usable),
                    "rows": [
                        row
                        for group in result.groups
                        if group.usable
                        for rollout in group.rollouts
                        for row in rows_of(group.task, rollout)
                    ],
                },
            )
            policy = updated(policy, result)
            step += 1
            if step % life.save_every == 0:
                save_file({"policy": policy}, checkpoints / "new")
                (checkpoints / "new").replace(checkpoints / f"{step}.safetensors")


def prepare(work: Path) -> Path:
    """Make the folders of a training and its first checkpoint. Return the folder of the untrained model."""
    policy = np.zeros((ANSWERS, ANSWERS), np.float32)
    policy[np.arange(ANSWERS), np.arange(ANSWERS)] = _START
    for name in ("weights", "checkpoints"):
        (work / name).mkdir(parents=True)
    for name in ("trained.jsonl", "sampled.jsonl"):
        (work / name).touch()
    save_file({"policy": policy}, work / "checkpoints" / "0.safetensors")
    write_model(work / "model", policy)
    return work / "model"
