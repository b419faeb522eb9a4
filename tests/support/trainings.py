"""Tasks of the trainer tests, and what verl must make of their rollouts."""

import copy
import functools
import statistics
from typing import Any

from agent_wrapper.contract import Rollout

GROUP = 4
SAME = 1e-4  # maximum difference between the engine's and the trainer's probabilities, both in float32

Task = dict[str, Any]


@functools.cache
def composed(*overrides: str) -> Any:
    """Let Hydra compose verl's settings, which takes 0.3 s. Do not change the result."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides])


def verl_settings(*overrides: str, base: tuple[str, ...] = ()) -> Any:
    """Return verl's settings with these values, of which "+KEY=VALUE" adds a key that verl lacks.

    `base` has overrides for Hydra itself, such as "model_engine=megatron".
    """
    from omegaconf import OmegaConf

    config = copy.deepcopy(composed(*base))
    for override in overrides:
        key, _, value = override.partition("=")
        parsed = OmegaConf.from_dotlist([f"value={value}"]).value
        OmegaConf.update(config, key.lstrip("+"), parsed, force_add=key.startswith("+"))
    return config


def normal(name: str, **more: Any) -> Task:
    return {"name": name, "rewards": [0.0, 1.0, 0.25, 0.5], **more}


def grpo(rewards: list[float]) -> dict[float, float]:
    """Return the advantage of each reward. The rewards must be distinct."""
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return {reward: (reward - mean) / (deviation + 1e-6) for reward in rewards}


def rollouts_of(run: Any, name: str) -> list[Rollout]:
    """Return the collected rollouts of a group."""
    names = run.groups()
    files = [file for file in run.run_dir.glob("rollouts/*/*") if names.get(file.name.rpartition(".")[0]) == name]
    return [Rollout.decode(file.read_bytes()) for file in files]


def versions(rollout: Rollout) -> list[int]:
    """Return the weight version of each turn."""
    turns = [turn for segment in rollout.segments for turn in segment.turns]
    return [int(span.version) for turn in turns for span in turn.weight_versions]
