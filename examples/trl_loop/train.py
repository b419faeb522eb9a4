"""Train a small model on sums with TRL's GRPOTrainer, on this machine, with the agent in a local cloud.

python train.py              # 10 steps of SmolLM2-135M
python train.py --tiny       # 2 steps of a random model, to check that everything works
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollout_backend import RolloutConfig, RolloutManager, Task, load_config
from rollout_backend.model.serving.install import find_model
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.tiny_model import make_tiny_model
from rollouts import RolloutFunction, agent_reward

AGENT = Path(__file__).parent.parent / "arithmetic" / "agent.py"
PROMPTS, GROUP = 16, 4
TASKS = [
    Task(
        task_id=f"sum-{a}-{b}",
        payload={"question": f"What is {a} + {b}? Answer with only a number.", "answer": str(a + b)},
    )
    for a in range(1, 10)
    for b in range(1, 10)
]


def settings(cloud: LocalCloud, model: Path) -> RolloutConfig:
    """Return the settings of a run. On a cluster they are a YAML file: `load_config("rollout.yaml")`."""
    base = {
        "run_id": f"trl-loop-{time.strftime('%m%d-%H%M%S')}",
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 16},
        "group": {"size": GROUP},
        "timeouts": {"model_call_s": 300, "agent_s": 600, "collection_s": 900, "session_key_s": 1200},
    }
    return load_config(base=base, env={}, top=cloud.settings())


def make_trainer(rollouts: RolloutFunction, model: Path, steps: int, lr: float, work: Path) -> GRPOTrainer:
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=agent_reward,
        rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": task.task_id} for task in TASKS]),
        args=GRPOConfig(
            output_dir=str(work / "trl"),
            max_steps=steps,
            num_generations=GROUP,
            per_device_train_batch_size=PROMPTS * GROUP,
            learning_rate=lr,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
    )


async def train(model: Path, steps: int, lr: float, work: Path) -> None:
    async with LocalCloud(AGENT, run_dir=work / "cloud") as cloud:
        os.environ.update(cloud.environ)
        async with RolloutManager(settings(cloud, model)) as manager:
            trainer = make_trainer(RolloutFunction(manager, TASKS), model, steps, lr, work)
            await asyncio.to_thread(trainer.train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 10, or 2 with --tiny")
    parser.add_argument("--model", type=Path, help="a model folder; default: the one of `rollout engine install`")
    parser.add_argument("--lr", type=float, help="learning rate; default: 2e-5, or 3e-3 with --tiny")
    parser.add_argument("--tiny", action="store_true", help="use a random model with a few thousand weights")
    parser.add_argument("--work", type=Path, default=Path("runs/trl_loop"), help="output directory")
    options = parser.parse_args()
    work = options.work.absolute()
    model = make_tiny_model(work / "model") if options.tiny else (options.model or find_model()).absolute()
    steps, lr = options.steps or (2 if options.tiny else 10), options.lr or (3e-3 if options.tiny else 2e-5)
    asyncio.run(train(model, steps, lr, work))


if __name__ == "__main__":
    main()
