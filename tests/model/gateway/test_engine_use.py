"""What a step's samples of the engines say about their number."""

import pytest

from rollout_backend.model.gateway.stats import EngineLoad, EngineUse, EngineUseMeter
from rollout_backend.run.accounts.findings import engine_findings


def use_of(*samples: list[EngineLoad]) -> EngineUse:
    meter = EngineUseMeter()
    for sample in samples:
        meter.add({f"engine {i}": each for i, each in enumerate(sample)})
    found = meter.result()
    assert found is not None
    return found


def test_means_are_over_samples():
    use = use_of([EngineLoad(8, 0, 10, 100), EngineLoad(0, 0, 30, 100)], [EngineLoad(4, 2, 0, 0)])
    assert use == EngineUse(engines=2, running=6, waiting=1, idle=1 / 3, full_batch=None, imbalance=2, kv_used=0.2)


def test_a_training_service_is_no_engine():
    meter = EngineUseMeter()
    meter.add({"http://service": EngineLoad(8, 2, is_service=True)})
    assert meter.result() is None


def test_the_imbalance_is_that_of_the_busiest_engine():
    even, uneven = [EngineLoad(3, 1), EngineLoad(4, 0)], [EngineLoad(6, 2), EngineLoad(0, 0)]
    assert use_of(even).imbalance == 1
    assert use_of(even, uneven).imbalance == 12 / 8
    assert use_of([EngineLoad(3, 1)]).imbalance is None  # one engine has nothing to share
    assert use_of([EngineLoad(0, 0)] * 2).imbalance is None


def test_too_few_engines_are_told_from_the_batches_of_those_with_a_queue():
    """Each of two engines runs 16 requests at a time, and 40 more wait."""
    use = use_of(*[[EngineLoad(16, 30, 9, 10), EngineLoad(16, 10, 9, 10)]] * 5)
    assert (use.full_batch, use.needed) == (16, 5)
    [finding] = engine_findings(use)
    assert finding.text == (
        "engines were the bottleneck: on average 2 engines ran 32 requests and 40 waited; 5 would run all of them at "
        "once. 90% of their KV caches was in use"
    )
    assert finding.advice == "serving.servers"


def test_a_queue_beside_an_engine_with_room_is_a_matter_of_routing():
    use = use_of(*[[EngineLoad(16, 6), EngineLoad(1, 0), EngineLoad(0, 0)]] * 20)
    [finding] = engine_findings(use)
    assert (finding.advice, "while others had room" in finding.text) == ("router.policy", True)


@pytest.mark.parametrize("samples", [[[EngineLoad(16, 3)]] * 10, [[EngineLoad(16, 30)]] * 2])
def test_a_short_queue_says_nothing_nor_does_a_passing_one(samples):
    assert list(engine_findings(use_of(*samples))) == []


def test_idle_engines():
    use = use_of([EngineLoad(1, 0), EngineLoad(0, 0)], [EngineLoad(0, 0)])
    assert "engines had no request 67% of the time" in next(engine_findings(use)).text
