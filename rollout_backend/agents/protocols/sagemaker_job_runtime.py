"""Run agents that were written for SageMaker's multi-turn RL, with `sagemaker.train.rft` or botocore."""

import re
from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import Outcome, RolloutRequest
from agent_wrapper.contract.codec import unpack
from agent_wrapper.outcome import AgentResult, Unscored, classify, failed
from agent_wrapper.runner import Returned
from rollout_backend.agents.protocols.base import ReportedResults
from rollout_backend.core.session_key import shorten
from rollout_backend.errors import InvokeRejected

_REGION = "us-east-1"


class SageMakerJobRuntime(ReportedResults):
    """Agents for the service `sagemakerjobruntime`.

    The invoke has the task's fields, of which the service sends `prompt`, and

        "metadata": {"jobArn": ..., "rolloutId": ..., "endpoint": ..., "region": ...}
        "inferenceParams": {"temperature": ..., "topP": ..., "maxTokens": ...}

    and both again as in the models of `sagemaker.train.rft`, whose names have underscores. The rollout's id is the
    short form of the session's key. The agent calls the endpoint with it, then CompleteRollout and UpdateReward. One
    reward is the rollout's. Several belong to its model calls, and the last one is the rollout's.
    """

    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        endpoint, sampling = request.endpoint, request.sampling
        region = request.result.region or _REGION
        # The pattern of the service allows letters and digits, with hyphens between them.
        run = re.sub("[^A-Za-z0-9]+", "-", request.run_id).strip("-")[:63].rstrip("-") or "run"
        job_arn = f"arn:aws:sagemaker:{region}:000000000000:job/AgentRFT/{run}"
        trajectory_id = shorten(endpoint.api_key)
        named = (
            ("temperature", "temperature", sampling.temperature),
            ("topP", "top_p", sampling.top_p),
            ("maxTokens", "max_tokens", sampling.max_tokens),
        )
        added = {
            "instance": task,
            "metadata": {
                "jobArn": job_arn,
                "job_arn": job_arn,
                "rolloutId": trajectory_id,
                "trajectory_id": trajectory_id,
                "endpoint": endpoint.base_url,
                "region": region,
            },
            "inferenceParams": {name: value for name, _, value in named if value is not None},
            "inference_params": {name: value for _, name, value in named if value is not None},
            "model_name": endpoint.name,
            "model_endpoint": endpoint.base_url,
        }
        if reserved := task.keys() & added.keys():
            raise InvokeRejected(
                f"the task's payload has the field {min(reserved)!r}, which SageMaker's payload reserves: rename it"
            )
        return {**task, **added}

    def check_accepted(self, answer: bytes, request: RolloutRequest) -> None:
        """Accept any answer, because the contract defines none."""

    def read_result(self, data: bytes, max_bytes: int) -> AgentResult:
        report = unpack(data, max_bytes)
        if report["status"] == "failed":
            # The SDK adds a reward of 0 to each failure, so it is no reward.
            message = f"the agent completed its rollout with the status failed. Its answer: {report['answer']}"
            return failed(Outcome.AGENT_ERROR, "invocation_error", message)
        rewards = report["rewards"]
        if rewards is None:
            return classify(Returned(Unscored({})), "")
        value: dict[str, Any] = {"reward": rewards[-1]} if rewards else {}
        if len(rewards) > 1:
            value["turn_rewards"] = [*rewards[:-1], 0.0]
        return classify(Returned(value), "")
