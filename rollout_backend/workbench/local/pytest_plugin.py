"""Fixtures for tests of agents: `run_agent`, `scripted_model`, `local_cloud`.

Every pytest run loads this module, so it imports nothing from this package until a fixture is used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agent_wrapper import RolloutApp
    from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp
    from agent_wrapper.contract import ModelEndpoint, Rollout, Sampling
    from rollout_backend.workbench.local.cloud import LocalCloud
    from rollout_backend.workbench.local.scripted import Script


pytest.register_assert_rewrite("rollout_backend.testing.runtime_contract")


class _Blocking:
    """The harness for synchronous tests. Its event loop runs in a separate thread."""

    def __init__(self, portal: Any, harness: Any) -> None:
        self._portal = portal
        self._harness = harness
        self._warned = set[str]()

    def run_agent(
        self,
        agent: RolloutApp | BedrockAgentCoreApp | Path | str,
        task: Mapping[str, Any],
        replies: Script,
        *,
        sampling: Sampling | None = None,
        timeout_s: float = 240.0,
        outcome: str | None = "completed",
        scorer: str | None = None,
        private: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """See `AgentHarness.run`. Fails the test if the rollout has a different outcome, unless `outcome` is None.

        `scorer` computes the reward, named as in `scoring.function`; it gets the task's `private` part.
        """
        __tracebackhide__ = True
        from rollout_backend.core.reasons import NOT_SERVING_TEXT
        from rollout_backend.errors import RolloutBackendError
        from rollout_backend.run.scoring.scorer import load_scorer

        async def run() -> Rollout:
            rollout: Rollout = await self._harness.run(agent, task, replies, sampling=sampling, timeout_s=timeout_s)
            if scorer is not None:
                rollout = await self._harness.score(rollout, load_scorer(scorer), task, private)
            return rollout

        # A test imports the app, and does not notice how its file ends. A container does.
        for file in _files_that_never_serve(agent) - self._warned:
            self._warned.add(file)
            warnings.warn(f"{file}: in a container, {NOT_SERVING_TEXT}", stacklevel=2)
        try:
            rollout: Rollout = self._portal.call(run)
        except RolloutBackendError as error:
            # The traceback has only frames of this package and of its event loop.
            raise error.with_traceback(None) from None
        if outcome not in (None, rollout.outcome):
            pytest.fail(_describe(rollout, outcome))
        return rollout

    def scripted_model(self, replies: Script, *, sampling: Sampling | None = None) -> ModelEndpoint:
        """See `AgentHarness.endpoint`."""

        endpoint: ModelEndpoint = self._portal.call(partial(self._harness.endpoint, replies, sampling=sampling))
        return endpoint


def _files_that_never_serve(app: object) -> set[str]:
    """Return the files with this app, except tests, if none of them calls `run`."""
    modules = [module for module in list(sys.modules.values()) if any(each is app for each in vars(module).values())]
    files = [Path(name) for module in modules if (name := getattr(module, "__file__", None))]
    of_agent = [file for file in files if not file.name.startswith(("test_", "conftest"))]
    sources = [file.read_text(errors="replace") for file in of_agent]
    return set() if any(".run(" in source for source in sources) else {str(file) for file in of_agent}


def _describe(rollout: Rollout, expected: str | None) -> str:
    """Describe a rollout that did not end as expected, with its agent's traceback."""
    failure = rollout.failure
    if failure is None:
        return f"the rollout ended as {rollout.outcome} with the reward {rollout.reward}, not as {expected}"
    found = f"the rollout ended as {rollout.outcome} ({failure.reason}), not as {expected}: {failure.message}"
    return found if failure.traceback is None else f"{found}\n{failure.traceback.rstrip()}"


@pytest.fixture(scope="session")
def _rollout_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Blocking]:
    from anyio.from_thread import start_blocking_portal

    from rollout_backend.base.local_keys import bypass_proxies
    from rollout_backend.workbench.local.harness import AgentHarness

    # Apps run in this process.
    bypass_proxies()
    harness = AgentHarness(run_dir=tmp_path_factory.mktemp("rollouts"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(harness):
        yield _Blocking(portal, harness)


@pytest.fixture
def run_agent(_rollout_harness: _Blocking) -> Callable[..., Rollout]:
    """`run_agent(app_or_path, task, replies, outcome="completed") -> Rollout`: run one rollout on scripted answers.

    App and gateway are real; the result is read from a local S3. The test fails if the rollout has a different
    outcome; `outcome=None` allows any.
    """
    return _rollout_harness.run_agent


@pytest.fixture
def scripted_model(_rollout_harness: _Blocking) -> Callable[..., ModelEndpoint]:
    """`scripted_model(replies) -> ModelEndpoint`: an OpenAI endpoint with these replies."""
    return _rollout_harness.scripted_model


@pytest.fixture
def local_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalCloud]]:
    """`local_cloud(agent, **arguments of LocalCloud) -> LocalCloud`: start a cloud that ends with the test.

    Until then, this process's environment has the cloud's credentials.
    """
    from contextlib import ExitStack

    from anyio.from_thread import start_blocking_portal

    from rollout_backend.workbench.local.cloud import LocalCloud

    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())

        def start(agent: Path | str | list[str], **more: Any) -> LocalCloud:
            cloud = LocalCloud(agent, **{"run_dir": tmp_path / "cloud", **more})
            stack.enter_context(portal.wrap_async_context_manager(cloud))
            for name, value in cloud.environ.items():
                monkeypatch.setenv(name, value)
            return cloud

        yield start
