"""A runtime that the backend does not know: one class and one configuration class, both in this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.checks import preflight
from rollout_backend.config import RolloutConfig, RuntimeConfig, load_config
from rollout_backend.core.circuit_breaker import CircuitBreaker, describe_log
from rollout_backend.errors import CircuitOpen, ConfigError, InvokeRejected
from rollout_backend.janitor.__main__ import stop_sessions
from rollout_backend.runtimes.base import AgentRuntime, CleanupSpec, SessionCalls
from rollout_backend.runtimes.registry import open_runtime


class ToyConfig(RuntimeConfig):
    """Settings of the toy runtime."""

    implementation: ClassVar[str] = f"{__name__}.ToyRuntime"
    greeting: str
    """A setting that only this runtime has."""


class ToyRuntime(AgentRuntime):
    """A runtime whose containers are the test bench's agents."""

    agents: ClassVar[SessionCalls]

    def __init__(self, config: ToyConfig) -> None:
        self.config = config

    @classmethod
    async def open(cls, config: ToyConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        return cls(config)

    async def check(self, session_s: float = 0.0) -> None: ...

    def limits(self) -> ToyConfig:
        return self.config.model_copy(update={"invoke_per_s": 7.0})

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        if self.config.greeting != "hello":
            raise InvokeRejected("wrong greeting", reason="container_error")
        return await self.agents.invoke(session_id, payload)

    async def stop(self, session_id: str) -> None:
        await self.agents.stop(session_id)

    def log_location(self, session_id: str | None) -> str:
        return f"the toy box {session_id}"

    def cleanup_spec(self) -> CleanupSpec:
        return CleanupSpec(f"{__name__}.toy_stopper", {"greeting": self.config.greeting})

    async def aclose(self) -> None: ...


stopped: list[str] = []


def toy_stopper(options: dict[str, Any]) -> Callable[[str], bool]:
    def stop(session_id: str) -> bool:
        stopped.append(f"{options['greeting']} {session_id}")
        return session_id != "unknown"

    return stop


@pytest.fixture
def open_toy(open_bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a bench whose steps run on the toy runtime. Arguments override its settings."""

    async def open_(*overrides: str) -> Any:
        runtime = f"runtime={{kind: {__name__}.ToyConfig, greeting: hello, max_attempts: 2, max_sessions: 4}}"
        bench = await open_bench(runtime, *overrides)
        monkeypatch.setattr(ToyRuntime, "agents", bench.agents, raising=False)
        toy = await open_runtime(bench.config.runtime)
        breaker = CircuitBreaker(
            bench.config.circuit_breaker, lambda entry: describe_log(bench.config, entry, toy.log_location)
        )
        bench.replace(**bench.without_pauses(toy), breaker=breaker)
        return bench

    return open_


async def test_a_step_runs_on_it(open_toy):
    bench = await open_toy()
    result = await bench.run("a", "b")
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert len(bench.agents.requests) == 4
    assert sorted(bench.agents.stopped) == sorted(request.session_id for request in bench.agents.requests)


async def test_its_diagnosis_names_its_logs(open_toy):
    bench = await open_toy("runtime.greeting=goodbye", "circuit_breaker={max_failures: 2, min_span_s: 0}")
    with pytest.raises(CircuitOpen, match=r"wrong greeting.*the toy box"):
        await bench.run("a", "b")


async def test_the_preflight_checks_it(open_toy):
    bench = await open_toy("queue.enabled=false", "model.context_length=2048")
    said = [str(finding) for finding in await preflight.check_run(bench.config, rollouts=8, machine=False)]
    assert "runtime: there, and ready" in said
    assert said[-1].startswith("runtime.invoke_per_s: 8 rollouts start within 1 s, at 7 sessions per second")


def test_the_janitor_stops_its_sessions():
    runtime = ToyRuntime(ToyConfig(kind="toy", greeting="hello"))
    assert stop_sessions(dataclasses.asdict(runtime.cleanup_spec()), 1000, ["a", "unknown"]) == ["a", "unknown"]
    assert sorted(stopped) == ["hello a", "hello unknown"]


def load(runtime: dict[str, Any]) -> RolloutConfig:
    return load_config(base={"model": {"path": "m"}, "storage": {"bucket": "results"}, "runtime": runtime}, env={})


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"kind": f"{__name__}.ToyConfig"}, r"runtime\.greeting: is missing"),
        ({"kind": f"{__name__}.ToyConfig", "greeting": "a", "extra": 1}, r"runtime\.extra: no such setting"),
        ({"kind": "no_such_package.Config"}, "no_such_package"),
        ({"kind": f"{__name__}.ToyRuntime"}, "is not a subclass of RuntimeConfig"),
        ({"greeting": "hello"}, "kind is missing: it is one of agentcore, http, kubernetes, process, ray, or the"),
    ],
)
def test_a_runtime_section_that_cannot_work_is_refused(runtime, message):
    with pytest.raises(ConfigError, match=message):
        load(runtime)


def test_a_configuration_survives_a_round_trip():
    config = load({"kind": f"{__name__}.ToyConfig", "greeting": "hello"})
    again = load_config(base=config.model_dump(mode="json"), env={})
    assert again == config
    assert isinstance(again.runtime, ToyConfig)
