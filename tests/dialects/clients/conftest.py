"""Real clients, a gateway, and a real engine behind a proxy that records what was sampled.

The model is small and seldom calls a tool. The tests check that each call ends with a well-formed answer or an error
that the client knows, and that the recorded tokens are the sampled ones, not what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agent_wrapper.contract import Trajectory
from gateway_server import Witness
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from token_exact import is_as_sampled


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
        is_as_sampled(trajectory, witness.sampled)
        return trajectory

    return check
