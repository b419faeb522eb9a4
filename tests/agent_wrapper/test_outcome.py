"""What becomes of what an agent returns or raises."""

import math
import urllib.error
from collections import OrderedDict
from decimal import Decimal
from email.message import Message
from fractions import Fraction
from typing import NoReturn

import aiohttp
import httpx
import numpy
import openai
import pytest
import yarl
from aiohttp.client_reqrep import ConnectionKey
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from agent_wrapper import AgentFailure, CommandError
from agent_wrapper.contract import Outcome, Rollout, Trajectory
from agent_wrapper.outcome import Unscored, build_rollout, classify, failed
from agent_wrapper.runner import Raised, Returned
from agent_wrapper.shared.trajectory import TrajectoryTooLarge, TrajectoryUnavailable
from protocol_requests import make_request
from rollouts import make_rollout, make_segment

URL = "http://gateway:80/v1"
REQUEST = make_request()
NOTHING = Trajectory(model="m", segments=())
SAMPLED = Trajectory(model="m", segments=(make_segment(),))


def rollout_of(returned: object, trajectory: Trajectory | TrajectoryUnavailable = NOTHING) -> Rollout:
    """Return the rollout of an agent that returned or raised this."""
    result = returned if isinstance(returned, (Raised, Returned)) else Returned(returned)
    return build_rollout(REQUEST, classify(result, URL), trajectory, 1.0, 2.0)


def ended(rollout: Rollout) -> tuple[Outcome, float | None, str]:
    return rollout.outcome, rollout.reward, rollout.failure.reason


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.float32(0.5) == 0.5, 1.0),
        (numpy.array(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (OrderedDict(reward=2), 2.0),
    ],
)
def test_numbers_are_rewards(value, reward):
    ending = classify(Returned(value), URL)
    assert (ending.outcome, ending.reward) == (Outcome.COMPLETED, reward)
    assert type(ending.reward) is float


class Unreadable(dict[str, int]):
    def items(self) -> NoReturn:
        raise KeyError("the connection is closed")


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.inf,
        math.nan,
        10**400,
        [1.0],
        numpy.array([1.0]),
        numpy.array("1"),
        Decimal("nan"),
        {"reward": None},
        1e39,
        {"reward": 3e38, "turn_rewards": [3e38]},
    ],
)
def test_other_values_are_a_bad_reward(value):
    ending = classify(Returned(value), URL)
    assert (ending.outcome, ending.reward, ending.extras) == (Outcome.AGENT_ERROR, None, {})
    assert ending.failure is not None
    assert ending.failure.reason == "bad_reward"
    assert "return a finite number, or a dict" in ending.failure.message


@pytest.mark.parametrize(
    "value",
    [
        {"reward": 1, 2: 3},
        {"reward": 1, "x": math.nan},
        {"reward": 1, "x": numpy.float32("nan")},
        {"reward": 1, "x": {1, 2}},
        {"reward": 1, "x": numpy.datetime64("2026-01-01")},
        {"reward": 1, "x": 2**70},
        {"reward": 1, "x": "\ud800"},
        Unreadable(reward=1),
        {"reward": 1, "steps": [[]] * 130_000},
    ],
)
def test_values_that_are_not_json_are_bad_extras(value):
    ending = classify(Returned(value), URL)
    assert (ending.outcome, ending.reward, ending.extras) == (Outcome.AGENT_ERROR, None, {})
    assert ending.failure is not None
    assert ending.failure.reason == "bad_extras"
    assert "; return JSON values, numbers or arrays" in ending.failure.message


def test_extras_store_numbers_and_arrays_of_other_libraries_as_pythons():
    values = {
        "score": numpy.float32(0.5),
        "long": numpy.longdouble(0.5),
        "steps": [numpy.int64(3)],
        "passed": numpy.float32(0.5) == 0.5,
        "each": {"scores": numpy.array([[1, 2], [3, 4]])},
        "price": Decimal("0.25"),
        "share": Fraction(1, 4),
    }
    extras = classify(Returned({"reward": 1, **values}), URL).extras
    assert extras == {
        "score": 0.5,
        "long": 0.5,
        "steps": [3],
        "passed": True,
        "each": {"scores": [[1, 2], [3, 4]]},
        "price": 0.25,
        "share": 0.25,
    }
    assert (type(extras["steps"][0]), type(extras["passed"])) == (int, bool)


def test_a_bad_reward_is_named():
    assert "the reward is 'good', a str, not a number" in classify(Returned("good"), URL).failure.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=2))
def test_accepted_extras_can_be_stored(extras):
    ending = classify(Returned({**extras, "reward": 1}), URL)
    rollout = make_rollout("x.0", Outcome.INFRA_ERROR, extras=ending.extras)
    assert Rollout.decode(rollout.encode()).extras == ending.extras
    assert Rollout.decode(rollout.to_json()).extras == ending.extras


def test_a_failures_texts_are_bounded_and_storable():
    failure = failed(Outcome.AGENT_ERROR, "reason", "\ud800" * 10_000, "x" * 100_000 + "the end").failure
    assert failure.message == "?" * 2_000
    assert len(failure.traceback) == 20_000
    assert failure.traceback.endswith("the end")


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1"])
def test_a_failure_scored_with_nonsense_has_no_reward(reward):
    ending = classify(Raised(AgentFailure("gave up", reward=reward)), URL)
    assert (ending.outcome, ending.reward, ending.failure.reason) == (Outcome.AGENT_ERROR, None, "bad_reward")


# --- whose fault an exception is --------------------------------------------------------------------------


def request(url: str) -> httpx.Request:
    return httpx.Request("POST", url)


def status_error(status: int, url: str) -> Exception:
    response = httpx.Response(status, request=request(url))
    client = openai.OpenAI(api_key="x")
    try:
        return client._make_status_error("message", body=None, response=response)
    finally:
        client.close()


def urllib_error(status: int, url: str) -> Exception:
    return urllib.error.HTTPError(url, status, "message", Message(), None)


def aiohttp_error(status: int | None, url: str) -> Exception:
    to = yarl.URL(url)
    if status is not None:
        made = aiohttp.RequestInfo(to, "POST", CIMultiDictProxy(CIMultiDict()), to)
        return aiohttp.ClientResponseError(made, (), status=status)
    assert to.host is not None
    key = ConnectionKey(to.host, to.port, False, False, None, None, None, None)
    return aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))


MODEL = "http://gateway/v1/chat/completions"
TOOL = "http://tool/search"


class ModelThrottledException(Exception):
    """As strands-agents names its own."""


class FailsToDescribeItself(Exception):
    @property
    def status(self) -> NoReturn:
        raise KeyError("status")


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        (openai.APIConnectionError(request=request(MODEL)), True),
        (openai.APIError("the stream broke", request(MODEL), body=None), True),
        (openai.APIConnectionError(request=request(TOOL)), False),
        (openai.APIError("the stream broke", request(TOOL), body=None), False),
        (status_error(500, MODEL), True),
        (status_error(429, MODEL), True),
        (status_error(410, MODEL), True),
        (status_error(410, TOOL), False),
        (status_error(400, MODEL), False),
        (status_error(503, TOOL), False),
        (httpx.ReadError("cut", request=request(MODEL)), True),
        (httpx.ConnectError("dead", request=request(TOOL)), False),
        (httpx.HTTPStatusError("m", request=request(MODEL), response=httpx.Response(502)), True),
        (ModelThrottledException("slow down"), True),
        (urllib_error(503, MODEL), True),
        (urllib_error(503, TOOL), False),
        (urllib_error(404, MODEL), False),
        (aiohttp_error(503, MODEL), True),
        (aiohttp_error(503, TOOL), False),
        (aiohttp_error(None, MODEL), True),
        (aiohttp_error(None, TOOL), False),
        (urllib_error(503, "http://tool:${PORT}/search"), False),
        (FailsToDescribeItself(), False),
        (ConnectionError("a tool's"), False),
        (RuntimeError("Connection error."), False),
    ],
    ids=repr,
)
def test_only_the_models_endpoint_failing_is_infrastructure(error, unavailable):
    ending = classify(Raised(error), URL)
    assert ending.reward is None
    assert ending.failure is not None
    expected = (Outcome.INFRA_ERROR, "model_unavailable") if unavailable else (Outcome.AGENT_ERROR, "agent_exception")
    assert (ending.outcome, ending.failure.reason) == expected


class Mute(AgentFailure):
    def __str__(self) -> NoReturn:
        raise KeyError("message")


class RaisesMute(dict[str, int]):
    def items(self) -> NoReturn:
        raise Mute("x")


UNSHOWABLE = SyntaxError("bad", ("f.py", 1, "no number", "x = "))


@pytest.mark.parametrize(
    "result", [Raised(Mute("x")), Raised(Mute("x", 0.5)), Returned(RaisesMute(reward=1)), Raised(UNSHOWABLE)]
)
def test_an_error_without_a_readable_message_is_published(result):
    ending = classify(result, URL)
    assert ending.outcome is Outcome.AGENT_ERROR
    assert ("SyntaxError" if result == Raised(UNSHOWABLE) else "Mute") in ending.failure.message


def raised_from(cause: Exception, how: str) -> Exception:
    if how == "group":
        return ExceptionGroup("several", [ValueError("other"), cause])
    error = ValueError("wrapped")
    error.__cause__ = cause if how == "from" else None
    error.__context__, error.__suppress_context__ = cause, how != "during"
    return error


@pytest.mark.parametrize("how", ["from", "during", "group"])
def test_the_cause_is_found_behind_other_errors(how):
    cause = raised_from(status_error(503, MODEL), "from")
    ending = classify(Raised(raised_from(cause, how)), URL)
    assert ending.failure.reason == "model_unavailable"
    assert ending.failure.message.startswith("openai.InternalServerError")


def test_the_one_error_of_a_task_group_counts_as_itself():
    def found(error: Exception) -> tuple[Outcome, float | None, str, str]:
        ending = classify(Raised(ExceptionGroup("tasks", [ExceptionGroup("inner", [error])])), URL)
        assert "ExceptionGroup: tasks (1 sub-exception)" in ending.failure.traceback
        return ending.outcome, ending.reward, ending.failure.reason, ending.failure.message

    agents = Outcome.AGENT_ERROR
    assert found(AgentFailure("gave up", reward=0.0)) == (agents, 0.0, "agent_failure", "gave up")
    assert found(CommandError("exit code 1")) == (agents, None, "command_failed", "exit code 1")
    assert found(KeyError("colour")) == (agents, None, "agent_exception", "KeyError: 'colour'")


def test_a_cause_that_the_agent_disowned_does_not_count():
    assert classify(Raised(raised_from(status_error(503, MODEL), "from None")), URL).outcome is Outcome.AGENT_ERROR


def test_a_circular_chain_of_causes_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(Raised(first), URL).outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize("result", [Returned(0.0), Raised(AgentFailure("gave up", 0.0))])
def test_a_reward_from_an_agent_that_lost_a_model_call_is_none(result):
    rollout = rollout_of(result, SAMPLED.model_copy(update={"unanswered_calls": 2}))
    assert ended(rollout) == (Outcome.INFRA_ERROR, None, "model_unavailable")
    assert rollout.segments == SAMPLED.segments
    assert rollout_of(result, SAMPLED).reward == 0.0


def test_an_agents_own_failure_stays_its_own_though_a_call_was_lost():
    rollout = rollout_of(Raised(KeyError("x")), SAMPLED.model_copy(update={"unanswered_calls": 1}))
    assert rollout.outcome is Outcome.AGENT_ERROR


def test_a_failed_command_is_the_models_fault_if_a_call_was_lost():
    failed = Raised(CommandError("solve exited with code 1: no answer"))
    rollout = rollout_of(failed, SAMPLED)
    assert ended(rollout) == (Outcome.AGENT_ERROR, None, "command_failed")
    assert rollout.failure.message == "solve exited with code 1: no answer"
    rollout = rollout_of(failed, SAMPLED.model_copy(update={"unanswered_calls": 1}))
    assert ended(rollout) == (Outcome.INFRA_ERROR, None, "model_unavailable")
    assert rollout.failure.message.endswith("left 1 calls unanswered: solve exited with code 1: no answer")


def test_neither_failures_nor_extras_contain_the_session_key():
    key = "header.claims.signature"
    endpoint = REQUEST.endpoint.model_copy(update={"api_key": key})
    request = REQUEST.model_copy(update={"endpoint": endpoint})
    error = ValueError(f"401 for http://gateway/k/{key}/v1/models")
    for result in (Raised(error), Returned({"reward": 1, "seen": [{key: f"Bearer {key}"}], "n": 1})):
        rollout = build_rollout(request, classify(result, URL), SAMPLED, 0, 1)
        assert key not in rollout.to_json().decode()
        assert "[session key]" in rollout.to_json().decode()


# --- agents that called no model here ---------------------------------------------------------------------


def test_an_agent_may_leave_its_reward_to_a_scorer():
    rollout = rollout_of(Unscored({"result": "4"}), SAMPLED)
    assert ended(rollout) == (Outcome.AGENT_ERROR, None, "no_reward")
    assert (rollout.can_be_scored, rollout.trainable, rollout.extras) == (True, False, {"result": "4"})


@pytest.mark.parametrize(
    ("values", "trajectory", "reason"),
    [
        ({}, NOTHING, "no_model_call"),
        ({}, SAMPLED.model_copy(update={"unanswered_calls": 1}), "model_unavailable"),
        ({}, TrajectoryUnavailable("no answer"), "trajectory_unavailable"),
        ({}, TrajectoryTooLarge("it has 300 segments"), "trajectory_too_large"),
        ({"result": math.nan}, SAMPLED, "bad_extras"),
    ],
)
def test_an_unscored_rollout_without_what_a_scorer_needs_cannot_be_scored(values, trajectory, reason):
    rollout = rollout_of(Unscored(values), trajectory)
    assert (rollout.failure.reason, rollout.can_be_scored) == (reason, False)


@pytest.mark.parametrize(
    ("trajectory", "outcome", "reason"),
    [
        (NOTHING, Outcome.AGENT_ERROR, "no_model_call"),
        (TrajectoryTooLarge("it has 300 segments"), Outcome.AGENT_ERROR, "trajectory_too_large"),
        (TrajectoryUnavailable("no answer"), Outcome.INFRA_ERROR, "trajectory_unavailable"),
        (NOTHING.model_copy(update={"unanswered_calls": 1}), Outcome.INFRA_ERROR, "model_unavailable"),
    ],
)
def test_a_reward_without_the_tokens_that_earned_it_is_dropped(trajectory, outcome, reason):
    rollout = rollout_of({"reward": 1, "messages": [{"role": "assistant", "content": "4"}]}, trajectory)
    assert ended(rollout) == (outcome, None, reason)
    assert rollout.segments == ()
    assert reason != "no_model_call" or "call the model at the context's base_url" in rollout.failure.message


def test_rewards_of_turns_are_stored_and_counted():
    turns = sum(len(segment.turns) for segment in SAMPLED.segments)
    rollout = rollout_of({"reward": 1, "turn_rewards": numpy.full(turns, 0.5), "note": "x"}, SAMPLED)
    assert (rollout.reward, rollout.turn_rewards, rollout.extras) == (1.0, (0.5,) * turns, {"note": "x"})
    assert Rollout.decode(rollout.encode()).turn_rewards == (0.5,) * turns
    for wrong, message in (
        ([0.5] * (turns + 1), f"returned {turns + 1} turn_rewards, and {turns} model calls were made"),
        ("1", "turn_rewards is '1', not a list of numbers"),
        ([math.nan] * turns, "which is not finite"),
    ):
        rollout = rollout_of({"reward": 1, "turn_rewards": wrong}, SAMPLED)
        assert ended(rollout) == (Outcome.AGENT_ERROR, None, "bad_reward")
        assert message in rollout.failure.message
