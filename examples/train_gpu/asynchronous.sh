#!/usr/bin/env bash
# The training of sync.sh, asynchronously: four GPUs train and four others sample meanwhile. See sync.sh for arguments.
#
# Tokens are up to two versions old, so importance weights of tokens, cut off at 2, correct for the weights that sampled
# them. Follows sync.sh, with the rollout correction of recipe/dapo/run_dapo_qwen2.5_32b_rollout_corr.sh of verl, but
# weights of tokens instead of rows, whose products leave almost nothing of rows of 32k tokens, and no rejection.
set -euo pipefail
exec bash "$(dirname "$0")/sync.sh" \
  trainer.v1.trainer_mode=separate_async \
  trainer.n_gpus_per_node=4 \
  actor_rollout_ref.hybrid_engine=False \
  actor_rollout_ref.rollout.nnodes=1 \
  actor_rollout_ref.rollout.n_gpus_per_node=4 \
  actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
  trainer.v1.separate_async.parameter_sync_step=4 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  trainer.v1.separate_async.num_warmup_batches=2 \
  +trainer.v1.sampler.sampler_kwargs.max_staleness=2 \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  "$@"
