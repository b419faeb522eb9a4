"""What agents of other protocols are sent, and what is made of their results."""

import json
import math
import re

import pytest

from agent_wrapper.contract import ContractError, Outcome
from agent_wrapper.outcome import AgentResult
from protocol_requests import KEY, make_request
from rollout_backend.agents.protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, AgentCoreRuntimeApp, Verl4216
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from rollout_backend.core.session_key import expand, issue
from rollout_backend.errors import InvokeRejected
from rollouts import make_claims

TOOLKIT, VERL = AgentCoreRlToolkit(), Verl4216()
ADDED = {
    "input_id": "t.0",
    "s3_bucket": "b",
    "result_key": "k",
    "payload": {"_rollout": {"base_url": "https://g/k/KEY"}},
}
REQUEST = make_request()


def result(**fields: object) -> AgentResult:
    return TOOLKIT.read_result(json.dumps({**ADDED, **fields}).encode(), 10**6)


def test_the_payload_is_that_of_the_toolkits_client():
    assert TOOLKIT.payload({"question": "2 + 2?"}, REQUEST) == {
        "question": "2 + 2?",
        "_rollout": {
            "exp_id": "some/runs/r/agents/00000003",
            "input_id": "t.0",
            "s3_bucket": "bucket",
            "base_url": f"https://gateway/k/{KEY}/v1",
            "api_key": KEY,
            "model_id": "m",
            "sampling_params": {"temperature": 0.5, "top_p": 1.0, "max_completion_tokens": 99},
        },
    }
    assert TOOLKIT.result_key(REQUEST) == "some/runs/r/agents/00000003/t.0/session.json"


def test_the_payload_of_the_pull_request_names_session_and_queue():
    payload = VERL.payload({"question": "2 + 2?"}, REQUEST)
    assert payload.keys() == {"question", "_training"}
    block = payload["_training"]
    assert (block["session_id"], block["sqs_url"]) == ("session", "https://sqs/q")
    assert VERL.result_key(REQUEST) == f"{block['exp_id']}/{block['input_id']}_{block['session_id']}.json"


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"status": "accepted"}', b'{"status": "processing"}', b"[" * 60_000]
)
def test_an_answer_of_another_app_is_refused_by_name(answer: bytes):
    with pytest.raises(InvokeRejected, match=r"AgentCoreRLApp|0\.2\.0"):
        TOOLKIT.check_accepted(answer, REQUEST)


def test_an_answer_that_names_the_key_is_accepted():
    TOOLKIT.check_accepted(
        json.dumps({"status": "processing", "result_key": TOOLKIT.result_key(REQUEST)}).encode(), REQUEST
    )
    VERL.check_accepted(b'{"status": "processing"}', REQUEST)


TRACE = "Traceback (most recent call last):\n  File ...\n"
GOOD = {"status_code": 200, "stop_reason": "end_turn"}
FAILED = {"status_code": 500, "stop_reason": ""}
STOPPED = f"{TRACE}asyncio.exceptions.CancelledError\n"
LOST_MODEL = f"{TRACE}openai.APIConnectionError: x\n\nThe above\n\n{TRACE}ValueError"


@pytest.mark.parametrize(
    ("fields", "outcome", "reward", "reason"),
    [
        ({**GOOD, "rewards": 1}, Outcome.COMPLETED, 1.0, None),
        ({**GOOD, "rewards": [0.0, 0.25]}, Outcome.COMPLETED, 0.25, None),
        ({**GOOD, "reward": 2.0}, Outcome.COMPLETED, 2.0, None),
        *(({"rewards": rewards}, Outcome.AGENT_ERROR, None, "bad_reward") for rewards in ([], None, ["1"], [[1.0]])),
        ({}, Outcome.AGENT_ERROR, None, "bad_reward"),
        ({**FAILED, "stop_reason": "no tool"}, Outcome.AGENT_ERROR, None, "status_code"),
        ({**FAILED, "traceback": f"{TRACE}tools.web.APITimeout: 7"}, Outcome.AGENT_ERROR, None, "status_code"),
        ({**FAILED, "traceback": LOST_MODEL}, Outcome.INFRA_ERROR, None, "model_unavailable"),
        ({**FAILED, "traceback": STOPPED}, Outcome.INFRA_ERROR, None, "terminated"),
        ({"status_code": 503, "rewards": [1.0]}, Outcome.INFRA_ERROR, None, "status_code"),
    ],
)
def test_an_object_becomes_a_result(
    fields: dict[str, object], outcome: Outcome, reward: float | None, reason: str | None
):
    found = result(**fields, note="x")
    assert (found.outcome, found.reward, found.failure and found.failure.reason) == (outcome, reward, reason)
    if outcome is Outcome.COMPLETED:
        assert found.extras == {"stop_reason": "end_turn", "note": "x"}


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"status_code": "200"}', b'{"status_code": true}'])
def test_other_objects_are_refused(data: bytes):
    with pytest.raises(ContractError):
        TOOLKIT.read_result(data, 10**6)


RUNTIME_APP = AgentCoreRuntimeApp()


def state(status: str, **more: object) -> bytes:
    return json.dumps({"version": 1, "invocation_id": "session", "status": status, **more}).encode()


def test_the_payload_of_a_runtime_app_starts_it_in_the_background():
    assert RUNTIME_APP.payload({"question": "2 + 2?"}, REQUEST) == {
        "question": "2 + 2?",
        "_config": {"base_url": f"https://gateway/k/{KEY}/v1", "model_id": "m", "api_key": KEY},
        "_agentcore_runtime": {"version": 1, "operation": "start", "invocation_id": "session", "background": True},
    }
    with pytest.raises(InvokeRejected, match="_config"):
        RUNTIME_APP.payload({"_config": {}}, REQUEST)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"reward": 1.0}', b'{"status": "accepted"}', b"[" * 9_999])
def test_an_answer_of_an_app_without_the_envelope_is_refused_by_name(answer: bytes):
    with pytest.raises(InvokeRejected, match="AgentCoreRuntimeApp"):
        RUNTIME_APP.check_accepted(answer, REQUEST)
    assert not RUNTIME_APP.has_ended(answer, REQUEST)


def test_a_running_invocation_is_accepted_and_polled_again():
    RUNTIME_APP.check_accepted(state("in_progress"), REQUEST)
    assert not RUNTIME_APP.has_ended(state("in_progress"), REQUEST)
    assert not RUNTIME_APP.has_ended(state("completed", invocation_id="another", result=1.0), REQUEST)


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (state("completed", result={"reward": 0.5}), Outcome.COMPLETED, None),
        (state("completed", result={"metrics": {}}), Outcome.AGENT_ERROR, "bad_reward"),
        (state("completed", result=None), Outcome.AGENT_ERROR, "bad_reward"),
        (state("completed", error="no such tool"), Outcome.AGENT_ERROR, "invocation_error"),
        (state("interrupted"), Outcome.INFRA_ERROR, "terminated"),
        (state("not_found"), Outcome.INFRA_ERROR, "terminated"),
    ],
)
def test_the_state_of_an_invocation_becomes_a_result(answer: bytes, outcome: Outcome, reason: str | None):
    assert RUNTIME_APP.has_ended(answer, REQUEST)
    found = RUNTIME_APP.read_result(answer, 10**6)
    assert (found.outcome, found.failure and found.failure.reason) == (outcome, reason)


def test_a_state_that_was_cut_is_no_result():
    cut = state("completed", result={"reward": 1.0, "log": "x" * 100_000})[:65_536]
    assert RUNTIME_APP.has_ended(cut, REQUEST)
    with pytest.raises(ContractError, match="64 KiB"):
        RUNTIME_APP.read_result(cut, 10**6)


JOB_RUNTIME = SageMakerJobRuntime()


def test_the_payload_of_the_job_runtime_has_both_spellings():
    """That of AWS's page, and that of the models of `sagemaker.train.rft`."""
    key, url = issue("secret" * 8, make_claims()), "https://gateway/v1"
    endpoint = REQUEST.endpoint.model_copy(update={"api_key": key, "base_url": url})
    request = REQUEST.model_copy(update={"endpoint": endpoint, "run_id": "my_run.7"})
    payload = JOB_RUNTIME.payload({"prompt": "2 + 2?"}, request)
    trajectory, job = (
        payload["metadata"]["rolloutId"],
        "arn:aws:sagemaker:us-east-1:000000000000:job/AgentRFT/my-run-7",
    )
    assert expand(trajectory) == key
    assert payload == {
        "prompt": "2 + 2?",
        "instance": {"prompt": "2 + 2?"},
        "metadata": {
            "jobArn": job,
            "job_arn": job,
            "rolloutId": trajectory,
            "trajectory_id": trajectory,
            "endpoint": url,
            "region": "us-east-1",
        },
        "inferenceParams": {"temperature": 0.5, "topP": 1.0, "maxTokens": 99},
        "inference_params": {"temperature": 0.5, "top_p": 1.0, "max_tokens": 99},
        "model_name": "m",
        "model_endpoint": url,
    }
    with pytest.raises(InvokeRejected, match="'metadata', which SageMaker's payload reserves"):
        JOB_RUNTIME.payload({"metadata": {}}, request)


@pytest.mark.parametrize(
    ("run_id", "name"),
    [("r", "r"), ("--", "run"), ("a__b", "a-b"), ("x" * 62 + ".y", "x" * 62), ("\u00e9t\u00e9", "t")],
)
def test_a_jobs_arn_has_the_form_that_the_service_accepts(run_id: str, name: str):
    [pattern] = {
        "arn:aws[a-z\\-]*:sagemaker:[a-z0-9\\-]*:[0-9]{12}:job/[a-zA-Z0-9_\\-]+/[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
    }
    payload = JOB_RUNTIME.payload({}, REQUEST.model_copy(update={"run_id": run_id}))
    arn = payload["metadata"]["jobArn"]
    assert arn.endswith(f"/{name}")
    assert re.fullmatch(pattern, arn)


@pytest.mark.parametrize(
    ("status", "rewards", "outcome", "reward", "reason"),
    [
        ("ready", [1], Outcome.COMPLETED, 1.0, None),
        ("ready", [0.25, 0.5], Outcome.COMPLETED, 0.5, None),
        ("ready", None, Outcome.AGENT_ERROR, None, "no_reward"),
        *(
            ("ready", rewards, Outcome.AGENT_ERROR, None, "bad_reward")
            for rewards in ([], [math.nan], [1.0, -math.inf])
        ),
        ("ready", [math.nan, 1.0], Outcome.AGENT_ERROR, None, "bad_reward"),
        ("failed", [0.0], Outcome.AGENT_ERROR, None, "invocation_error"),
        ("failed", None, Outcome.AGENT_ERROR, None, "invocation_error"),
    ],
)
def test_a_report_becomes_a_result(status, rewards, outcome: Outcome, reward: float | None, reason: str | None):
    report = json.dumps({"status": status, "rewards": rewards, "answer": "no such tool"}).encode()
    found = JOB_RUNTIME.read_result(report, 10**6)
    assert (found.outcome, found.reward, found.failure and found.failure.reason) == (outcome, reward, reason)
    assert found.turn_rewards == ((0.25, 0.0) if rewards == [0.25, 0.5] else ())
    if status == "failed":
        assert "no such tool" in found.failure.message
