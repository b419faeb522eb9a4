"""The rollout function of `examples/trl_loop`, called by TRL's own trainer: `make trl`."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import run_config
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.workbench.local.tiny_model import make_tiny_model
from rollouts import make_rollout, make_segment

pytest.importorskip("trl", reason="TRL is in a separate environment: run `make trl`")
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_loop"
TASKS = [Task("task-a", {}), Task("task-b", {})]


class Manager:
    """A stand-in that gives each task the same rewards, and keeps the weights it gets. None is a lost rollout."""

    def __init__(self, rewards: Sequence[float | None], temperature: float = 1.0) -> None:
        self.config = run_config(group={"size": len(rewards)}, sampling={"temperature": temperature})
        self.weights: list[dict[str, torch.Tensor]] = []
        self.collected: list[list[str]] = []
        self._rewards = rewards

    async def update_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights.append({name: tensor.clone() for name, tensor in weights.items()})

    async def collect(self, tasks: list[Task]) -> Any:
        self.collected.append([task.task_id for task in tasks])
        return types.SimpleNamespace(groups=[self._group(task) for task in tasks])

    def _group(self, task: Task) -> GroupResult:
        done = [(n, reward) for n, reward in enumerate(self._rewards) if reward is not None]
        rollouts = tuple(
            make_rollout(f"{task.task_id}.{n}", reward=reward, segments=[make_segment(3, 4 + n)])
            for n, reward in done
        )
        return GroupResult(task, rollouts, usable=len(done) > 1, planned=len(self._rewards))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.delitem(sys.modules, "rollouts")  # the tests' module of this name
    import rollouts

    yield rollouts
    sys.modules.pop("rollouts", None)


async def train(example: Any, manager: Manager, folder: Path, steps: int = 1, **options: Any) -> Any:
    """Return TRL's trainer after these steps on a tiny model."""
    size = manager.config.group.size
    model = make_tiny_model(folder / "model")
    settings = {
        "num_generations": size,
        "per_device_train_batch_size": len(TASKS) * size,
        "optim": "sgd",  # Adam would magnify the rounding of near-zero gradients
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
    }
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=example.agent_reward,
        rollout_func=example.RolloutFunction(manager, TASKS),
        train_dataset=Dataset.from_list([{"prompt": task.task_id} for task in TASKS]),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **{**settings, **options},
        ),
    )
    await asyncio.to_thread(trainer.train)
    return trainer


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
async def test_trl_trains_agents_rollouts_and_a_lost_one_changes_nothing(example: Any, tmp_path: Path) -> None:
    whole = await train(example, Manager([1.0, 0.25, 0.0]), tmp_path / "whole")
    manager = Manager([1.0, 0.25, 0.0, None])
    lossy = await train(example, manager, tmp_path / "lossy")
    before = make_tiny_model(tmp_path / "new")
    first = AutoModelForCausalLM.from_pretrained(before, dtype="float32").state_dict()
    after, expected = lossy.model.state_dict(), whole.model.state_dict()
    assert any((after[name] - first[name]).abs().max() > 1e-3 for name in first), "nothing was trained"
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=1e-4)
    assert manager.collected == [["task-a", "task-b"]]
    assert manager.weights == []  # the engines have the first step's weights

    manager = Manager([1.0, None, None])  # no group is left
    idle = await train(example, manager, tmp_path / "idle", steps=2)
    [served] = manager.weights
    for name, tensor in idle.model.state_dict().items():
        torch.testing.assert_close(tensor, first[name], atol=1e-6, rtol=0)
        assert torch.equal(served[name], tensor)

    for found, refused, options in (
        (Manager([1.0, 0.0]), "num_generations is 3", {"num_generations": 3, "per_device_train_batch_size": 6}),
        (Manager([1.0, 0.0], temperature=0.5), "temperature=1.0", {}),
    ):
        with pytest.raises(ValueError, match=refused):
            await train(example, found, tmp_path / "refused", **options)
        assert found.collected == []
