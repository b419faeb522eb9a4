#!/usr/bin/env bash
# A mixture of experts, such as MODEL=Qwen/Qwen3-30B-A3B, on Megatron, which replays the experts that SGLang used (R3).
# See sync.sh for arguments.
set -euo pipefail
exec bash "$(dirname "$0")/sync.sh" \
  model_engine=megatron \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.actor.megatron.router_replay.mode=R3 \
  actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
