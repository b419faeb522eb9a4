"""Invoke agents of another protocol, and write their results as rollouts.

Invariants:

- An agent's result is read only for an open session of this run, so it counts for one rollout and attempt.
- The tokens are the sealed trajectory of the gateway. Fetching it closes the session.
- A rollout is written once, under the contract's key, before its step fetches it.
- While S3 or the runtime fails, the search continues until the session is closed: "could not ask" is not "not there".
- Before a step ends a rollout without a result, it calls `find_result`, which goes before all other searches.
"""

import asyncio
import contextlib
import functools
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

from agent_wrapper.contract import REQUEST_FIELD, ContractError, Outcome, RolloutRequest, Trajectory
from agent_wrapper.outcome import build_rollout, encode, failed
from agent_wrapper.shared.redaction import without_key
from agent_wrapper.shared.trajectory import TrajectoryUnavailable
from rollout_backend.agents.protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, AgentCoreRuntimeApp, Verl4216
from rollout_backend.agents.protocols.base import (
    AgentProtocol,
    PolledResults,
    ReportedResults,
    WrittenResults,
    results_prefix,
)
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from rollout_backend.agents.runtimes.base import SessionCalls
from rollout_backend.core.ledger import CallTally
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.core.session_key import shorten
from rollout_backend.errors import (
    InvokeRejected,
    ResultMissing,
    RunHeld,
    RuntimeCallError,
    ServingError,
    StoreError,
    WriteConflict,
)
from rollout_backend.run.collect.buffer import MAX_KEYS, log_defects
from rollout_backend.run.collect.store import ObjectStore
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue

log = logging.getLogger(__name__)

_ACCEPTED = b'{"status": "accepted"}'
# A poll that a runtime receives after the session's stop would start a new container.
_POLL_ARRIVES_S = 5.0
# An agent that fails reports first, and then answers its invoke with the error.
_ERROR_ARRIVES_S = 5.0
_ANSWER_CHARS = 500

_P = TypeVar("_P", bound=AgentProtocol)

_PROTOCOLS: Mapping[str, Callable[[], AgentProtocol]] = {
    "agentcore-rl-toolkit": AgentCoreRlToolkit,
    "agentcore-runtime-app": AgentCoreRuntimeApp,
    "sagemaker-job-runtime": SageMakerJobRuntime,
    "verl-4216": Verl4216,
}


def agent_protocol(name: str) -> AgentProtocol | None:
    """Return the protocol that `runtime.agent_protocol` names; None for `rollout`, which needs no translation."""
    return None if name == "rollout" else _PROTOCOLS[name]()


@dataclass
class _Session:
    """An open session, invoked or adopted at `began` in unix seconds."""

    request: RolloutRequest
    began: float
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its result is fetched and its rollout is written."""
    rejected_at: float | None = None
    """Time of the first rejected fetch after the last answered one, in loop seconds."""


class TranslatorOptions(TypedDict):
    """The options of each translator."""

    interval_s: float
    """Interval between two searches for results while a session is open."""
    max_writes: int
    """Number of results that are translated concurrently."""
    seal: Callable[[RolloutRequest], Awaitable[Trajectory]]
    """Closes a session and returns its trajectory. Raises TrajectoryUnavailable."""
    on_result: Callable[[int, str, int], Awaitable[None]]
    """Called with step, rollout and attempt once a rollout is written."""


class Translator(ABC, Generic[_P]):
    """Calls a runtime whose agents speak another protocol. `run` finds their results."""

    def __init__(
        self,
        calls: SessionCalls,
        protocol: _P,
        store: ObjectStore,
        **options: Unpack[TranslatorOptions],
    ) -> None:
        """`calls` are the runtime's calls. Rollouts are written to `store`."""
        self._calls = calls
        self._protocol = protocol
        self._store = store
        self._interval_s = options["interval_s"]
        self._seal = options["seal"]
        self._on_result = options["on_result"]
        self._room = asyncio.Semaphore(options["max_writes"])
        # Several hostile results at once could exhaust memory.
        self._builder = ThreadPoolExecutor(1, "translator")
        # Open sessions by id, and the ids of those that `run` is searching.
        self._open: dict[str, _Session] = {}
        self._searching: set[str] = set()

    @abstractmethod
    async def _candidates(self) -> list[str]:
        """Return the ids of open sessions that may have a result now."""

    async def _admit(self, session_id: str, call: CallKind) -> None:
        """Wait for the turn of this search.

        Raises:
            ResultMissing: the session was closed.
        """

    async def _ask(self, request: RolloutRequest) -> bytes:
        """Return what only the session's container can answer, by default nothing. Raises as `_fetch`."""
        return b""

    @abstractmethod
    async def _fetch(self, request: RolloutRequest, answer: bytes) -> tuple[bytes, float]:
        """Return a session's result, and how many seconds ago it was written. `answer` is that of `_ask`.

        Raises:
            ResultMissing: there is none yet, or the session was closed.
            StoreError, RuntimeCallError: it could not be read.
            ContractError: it cannot be a result.
        """

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        fields = json.loads(payload)
        request = RolloutRequest.parse(fields.pop(REQUEST_FIELD))
        translated = self._protocol.payload(fields, request)
        answer = await self._calls.invoke(session_id, json.dumps(translated).encode())
        self._protocol.check_accepted(answer, request)
        self._open[session_id] = _Session(request, time.time())
        return _ACCEPTED

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        """Find the result of a running session. `payload` returns the payload of its invoke."""
        request = RolloutRequest.parse(json.loads(payload())[REQUEST_FIELD])
        self._open[session_id] = _Session(request, time.time())
        self._calls.adopt(session_id, payload)

    async def stop(self, session_id: str) -> bool | None:
        self._open.pop(session_id, None)
        return await self._calls.stop(session_id)

    async def run(self) -> None:
        """Write the rollouts of open sessions whose agents have finished, until cancelled."""
        async with asyncio.TaskGroup() as searching:
            while True:
                await asyncio.sleep(self._interval_s)
                for session_id in await self._candidates():
                    if session_id not in self._searching:
                        self._searching.add(session_id)
                        task = searching.create_task(self._search(session_id, CallKind.POLL))
                        task.add_done_callback(functools.partial(self._on_searched, session_id))

    def _on_searched(self, session_id: str, done: asyncio.Task[bool]) -> None:
        self._searching.discard(session_id)

    async def find_result(self, session_id: str, *, ended: bool) -> bool:
        """Implement `ResultSource.find_result`."""
        return await self._search(session_id, CallKind.LAST_POLL)

    async def _search(self, session_id: str, call: CallKind) -> bool:
        """Write the rollout of the session if it has a result. Return False if that could not be determined."""
        return await log_defects(session_id, functools.partial(self._write_if_there, session_id, call), False)

    async def _write_if_there(self, session_id: str, call: CallKind) -> bool:
        session = self._open.get(session_id)
        if session is None:
            return True
        try:
            # A search that has started may find the result, which makes this one unnecessary.
            async with session.writing:
                pass
            await self._admit(session_id, call)
            async with session.writing:
                # Another search may have written the rollout, or the session was closed.
                if self._open.get(session_id) is session:
                    # A silent container must not take up the room of others.
                    answer = await self._ask(session.request)
                    async with self._room:
                        await self._write(session, answer)
        except ResultMissing:
            session.rejected_at = None
        except RunHeld:
            # The new manager asks for the result.
            pass
        except (StoreError, RuntimeCallError) as error:
            log.warning("session %s: the result could not be read and is retried: %s", session_id, error)
            return isinstance(error, InvokeRejected) and self._is_rejected_for_good(session)
        return True

    def _is_rejected_for_good(self, session: _Session) -> bool:
        """Return whether the container has rejected every fetch for `publish_grace_s`: no result will come."""
        now = asyncio.get_running_loop().time()
        session.rejected_at = now if session.rejected_at is None else session.rejected_at
        return now - session.rejected_at >= (session.request.publish_grace_s or 0.0)

    async def _write(self, session: _Session, answer: bytes) -> None:
        request = session.request
        data: bytes | ContractError
        try:
            data, age_s = await self._fetch(request, answer)
        except ContractError as error:
            data, age_s = error, 0.0
        finished = time.time() - age_s
        trajectory: Trajectory | TrajectoryUnavailable
        try:
            trajectory = await self._seal(request)
        except TrajectoryUnavailable as error:
            trajectory = error
        loop = asyncio.get_running_loop()
        target, body = await loop.run_in_executor(self._builder, self._build, session, data, trajectory, finished)
        try:
            await self._store.put_if_match(target, body, None)
        except WriteConflict:
            log.warning("%s: another attempt wrote its result first; this result is dropped", request.rollout_id)
        self._open.pop(request.session_id, None)
        await self._on_result(request.step, request.rollout_id, request.attempt)

    def _build(
        self,
        session: _Session,
        data: bytes | ContractError,
        trajectory: Trajectory | TrajectoryUnavailable,
        finished: float,
    ) -> tuple[str, bytes]:
        """Return the key and the bytes of the rollout. A result of many MB takes seconds."""
        try:
            if isinstance(data, ContractError):
                raise data
            result = self._protocol.read_result(data, self._store.config.max_result_bytes)
        except ContractError as error:
            result = failed(Outcome.INFRA_ERROR, "invalid_result", f"the agent's result cannot be read: {error}")
        rollout = build_rollout(session.request, result, trajectory, session.began, finished)
        rollout, body = encode(rollout, self._store.config.max_result_bytes)
        return session.request.key_for(rollout.outcome), body


class BucketTranslator(Translator[WrittenResults]):
    """Finds results by listing the prefixes of open sessions."""

    async def _candidates(self) -> list[str]:
        """Return the sessions with a result, or all of them if there are too many objects to list."""
        ids = {self._protocol.result_key(session.request): session_id for session_id, session in self._open.items()}
        found = []
        for prefix in {results_prefix(session.request) for session in self._open.values()}:
            listed = 0
            try:
                async for key in self._store.keys(prefix):
                    listed += 1
                    if listed > MAX_KEYS:
                        # A hostile agent may write any number of objects.
                        return [*self._open]
                    if key in ids:
                        found.append(ids[key])
            except StoreError as error:
                log.warning("%s; it is listed again", error)
        return found

    async def _fetch(self, request: RolloutRequest, answer: bytes) -> tuple[bytes, float]:
        stored = await self._store.fetch(self._protocol.result_key(request))
        return stored.body, stored.age_s


class PollingTranslator(Translator[PolledResults]):
    """Finds results by invokes of open sessions, which the queue of all calls admits."""

    def __init__(
        self,
        calls: SessionCalls,
        protocol: PolledResults,
        store: ObjectStore,
        poll: Callable[[str, bytes], Awaitable[bytes]],
        admission: CallQueue,
        **options: Unpack[TranslatorOptions],
    ) -> None:
        """`poll` is the runtime's invoke, and `admission` the queue of its calls."""
        super().__init__(calls, protocol, store, **options)
        self._poll = poll
        self._admission = admission
        # Polls in flight, by session.
        self._polls: dict[str, asyncio.Task[bytes]] = {}

    async def stop(self, session_id: str) -> bool | None:
        self._open.pop(session_id, None)
        if (poll := self._polls.get(session_id)) is not None:
            await asyncio.wait([poll], timeout=_POLL_ARRIVES_S)
            # Otherwise an unanswered poll would keep its place in the queue.
            poll.cancel()
        return await super().stop(session_id)

    async def _candidates(self) -> list[str]:
        return [*self._open]

    async def find_result(self, session_id: str, *, ended: bool) -> bool:
        """Implement `ResultSource.find_result`. An invoke of a session that has ended would start a new container."""
        if not ended:
            return await super().find_result(session_id, ended=ended)
        if (session := self._open.get(session_id)) is not None:
            async with session.writing:
                # Wait until the result of the last poll is written.
                pass
        return True

    async def _admit(self, session_id: str, call: CallKind) -> None:
        if session_id in self._open:
            await self._admission.admit(call)
            if session_id in self._open:
                return
            self._admission.give_back(call)
        raise ResultMissing(session_id)

    async def _ask(self, request: RolloutRequest) -> bytes:
        session_id = request.session_id
        self._polls[session_id] = poll = asyncio.create_task(self._send(request))
        try:
            await asyncio.wait([poll])
        finally:
            poll.cancel()
            del self._polls[session_id]
        # `stop` cancels the poll of a session that it closes.
        if poll.cancelled() or not self._protocol.has_ended(answer := poll.result(), request):
            raise ResultMissing(session_id)
        return answer

    async def _fetch(self, request: RolloutRequest, answer: bytes) -> tuple[bytes, float]:
        return answer, 0.0

    async def _send(self, request: RolloutRequest) -> bytes:
        payload = json.dumps(self._protocol.poll(request)).encode()
        with self._admission.track(CallKind.POLL, CallTally()):
            return await self._poll(request.session_id, payload)


class Reports(Protocol):
    """The gateways, to which agents report."""

    async def reports(self) -> Mapping[str, Mapping[str, Any]]:
        """Return `status`, `has_rewards` and `age_s` of every report, by session."""

    async def report_of(self, session_id: str) -> Mapping[str, Any] | None:
        """Return the same fields and `rewards` for one session; None without a report. Raises ServingError."""


class ReportTranslator(Translator[ReportedResults]):
    """Finds results by asking the gateways, and sends invokes that agents answer when they have finished.

    An invoke counts as accepted once its agent has reported, or if it has not failed within `accept_s`. If it fails
    after that, the session has ended.
    """

    def __init__(
        self,
        calls: SessionCalls,
        protocol: ReportedResults,
        store: ObjectStore,
        reports: Reports,
        on_end: Callable[[SessionEnd], None],
        *,
        accept_s: float,
        scored: bool,
        **options: Unpack[TranslatorOptions],
    ) -> None:
        """`calls` must end each invoke in time. With `scored`, agents need not report a reward."""
        super().__init__(calls, protocol, store, **options)
        self._reports = reports
        self._on_end = on_end
        self._accept_s = accept_s
        self._scored = scored
        self._invokes: dict[str, asyncio.Task[bytes]] = {}
        # Set when the agent of an invoke in flight has reported.
        self._reported: dict[str, asyncio.Event] = {}

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        fields = json.loads(payload)
        request = RolloutRequest.parse(fields.pop(REQUEST_FIELD))
        translated = json.dumps(self._protocol.payload(fields, request)).encode()
        self._open[session_id] = _Session(request, time.time())
        self._invokes[session_id] = invoke = asyncio.create_task(self._calls.invoke(session_id, translated))
        self._reported[session_id] = reported = asyncio.Event()
        invoke.add_done_callback(lambda _: reported.set())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._accept_s):
                    await reported.wait()
            error = invoke.exception() if invoke.done() else None
            if error is not None and not await self._has_reported(session_id, error):
                raise error
        except BaseException:
            self._forget(session_id)
            raise
        invoke.add_done_callback(functools.partial(self._on_invoke_end, session_id))
        return _ACCEPTED

    async def _has_reported(self, session_id: str, error: BaseException) -> bool:
        """Return whether the agent has reported, or may have, although its invoke failed with this error."""
        if not isinstance(error, RuntimeCallError) or error.refused or error.never_opened:
            return False
        try:
            return await self._reports.report_of(session_id) is not None
        except ServingError:
            # The session has ended, so the gateway is asked again.
            return True

    def _on_invoke_end(self, session_id: str, invoke: asyncio.Task[bytes]) -> None:
        if invoke.cancelled() or session_id not in self._open or (error := invoke.exception()) is None:
            return
        reason, final = "runtime_error", False
        if isinstance(error, RuntimeCallError):
            reason, final = error.reason, isinstance(error, InvokeRejected) and error.final
        else:
            log.error("session %s: the invoke failed", session_id, exc_info=error)
        self._on_end(SessionEnd(session_id, reason, str(error), final=final))

    def _forget(self, session_id: str) -> None:
        self._open.pop(session_id, None)
        self._reported.pop(session_id, None)
        if (invoke := self._invokes.pop(session_id, None)) is not None:
            invoke.cancel()

    async def stop(self, session_id: str) -> bool | None:
        self._forget(session_id)
        return await super().stop(session_id)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            for session_id in list(self._invokes):
                self._forget(session_id)

    async def _candidates(self) -> list[str]:
        found = []
        for session_id, report in (await self._reports.reports()).items():
            if (session := self._open.get(session_id)) is not None:
                if session_id in self._reported:
                    self._reported[session_id].set()
                if report["age_s"] >= self._wait_s(session.request, report):
                    found.append(session_id)
        return found

    async def find_result(self, session_id: str, *, ended: bool) -> bool:
        """Implement `ResultSource.find_result`. An agent whose invoke was cut off may still report its reward."""
        if ended and (session := self._open.get(session_id)) is not None:
            with contextlib.suppress(ServingError):
                report = await self._reports.report_of(session_id)
                if report is not None and report["age_s"] < self._wait_s(session.request, report):
                    return False
        return await super().find_result(session_id, ended=ended)

    async def _fetch(self, request: RolloutRequest, answer: bytes) -> tuple[bytes, float]:
        session_id = request.session_id
        try:
            report = await self._reports.report_of(session_id)
        except ServingError as error:
            raise StoreError(str(error)) from error
        if report is None:
            raise ResultMissing(session_id)
        result = {"status": report["status"], "rewards": report["rewards"], "answer": self._answer(request)}
        return json.dumps(result).encode(), report["age_s"]

    def _wait_s(self, request: RolloutRequest, report: Mapping[str, Any]) -> float:
        """Return for how many seconds after a rollout's completion its reward, or its error, may still arrive."""
        if report["status"] == "failed":
            invoke = self._invokes.get(request.session_id)
            return 0.0 if invoke is None or invoke.done() else _ERROR_ARRIVES_S
        if report["has_rewards"]:
            return 0.0
        return self._interval_s if self._scored else request.publish_grace_s or 0.0

    def _answer(self, request: RolloutRequest) -> str:
        """Return the agent's answer to its invoke, without the session's key."""
        invoke = self._invokes.get(request.session_id)
        if invoke is None or not invoke.done() or invoke.cancelled():
            return "not known"
        text = str(invoke.exception() or invoke.result().decode(errors="replace"))
        return str(without_key(text, shorten(request.endpoint.api_key)))[:_ANSWER_CHARS]
