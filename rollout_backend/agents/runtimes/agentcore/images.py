"""The runtimes of tasks that name an image: one for each image, created on demand and shared by steps and runs.

Invariants:

- A runtime's name is derived from its whole definition, so two runs that need the same runtime create it once.
- A runtime is not deleted while this run needs it or has an open session in it, or while another run leases it. A
  lease is a tag with the run's name and the time until which its sessions can last. It is written before the first
  session.
- Only runtimes with this backend's tag are deleted. When the quota refuses a new runtime, the run deletes the least
  recently used one. The janitor deletes the runtimes of a killed run that no other run leases.
- Tags are read one at a time, below the rate that AgentCore grants to all users of an account together. The tags of
  a runtime are cached for as many seconds as there are runtimes, and read again before a deletion.
- If a creation fails, the rollouts of its image end with the service's reason. Refused and unanswered calls are
  retried until the deadline of the rollouts that wait for them. A deleted runtime is created again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from rollout_backend.agents.runtimes.agentcore.control import (
    READ_PAUSE_S,
    QuotaOfRuntimes,
    RuntimeDelayed,
    RuntimeMaker,
    delete_runtime,
    id_of,
    list_runtimes,
    pauses,
)
from rollout_backend.agents.runtimes.agentcore.provision import TAG, RuntimeSpec
from rollout_backend.base import aws
from rollout_backend.base.names import derived_name
from rollout_backend.config import AgentCoreConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, TaskContainer, container_key
from rollout_backend.errors import (
    InvokeRejected,
    NoCredentials,
    PreflightError,
    RuntimeCallError,
    RuntimeNotReady,
    WrongClock,
)

# The value of TAG.
MADE_BY = "image"
LEASE, USED = "rollout-backend-run:", "rollout-backend-used"
_NAME = re.compile(r"[A-Za-z]\w*_([0-9a-f]{12})_[0-9a-f]{8}")
_SESSION = re.compile(r"rollout-[0-9a-f]{32}-([0-9a-f]{12})")
# Characters of a run's id. A tag's key has at most 128.
_RUN_ID = 108
# Characters of a name before the two digests. A name has at most 48.
_PREFIX = 26
# Number of concurrent creations. AgentCore throttles its control plane at a few calls per second.
MAKERS = 8
# The pause between a failed creation and the next one.
_FAILED_S = 300.0
# After a deletion, the creation is retried this often, for half a minute, before another runtime is deleted.
_FREEING = 12
# Used until `session_s` is known.
_SESSION_S = 3600.0
# How long an invoke waits for its runtime. The step then repeats it.
_WAIT_S = 10.0
# The limit for giving up leases.
_CLOSE_S = 60.0


@dataclasses.dataclass(eq=False)
class ImageRuntime:
    """A runtime that this run uses. `sessions` maps each session that may be open to the latest time of its end."""

    spec: RuntimeSpec
    making: asyncio.Task[str] | None = None
    # In unix seconds: the last failed creation, the ends of sessions by id and of leases by tag, and the last use.
    failed: float = float("-inf")
    sessions: dict[str, float] = dataclasses.field(default_factory=dict)
    leases: dict[str, float] = dataclasses.field(default_factory=dict)
    leasing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    used: float = 0.0

    @property
    def arn(self) -> str | None:
        made = self.making is not None and self.making.done() and not self.making.cancelled()
        return self.making.result() if made and self.making and self.making.exception() is None else None


class ImageRuntimes:
    """The runtimes of one run's tasks."""

    def __init__(self, config: AgentCoreConfig, client: Any, on_status: Callable[[str], object]) -> None:
        # How long a session can last.
        self.session_s = _SESSION_S
        self._config = config
        self._client = client
        self._on_status = on_status
        self._wall = time.time
        # Runtimes by name, rollouts by the key of their container, and the tags of this run's leases.
        self._known: dict[str, ImageRuntime] = {}
        self._needed: Counter[str] = Counter()
        self._own: set[str] = set()
        self._makers = asyncio.Semaphore(MAKERS)
        self._listing = asyncio.Lock()
        # The time of the last listing, and the ARNs by name.
        self._listed: tuple[float, Mapping[str, str]] = (float("-inf"), {})
        self._evicting = asyncio.Lock()
        # Names and ARNs of unused runtimes, the least recently used last.
        self._candidates: list[tuple[str, str]] = []
        self._tags = TagReader(client)
        # By ARN: when the tags were read, in unix seconds, and the tags.
        self._seen: dict[str, tuple[float, Mapping[str, str]]] = {}

    @contextmanager
    def hold(self, payload: Mapping[str, Any]) -> Iterator[None]:
        """Keep the task's runtime, even if its rollout waits for a slot or was started by an earlier process."""
        key = container_key(payload)
        self._needed[key] += 1
        try:
            yield
        finally:
            self._needed[key] -= 1

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None:
        """Return once the task's runtime can be invoked, or cannot be created."""
        while True:
            try:
                await asyncio.shield(self._make_once(self._runtime_of(payload), run_id))
            except RuntimeNotReady:
                await asyncio.sleep(_WAIT_S)
            except RuntimeCallError:
                # The invoke raises it again.
                return
            else:
                return

    async def open_session(self, session_id: str, payload: Mapping[str, Any], run_id: str) -> str:
        """Return the ARN of the task's runtime, which is not deleted until `close_session`.

        Raises:
            RuntimeCallError: it is not ready, or cannot be created.
        """
        runtime = self._runtime_of(payload)
        was_open = session_id in runtime.sessions
        runtime.sessions[session_id] = self._wall() + self.session_s
        runtime.used = self._wall()
        making = self._make_once(runtime, run_id)
        try:
            await asyncio.wait([making], timeout=_WAIT_S)
            if not making.done():
                raise RuntimeNotReady(f"runtime {runtime.spec.name} for {runtime.spec.image} is being created")
            arn = making.result()
            await self._lease(runtime, arn, run_id)
        except BaseException:
            if not was_open:
                runtime.sessions.pop(session_id, None)
            raise
        return arn

    def close_session(self, session_id: str) -> None:
        for runtime in self._known.values():
            runtime.sessions.pop(session_id, None)

    def arn_of(self, session_id: str) -> str | None:
        """Return the runtime of an open session, if this process has opened it."""
        return next((each.arn for each in self._known.values() if session_id in each.sessions), None)

    def forget(self, arn: str) -> RuntimeNotReady:
        """Forget a runtime that was deleted, so that its next use creates it again. Return the error that says so."""
        for runtime in self._known.values():
            if runtime.arn == arn:
                runtime.making = None
                runtime.leases.clear()
        return RuntimeNotReady(f"runtime {arn} was deleted, and is created again")

    async def arns_of(self, session_id: str) -> list[str]:
        """Return the runtimes that may have this session. Raises RuntimeCallError."""
        if (known := self.arn_of(session_id)) is not None:
            return [known]
        with _as_call_error("ListAgentRuntimes"):
            arns = await self._arns()
        return [arn for name, arn in arns.items() if may_have(name, session_id)]

    async def aclose(self) -> None:
        """Cancel all creations, and remove this run's leases from runtimes without an open session."""
        making = [each.making for each in self._known.values() if each.making is not None]
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(self._give_up(each) for each in self._known.values() if not each.sessions))
        # A second call would retry for 40 s with a closed client.
        self._known.clear()

    async def _give_up(self, runtime: ImageRuntime) -> None:
        """Remove this run's leases. A creation writes one even if no session is opened later."""
        arn = runtime.arn
        runtime.leases.clear()
        if arn is not None:
            async with self._makers:
                with contextlib.suppress(*aws.CALL_ERRORS):
                    await self._client.untag_resource(resourceArn=arn, tagKeys=sorted(self._own))

    # --- one runtime --------------------------------------------------------------------------------------

    def _runtime_of(self, payload: Mapping[str, Any]) -> ImageRuntime:
        try:
            container = TaskContainer.parse(payload[CONTAINER_FIELD], f"{CONTAINER_FIELD}.")
            spec = spec_of(self._config, container, payload)
        except ValueError as error:
            raise InvokeRejected(f"the payload's container cannot be started: {error}") from error
        return self._known.setdefault(spec.name, ImageRuntime(spec))

    def _make_once(self, runtime: ImageRuntime, run_id: str) -> asyncio.Task[str]:
        """Return the task that creates the runtime, which all callers share. A failed creation is retried; after
        `_FAILED_S` if the definition itself was refused."""
        self._own.add(lease_of(run_id))
        made, fails = runtime.making, self._wall() < runtime.failed + _FAILED_S
        if made is None or made.cancelled() or (made.done() and made.exception() is not None and not fails):
            made = runtime.making = asyncio.create_task(self._make(runtime, run_id))
            # Retrieve the exception even if no caller waits.
            made.add_done_callback(lambda task: task.cancelled() or task.exception())
        return made

    async def _make(self, runtime: ImageRuntime, run_id: str) -> str:
        spec = runtime.spec
        repeats: Iterator[float] = iter(())
        async with self._makers:
            while True:
                # Hundreds of creations wait for an hour, so compute the lease as late as possible.
                lease = self._lease_tags(run_id)
                maker = RuntimeMaker(
                    spec,
                    self._client,
                    self._config.ready_timeout_s,
                    tags={TAG: MADE_BY, **lease},
                    ecr_url=self._config.endpoint_url,
                    on_status=self._on_status,
                    find_id=self._id_of,
                )
                try:
                    with _as_call_error(f"runtime {spec.name} for {spec.image}"):
                        made = await maker.make()
                except InvokeRejected as error:
                    if error.reason == "runtime_create_failed":
                        runtime.failed = self._wall()
                    raise
                except QuotaOfRuntimes as error:
                    if (pause := next(repeats, None)) is not None:
                        # The quota may be freed late.
                        await asyncio.sleep(pause)
                    elif await self._evict():
                        repeats = itertools.islice(pauses(), _FREEING)
                    else:
                        raise RuntimeNotReady(
                            f"runtime {spec.name} for {spec.image}: {error}, and every runtime of an image is in use"
                        ) from error
                else:
                    if made.created:
                        runtime.leases[lease_of(run_id)] = float(lease[lease_of(run_id)])
                    return made.arn

    async def _lease(self, runtime: ImageRuntime, arn: str, run_id: str) -> None:
        """Write the run's lease of the runtime, unless its current lease lasts long enough."""
        key = lease_of(run_id)
        async with runtime.leasing:
            if runtime.leases.get(key, 0.0) >= self._wall() + self.session_s:
                return
            tags = self._lease_tags(run_id)
            with _as_call_error(f"a lease of {arn}"):
                try:
                    await self._tag(arn, tags)
                except self._client.exceptions.ResourceNotFoundException as error:
                    raise self.forget(arn) from error
            runtime.leases[key] = float(tags[key])

    async def _tag(self, arn: str, tags: Mapping[str, str]) -> None:
        """Add tags. A runtime has at most 50; if AgentCore refuses more, remove the expired leases of killed runs."""
        try:
            await self._client.tag_resource(resourceArn=arn, tags=tags)
        except ClientError as error:
            if aws.code_of(error) not in ("ServiceQuotaExceededException", "ValidationException"):
                raise
            found, now = await self._tags.read(arn), self._wall()
            if not (ended := [key for key in found if key.startswith(LEASE) and not is_leased(found, key, now)]):
                raise
            await self._client.untag_resource(resourceArn=arn, tagKeys=ended)
            await self._client.tag_resource(resourceArn=arn, tags=tags)

    def _lease_tags(self, run_id: str) -> dict[str, str]:
        now = self._wall()
        return {lease_of(run_id): str(int(now + 2 * self.session_s)), USED: str(int(now))}

    # --- the account's runtimes ---------------------------------------------------------------------------

    async def _id_of(self, name: str) -> str | None:
        arn = (await self._arns()).get(name)
        return None if arn is None else id_of(arn)

    async def _arns(self) -> Mapping[str, str]:
        """Return the runtimes of images by name. Calls at the same time share one listing."""
        loop = asyncio.get_running_loop()
        called = loop.time()
        async with self._listing:
            if self._listed[0] < called:
                began = loop.time()
                self._listed = began, await runtimes_of_images(self._client)
            return self._listed[1]

    async def _evict(self) -> bool:
        """Delete the least recently used runtime of an image that no run uses. Return False if there is none."""
        async with self._evicting:
            with _as_call_error("the deletion of a runtime"):
                self._candidates = self._candidates or await self._scan()
                while self._candidates:
                    name, arn = self._candidates.pop()
                    if not self._is_used(name) and self._is_unused(name, await self._read_tags(arn)):
                        self._known.pop(name, None)
                        self._on_status(f"deleting runtime {name}, to create another one within the quota")
                        if not await delete_runtime(self._client, id_of(arn), self._config.ready_timeout_s):
                            return True
        return False

    async def _scan(self) -> list[tuple[str, str]]:
        """Return the unused runtimes, the least recently used last."""
        arns, found = await self._arns(), []
        self._seen = {arn: self._seen[arn] for arn in arns.values() if arn in self._seen}
        for name, arn in arns.items():
            if self._is_used(name):
                continue
            read, tags = self._seen.get(arn, (float("-inf"), {}))
            if self._wall() - read >= len(arns):
                tags = await self._read_tags(arn)
            if self._is_unused(name, tags):
                known = self._known.get(name)
                found.append((max(_number(tags.get(USED)), known.used if known else 0.0), name, arn))
        return [(name, arn) for _, name, arn in sorted(found, reverse=True)]

    async def _read_tags(self, arn: str) -> Mapping[str, str]:
        tags = await self._tags.read(arn)
        self._seen[arn] = self._wall(), tags
        return tags

    def _is_used(self, name: str) -> bool:
        """Return whether this process uses the runtime."""
        known, now = self._known.get(name), self._wall()
        if known is not None and known.making is not None and not known.making.done():
            return True
        opened = known is not None and any(until > now for until in known.sessions.values())
        return opened or self._needed[name.split("_")[-2]] > 0

    def _is_unused(self, name: str, tags: Mapping[str, str]) -> bool:
        """Return whether no run uses the runtime. Leases of this run, also of an earlier process, do not count."""
        if tags.get(TAG) != MADE_BY or self._is_used(name):
            return False
        return not any(is_leased(tags, key, self._wall()) for key in tags.keys() - self._own)


def spec_of(config: AgentCoreConfig, container: TaskContainer, payload: Mapping[str, Any]) -> RuntimeSpec:
    """Return the runtime of a task's container, under a name that follows from its definition. Pure."""
    memory = [config.min_memory_mib, *(int(each.removesuffix("Mi")) for each in container.resources.values())]
    spec = dataclasses.replace(
        RuntimeSpec.of(config),
        image=container.image,
        environment={**config.environment, **container.env},
        min_memory_mib=max((each for each in memory if each is not None), default=None),
    )
    digest = hashlib.sha256(json.dumps(spec.definition(), sort_keys=True).encode()).hexdigest()[:8]
    return dataclasses.replace(spec, name=f"{spec.name[:_PREFIX]}_{container_key(payload)}_{digest}")


def lease_of(run_id: str) -> str:
    """Return the key of the tag that holds a run's lease."""
    return LEASE + derived_name(run_id, "A-Za-z0-9._-", _RUN_ID)


def has_image(session_id: str) -> bool:
    """Return whether a session's id names a container: see `Manifest.session_id`."""
    return _SESSION.fullmatch(session_id) is not None


def may_have(name: str, session_id: str) -> bool:
    """Return whether a session may be in the runtime of this name."""
    named, wanted = _NAME.fullmatch(name), _SESSION.fullmatch(session_id)
    return named is not None and wanted is not None and named[1] == wanted[1]


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def is_leased(tags: Mapping[str, str], key: str, now: float) -> bool:
    return key.startswith(LEASE) and _number(tags[key]) > now


async def runtimes_of_images(client: Any) -> dict[str, str]:
    """Return the ARNs of the runtimes that were made for images, by the runtime's name."""
    found = [(each["agentRuntimeName"], each["agentRuntimeArn"]) async for each in list_runtimes(client)]
    return {name: arn for name, arn in found if _NAME.fullmatch(name)}


class TagReader:
    """Reads tags of runtimes, one after the other."""

    def __init__(self, client: Any, pause_s: float = READ_PAUSE_S) -> None:
        self._client = client
        self._pause_s = pause_s
        self._turn = asyncio.Lock()

    async def read(self, arn: str) -> Mapping[str, str]:
        """Return a runtime's tags; none if it does not exist, or if these credentials may not read them."""
        async with self._turn:
            try:
                return dict((await self._client.list_tags_for_resource(resourceArn=arn))["tags"])
            except ClientError as error:
                if aws.is_denied(error) or aws.status_of(error) == 404:
                    return {}
                raise
            finally:
                await asyncio.sleep(self._pause_s)


@contextmanager
def _as_call_error(what: str) -> Iterator[None]:
    """Convert errors of the control plane to RuntimeCallError, except QuotaOfRuntimes."""
    try:
        yield
    except QuotaOfRuntimes:
        raise
    except RuntimeDelayed as error:
        raise RuntimeNotReady(str(error)) from error
    except PreflightError as error:
        raise _classify(error.__cause__, str(error)) from error
    except aws.CALL_ERRORS as error:
        raise _classify(error, f"{what}: {aws.reason(error)}") from error


def _classify(cause: BaseException | None, text: str) -> RuntimeCallError:
    if isinstance(cause, ClientError):
        if aws.is_expired(cause):
            return InvokeRejected(text, reason="credentials_expired")
        if aws.is_wrong_clock(cause):
            return WrongClock(text)
        if aws.is_denied(cause):
            return InvokeRejected(text, reason="access_denied")
        if aws.is_renewable(cause):
            return NoCredentials(text)
        status = aws.status_of(cause)
        if aws.is_throttled(cause) or aws.is_of_proxy(cause) or status >= 500 or status in (402, 404, 409):
            return RuntimeNotReady(text)
    elif isinstance(cause, aws.UNSIGNED):
        return NoCredentials(text)
    elif isinstance(cause, (BotoCoreError, *aws.NO_ANSWER)):
        return RuntimeNotReady(text)
    return InvokeRejected(text, reason="runtime_create_failed")
