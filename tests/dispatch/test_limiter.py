import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.dispatch.limiter import TokenBucket


def test_a_burst_is_free_and_then_the_rate_holds():
    bucket = TokenBucket(rate=10, burst=3)
    assert [round(bucket.reserve(100.0), 3) for _ in range(5)] == [0, 0, 0, 0.1, 0.2]


def test_rest_refills_up_to_the_burst():
    bucket = TokenBucket(rate=10, burst=2)
    for _ in range(2):
        bucket.reserve(0.0)
    assert [round(bucket.reserve(60.0), 3) for _ in range(3)] == [0, 0, 0.1]


def test_a_pause_holds_everything_back():
    bucket = TokenBucket(rate=10, burst=5)
    bucket.pause(0.0, 2.0)
    assert [round(bucket.reserve(1.0), 3) for _ in range(2)] == [1.1, 1.2]


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_nonsense_is_refused(rate, burst):
    with pytest.raises(ValueError, match="rate must be above 0"):
        TokenBucket(rate, burst)


@given(
    rate=st.floats(0.5, 100),
    burst=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 2), st.booleans()), min_size=1, max_size=60),
)
def test_no_window_sees_more_than_the_rate_and_one_burst(rate, burst, steps):
    bucket, now, due = TokenBucket(rate, burst), 0.0, []
    for gap, throttled in steps:
        now += gap
        if throttled:
            bucket.pause(now, 0.5)
        due.append(now + bucket.reserve(now))
    for i, start in enumerate(due):
        for j in range(i, len(due)):
            assert j - i + 1 <= rate * (due[j] - start) + burst + 1e-6
