"""A request for a rollout, as the backend sends it to an agent."""

from typing import Any

from agent_wrapper.contract import ModelEndpoint, ResultTarget, RolloutRequest, Sampling

KEY = "0123456789-session-key"


def make_request(**more: Any) -> RolloutRequest:
    fields: dict[str, Any] = {
        "run_id": "r",
        "step": 3,
        "task_id": "t",
        "rollout_id": "t.0",
        "attempt": 1,
        "session_id": "session",
        "endpoint": ModelEndpoint(
            base_url=f"https://gateway/k/{KEY}/v1",
            api_key=KEY,
            name="m",
            trajectory_url="https://gateway/v1/rollout/trajectory",
        ),
        "sampling": Sampling(temperature=0.5, max_tokens=99),
        "deadline": 0.0,
        "remaining_s": 600.0,
        "result": ResultTarget(bucket="bucket", prefix="some/", queue_url="https://sqs/q"),
    }
    return RolloutRequest.model_validate({**fields, **more})
