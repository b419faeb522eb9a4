#!/usr/bin/env bash
# A mixture of experts, such as MODEL=Qwen/Qwen3-30B-A3B, on Megatron, which replays the experts that SGLang used (R3).
# See sync.sh for arguments.
#
# Follows sync.sh, with recomputation, the router's dtype, offloading and the parallelism of experts of
# examples/router_replay/run_qwen3_30b_a3b_sglang_megatron.sh of verl. It differs from that in this: one machine with
# tensor and context parallelism instead of six with pipelines, micro-batches by tokens, and Megatron's own dispatcher
# of tokens instead of DeepEP's.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
transformer=actor_rollout_ref.actor.megatron.override_transformer_config
exec bash "$(dirname "$0")/sync.sh" \
  model_engine=megatron \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.context_parallel_size=2 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  $transformer.recompute_granularity=full \
  $transformer.recompute_method=uniform \
  $transformer.recompute_num_layers=1 \
  +$transformer.moe_router_dtype=fp32 \
  actor_rollout_ref.actor.megatron.router_replay.mode=R3 \
  actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
