from collections.abc import Awaitable, Callable

import pytest
from tenacity import wait_none

from rollout_backend.core.ledger import Ledger, PlannedRollout
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher, Submission
from rollout_backend.dispatch.session_closer import SessionCloser

Close = Callable[..., Awaitable[bool]]


class ScriptedRuntime:
    """A runtime that answers each call with the next scripted answer. The last one is repeated."""

    def __init__(self) -> None:
        self.invokes: list[str] = []
        self.stops: list[str] = []
        self.on_invoke: list[Exception | bytes] = [b'{"status": "accepted"}']
        self.on_stop: list[Exception | None] = [None]

    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self.invokes.append(session_id)
        answer = self.on_invoke.pop(0) if len(self.on_invoke) > 1 else self.on_invoke[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stop(self, session_id: str) -> None:
        self.stops.append(session_id)
        answer = self.on_stop.pop(0) if len(self.on_stop) > 1 else self.on_stop[0]
        if answer is not None:
            raise answer

    async def aclose(self) -> None: ...


@pytest.fixture
def runtime() -> ScriptedRuntime:
    return ScriptedRuntime()


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(step=0)
    ledger.plan([PlannedRollout("a.0", "a")])
    return ledger


@pytest.fixture
def close(runtime: ScriptedRuntime, ledger: Ledger) -> Close:
    """Stop a session, and give up after some seconds."""

    async def close(session_id: str, call: CallKind = CallKind.STOP, retry_s: float = 0.0) -> bool:
        calls = CallQueue(invoke_per_s=1000, stop_per_s=1000)
        return await SessionCloser(runtime, calls, retry_s=retry_s, wait=wait_none()).close(session_id, ledger, call)

    return close


class Prepare:
    """Makes the request of an attempt, or raises the next of its errors."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    async def __call__(self, attempt: int) -> Submission:
        if self.errors:
            raise self.errors.pop(0)
        return Submission(f"session-of-attempt-{attempt}", b"{}", deadline=100.0)


@pytest.fixture
def prepare() -> Prepare:
    return Prepare()


@pytest.fixture
def submit(
    runtime: ScriptedRuntime, ledger: Ledger, close: Close, prepare: Prepare
) -> Callable[..., Awaitable[bool]]:
    """Submit the rollout a.0 in at most three attempts, until a time of the loop's clock."""

    async def submit(until: float = float("inf")) -> bool:
        calls = CallQueue(invoke_per_s=1000, stop_per_s=1000)
        dispatcher = Dispatcher(
            runtime, calls, max_sessions=4, max_attempts=3, wait=wait_none(), wait_refused=wait_none()
        )
        return await dispatcher.submit("a.0", ledger, prepare, close, until)

    return submit
