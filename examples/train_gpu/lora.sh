#!/usr/bin/env bash
# The training of sync.sh with a LoRA adapter: verl sends its servers only that. See sync.sh for arguments.
#
# Follows sync.sh, with load_format of examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh of verl. It differs from
# that in this: a learning rate of 1e-5 instead of 3e-6, and no KL loss.
set -euo pipefail
exec bash "$(dirname "$0")/sync.sh" \
  actor_rollout_ref.model.lora_rank=32 \
  actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.model.target_modules=all-linear \
  actor_rollout_ref.rollout.load_format=safetensors \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  "$@"
