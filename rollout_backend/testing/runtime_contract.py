"""Tests that every agent runtime must pass. Subclass `RuntimeContract` in a test module, and name your service.

    class TestMyRuntime(RuntimeContract):
        faults = ProxiedService.FAULTS

        @asynccontextmanager
        async def serve(self, folder):
            async with MyEmulator() as emulator, FaultProxy(emulator.url) as proxy:
                yield MyService(emulator, proxy)

Each test starts the service, opens a runtime and closes both, in a separate event loop. The tests open at most four
sessions at once, and wait until the service itself counts what they expect.
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal
from uuid import uuid4

import pytest
from pydantic import SecretStr

from rollout_backend.agents.runtimes.base import AgentRuntime, open_runtime
from rollout_backend.base.check_result import raise_problems
from rollout_backend.config import RuntimeConfig
from rollout_backend.core.reasons import WHAT_TO_DO
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    InvokeRejected,
    NoCredentials,
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.testing import fault_proxy

Call = Literal["invoke", "stop"]
_WAIT_S, _POLL_S = 120.0, 0.02

_STOP_ELSEWHERE = """
import json, sys
from rollout_backend.run.janitor.__main__ import stop_sessions
print(json.dumps(stop_sessions(json.loads(sys.argv[1]), 1000, sys.argv[2:])))
"""


class ServiceFault(StrEnum):
    """A fault of the service in every invoke or in every stop."""

    THROTTLED = "throttled"
    """The service refuses the call because there are too many."""
    UNAVAILABLE = "unavailable"
    """The service refuses the call for now."""
    BROKEN = "broken"
    """The service fails, and may have executed the call."""
    LOST_ANSWER = "lost answer"
    """The service executes the call, and the connection breaks before the answer."""
    FORBIDDEN = "forbidden"
    """The service does not accept the credentials."""


class Service(ABC):
    """The service behind a runtime, on this machine, and the settings with which a runtime uses it."""

    config: RuntimeConfig
    payload: bytes = b"{}"
    """A payload that starts an agent, which then runs until its session is stopped."""
    run_id: str = "run"
    """The run of that payload, if it names one."""
    broken: Mapping[str, RuntimeConfig] = {}
    """Settings that `check` must refuse, by a regular expression of its message."""
    unreachable: RuntimeConfig | None = None
    """Settings of a service that does not exist."""

    @abstractmethod
    async def sessions(self) -> Collection[str]:
        """Return the ids of the sessions that run, as the service itself counts them."""

    async def crash(self, session_id: str) -> None:
        """End the agent of a session like a crash, if `RuntimeContract.reports_ends`."""
        raise NotImplementedError

    def failing(self, fault: ServiceFault, call: Call) -> AbstractAsyncContextManager[None]:
        """Let every call of this kind fail within a block, for each fault of `RuntimeContract.faults`."""
        raise NotImplementedError


class ProxiedService(Service):
    """A service that a runtime reaches through a `FaultProxy`, which injects the faults."""

    FAULTS: ClassVar[Collection[ServiceFault]] = tuple(ServiceFault)
    paths: ClassVar[Mapping[Call, str]]
    """The path of each kind of call, as a glob pattern."""
    statuses: ClassVar[Mapping[ServiceFault, tuple[int, str]]] = {
        ServiceFault.THROTTLED: (429, "ThrottlingException"),
        ServiceFault.UNAVAILABLE: (503, "ServiceUnavailableException"),
        ServiceFault.BROKEN: (502, "BadGateway"),
        ServiceFault.FORBIDDEN: (403, "AccessDeniedException"),
    }
    """Status and AWS error code with which the service answers each fault."""

    def __init__(self, proxy: fault_proxy.FaultProxy) -> None:
        self._proxy = proxy

    @asynccontextmanager
    async def failing(self, fault: ServiceFault, call: Call) -> AsyncIterator[None]:
        if fault is ServiceFault.LOST_ANSWER:
            rule = fault_proxy.Rule("*", fault_proxy.Fault.CUT_AFTER, path=self.paths[call])
        else:
            status, code = self.statuses[fault]
            rule = fault_proxy.Rule("*", fault_proxy.Fault.FAIL, path=self.paths[call], status=status, code=code)
        self._proxy.rules.append(rule)
        try:
            yield
        finally:
            self._proxy.rules.remove(rule)


class RuntimeContract:
    """The tests. A subclass defines `serve`, and sets what its service can do."""

    faults: ClassVar[Collection[ServiceFault]] = ()
    """The faults that the service's `failing` supports."""
    capacity: ClassVar[int | None] = None
    """The service refuses more sessions than this, at most four. None: it has no such limit."""
    reports_ends: ClassVar[bool] = False
    """The runtime implements `watch_sessions`, and the service `crash`."""

    def serve(self, folder: Path) -> AbstractAsyncContextManager[Service]:
        """Start the service for one test. `folder` is empty and belongs to this test."""
        raise NotImplementedError

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        if "fault" in metafunc.fixturenames:
            metafunc.parametrize("fault", cls.faults, ids=lambda fault: fault.value)

    # --- sessions -----------------------------------------------------------------------------------------

    def test_an_invoke_starts_one_session_and_a_stop_ends_it(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            one, other = new_session(), new_session()
            assert await runtime.invoke(one, service.payload)
            await runtime.invoke(other, service.payload)
            await _until_open(service, one, other)
            await runtime.stop(one)
            await _until_open(service, other)
            await runtime.stop(other)
            await _until_open(service)

        self._play(play, tmp_path)

    def test_a_second_invoke_of_a_session_starts_no_other(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            await runtime.invoke(session, service.payload)
            await runtime.invoke(session, service.payload)
            assert [*await service.sessions()] == [session]
            await runtime.stop(session)
            await _until_open(service)

        self._play(play, tmp_path)

    def test_a_stop_of_an_unknown_session_succeeds_and_so_does_a_second_one(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            await runtime.stop(new_session())
            await runtime.invoke(session, service.payload)
            await asyncio.gather(runtime.stop(session), runtime.stop(session))
            await _until_open(service)
            await runtime.stop(session)

        self._play(play, tmp_path)

    def test_sessions_start_and_stop_concurrently(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            sessions = [new_session() for _ in range(4)]
            await asyncio.gather(*(runtime.invoke(each, service.payload) for each in sessions))
            await _until_open(service, *sessions)
            await asyncio.gather(*(runtime.stop(each) for each in sessions))
            await _until_open(service)

        self._play(play, tmp_path)

    @pytest.mark.parametrize("turns", [0, 1, 3, 30])
    def test_an_invoke_that_is_cancelled_leaks_nothing_once_its_session_is_stopped(
        self, tmp_path: Path, turns: int
    ) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            invoke = asyncio.create_task(runtime.invoke(session, service.payload))
            # Let the event loop run this many turns.
            for _ in range(turns):
                await asyncio.sleep(0)
            invoke.cancel()
            await asyncio.gather(invoke, return_exceptions=True)
            await runtime.stop(session)
            # A call that was on its way when it was cancelled may arrive after the stop; another stop ends it.
            await _until(lambda: _stopped(service, runtime, session), "the session has ended")

        self._play(play, tmp_path)

    def test_above_its_capacity_it_refuses_sessions_and_says_so(self, tmp_path: Path) -> None:
        if self.capacity is None:
            pytest.skip("the service has no limit")

        async def play(service: Service, runtime: AgentRuntime) -> None:
            sessions = [new_session() for _ in range(self.capacity or 0)]
            for each in sessions:
                await runtime.invoke(each, service.payload)
            with pytest.raises((QuotaExceeded, Throttled)):
                await runtime.invoke(new_session(), service.payload)
            await runtime.stop(sessions.pop())
            await _until_open(service, *sessions)
            sessions.append(new_session())
            await runtime.invoke(sessions[-1], service.payload)
            await asyncio.gather(*(runtime.stop(each) for each in sessions))
            await _until_open(service)

        self._play(play, tmp_path)

    def test_a_session_that_crashes_is_reported_and_one_that_is_stopped_is_not(self, tmp_path: Path) -> None:
        if not self.reports_ends:
            pytest.skip("missing heartbeats show the end of a session")

        async def play(service: Service, runtime: AgentRuntime) -> None:
            crashed, stopped = new_session(), new_session()
            await runtime.invoke(crashed, service.payload)
            await runtime.invoke(stopped, service.payload)
            ends: asyncio.Queue[SessionEnd] = asyncio.Queue()
            watching = asyncio.create_task(runtime.watch_sessions(service.run_id, ends.put_nowait))
            await runtime.stop(stopped)
            await service.crash(crashed)
            async with asyncio.timeout(_WAIT_S):
                end = await ends.get()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert (end.session_id, ends.empty()) == (crashed, True)
            assert end.reason in WHAT_TO_DO
            await runtime.stop(crashed)
            await _until_open(service)

        self._play(play, tmp_path)

    # --- faults -------------------------------------------------------------------------------------------

    def test_a_failed_invoke_says_what_may_be_done_about_it(self, tmp_path: Path, fault: ServiceFault) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            async with service.failing(fault, "invoke"):
                with pytest.raises(RuntimeCallError) as caught:
                    await runtime.invoke(session, service.payload)
            _check_invoke_error(fault, caught.value)
            if caught.value.never_opened:
                assert [*await service.sessions()] == []
            await runtime.invoke(session, service.payload)
            await runtime.stop(session)
            await _until_open(service)

        self._play(play, tmp_path)

    def test_a_failed_stop_says_what_may_be_done_about_it(self, tmp_path: Path, fault: ServiceFault) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            await runtime.invoke(session, service.payload)
            async with service.failing(fault, "stop"):
                with pytest.raises(RuntimeCallError) as caught:
                    await runtime.stop(session)
            _check_stop_error(fault, caught.value)
            await runtime.stop(session)
            await _until_open(service)

        self._play(play, tmp_path)

    def test_a_service_that_cannot_be_reached_opened_nothing(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            if service.unreachable is None:
                pytest.skip("the service is part of this machine")
            other = await open_runtime(service.unreachable)
            try:
                with pytest.raises(RuntimeUnavailable) as caught:
                    await other.invoke(new_session(), service.payload)
                assert caught.value.never_opened
                with pytest.raises((OutcomeUnknown, RuntimeUnavailable)):
                    await other.stop(new_session())
            finally:
                await other.aclose()

        self._play(play, tmp_path)

    # --- around sessions ----------------------------------------------------------------------------------

    def test_check_passes_and_limits_keep_what_is_set(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            raise_problems(await runtime.check(session_s=60.0) or ())
            limits = runtime.limits()
            assert type(limits) is type(service.config)
            for name in service.config.model_fields_set & set(RuntimeConfig.model_fields):
                assert getattr(limits, name) == getattr(service.config, name), name
            assert all(isinstance(value, str) for value in runtime.describe().values())

        self._play(play, tmp_path)

    def test_check_says_what_is_wrong(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            for message, config in service.broken.items():
                with pytest.raises(PreflightError, match=message):
                    await _check(config)

        self._play(play, tmp_path)

    def test_it_says_where_the_logs_are(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            session = new_session()
            assert runtime.log_location(None)
            await runtime.invoke(session, service.payload)
            location = runtime.log_location(session)
            assert location
            if location.startswith(os.sep):
                await _until(lambda: _is_file(location), f"{location} exists")
            await runtime.stop(session)

        self._play(play, tmp_path)

    def test_another_process_stops_a_session_by_the_cleanup_spec(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            spec = runtime.cleanup_spec()
            if spec is None:
                pytest.skip("the runtime has no cleanup_spec: sessions of a killed run end at their idle timeout")
            session, unknown = new_session(), new_session()
            await runtime.invoke(session, service.payload)
            argv = [sys.executable, "-c", _STOP_ELSEWHERE, json.dumps(dataclasses.asdict(spec)), session, unknown]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == [session, unknown], done.stderr
            await _until_open(service)

        self._play(play, tmp_path)

    @pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
    def test_aclose_closes_every_connection(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            before = 0
            # The first time, libraries open connections that stay open.
            for _ in range(2):
                before = await _count_connections()
                other, session = await open_runtime(service.config), new_session()
                await other.invoke(session, service.payload)
                await other.stop(session)
                await other.aclose()
            await _until(lambda: _at_most(before), "every connection is closed")

        self._play(play, tmp_path)

    def test_the_settings_survive_a_round_trip(self, tmp_path: Path) -> None:
        async def play(service: Service, runtime: AgentRuntime) -> None:
            config = service.config
            secrets = {name: value for name, value in config if isinstance(value, SecretStr)}
            stored = config.model_dump(mode="json", exclude_unset=True)
            assert type(config).model_validate(stored | secrets) == config

        self._play(play, tmp_path)

    def _play(self, play: Callable[[Service, AgentRuntime], Awaitable[None]], folder: Path) -> None:
        async def run() -> None:
            async with self.serve(folder) as service:
                runtime = await open_runtime(service.config)
                try:
                    await play(service, runtime)
                finally:
                    await runtime.aclose()

        asyncio.run(run())


def new_session() -> str:
    """Return a new session id in the backend's format."""
    return f"rollout-{uuid4().hex}"


def _check_invoke_error(fault: ServiceFault, error: RuntimeCallError) -> None:
    match fault:
        case ServiceFault.THROTTLED:
            assert isinstance(error, (Throttled, QuotaExceeded)), error
        case ServiceFault.UNAVAILABLE:
            assert isinstance(error, RuntimeUnavailable), error
            assert error.refused
        case ServiceFault.BROKEN:
            assert isinstance(error, (RuntimeUnavailable, OutcomeUnknown)), error
            assert not error.never_opened, "the session may be open"
        case ServiceFault.LOST_ANSWER:
            assert isinstance(error, (OutcomeUnknown, RuntimeUnavailable)), error
            assert not error.never_opened, "the session may be open"
        case ServiceFault.FORBIDDEN:
            assert isinstance(error, (InvokeRejected, NoCredentials)), error
            assert error.never_opened


def _check_stop_error(fault: ServiceFault, error: RuntimeCallError) -> None:
    match fault:
        case ServiceFault.THROTTLED:
            assert isinstance(error, (Throttled, QuotaExceeded)), error
        case ServiceFault.FORBIDDEN:
            assert isinstance(error, (InvokeRejected, NoCredentials)), error
        case _:
            assert isinstance(error, (RuntimeUnavailable, OutcomeUnknown)), error


async def _check(config: RuntimeConfig) -> None:
    runtime = await open_runtime(config)
    try:
        raise_problems(await runtime.check(session_s=60.0) or ())
    finally:
        await runtime.aclose()


# --- waiting ----------------------------------------------------------------------------------------------


async def _until(met: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(_WAIT_S):
            # The service sends no event, so poll.
            while not await met():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"after {_WAIT_S:g} s it is not so that {what}") from None


async def _until_open(service: Service, *sessions: str) -> None:
    found: list[str] = []

    async def met() -> bool:
        found[:] = sorted(await service.sessions())
        return found == sorted(sessions)

    try:
        await _until(met, "")
    except AssertionError:
        raise AssertionError(f"the service runs {found}, not {sorted(sessions)}") from None


async def _stopped(service: Service, runtime: AgentRuntime, session: str) -> bool:
    if session in await service.sessions():
        await runtime.stop(session)
    return not await service.sessions()


async def _is_file(path: str) -> bool:
    return Path(path).is_file()  # noqa: ASYNC240


async def _count_connections() -> int:
    """Return how many sockets and pipes this process has."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(_target(link).startswith(("socket:", "pipe:")) for link in links)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        # The listing's own descriptor is closed.
        return ""


async def _at_most(count: int) -> bool:
    return await _count_connections() <= count


__all__ = ["Call", "ProxiedService", "RuntimeContract", "Service", "ServiceFault", "new_session"]
