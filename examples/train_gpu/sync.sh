#!/usr/bin/env bash
# GRPO on the eight GPUs of one machine, synchronously: FSDP trains and SGLang samples on the same GPUs in turn.
#
#   MODEL=Qwen/Qwen3-4B BACKEND=backend.yaml TRAIN=tasks.jsonl VAL=validation.jsonl bash sync.sh
#
# Further arguments go to verl, after and so instead of those below: bash sync.sh trainer.experiment_name=second
# Several machines: docs/training.md, "Run on several machines".
#
# Follows recipe/retool/run_qwen2_7b_dapo.sh of verl, multi-turn GRPO with tools: batch, learning rate, no KL,
# clip_ratio_high and clip_ratio_c, validation and checkpoints. It differs in this: agents bring their tools, SGLang
# samples, 8 rollouts a prompt instead of 16, one optimizer step per batch instead of four, rows of 32k tokens on two
# GPUs instead of 18k on four, a limit of kept checkpoints, and loggers that need no account (add wandb or tensorboard).
set -euo pipefail
# Sequence parallelism of FSDP; Megatron has its own.
if [[ " $* " != *" model_engine=megatron "* ]]; then
  set -- \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2 \
    "$@"
fi
exec python3 -m verl.trainer.main_ppo \
  actor_rollout_ref.model.path="$MODEL" \
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout_backend.verl.CloudAgentLoopManager \
  +actor_rollout_ref.rollout.custom.rollout_backend="$BACKEND" \
  trainer.v1.sampler.custom_sampler.path=pkg://rollout_backend.verl.sampler \
  trainer.v1.sampler.custom_sampler.name=RolloutSampler \
  data.custom_cls.path=pkg://rollout_backend.verl.dataset \
  data.custom_cls.name=PayloadDataset \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  data.train_batch_size=64 \
  data.max_prompt_length=4096 \
  data.max_response_length=28672 \
  algorithm.adv_estimator=grpo_skip_missing \
  critic.enable=False \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=8 \
  trainer.project_name=my-agent \
  trainer.experiment_name=first \
  trainer.logger='[console,file]' \
  trainer.save_freq=20 \
  trainer.max_actor_ckpt_to_keep=2 \
  trainer.test_freq=10 \
  "$@"
