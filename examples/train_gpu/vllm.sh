#!/usr/bin/env bash
# The training of sync.sh with verl's vLLM servers, in an environment with vLLM 0.24.0. See sync.sh for arguments.
#
# Follows sync.sh. vLLM must report logprobs of the distribution that tokens are sampled from, and its weights' version.
set -euo pipefail
exec bash "$(dirname "$0")/sync.sh" \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.logprobs_mode=processed_logprobs \
  +actor_rollout_ref.rollout.engine_kwargs.vllm.middleware=rollout_backend.verl.vllm_middleware.WeightVersions \
  "$@"
