"""The services of a run for virtual time: a bucket in memory, and no faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agent_wrapper.contract import ModelEndpoint, Rollout
from memory_store import MemoryStore
from rollout_backend.agents.runtimes.base import SessionCalls
from rollout_backend.config import RolloutConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.in_flight import InFlightLog
from rollout_backend.run.step.services import StepServices
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from step_bench import NoLines

_BEGAN_AT = 1_800_000_000.0


def wall() -> float:
    """Return the virtual time in unix seconds."""
    return _BEGAN_AT + asyncio.get_running_loop().time()


def virtual_config(**sections: Mapping[str, Any]) -> RolloutConfig:
    """Return settings in which `sections` override a section's fields."""
    base: dict[str, Any] = {
        "run_id": "virtual",
        "model": {"path": Path("model")},
        "storage": {"bucket": "bucket"},
        "queue": {"enabled": False},
        "runtime": {"kind": "http", "url": "http://agents"},
        "group": {"size": 1},
        "circuit_breaker": {"max_failures": None},
        "timeouts": {
            "model_call_s": 20, "agent_s": 300, "publish_grace_s": 60, "collection_s": 1800, "session_key_s": 3600,
        },
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return RolloutConfig.parse(base)


class _Runtime:
    """What a step asks of a runtime besides its calls."""

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None: ...

    def log_location(self, session_id: str | None) -> str:
        return "a log"


class _Gateways:
    identity = "gateways"

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        return ModelEndpoint(base_url="http://g/v1", api_key="key", name="m", trajectory_url="http://g/t")

    async def revoke(self, session_ids: Iterable[str]) -> None: ...

    async def adopt(self, session_ids: Iterable[str]) -> None: ...


class _Archive:
    def write_rollout(self, rollout: Rollout, data: bytes) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    async def wait(self, *writes: Future[Any]) -> None: ...


def virtual_services(
    config: RolloutConfig, store: MemoryStore, calls: SessionCalls, queue: CallQueue, **more: Any
) -> StepServices:
    """Return the services of a run whose sessions are opened by `calls`; `more` replaces some of them."""
    kept: Any = store
    made: dict[str, Any] = {
        "config": config,
        "runtime": _Runtime(),
        "dispatcher": Dispatcher(calls, queue, max_sessions=config.runtime.max_sessions),
        "gateways": _Gateways(),
        "buffer": RolloutBuffer(config.run_id, kept, None, config.collect.max_fetches),
        "manifests": ManifestStore(kept, config.run_id),
        "blocklist": TaskBlocklist(kept, config.run_id, config.group.block_task_after),
        "archive": _Archive(),
        "breaker": CircuitBreaker(config.circuit_breaker),
        "in_flight": InFlightLog(NoLines()),
        "wall": wall,
    }
    return StepServices(**{**made, **more})
