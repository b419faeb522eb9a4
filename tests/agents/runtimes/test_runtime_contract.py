"""The contract of `AgentRuntime`, for each runtime of this package."""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from agent_servers import BARE_AGENT
from builders import served
from kubernetes_bench import IMAGE, Containers, payload
from rollout_backend.agents.runtimes.http import SESSION_HEADER
from rollout_backend.agents.runtimes.kubernetes.runtime import KubernetesRuntime
from rollout_backend.config import AgentCoreConfig, HttpConfig, KubernetesConfig
from rollout_backend.testing.fault_proxy import FaultProxy
from rollout_backend.testing.runtime_contract import Call, ProxiedService, RuntimeContract, Service, ServiceFault
from rollout_backend.workbench.local.cloud import LocalRuntime
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from tests.emulators.kubernetes_emulator import ApiFault, FaultKind, KubernetesEmulator

TOKEN = "the token of the agent server"
NOWHERE = "http://127.0.0.1:9"

# --- AgentCore --------------------------------------------------------------------------------------------


class AgentCoreService(ProxiedService):
    paths: ClassVar = {"invoke": "*/invocations", "stop": "*/stopruntimesession"}
    statuses: ClassVar = {**ProxiedService.statuses, ServiceFault.BROKEN: (500, "InternalServerException")}

    def __init__(self, local: LocalRuntime, proxy: FaultProxy) -> None:
        super().__init__(proxy)
        self._local = local
        self.config = AgentCoreConfig(
            arn=local.arn,
            endpoint_url=proxy.url,
            session_logs=local.session_logs,
            invoke_per_s=20,
            read_timeout_s=120,
        )
        other = local.arn.replace("local-", "other-")
        self.broken = {r"does not exist.*runtime\.arn": self.config.model_copy(update={"arn": other})}
        self.unreachable = self.config.model_copy(update={"endpoint_url": NOWHERE})

    async def sessions(self) -> Collection[str]:
        return [each["id"] for each in (await self._local.sessions())["sessions"]]

    async def crash(self, session_id: str) -> None:
        await self._local.kill(session_id)


@pytest.mark.slow  # each session starts an interpreter, and each test loads botocore's models
class TestAgentCoreRuntime(RuntimeContract):
    faults = ProxiedService.FAULTS
    capacity = 4
    reports_ends = True

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def emulator(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("agentcore")
        limits = EmulatorLimits(max_sessions=4)
        cls.local = LocalRuntime(BARE_AGENT, run_dir=folder, env={}, limits=limits)
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(cls.local):
            yield

    @pytest.fixture(autouse=True)
    def _keys(self, local_keys: None) -> None: ...

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        async with FaultProxy(self.local.endpoint_url) as proxy:
            yield AgentCoreService(self.local, proxy)


# --- Kubernetes -------------------------------------------------------------------------------------------


class KubernetesService(Service):
    payload = payload("any")

    def __init__(self, cluster: KubernetesEmulator) -> None:
        self._cluster = cluster
        self.config = KubernetesConfig(image=IMAGE, kubeconfig=cluster.kubeconfig)
        self.broken = {
            r"runtime\.namespace: .*no namespace 'elsewhere'": self.config.model_copy(
                update={"namespace": "elsewhere"}
            ),
            r"runtime\.service_account: .*no service account 'agent'": self.config.model_copy(
                update={"service_account": "agent"}
            ),
        }
        nowhere = cluster.kubeconfig.with_name("nowhere")
        nowhere.write_text(cluster.kubeconfig.read_text().replace(cluster.url, NOWHERE))
        self.unreachable = self.config.model_copy(update={"kubeconfig": nowhere})

    async def sessions(self) -> Collection[str]:
        return [name.removesuffix("-abcde") for name in self._cluster.running_pods()]

    async def crash(self, session_id: str) -> None:
        await self._cluster.delete_pod(session_id)

    @asynccontextmanager
    async def failing(self, fault: ServiceFault, call: Call) -> AsyncIterator[None]:
        method, path = ("POST", "*/jobs") if call == "invoke" else ("DELETE", "*/jobs/*")
        if fault is ServiceFault.FORBIDDEN:
            self._cluster.denied.add(("jobs", "create" if call == "invoke" else "delete"))
        else:
            self._cluster.faults.append(ApiFault(API_FAULTS[fault], method, path, times=1000))
        try:
            yield
        finally:
            self._cluster.denied.clear()
            self._cluster.faults.clear()


API_FAULTS: Mapping[ServiceFault, FaultKind] = {
    ServiceFault.THROTTLED: "throttle",
    ServiceFault.UNAVAILABLE: "unavailable",
    ServiceFault.BROKEN: "error",
    ServiceFault.LOST_ANSWER: "lose answer",
}


class TestKubernetesRuntime(RuntimeContract):
    faults = ProxiedService.FAULTS
    reports_ends = True

    @pytest.fixture(autouse=True)
    def _no_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KubernetesRuntime, "exit_s", 0.05)

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        async with KubernetesEmulator({IMAGE: Containers()}, folder) as cluster:
            yield KubernetesService(cluster)

    @pytest.mark.slow  # imports aiohttp and tenacity in another process
    def test_another_process_stops_a_session_by_the_cleanup_spec(self, tmp_path: Path) -> None:
        super().test_another_process_stops_a_session_by_the_cleanup_spec(tmp_path)


# --- HTTP -------------------------------------------------------------------------------------------------


class AgentServer:
    """The container's contract, without agents."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        session = request.headers.get(SESSION_HEADER, "")
        match request.path:
            case "/ping" | "/deaf/ping":  # the second is of a server that cannot stop sessions
                return web.json_response({"status": "Healthy"})
            case "/invocations" | "/stop" if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            case "/invocations":
                self.open.add(session)
                return web.json_response({"status": "accepted"})
            case "/stop" if session in self.open:
                self.open.remove(session)
                return web.json_response({"status": "stopping"})
            case "/stop":
                return web.json_response({"error": "SessionNotFound"}, status=404)
        return web.Response(status=404)


class HttpService(ProxiedService):
    paths: ClassVar = {"invoke": "/invocations", "stop": "/stop"}

    def __init__(self, server: AgentServer, proxy: FaultProxy) -> None:
        super().__init__(proxy)
        self._server = server
        self.config = HttpConfig(url=proxy.url, token=TOKEN)
        self.unreachable = HttpConfig(url=NOWHERE)
        self.broken = {
            r"answers 401: set runtime\.token": HttpConfig(url=proxy.url),
            r"answers 404: runtime\.url must be the root": HttpConfig(url=f"{proxy.url}/elsewhere"),
            r"cannot stop sessions: .*runtime\.can_stop=false": HttpConfig(url=f"{proxy.url}/deaf"),
            r"start it, or correct runtime\.url": self.unreachable,
        }

    async def sessions(self) -> Collection[str]:
        return self._server.open


class TestHttpRuntime(RuntimeContract):
    faults = ProxiedService.FAULTS

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        server = AgentServer()
        async with served(server.answer) as url, FaultProxy(url) as proxy:
            yield HttpService(server, proxy)

    @pytest.mark.slow  # imports aiohttp and botocore in another process
    def test_another_process_stops_a_session_by_the_cleanup_spec(self, tmp_path: Path) -> None:
        super().test_another_process_stops_a_session_by_the_cleanup_spec(tmp_path)
