"""Runtimes of tasks that name an image: shared by runs, within the account's quota, removed after a killed run."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agent_servers import BARE_AGENT, serve_emulator
from builders import eventually, skip_to_end
from rollout_backend.agents.runtimes.agentcore.cleanup import remove_unused, session_stopper
from rollout_backend.agents.runtimes.agentcore.control import control_client
from rollout_backend.agents.runtimes.agentcore.images import (
    LEASE,
    MADE_BY,
    MAKERS,
    TagReader,
    _classify,
    lease_of,
    spec_of,
)
from rollout_backend.agents.runtimes.agentcore.provision import MARK, TAG
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.config import AgentCoreConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, TaskContainer, container_key
from rollout_backend.errors import InvokeRejected, PreflightError, RuntimeNotReady, RuntimeUnavailable, Throttled
from rollout_backend.workbench.local.agentcore_emulator import ROLE, AgentCoreEmulator
from tests.emulators.ecr_emulator import EcrEmulator

ECR = "000000000000.dkr.ecr.us-east-1.amazonaws.com"
AGENT, ONE, TWO, THREE = (f"{ECR}/team/{name}:1" for name in ("agent", "one", "two", "three"))
MISSING = f"{ECR}/team/missing:1"
HOUR = 3600.0
PROVIDER = "arn:aws:bedrock-agentcore:us-east-1:000000000000:capacity-provider/mine-0123456789"


class Cloud:
    """An emulator with a control plane, and the runs that use it."""

    def __init__(self, emulator: AgentCoreEmulator, url: str, stack: AsyncExitStack) -> None:
        self.emulator = emulator
        self.url = url
        self._stack = stack

    def config(self, **more: object) -> AgentCoreConfig:
        fields = {"image": AGENT, "role": ROLE, "endpoint_url": self.url, "ready_timeout_s": 60, **more}
        return AgentCoreConfig.model_validate(fields)

    async def run(self, run_id: str, **more: object) -> Run:
        runtime = await AgentCoreRuntime.open(self.config(**more))
        self._stack.push_async_callback(runtime.aclose)
        return Run(runtime, run_id)

    @property
    def images(self) -> list[str]:
        """The images of the runtimes of tasks, in the order of their creation."""
        made = [each.definition["agentRuntimeArtifact"] for each in self.emulator._control.runtimes.values()]
        uris = [each["containerConfiguration"]["containerUri"] for each in made]
        return [each for each in uris if each != AGENT]

    @property
    def sessions(self) -> list[str]:
        return [each["id"] for pool in self.emulator._pools.values() for each in pool.snapshot()["sessions"]]


def refusal(code: str, status: int) -> ClientError:
    said: Any = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, "AnyOperation")


class Run:
    def __init__(self, runtime: AgentCoreRuntime, run_id: str) -> None:
        self.runtime = runtime
        self.run_id = run_id

    @staticmethod
    def task(image: str) -> dict[str, Any]:
        return {CONTAINER_FIELD: TaskContainer(image=image).model_dump(mode="json")}

    async def invoke(self, image: str, session_id: str = "") -> tuple[str, dict[str, Any]]:
        payload = self.task(image)
        session_id = session_id or f"rollout-{uuid.uuid4().hex}-{container_key(payload)}"
        request = json.dumps({**payload, "_rollout": {"run_id": self.run_id}}).encode()
        return session_id, json.loads(await self.runtime.invoke(session_id, request))

    async def use(self, image: str) -> str:
        session_id, answer = await self.invoke(image)
        assert answer["image"] == image
        return session_id


@pytest.fixture
async def start(tmp_path: Path, local_keys: None) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:

        async def start(**control: object) -> Cloud:
            limits = {"transition_s": 0.05, "keeps_runtimes_with_sessions": True, **control}
            images = {each: (*BARE_AGENT, each) for each in (AGENT, ONE, TWO, THREE)}
            serving = serve_emulator(tmp_path, images=images, control=limits)
            return Cloud(*await stack.enter_async_context(serving), stack)

        yield start


def test_a_name_follows_from_all_that_makes_the_runtime():
    def name(image: str = ONE, env: dict[str, str] = {}, memory: str = "", **more: object) -> str:  # noqa: B006
        config = AgentCoreConfig.model_validate({"image": AGENT, "role": ROLE, **more})
        container = TaskContainer(image=image, env=env, resources={"memory": memory} if memory else {})
        return spec_of(config, container, {CONTAINER_FIELD: container.model_dump(mode="json")}).name

    vpc = {"subnets": ["subnet-01234567"], "security_groups": ["sg-01234567"]}
    others = [name(TWO), name(env={"A": "1"}), name(memory="9000Mi"), name(**vpc), name(idle_timeout_s=60)]
    assert name() == name()
    assert len({name(), *others}) == 6
    longest = name(name="a" * 48)
    assert len(longest) == 48
    assert longest.startswith("a" * 26 + "_")
    assert [len(lease_of("r" * size)) <= 128 for size in (108, 109, 1000)] == [True] * 3


async def test_two_runs_share_the_runtime_of_an_image(start):
    cloud = await start(invisible_s=0.3)
    runs = await asyncio.gather(cloud.run("a"), cloud.run("b"))
    sessions = await asyncio.gather(*(run.use(ONE) for run in runs for _ in range(2)))
    assert cloud.images == [ONE]
    assert sorted(cloud.sessions) == sorted(sessions)
    # A restarted trainer knows only the ids of the sessions.
    restarted = await cloud.run("a")
    for session in sessions[:3]:
        await restarted.runtime.stop(session)
    stop = session_stopper(runs[1].runtime.cleanup_spec().options)  # the janitor's
    assert await asyncio.to_thread(stop, sessions[3])
    assert cloud.sessions == []


async def test_the_least_recently_used_runtime_makes_room_within_the_quota(start):
    cloud = await start(max_runtimes=3)
    run = await cloud.run("a")
    first, second = await run.use(ONE), await run.use(TWO)
    with pytest.raises(RuntimeNotReady, match=r"the maximum.*every runtime of an image is in use"):
        await run.use(THREE)
    await run.runtime.stop(first)
    await run.runtime.stop(second)
    await run.runtime.stop(await run.use(ONE))
    run.runtime._images._known[_name(run, ONE)].used += 1  # TWO is the older one, also within the same second
    await run.use(THREE)
    assert cloud.images == [ONE, THREE]


def _name(run: Run, image: str) -> str:
    payload = run.task(image)
    return spec_of(run.runtime.limits(), TaskContainer(image=image), payload).name


async def test_a_runtime_of_a_waiting_or_adopted_rollout_is_not_deleted(start):
    cloud = await start(max_runtimes=2)
    before, restarted = await cloud.run("a"), await cloud.run("a")
    await before.runtime.stop(await before.use(ONE))
    for run in (before, restarted):
        with run.runtime.hold(run.task(ONE)), pytest.raises(RuntimeNotReady, match="in use"):
            await run.use(TWO)
    await restarted.use(TWO)  # the lease is its own
    assert cloud.images == [TWO]


async def test_a_session_that_may_be_open_counts_until_its_time_is_over(start, monkeypatch):
    cloud = await start(max_runtimes=2)
    run = await cloud.run("a")
    images, now = run.runtime._images, 1e9
    images._wall = lambda: now
    errors = iter([RuntimeUnavailable("503", refused=True), Throttled("429")])

    async def refuse(*of: object) -> bytes:
        raise next(errors)

    with monkeypatch.context() as patched:
        patched.setattr(run.runtime, "_invoke", refuse)
        for error in (RuntimeUnavailable, Throttled):
            with pytest.raises(error):
                await run.invoke(ONE, "s")
    with pytest.raises(RuntimeNotReady, match="in use"):
        await run.use(TWO)
    now += images.session_s
    await run.use(TWO)
    assert cloud.images == [TWO]


async def test_one_runtime_makes_room_also_if_the_quota_is_freed_late(start):
    cloud = await start()
    run = await cloud.run("a")
    for image in (ONE, TWO):
        await run.runtime.stop(await run.use(image))
    client, refused = run.runtime._images._client, iter(range(3))
    create = client.create_agent_runtime

    async def create_late(**fields: object) -> Any:
        if next(refused, None) is not None:
            raise refusal("ServiceQuotaExceededException", 402)
        return await create(**fields)

    client.create_agent_runtime = create_late
    await run.runtime.wait_ready(run.task(THREE), "a")
    assert len(cloud.images) == 2


async def test_ended_leases_make_room_for_another_tag(start):
    cloud = await start()
    first, run = await cloud.run("a"), await cloud.run("b")
    await first.use(ONE)
    (record,) = [each for each in cloud.emulator._control.runtimes.values() if LEASE + "a" in each.tags]
    ended = {f"{LEASE}{i}": "1" for i in range(50 - len(record.tags))}
    record.tags |= ended
    await run.use(ONE)
    assert record.tags.keys() & ended.keys() == set()
    assert {LEASE + "a", LEASE + "b"} <= record.tags.keys()


async def test_the_tags_of_runtimes_are_read_once_in_a_while(start):
    number = 20
    cloud = await start(max_runtimes=number + 1)
    run = await cloud.run("a")
    images, now = run.runtime._images, 1e9
    images._wall, images._tags = lambda: now, TagReader(images._client, 0.0)
    arn = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/rollout_agent_{:012x}_00000000-0123456789".format
    for i in range(number):
        record = cloud.emulator._control.add(arn(i), {"description": MARK})
        record.tags = {TAG: MADE_BY, f"{LEASE}other": "2e9"}
    read, reads = images._client.list_tags_for_resource, []

    async def note(**fields: object) -> Any:
        reads.append(fields)
        return await read(**fields)

    images._client.list_tags_for_resource = note
    for _ in range(3):
        making = images._make_once(images._runtime_of(run.task(ONE)), "a")
        with pytest.raises(RuntimeNotReady, match="in use"):
            await making
        assert len(reads) == number
    now += number
    cloud.emulator._control.runtimes[arn(7)].tags = {TAG: MADE_BY}
    await images._make_once(images._runtime_of(run.task(ONE)), "a")
    assert len(reads) == 2 * number + 1, "all of them, and the one again before its deletion"
    assert arn(7) not in cloud.emulator._control.runtimes


async def test_tags_are_read_below_the_rate_of_the_control_plane():
    times = []

    class Client:
        async def list_tags_for_resource(self, **_: str) -> dict[str, Any]:
            times.append(asyncio.get_running_loop().time())
            return {"tags": {}}

    async def read_all() -> None:
        reader = TagReader(Client(), 3.0)
        await asyncio.gather(*(reader.read("arn") for _ in range(4)))

    await skip_to_end(read_all(), 0.5)
    assert all(after - before >= 3 for before, after in itertools.pairwise(times))


async def test_a_creation_that_has_waited_for_others_begins_with_a_whole_lease(start):
    cloud = await start()
    run = await cloud.run("a")
    images, now = run.runtime._images, 1e9
    images._wall = lambda: now
    async with AsyncExitStack() as others:
        for _ in range(MAKERS):
            await others.enter_async_context(images._makers)
        making = images._make_once(images._runtime_of(run.task(ONE)), "a")
        await asyncio.wait([making], timeout=0)
        now += 2 * HOUR
    record = cloud.emulator._control.runtimes[await making]
    assert float(record.tags[LEASE + "a"]) == now + 2 * images.session_s


async def test_a_lease_ends_with_its_time_or_with_its_run(start):
    cloud = await start(max_runtimes=2)
    one, two, three = [await cloud.run(run_id) for run_id in "abc"]
    now = 1e9
    for run in (one, two, three):
        run.runtime._images._wall = lambda: now
        run.runtime._images.session_s = HOUR
    await one.runtime.wait_ready(one.task(ONE), "a")
    with pytest.raises(RuntimeNotReady, match="in use"):  # the first run may be killed now, and started again
        await two.use(TWO)
    await one.runtime.stop(await one.use(ONE))
    now += HOUR - 1
    await one.runtime.stop(await one.use(ONE))  # the lease lasts long enough
    now += HOUR
    with pytest.raises(RuntimeNotReady, match="in use"):
        await two.use(TWO)
    now += 2
    await two.runtime.stop(await two.use(TWO))
    assert cloud.images == [TWO]
    await two.runtime.aclose()
    now += 1
    await three.use(THREE)
    assert cloud.images == [THREE]


async def test_an_image_without_a_runtime_fails_alone_with_the_reason_of_the_service(start):
    cloud = await start()
    run = await cloud.run("a")
    now = 1e9
    run.runtime._images._wall = lambda: now
    await run.runtime.wait_ready(run.task(MISSING), "a")  # returns: the invoke says why
    failed = run.runtime._images._known[_name(run, MISSING)]
    making = failed.making
    with pytest.raises(InvokeRejected, match=r"CREATE_FAILED: The specified image .*missing.*arm64") as caught:
        await run.use(MISSING)
    assert (caught.value.reason, caught.value.never_opened) == ("runtime_create_failed", True)
    assert failed.making is making, "the second rollout did not create it again"
    now += HOUR
    with pytest.raises(InvokeRejected):
        await run.use(MISSING)
    assert failed.making is not making
    await run.use(ONE)


async def test_an_image_for_another_processor_is_refused_before_its_runtime_is_made(start):
    cloud = await start()
    async with EcrEmulator(cloud.url) as ecr:
        ecr.push(ONE, "amd64")
        ecr.push(TWO, "amd64", "arm64")
        run = await cloud.run("a", endpoint_url=ecr.url)
        with pytest.raises(
            InvokeRejected, match=f"{ONE} is built for amd64, and AgentCore runs arm64 only"
        ) as caught:
            await run.use(ONE)
        assert (caught.value.reason, caught.value.never_opened) == ("runtime_create_failed", True)
        await run.runtime.stop(await run.use(TWO))
        await run.use(THREE)  # which ECR does not find
        assert cloud.images == [TWO, THREE]
        assert ecr.calls["BatchGetImage"] == 4, "each image is asked for once, before its runtime is created"
        await run.runtime.aclose()


async def test_tasks_are_checked_before_anything_is_made(start):
    cloud = await start()
    async with EcrEmulator(cloud.url) as ecr:
        ecr.push(ONE, "amd64")
        ecr.push(TWO, "arm64")
        ecr.push(AGENT, "amd64")
        config = cloud.config(endpoint_url=ecr.url)
        payloads = {name: Run.task(image) for name, image in (("a", ONE), ("b", TWO), ("c", THREE))}
        odd = {str(each): {CONTAINER_FIELD: each} for each in (5, {}, {"image": 5})}
        refused, found = await AgentCoreRuntime.check_tasks(config, {**payloads, **odd, "plain": {}})
        assert refused.keys() == {"a", *odd}
        assert all(f"{CONTAINER_FIELD}." in refused[name] for name in odd)
        assert [(each.name, each.level) for each in found] == [
            ("task-images-missing", "warning"),
            ("task-images", "ok"),
        ]
        ecr.refused = {"BatchGetImage"}
        refused, [unknown] = await AgentCoreRuntime.check_tasks(config, payloads)
        assert (refused, unknown.level, "AccessDenied" in unknown.text) == ({}, "unchecked", True)
        ecr.refused = set()
        with pytest.raises(PreflightError, match=f"{AGENT} is built for amd64"):
            await AgentCoreRuntime.preview(config)
        on_instances = cloud.config(endpoint_url=ecr.url, capacity_provider=PROVIDER)
        assert await AgentCoreRuntime.check_tasks(on_instances, payloads) == ({}, ())
        assert "would be made" in str(await AgentCoreRuntime.preview(on_instances))
    assert cloud.images == []


async def test_a_container_that_cannot_be_started_fails_its_own_rollouts(start):
    run = await (await start()).run("a")
    for container in (5, {"image": 5}, {"image": ONE, "resources": {"memory": "4Gi"}}):
        await run.runtime.wait_ready({CONTAINER_FIELD: container}, "a")
        request = {CONTAINER_FIELD: container, "_rollout": {"run_id": "a"}}
        with pytest.raises(InvokeRejected, match="container cannot be started"):
            await run.runtime.invoke("s", json.dumps(request).encode())


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("ThrottlingException", 429, "runtime_not_ready"),
        ("ServiceQuotaExceededException", 402, "runtime_not_ready"),
        # A proxy's page has no code.
        ("400", 400, "runtime_not_ready"),
        ("403", 403, "runtime_not_ready"),
        ("AccessDeniedException", 403, "access_denied"),
        ("ExpiredTokenException", 403, "credentials_expired"),
        ("ValidationException", 400, "runtime_create_failed"),
    ],
)
def test_what_was_not_answered_is_asked_again(code, status, reason):
    error = _classify(refusal(code, status), "why")
    assert (error.reason, error.refused) == (reason, reason == "runtime_not_ready")
    assert error.never_opened


@pytest.mark.parametrize("leased", [True, False])
async def test_a_runtime_that_somebody_has_deleted_is_created_again(start, leased):
    cloud = await start()
    run = await cloud.run("a")
    await run.runtime.stop(await run.use(ONE))
    async with control_client("us-east-1", cloud.url) as client:
        known = run.runtime._images._known[_name(run, ONE)]
        arn = known.arn
        await client.delete_agent_runtime(agentRuntimeId=arn.rpartition("/")[2])
    await eventually(lambda: arn not in cloud.emulator._control.runtimes)
    if not leased:
        known.leases.clear()
    with pytest.raises(RuntimeNotReady, match="was deleted"):
        await run.use(ONE)
    assert not known.leases
    await run.use(ONE)
    run.runtime._images.forget(arn)  # another rollout's invoke of the deleted one is answered late
    assert known.arn is not None


async def test_the_janitor_removes_what_only_the_killed_run_has_used(start):
    cloud = await start()
    killed, other = await cloud.run("a"), await cloud.run("b")
    shared, session = await other.use(ONE), await killed.use(TWO)
    await killed.use(ONE)
    await killed.runtime.wait_ready(killed.task(THREE), "a")  # no session was ever opened there
    spec = killed.runtime.cleanup_spec()
    assert spec.remover == f"{remove_unused.__module__}.remove_unused"
    stop = session_stopper(spec.options)
    assert await asyncio.to_thread(stop, session)
    await asyncio.to_thread(remove_unused, spec.options, "a", lambda: False)
    assert len(cloud.images) == 3, "the run was started again"
    errors = [refusal("InternalError", 500)]

    def is_dead() -> bool:
        if errors:
            raise errors.pop()
        return True

    await asyncio.to_thread(remove_unused, spec.options, "a", is_dead)
    assert len(cloud.images) < 3, "the error has cost one runtime"
    await asyncio.to_thread(remove_unused, spec.options, "a", is_dead)
    assert cloud.images == [ONE]
    assert shared in cloud.sessions
