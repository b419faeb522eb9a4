"""The warning that no agent has called the model."""

import pytest

from rollout_backend.gateway.stats import Counters, GatewayStats
from rollout_backend.results.progress import FirstCall


def stats(in_flight: int = 0, calls: int = 0, **errors: int) -> GatewayStats:
    counters = Counters(calls=calls)
    counters.errors.update(errors)
    return counters.snapshot(0, 0, in_flight)


@pytest.fixture
def first_call() -> FirstCall:
    return FirstCall("http://gateway:8000", "gateway.public_url")


def test_the_warning_comes_after_30_seconds_in_which_agents_ran(first_call):
    for now, running in ((0, 0), (100, 3), (129, 3)):
        first_call.observe(now, running, stats(not_found=9))
        assert first_call.warning == ""
    first_call.observe(130, 3, stats(not_found=9))
    assert first_call.warning == (
        "no model call has arrived for 30 s, and agents run: can they reach http://gateway:8000 (gateway.public_url)?"
    )


def test_time_without_agents_does_not_count(first_call):
    for now, running in ((0, 1), (20, 0), (40, 1), (69, 1)):
        first_call.observe(now, running, stats())
        assert first_call.warning == ""


@pytest.mark.parametrize(
    "later", [stats(calls=1), stats(in_flight=1), stats(invalid_api_key=1)], ids=["answered", "in flight", "refused"]
)
def test_any_call_withdraws_the_warning(first_call, later):
    first_call.observe(0, 1, stats())
    first_call.observe(60, 1, stats())
    assert first_call.warning
    first_call.observe(65, 1, later)
    assert (first_call.arrived, first_call.warning) == (True, "")
