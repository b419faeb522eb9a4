"""Run a step with SkyRL's generator, in its environment, as its trainer does.

`SkyRLGymGenerator` and the environments' threads are real, with their defaults; an engine of a few lines answers
instead of vLLM, and nothing is trained after it. An agent is the step of an environment of SkyRL-Gym, which has no
time limit. The trainer gets all rollouts of a step, or the first exception, which ends it.
"""

import asyncio
import json
import os
import re
from collections import Counter
from typing import Any

import skyrl_gym
from harness import Work, ended, failing_agents, hand_over, main, tokens_of
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.generators.utils import prepare_generator_input
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer


class Environment(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self._agent = failing_agents(json.loads(os.environ["FAULT_BENCH"])).make(extras["task"])

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "user", "content": f"proof {self._agent.proof}"}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        try:
            reward = asyncio.run(self._agent.run())
        finally:
            self._agent.end()
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class Engine:
    """Answers with the token ids that the prompt names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        prompts = [self._tokenizer.decode(ids) for ids in batch["prompt_token_ids"]]
        answers = [tokens_of(int(re.findall(r"proof (\d+)", prompt)[0])) for prompt in prompts]
        return {"responses": [""] * len(answers), "response_ids": answers, "stop_reasons": ["stop"] * len(answers)}

    async def finish_session(self, session_id: str) -> None:
        pass


async def step_with_faults(work: Work) -> None:
    skyrl_gym.register("faulty", Environment)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    config = GeneratorConfig(n_samples_per_prompt=work["group"], max_input_length=512)
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(), Engine(tokenizer), tokenizer)
    tasks = [f"t{number}" for number in range(work["groups"])]
    prompts = [{"prompt": [], "env_class": "faulty", "env_extras": {"task": task}, "uid": task} for task in tasks]
    batch, groups = prepare_generator_input(prompts, config.n_samples_per_prompt, None, "faulty", "train", 1)
    found = await generator.generate(batch, disable_tqdm=True)
    for group, rewards, ids in zip(groups, found["rewards"], found["response_ids"], strict=True):
        hand_over(group, sum(rewards), ids)
    ended(Counter())


if __name__ == "__main__":
    main(step_with_faults)
