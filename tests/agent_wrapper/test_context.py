import dataclasses
import math
import time

import openai
import pytest

from agent_wrapper import RolloutContext
from agent_wrapper.contract.keys import trace_ids
from protocol_requests import make_request


def test_in_deployment_the_environment_decides():
    env = {"OPENAI_BASE_URL": "http://model/v1", "OPENAI_API_KEY": "secret", "ROLLOUT_MODEL": "m"}
    context = RolloutContext.from_environment({"x": 1}, env)
    assert (context.base_url, context.api_key, context.model) == ("http://model/v1", "secret", "m")
    assert (context.training, context.rollout_id, context.remaining_s) == (False, None, math.inf)
    assert "secret" not in repr(context)


def test_in_training_the_context_names_the_rollouts_trace():
    context = RolloutContext.from_request(make_request(), {})
    ids = trace_ids("r", 3, "t.0")
    assert context.traceparent == context.environ()["TRACEPARENT"] == "00-{:032x}-{:016x}-01".format(*ids)
    assert RolloutContext.from_environment({}, {}).traceparent is None


def test_what_is_not_known_is_left_to_the_environment_and_the_client():
    context = RolloutContext.from_environment({}, {"ROLLOUT_MODEL": "m"})
    assert {*context.environ(keep_home=True).values()} == {"m"}
    assert {*context.openai_kwargs()} == {"timeout", "max_retries"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.model = "other"  # type: ignore[misc]


def test_a_call_may_last_until_the_deadline():
    context = dataclasses.replace(
        RolloutContext.from_environment({}, {"OPENAI_API_KEY": "k"}), deadline=time.time() + 1000, rollout_id="r"
    )
    assert 700 < context.openai_kwargs()["timeout"] <= 1000
    late = dataclasses.replace(context, deadline=time.time() - 5)
    assert late.remaining_s == 0
    assert late.openai_kwargs()["timeout"] == 1


def test_the_openai_client_accepts_the_settings():
    context = RolloutContext.from_environment({}, {"OPENAI_BASE_URL": "http://model/v1", "OPENAI_API_KEY": "k"})
    with openai.OpenAI(**context.openai_kwargs()) as client:
        assert str(client.base_url) == "http://model/v1/"
