"""Run a step with verl's own agent loop and the replay buffer of its synchronous v1 trainer, in verl's environment.

verl's manager, workers, TransferQueue and replay buffer are real, with their defaults; nothing is trained after it.
An agent is a coroutine of a worker, which verl gives no time limit. verl trains the rows that the buffer returns, and
pads what is missing with rows that have no weight.
"""

import json
import os
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Work, ended, failing_agents, hand_over, main, tokens_of
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput


class Agent(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        agent = failing_agents(json.loads(os.environ["FAULT_BENCH"])).make(row["task"])
        try:
            reward = await agent.run()
        finally:
            agent.end()
        ids = tokens_of(agent.proof)
        versions = {"min_global_steps": 1, "max_global_steps": 1}
        return AgentLoopOutput(
            prompt_ids=[1],
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=[-0.5] * len(ids),
            reward_score=reward,
            num_turns=2,
            metrics={},
            extra_fields={**versions, "reward_extra_info": {}},
        )


def start_ray(tries: int = 6) -> None:
    """Start Ray, which gives itself 30 s on any machine."""
    import ray

    for left in reversed(range(tries)):
        try:
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        except Exception:
            ray.shutdown()
            if not left:
                raise
        else:
            return


async def step_with_faults(work: Work) -> None:
    import numpy as np
    import transfer_queue as tq
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils import tensordict_utils as tu

    loops = Path(work["folder"]) / "loops.yaml"
    loops.write_text("- name: faulty\n  _target_: verl_loop.Agent\n")
    # The tokenizer alone names no kind of model.
    model = Path(work["folder"]) / "model"
    shutil.copytree(work["model"], model, dirs_exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                f"{rollout}.name=sglang",
                f"{rollout}.n={work['group']}",
                f"{rollout}.agent.num_workers=1",
                f"{rollout}.agent.agent_loop_config_path={loops}",
                f"{rollout}.agent.default_agent_loop=faulty",
                f"data.train_batch_size={work['groups']}",
                "transfer_queue.enable=True",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            ],
        )
    os.environ |= {"PYTHONPATH": str(Path(__file__).parent), "RAY_worker_niceness": "0"}
    start_ray()
    tq.init(config.transfer_queue)
    manager = await AgentLoopManagerTQ.create(config, None)
    sampler = config.trainer.v1.sampler
    buffer = ReplayBuffer(
        "sync",
        config.trainer.v1.get("sync", {}),
        sampler.max_off_policy_threshold,
        sampler.max_off_policy_strategy,
        sampler.sampler_kwargs,
    )
    groups = {str(uuid.uuid4()): f"t{number}" for number in range(work["groups"])}
    columns = {"uid": list(groups), "task": list(groups.values()), "raw_prompt": list(groups.values())}
    batch = tu.get_tensordict({name: np.array(column, dtype=object) for name, column in columns.items()})
    tu.assign_non_tensor_data(batch, "index", list(range(len(groups))))
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    pending = {"is_prompt": True, "status": "pending", "global_steps": 1}
    tq.kv_batch_put(keys=list(groups), partition_id="train", tags=[pending] * len(groups))
    manager.generate_sequences(batch)
    rows, _ = buffer.sample(1, "train", len(groups))
    data = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=["responses", "rm_scores"])
    for key, ids, scores in zip(rows.keys, data["responses"], data["rm_scores"], strict=True):
        hand_over(groups[key.split("_")[0]], float(scores.sum()), ids.tolist())
    missing = work["groups"] * work["group"] - len(rows.keys)
    ended(Counter({"padded": missing} if missing else {}))


if __name__ == "__main__":
    main(step_with_faults)
