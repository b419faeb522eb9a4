from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from rollout_backend.core.ledger import Ledger, PlannedRollout
from rollout_backend.dispatch.dispatcher import Submission


class PlainRuntime:
    """Answers each call as told, and remembers what was asked. What is told last goes on."""

    def __init__(self) -> None:
        self.invokes: list[str] = []
        self.stops: list[str] = []
        self.on_invoke: list[Exception | bytes] = [b'{"status": "accepted"}']
        self.on_stop: list[Exception | None] = [None]

    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self.invokes.append(session_id)
        told = self.on_invoke.pop(0) if len(self.on_invoke) > 1 else self.on_invoke[0]
        if isinstance(told, Exception):
            raise told
        return told

    async def stop(self, session_id: str) -> None:
        self.stops.append(session_id)
        told = self.on_stop.pop(0) if len(self.on_stop) > 1 else self.on_stop[0]
        if told is not None:
            raise told

    async def aclose(self) -> None: ...


@pytest.fixture
def runtime() -> PlainRuntime:
    return PlainRuntime()


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(step=0)
    ledger.plan([PlannedRollout("a.0", "a")])
    return ledger


@pytest.fixture
def prepare() -> Callable[[int], Awaitable[Submission]]:
    async def prepare(attempt: int) -> Submission:
        return Submission(f"session-of-attempt-{attempt}", b"{}", deadline=100.0)

    return prepare
