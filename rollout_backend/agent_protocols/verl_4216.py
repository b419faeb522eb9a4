"""Agents of verl's pull request 4216, from which agentcore-rl-toolkit developed.

The invoke's `_training` block has `exp_id`, `session_id`, `input_id`, `sqs_url` and `s3_bucket`. The agent writes the
toolkit's result under another key, and announces it. If the announcement fails, it replaces the result by an error:

    EXP_ID/INPUT_ID_SESSION_ID.json

The buffer drops the announcement, because results of other protocols are found by listing. The block also names the
model's address. An agent that reads it from its environment has one address for all sessions, and cannot be run.
"""

from collections.abc import Mapping
from typing import Any

from agent_wrapper.contract import REQUEST_FIELD, RolloutRequest
from rollout_backend.agent_protocols.agentcore_rl_toolkit import AgentCoreRlToolkit
from rollout_backend.agent_protocols.base import results_prefix


class Verl4216(AgentCoreRlToolkit):
    """The toolkit's protocol, with another block and another key, which the answer does not name."""

    names_key = False

    def payload(self, task: Mapping[str, Any], request: RolloutRequest) -> dict[str, Any]:
        fields = super().payload(task, request)
        block = fields.pop(REQUEST_FIELD)
        return {
            **fields,
            "_training": {**block, "session_id": request.session_id, "sqs_url": request.result.queue_url},
        }

    def result_key(self, request: RolloutRequest) -> str:
        return f"{results_prefix(request)}{request.rollout_id}_{request.session_id}.json"
