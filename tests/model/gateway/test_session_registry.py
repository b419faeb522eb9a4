import asyncio
import functools

import pytest

from agent_wrapper.contract import Trajectory
from builders import Clock
from rollout_backend.model.gateway.sessions.calls import InFlightCall
from rollout_backend.model.gateway.sessions.registry import OpenSession, SessionRegistry
from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.rendering.segments import Completion
from rollouts import make_claims

claims = functools.partial(make_claims, expires_at=100.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(bundle, clock) -> SessionRegistry:
    return SessionRegistry(bundle, "m", session_key_s=50.0, clock=clock)


def hang(session: OpenSession) -> asyncio.Task:
    """Start a call in this session that no engine answers."""
    running = InFlightCall(ModelCall("m", ()))
    task = running.start(asyncio.Event().wait())
    session.retries.add(running)
    return task


async def test_an_expired_session_is_removed_and_its_calls_are_aborted(registry, clock):
    session = await registry.open(claims())
    await registry.open(claims("other", expires_at=200.0))
    call = hang(session)
    clock.now = 100.0
    await registry.sweep()
    assert call.cancelled()
    assert (registry.open_count, registry.closed_count) == (1, 0)


async def test_a_session_whose_key_expires_while_a_body_is_read_makes_no_call(registry, clock):
    session = await registry.open(claims())
    clock.now = 100.0
    await registry.sweep()
    with pytest.raises(ApiError, match="expired") as caught:
        registry.check_open(session)
    assert (caught.value.status, registry.open_count) == (410, 0)


async def test_a_revoked_session_is_remembered_until_its_key_expires(registry, clock):
    await registry.revoke(["s"])
    clock.now = 49.0
    await registry.sweep()
    with pytest.raises(ApiError, match="closed"):
        await registry.open(claims(expires_at=49.9))
    clock.now = 50.0
    await registry.sweep()
    assert registry.closed_count == 0


async def test_a_trajectory_that_the_trainer_would_refuse_is_not_returned(bundle, clock):
    registry = SessionRegistry(bundle, "m", session_key_s=50.0, clock=clock, max_result_bytes=2_500_000)
    for session, turns in (("fits", 3), ("large", 4)):
        recorder = (await registry.open(claims(session))).conversations.recorder
        for turn in range(turns):  # whose prompts begin with the same tokens, which are stored once
            recorder.add([*range(90_000), 200_000 + turn], Completion((7,), (-0.5,)), split_reason="x")
    assert len(Trajectory.decode(await registry.seal(claims("fits"))).segments) == 3
    for _ in range(2):
        with pytest.raises(ApiError, match=r"\(4 segments; .*raise storage\.max_result_bytes") as caught:
            await registry.seal(claims("large"))
        assert (caught.value.status, caught.value.code) == (413, "trajectory_too_large")


async def test_revoking_a_session_ends_its_sealing(registry):
    session = await registry.open(claims())
    hang(session)
    seal = asyncio.create_task(registry.seal(claims()))
    await asyncio.sleep(0)
    await registry.revoke(["s"])
    with pytest.raises(ApiError, match="revoked"):
        await seal


async def test_a_cancelled_seal_is_still_made(registry):
    await registry.open(claims())
    seal = asyncio.create_task(registry.seal(claims()))
    await asyncio.sleep(0)
    seal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seal
    assert Trajectory.decode(await registry.seal(claims())).model == "m"


async def test_a_sealed_trajectory_is_dropped_after_ten_minutes(registry, clock):
    sealed = await registry.seal(claims(expires_at=1000.0))
    clock.now = 599.0
    await registry.sweep()
    assert await registry.seal(claims(expires_at=1000.0)) == sealed
    clock.now = 600.0
    await registry.sweep()
    assert (registry.open_count, registry.closed_count) == (0, 1)
    with pytest.raises(ApiError, match="sealed long ago"):
        await registry.seal(claims(expires_at=1000.0))
    with pytest.raises(ApiError, match="sealed long ago"):
        await registry.open(claims(expires_at=1000.0))
    clock.now = 1000.0
    await registry.sweep()
    assert registry.closed_count == 0


async def test_a_trajectory_is_not_fetched_without_a_pause(registry, monkeypatch):
    await registry.open(claims())
    await registry.open(claims("other"))
    await registry.seal(claims())
    await registry.seal(claims("other"))
    loop, test, pauses, sleep = asyncio.get_running_loop(), asyncio.current_task(), [], asyncio.sleep
    now = loop.time()

    async def record(seconds):
        if asyncio.current_task() is not test:
            await sleep(seconds)
            return
        pauses.append(seconds)
        await sleep(0)

    with monkeypatch.context() as frozen:
        frozen.setattr(loop, "time", lambda: now)
        frozen.setattr(asyncio, "sleep", record)
        for _ in range(3):
            await registry.wait_turn(claims())
        await registry.wait_turn(claims("other"))
    # Another session does not wait for it.
    assert pauses == pytest.approx([0, 0.25, 0.5, 0])
