import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.run.dispatch.rate_limiter import AdaptiveRate


def send(rate: AdaptiveRate, now: float) -> float:
    """Send the next call as soon as it may be sent, and return when."""
    at = now + rate.due(now)
    assert rate.due(at) == 0
    rate.take(at)
    return at


def test_a_refusal_halves_the_rate_down_to_the_floor():
    rate = AdaptiveRate(8)
    found = []
    for now in range(1, 6):
        rate.refused(sent_at=now, now=now)
        found.append(rate.rate)
    assert found == [4, 2, 1, 1, 1]


def test_refusals_of_calls_sent_before_the_decrease_are_one_signal():
    rate = AdaptiveRate(64)
    for _ in range(64):
        rate.refused(sent_at=0.0, now=0.2)
    assert rate.rate == 32
    rate.refused(sent_at=0.3, now=0.5)
    assert rate.rate == 16


def test_a_grant_of_a_call_sent_before_the_decrease_raises_nothing():
    rate = AdaptiveRate(64)
    rate.refused(sent_at=0.0, now=0.2)
    rate.granted(sent_at=0.1)
    assert rate.rate == 32


def test_no_call_is_admitted_before_the_time_of_a_retry_after():
    rate = AdaptiveRate(10)
    rate.refused(sent_at=0.0, now=1.0, retry_after_s=5.0)
    rate.refused(sent_at=0.5, now=1.5)
    rate.granted(sent_at=1.2)
    assert rate.due(2.0) == 4.0
    assert send(rate, 3.0) == 6.0
    assert rate.due(6.1) < 1


def test_refusals_take_no_credit_from_the_time_after_them():
    rate = AdaptiveRate(20)
    now = 0.0
    while now < 60:
        now = send(rate, now)
        rate.refused(sent_at=now, now=now)
    assert rate.due(now) <= 1 / rate.floor


def test_granted_calls_lead_back_to_the_ceiling_within_a_minute():
    rate = AdaptiveRate(20)
    for now in range(10):
        rate.refused(sent_at=now, now=now)
    now = 10.0
    while now < 70:
        now = send(rate, now)
        rate.granted(sent_at=now)
    assert rate.rate == 20


def test_a_ceiling_that_admits_nothing_is_refused():
    with pytest.raises(ValueError, match="a rate must be above 0"):
        AdaptiveRate(0)


@given(
    ceiling=st.floats(0.5, 100),
    calls=st.lists(st.tuples(st.floats(0, 2), st.sampled_from(["granted", "refused", "lost"])), max_size=60),
)
def test_no_window_has_more_than_the_ceiling_and_one_burst(ceiling, calls):
    rate, now, sent = AdaptiveRate(ceiling), 0.0, []
    for gap, answer in calls:
        now = send(rate, now + gap)
        sent.append(now)
        if answer == "granted":
            rate.granted(sent_at=now)
        elif answer == "refused":
            rate.refused(sent_at=now, now=now)
        assert rate.floor <= rate.rate <= rate.ceiling
    burst = max(1.0, ceiling)
    for i, start in enumerate(sent):
        for j in range(i, len(sent)):
            assert j - i + 1 <= ceiling * (sent[j] - start) + burst + 1e-3
