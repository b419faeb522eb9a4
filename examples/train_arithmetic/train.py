"""Train a small model on sums with verl, on this machine, with the agent in a local cloud.

    python train.py                          # 15 steps of GRPO on SmolLM2-135M: mean reward .06 -> .98
    python train.py --tiny                   # two steps of a random model, to check that everything works
    python train.py trainer.total_epochs=2   # other arguments go to verl unchanged

The script starts verl's own `python -m verl.trainer.main_ppo` with the environment and the settings below.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml

from curve import Curve
from rollout_backend.errors import RolloutBackendError
from rollout_backend.model.serving.install import find_model
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.verl.verl_settings import run_id_of
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.tiny_model import make_tiny_model
from verl_cpu.environment import environment, overrides

AGENT = Path(__file__).parent.parent / "arithmetic" / "agent.py"
PROMPTS, GROUP = 16, 4
PROJECT, RUNS = "train-arithmetic", Path("runs")
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def backend_overrides(tasks: Path, settings: Path) -> list[str]:
    """Return what a training script adds to train through this backend, on any machine."""
    return [
        f"+{ROLLOUT}.agent.agent_loop_manager_class=rollout_backend.verl.CloudAgentLoopManager",
        f"+{ROLLOUT}.custom.rollout_backend={settings}",
        # The `payload` of a row goes to the agent unchanged.
        "data.custom_cls.path=pkg://rollout_backend.verl.dataset",
        "data.custom_cls.name=PayloadDataset",
        f"data.train_files={tasks}",
        f"data.val_files={tasks}",
        # GRPO that leaves out lost rollouts instead of treating them as failures of the model.
        "algorithm.adv_estimator=grpo_skip_missing",
        # Adds metrics on left-out rollouts and on staleness. It wraps verl's own sampler.
        "trainer.v1.sampler.custom_sampler.path=pkg://rollout_backend.verl.sampler",
        "trainer.v1.sampler.custom_sampler.name=RolloutSampler",
        # The engine samples the tokens: let the trainer compare its logprobs with the engine's.
        f"{ROLLOUT}.calculate_log_probs=True",
    ]


def training_overrides(options: argparse.Namespace, model: Path) -> list[str]:
    """Return what every training script of verl sets: the model, the batch, the optimizer."""
    prompt, response = 96 if options.tiny else 48, 16
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"{ROLLOUT}.n={GROUP}",
        f"{ROLLOUT}.temperature=1.0",
        f"{ROLLOUT}.dtype={options.dtype}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        # Once most groups are all right, few rollouts decide each update, and a constant rate can unlearn the task.
        f"{ACTOR}.optim.lr=2e-5",
        f"{ACTOR}.optim.lr_scheduler_type={'constant' if options.tiny else 'cosine'}",
        f"{ACTOR}.optim.weight_decay=0",
        f"{ACTOR}.use_kl_loss=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "algorithm.use_kl_in_reward=False",
        f"trainer.use_v1={options.trainer != 'legacy'}",
        f"trainer.v1.trainer_mode={'separate_async' if options.trainer == 'async' else 'sync'}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={options.work.name}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]
    if options.tiny:  # it is rarely right, and its weights must change enough to detect old ones
        settings += [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.optim.lr=3e-3"]
    return settings


def cpu_overrides(options: argparse.Namespace) -> list[str]:
    """Return what a machine without a GPU needs."""
    server = f"{{log_dir: {options.work}}}"
    devices = overrides(rollout_devices=1) if options.trainer == "async" else overrides()
    return [*devices, f"+{ROLLOUT}.engine_kwargs.sglang_cpu={server}"]


def write_tasks(path: Path, count: int) -> Path:
    """Write sums of two single digits, one task per line. The same seed gives the same sums."""
    digits = random.Random(0)
    lines = []
    for _ in range(count):
        a, b = digits.randint(1, 9), digits.randint(1, 9)
        payload = {"question": f"What is {a} + {b}? Answer with only a number.", "answer": str(a + b)}
        lines.append(json.dumps({"payload": payload}) + "\n")
    path.write_text("".join(lines))
    return path


def write_settings(path: Path, cloud: LocalCloud) -> Path:
    """Write the backend's settings: the bucket and the runtime. verl's settings provide the rest."""
    settings: dict[str, Any] = {
        **cloud.settings(),
        "output_dir": str(RUNS.absolute()),  # where `rollout show` looks
        "timeouts": {"model_call_s": 300, "agent_s": 600, "collection_s": 900, "session_key_s": 1200},
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


async def train(options: argparse.Namespace, passed_on: list[str]) -> Curve:
    """Run verl until it ends. Raises RolloutBackendError with the end of its log."""
    work: Path = options.work
    model = make_tiny_model(work / "model") if options.tiny else (options.model or find_model()).absolute()
    tasks = write_tasks(work / "tasks.jsonl", PROMPTS * (options.steps + 1))
    curve = Curve(work / "metrics.jsonl")
    curve.source.unlink(missing_ok=True)
    async with LocalCloud(AGENT, run_dir=work / "cloud") as cloud:
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *training_overrides(options, model),
            *backend_overrides(tasks, write_settings(work / "rollout_backend.yaml", cloud)),
            *cpu_overrides(options),
            f"hydra.run.dir={work}",
            "hydra.output_subdir=null",
            *passed_on,
        ]
        env = {**environment(options.threads), **cloud.environ, "VERL_FILE_LOGGER_PATH": str(curve.source)}
        log = work / "verl.log"
        log.unlink(missing_ok=True)
        verl = ServerProcess("verl", command, log, env)
        print(f"verl is starting, which takes a minute; its log is {log}")
        await verl.start()
        try:
            ended = asyncio.create_task(verl.wait())
            while not ended.done():
                await asyncio.wait({ended}, timeout=1.0)
                curve.show_new()
        finally:
            await verl.stop(grace_s=20)
        if verl.returncode:
            raise RolloutBackendError(f"verl ended with code {verl.returncode}. {verl.log_tail()}")
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 15, or 2 with --tiny")
    parser.add_argument("--model", type=Path, help="a model folder; default: the one of `rollout engine install`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="data type of the engine")
    parser.add_argument("--work", type=Path, default=Path("runs/train_arithmetic"), help="output directory")
    parser.add_argument(
        "--trainer",
        choices=["v1", "legacy", "async"],
        default="v1",
        help="trainer of verl; async is v1's separate_async",
    )
    parser.add_argument("--tiny", action="store_true", help="use a random model with a few thousand weights")
    parser.add_argument("--threads", type=int, help="threads of the trainer; default: one per core")
    options, passed_on = parser.parse_known_args()
    if unknown := [argument for argument in passed_on if argument.startswith("-")]:
        parser.error(f"no such option: {' '.join(unknown)}")
    options.steps = options.steps or (2 if options.tiny else 15)
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        curve = asyncio.run(train(options, passed_on))
    except RolloutBackendError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    curve.write(options.work)
    trainer = {"project_name": PROJECT, "experiment_name": options.work.name}
    report = RUNS / run_id_of(trainer) / "report.html"
    if report.is_file():  # verl's process wrote it; other arguments may have renamed the run
        print(f"report: {report}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
