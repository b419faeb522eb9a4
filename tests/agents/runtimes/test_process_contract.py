"""The contract of `AgentRuntime`, for agents as processes of this machine, and of a Ray cluster of two machines."""

import asyncio
import contextlib
import os
import signal
import sys
import zipfile
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from builders import background, eventually, processes_with
from ray_cluster import Machines, ray_machines
from rollout_backend.agents.runtimes.base import AgentRuntime, open_runtime
from rollout_backend.config import ProcessConfig, RayConfig
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import RuntimeUnavailable
from rollout_backend.testing.runtime_contract import Call, RuntimeContract, Service, ServiceFault, new_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


class ProcessService(Service):
    """Processes that run until they are stopped, each with a child that has left the process group."""

    config: ProcessConfig

    def __init__(self, folder: Path) -> None:
        self.marker = f"CONTRACT_TEST={folder}"
        self.config = ProcessConfig(
            command=["sh", "-c", "setsid sleep 600 & exec sleep 600"],
            working_dir=folder,
            session_logs=folder / "sessions",
            max_sessions=4,
            environment=dict([self.marker.split("=", 1)]),
        )
        other = self.with_settings
        self.broken = {
            r"runtime\.working_dir: there is no folder": other(working_dir=folder / "missing"),
            r"runtime\.command: there is no program 'no-such-program'": other(command="no-such-program"),
            r"runtime\.python: there is no program": other(command=(), app="a:b", python="/no/python"),
            r"runtime\.app: nothing:app cannot be imported .*No module named 'nothing'": other(
                command=(), app="nothing:app"
            ),
            r"runtime\.session_logs: .* cannot be written": other(session_logs="/dev/null/sessions"),
        }

    def with_settings(self, **settings: object) -> ProcessConfig:
        """Return its config with other settings."""
        return type(self.config).model_validate({**self.config.model_dump(), **settings})

    async def sessions(self) -> Collection[str]:
        return {name for pid in processes_with(self.marker) if (name := _session_of(pid))}

    async def crash(self, session_id: str) -> None:
        for pid in processes_with(self.marker):
            if _session_of(pid) == session_id:
                _kill(pid)

    @asynccontextmanager
    async def failing(self, fault: ServiceFault, call: Call) -> AsyncIterator[None]:
        """Let a file take the place of the folder of the sessions."""
        assert fault is ServiceFault.UNAVAILABLE
        folder = self.config.session_logs
        assert folder is not None
        folder.mkdir(exist_ok=True)
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()
        try:
            yield
        finally:
            folder.unlink()
            aside.rename(folder)


def _session_of(pid: int) -> str:
    """Return the session of a process by its log; nothing if it ended meanwhile."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may end with another one
        os.kill(pid, signal.SIGKILL)


class TestProcessRuntime(RuntimeContract):
    faults = (ServiceFault.UNAVAILABLE,)
    capacity = 4
    reports_ends = True

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        service = ProcessService(folder)
        try:
            yield service
        finally:
            for pid in processes_with(service.marker):
                _kill(pid)


# --- on a Ray cluster -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A cluster whose second machine is for agents."""
    agents = {"num_cpus": 1, "resources": {"agents": 100}, "labels": {"pool": "agents"}}
    with ray_machines({"num_cpus": 1}, [agents]) as machines:
        yield machines


class RayService(ProcessService):
    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder)
        settings = {**self.config.model_dump(), "kind": "ray", "address": address, "num_cpus": 0}
        self.config = RayConfig.model_validate({**settings, "resources": {"agents": 1}})
        other = self.with_settings
        self.broken = {
            r"runtime\.resources: a session needs 1 of nothing, and the Ray cluster has 0": other(
                resources={"nothing": 1}
            ),
            r"runtime\.node_labels: no machine of the Ray cluster has the label pool=others": other(
                node_labels={"pool": "others"}
            ),
            r"runtime\.working_dir: there is no folder .* \(on a machine of the Ray cluster\)": other(
                working_dir=folder / "missing"
            ),
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestRayRuntime(RuntimeContract):
    capacity = 4
    reports_ends = True

    @pytest.fixture(autouse=True)
    def _in_cluster(self, machines: Machines) -> None:
        self.address = machines.address

    @pytest.mark.parametrize("turns", [0, 30])
    def test_an_invoke_that_is_cancelled_leaks_nothing_once_its_session_is_stopped(
        self, tmp_path: Path, turns: int
    ) -> None:
        super().test_an_invoke_that_is_cancelled_leaks_nothing_once_its_session_is_stopped(tmp_path, turns)

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        service = RayService(folder, self.address)
        try:
            yield service
        finally:
            for pid in processes_with(service.marker):
                _kill(pid)


@asynccontextmanager
async def ends_of(runtime: AgentRuntime, service: ProcessService) -> AsyncIterator[asyncio.Queue[SessionEnd]]:
    """Watch the runtime's sessions, and close it in the end, with all processes."""
    ends = asyncio.Queue[SessionEnd]()
    async with asyncio.timeout(600), background(runtime.watch_sessions("run", ends.put_nowait)):
        yield ends
    await runtime.aclose()
    for pid in processes_with(service.marker):  # a real machine that is lost takes them with it
        _kill(pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_lost_machine_of_a_ray_cluster_is_reported_at_once(machines: Machines, tmp_path: Path) -> None:
    machines.add("127.0.0.3", num_cpus=1, resources={"lost": 1})
    service = RayService(tmp_path, machines.address)
    runtime = await open_runtime(service.with_settings(resources={"lost": 1}))
    session = new_session()
    await runtime.invoke(session, b"{}")
    async with ends_of(runtime, service) as ends:
        await machines.lose("127.0.0.3")
        end = await ends.get()
        assert (end.session_id, end.reason) == (session, "container_lost")
        assert "its machine or its Ray actor was lost" in end.message
        await runtime.stop(session)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_full_ray_cluster_is_waited_for_and_is_no_failed_attempt(machines: Machines, tmp_path: Path) -> None:
    service = RayService(tmp_path, machines.address)
    first = await open_runtime(service.with_settings(resources={"agents": 100}))
    second = await open_runtime(service.with_settings(resources={"agents": 100}, start_timeout_s=2.0))
    session, waiting = new_session(), new_session()
    try:
        await first.invoke(session, b"{}")
        assert ["not checked: no machine" in each.text for each in await second.check() or ()] == [True]
        with pytest.raises(RuntimeUnavailable, match="its machines are full") as full:
            await second.invoke(waiting, b"{}")
        assert full.value.refused
    finally:
        await first.stop(session)
        await second.stop(waiting)
        await first.aclose()
        await second.aclose()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_an_agent_ends_with_its_ray_actor(machines: Machines, tmp_path: Path) -> None:
    """Also one that ignores SIGTERM, with its child that has left the process group."""
    import ray

    service = RayService(tmp_path, machines.address)
    command = ["sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600"]
    runtime, session = await open_runtime(service.with_settings(command=command, grace_s=0.1)), new_session()
    async with ends_of(runtime, service) as ends:
        await runtime.invoke(session, b"{}")
        assert await service.sessions() == {session}
        actor = ray.get_actor(session, namespace=runtime.cleanup_spec().options["namespace"])
        os.kill(await actor.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        assert (await ends.get()).reason == "container_lost"
        await eventually(lambda: not [*processes_with(service.marker)])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_labels_and_the_runtime_environment_reach_an_agents_machine(machines: Machines, tmp_path: Path) -> None:
    wheel = tmp_path / "greeting-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("greeting.py", "HELLO = 'hello'")
        for name, text in about.items():
            made.writestr(f"greeting-1.0.dist-info/{name}", text)
    service = RayService(tmp_path, machines.address)
    (tmp_path / "agent.py").write_text(
        "import os, greeting, types\n"
        "def run(): print(greeting.HELLO, os.environ['TO'])\n"
        "app = types.SimpleNamespace(run=run)\n"
    )
    config = service.with_settings(
        resources={},
        node_labels={"pool": "agents"},
        runtime_env={"env_vars": {"TO": "world"}, "pip": [str(wheel)]},
        command=(),
        app="agent:app",
        start_timeout_s=300,
    )
    runtime = await open_runtime(config)
    async with ends_of(runtime, service) as ends:
        await runtime.invoke(new_session(), b"{}")
        assert "exited with code 0: hello world" in (await ends.get()).message


def test_fields_of_the_runtime_environment_that_were_never_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image_uri: agents on Ray take env_vars and pip"):
        RayConfig(command=["true"], working_dir=tmp_path, runtime_env={"image_uri": "agent:1"})
