"""Real clients, a gateway, and a real engine behind a proxy that records what was sampled.

The model is small and seldom calls a tool. The tests check that each call ends with a well-formed answer or an error
that the client knows, and that the recorded tokens are the sampled ones, not what the model says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from agent_wrapper.contract import Trajectory
from gateway_server import Witness
from rollout_backend.rendering.renderer import RendererBundle, load_renderer


@pytest.fixture(scope="session")
def real_bundle(real_model) -> RendererBundle:
    return load_renderer(real_model)


@pytest.fixture
def witness(real_engine) -> Iterator[Witness]:
    with Witness(real_engine) as witness:
        yield witness


@pytest.fixture
def gateway(serve, witness, real_model, real_bundle):
    return serve(witness.url, model=real_model, bundle=real_bundle, model_call_s=150)


@pytest.fixture
def recorded(gateway, witness) -> Callable[[], Trajectory]:
    """Seal the session, and check that it has exactly what the engine sampled, each token once."""

    def check(session: str = "s1") -> Trajectory:
        trajectory = gateway.trajectory(session)
        turns = {}
        for segment in trajectory.segments:
            ids, logprobs, mask = (
                getattr(segment, name).tolist() for name in ("token_ids", "logprobs", "response_mask")
            )
            at = 0
            for turn in segment.turns:
                assert mask[at : turn.end] == [0] * (turn.start - at) + [1] * (turn.end - turn.start)
                assert all(map(math.isnan, logprobs[at : turn.start]))
                assert turn.weight_versions[0].start == turn.start
                assert turn.weight_versions[-1].end == turn.end
                turns[tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])] = logprobs[turn.start : turn.end]
                at = turn.end
            assert at == len(ids)
        assert turns.keys() == {(tuple(call.prompt), tuple(call.ids)) for call in witness.sampled}
        for call in witness.sampled:
            logprobs = turns[tuple(call.prompt), tuple(call.ids)]
            if call.constrained:
                assert all(map(math.isnan, logprobs))
            else:
                assert logprobs == pytest.approx(call.logprobs, abs=1e-6)
        assert sum(sum(segment.response_mask) for segment in trajectory.segments) == sum(
            len(call.ids) for call in witness.sampled
        )
        return trajectory

    return check
