"""Plans against botocore's serializers: the same requests, and only of arguments that botocore accepts."""

import functools
from typing import Any

import pytest
from botocore.awsrequest import prepare_request_dict
from botocore.exceptions import ParamValidationError
from botocore.model import OperationModel, ServiceModel
from botocore.serialize import create_serializer
from botocore.session import Session
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.aws.repeated_call import Rendered, RequestPlan

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/mine-0123456789"
TEXT = st.text(st.characters(codec="utf-8"), max_size=50)
ANY = st.one_of(TEXT, st.none(), st.booleans(), st.integers(), st.binary(), st.lists(TEXT))
ENTRY = st.fixed_dictionaries({"Id": TEXT, "ReceiptHandle": TEXT}, optional={"VisibilityTimeout": st.integers()})
RUNTIME = {"agentRuntimeArn": ARN, "qualifier": "DEFAULT"}


@functools.cache
def service_model(service: str) -> ServiceModel:
    return Session().get_service_model(service)


def model_of(service: str, operation: str) -> OperationModel:
    return service_model(service).operation_model(operation)


def made_by_botocore(model: OperationModel, arguments: dict[str, Any]) -> dict[str, Any]:
    request = create_serializer(model.service_model.resolved_protocol).serialize_to_request(arguments, model)
    prepare_request_dict(request, "https://host.example/a")
    return dict(request)


def check(
    model: OperationModel, fixed: dict[str, Any], first: dict[str, Any], others: dict[str, Any]
) -> Rendered | None:
    """Check the plan that a first call results in with the arguments of another."""
    plan = RequestPlan.of(model, made_by_botocore(model, {**fixed, **first}), fixed, first)
    assert plan is not None
    rendered = plan.render(others)
    if rendered is not None:
        expected = made_by_botocore(model, {**fixed, **others})
        assert rendered == (expected["url"], dict(expected["headers"]), expected["body"])
    return rendered


@given(TEXT)
def test_a_key_is_encoded_as_by_botocore(key):
    model = model_of("s3", "GetObject")
    assert (check(model, {"Bucket": "mine"}, {"Key": "a"}, {"Key": key}) is None) == (key == "")


@given(TEXT, st.binary(max_size=50))
def test_an_invoke_is_that_of_botocore(session, payload):
    names = {"runtimeSessionId": "s" * 33, "payload": b"x"}
    rendered = check(
        model_of("bedrock-agentcore", "InvokeAgentRuntime"),
        {**RUNTIME, "contentType": "application/json"},
        names,
        {"runtimeSessionId": session, "payload": payload},
    )
    assert (rendered is None) == (len(session) < 33)


@given(st.lists(ENTRY, max_size=3))
def test_a_list_of_entries_is_that_of_botocore(entries):
    model = model_of("sqs", "ChangeMessageVisibilityBatch")
    first = [{"Id": "0", "ReceiptHandle": "r"}]
    assert (
        check(model, {"QueueUrl": "https://q.example/1/mine"}, {"Entries": first}, {"Entries": entries}) is not None
    )


@given(session=ANY, token=ANY)
def test_only_valid_arguments_are_planned(session, token):
    first = {"runtimeSessionId": "s" * 33, "clientToken": "t" * 33}
    others = {"runtimeSessionId": session, "clientToken": token}
    check(model_of("bedrock-agentcore", "StopRuntimeSession"), RUNTIME, first, others)


INVALID = [
    [{"Id": "0"}],
    [{"Id": "0", "ReceiptHandle": "r", "VisibilityTimeout": "1"}],
    [{"Id": "0", "ReceiptHandle": "r", "Other": "x"}],
    [None],
    "text",
]


@pytest.mark.parametrize("entries", INVALID)
def test_invalid_entries_are_left_to_botocore(entries):
    model, queue = model_of("sqs", "ChangeMessageVisibilityBatch"), {"QueueUrl": "https://q.example/1/mine"}
    first = {"Entries": [{"Id": "0", "ReceiptHandle": "r"}]}
    plan = RequestPlan.of(model, made_by_botocore(model, {**queue, **first}), queue, first)
    assert plan is not None
    assert plan.render({"Entries": entries}) is None
    with pytest.raises(ParamValidationError):
        made_by_botocore(model, {**queue, "Entries": entries})


UNPLANNED = [
    ("s3", "GetObject", {"Bucket": "b"}, {"Key": "k", "VersionId": "v"}),  # in the query
    ("s3", "PutObjectTagging", {"Bucket": "b", "Key": "k"}, {"Tagging": {"TagSet": []}}),  # XML
    ("sqs", "SetQueueAttributes", {"QueueUrl": "https://q.example/1/mine"}, {"Attributes": {"a": "b"}}),  # a map
]


@pytest.mark.parametrize(("service", "operation", "fixed", "varying"), UNPLANNED)
def test_other_places_and_shapes_have_no_plan(service, operation, fixed, varying):
    model = model_of(service, operation)
    assert RequestPlan.of(model, made_by_botocore(model, {**fixed, **varying}), fixed, varying) is None
