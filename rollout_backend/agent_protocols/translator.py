"""Invoke agents of another protocol, and write their results as rollouts.

Invariants:

- an agent's object is read only for a session that this run has open, so it counts for one rollout and attempt;
- the tokens are the sealed trajectory of the gateway, which closes the session;
- a rollout is written under the contract's key, once, before its step is told to fetch it;
- "could not ask" is not "not there": while S3 fails, the objects are listed again until the session is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agent_wrapper.contract import REQUEST_FIELD, ContractError, Outcome, RolloutRequest, Trajectory
from agent_wrapper.outcome import build_rollout, failed
from agent_wrapper.trajectory import TrajectoryUnavailable
from rollout_backend.agent_protocols.base import AgentProtocol, results_prefix
from rollout_backend.collect.buffer import log_defects
from rollout_backend.collect.inventory import MAX_KEYS
from rollout_backend.collect.store import ObjectStore
from rollout_backend.errors import ResultMissing, StoreError, WriteConflict
from rollout_backend.runtimes.base import SessionCalls

log = logging.getLogger(__name__)

_ACCEPTED = b'{"status": "accepted"}'


@dataclass(frozen=True)
class _Session:
    request: RolloutRequest
    began: float  # unix seconds


class Translator:
    """The calls of a runtime whose agents speak another protocol. `run` finds their results."""

    def __init__(
        self,
        calls: SessionCalls,
        protocol: AgentProtocol,
        store: ObjectStore,
        *,
        list_interval_s: float,
        max_writes: int,
        seal: Callable[[RolloutRequest], Awaitable[Trajectory]],
        on_result: Callable[[int, str, int], Awaitable[None]],
    ) -> None:
        """Make a translator.

        Args:
            calls: The runtime's calls.
            protocol: What its agents speak.
            store: Where agents write, and where rollouts are written.
            list_interval_s: Interval between listings while a session is open.
            max_writes: How many results are translated at once.
            seal: Closes a session and returns its trajectory. Raises TrajectoryUnavailable.
            on_result: Called with step, rollout and attempt once a rollout is written.
        """
        self._calls = calls
        self._protocol = protocol
        self._store = store
        self._interval_s = list_interval_s
        self._seal = seal
        self._on_result = on_result
        self._room = asyncio.Semaphore(max_writes)
        self._builder = ThreadPoolExecutor(1, "translator")  # several hostile results at once could exhaust memory
        self._open: dict[str, _Session] = {}  # by the key of its result
        self._keys: dict[str, str] = {}  # the same keys, by session
        self._writing: set[str] = set()  # of the same keys

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        fields = json.loads(payload)
        request = RolloutRequest.parse(fields.pop(REQUEST_FIELD))
        translated = self._protocol.payload(fields, request)
        answer = await self._calls.invoke(session_id, json.dumps(translated).encode())
        self._protocol.check_accepted(answer, request)
        self._watch(request)
        return _ACCEPTED

    def watch(self, payload: bytes) -> None:
        """Find the result of a session whose agent runs. `payload` is that of the contract's invoke."""
        self._watch(RolloutRequest.parse(json.loads(payload)[REQUEST_FIELD]))

    def _watch(self, request: RolloutRequest) -> None:
        key = self._protocol.result_key(request)
        self._open[key], self._keys[request.session_id] = _Session(request, time.time()), key

    async def stop(self, session_id: str) -> None:
        key = self._keys.pop(session_id, "")
        session = self._open.get(key)
        if session is not None and session.request.session_id == session_id:  # else another attempt's
            del self._open[key]
        await self._calls.stop(session_id)

    async def run(self) -> None:
        """Write the rollouts of open sessions whose agents have finished, until cancelled."""
        async with asyncio.TaskGroup() as writing:
            while True:
                await asyncio.sleep(self._interval_s)
                for key in await self._finished():
                    if key not in self._writing:
                        self._writing.add(key)
                        writing.create_task(log_defects(key, self._write_if_there(key), None))

    async def _finished(self) -> list[str]:
        """Return the keys of open sessions' results, or of all that are expected if there are too many to list."""
        found = []
        for prefix in {results_prefix(session.request) for session in self._open.values()}:
            listed = 0
            try:
                async for key in self._store.keys(prefix):
                    listed += 1
                    if listed > MAX_KEYS:  # a hostile agent may write any number
                        return [*self._open]
                    if key in self._open:
                        found.append(key)
            except StoreError as error:
                log.warning("%s; it is listed again", error)
        return found

    async def _write_if_there(self, key: str) -> None:
        """Write the rollout of the session with this result. It is tried again while the session is open."""
        try:
            async with self._room:
                session = self._open.get(key)
                if session is not None:  # else it was closed meanwhile
                    await self._write(key, session)
        except ResultMissing:
            pass  # there were too many keys to list
        except StoreError as error:
            log.warning("the result %s is read again: %s", key, error)
        finally:
            self._writing.discard(key)

    async def _write(self, key: str, session: _Session) -> None:
        request = session.request
        data: bytes | ContractError
        try:
            stored = await self._store.fetch(key)
            data, finished = stored.body, time.time() - stored.age_s
        except ContractError as error:
            data, finished = error, time.time()
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
        self._open.pop(key, None)
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
        return session.request.key_for(rollout.outcome), rollout.encode()
