import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal

from agent_wrapper.contract import Sampling, Trajectory
from rollout_backend.config import GatewayConfig, ModelConfig, RouterConfig, ServingConfig
from rollout_backend.core.session_key import SessionClaims, issue
from rollout_backend.dialects.registry import DIALECTS
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.server import create_app
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from rollout_backend.serving.install import cache_dir, find_model, model_path
from rollout_backend.serving.local_engine import LocalEngine
from rollout_backend.serving.router import Router
from rollout_backend.serving.server_process import free_port


@pytest.fixture(scope="session")
def byte_model() -> ModelConfig:
    return ModelConfig(path=BYTE_MODEL, name="scripted", renderer="chatml", context_length=4096)


@pytest.fixture(scope="session")
def bundle(byte_model) -> RendererBundle:
    return load_renderer(byte_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = model_path(cache_dir())
    if not (path / "tokenizer.json").is_file():
        pytest.skip("the small model is not installed")
    return path


SECRET = "test-secret-" * 4
CONTROL_KEY = "test-control-" * 4


class Served:
    """A gateway served by a thread, so that plain tests can call it."""

    def __init__(self, app, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.secret = SECRET
        self.control = {"Authorization": f"Bearer {CONTROL_KEY}"}
        self._clients: list[openai.OpenAI] = []
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self._server.should_exit = True
        self._thread.join()

    def key(
        self, session: str = "s1", *, secret: str = SECRET, lives_s: float = 600, journal_id: str = "", **sampling
    ) -> str:
        claims = SessionClaims(
            run_id="run",
            step=0,
            rollout_id="r",
            attempt=1,
            session_id=session,
            sampling=Sampling(**sampling),
            expires_at=time.time() + lives_s,
            journal_id=journal_id,
        )
        return issue(secret, claims)

    def client(self, session: str = "s1", **more) -> openai.OpenAI:
        return self.client_with(self.key(session, **more))

    def client_with(self, key: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self._clients.append(client)
        return client

    def seal(self, session: str = "s1") -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key(session)}"}
        return httpx.post(f"{self.url}/v1/rollout/trajectory", headers=headers)

    def trajectory(self, session: str = "s1") -> Trajectory:
        return Trajectory.decode(self.seal(session).raise_for_status().content)

    def stats(self) -> GatewayStats:
        return GatewayStats.model_validate(httpx.get(f"{self.url}/control/stats", headers=self.control).json())


@pytest.fixture
def serve(bundle, byte_model):
    """Starts a gateway for an engine's URL; keywords go into its settings."""
    served: list[Served] = []

    def start(engine_url: str, gateway: dict | None = None, bundle=bundle, dialects=DIALECTS, **more) -> Served:
        port = free_port()
        settings = GatewaySettings(
            port=port,
            gateway=GatewayConfig(**(gateway or {})),
            engine_url=engine_url,
            secret=SECRET,
            control_key=CONTROL_KEY,
            **{"model": byte_model, "engine_attempts": 2, "model_call_s": 20, **more},
        )
        served.append(Served(create_app(settings, bundle, dialects), port))
        return served[-1]

    yield start
    for server in served:
        server.stop()


# On the CPU we start without one. Left to it, a small model fills JSON with blanks until its tokens are used up.
GRAMMARS = ("--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace")


@pytest.fixture(scope="session")
def real_model() -> ModelConfig:
    return ModelConfig(path=find_model(), name="scripted", renderer="auto", context_length=4096)


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory) -> Callable[..., AbstractContextManager[str]]:
    """`run_engine(model, within_s, **serving)` is a context: a real SGLang on the CPU, in float32; its URL."""

    @contextmanager
    def run(model: ModelConfig, within_s: float, **serving) -> Iterator[str]:
        settings = ServingConfig(
            kind="process", device="cpu", dtype="float32", threads=1, startup_timeout_s=within_s, **serving
        )
        engine = LocalEngine("the engine", model, settings, tmp_path_factory.mktemp("engine") / "log")
        with start_blocking_portal() as portal:
            try:
                portal.call(engine.start)
                yield engine.url
            finally:
                portal.call(engine.stop)

    return run


@pytest.fixture(scope="session")
def real_engine(real_model, run_engine) -> Iterator[str]:
    """One real SGLang with the small model, for all tests of the gateway; its URL."""
    with run_engine(real_model, 170.0, max_total_tokens=8192, extra_args=GRAMMARS) as url:
        yield url


@pytest.fixture
def behind_router(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """`behind_router(engine_url)` is the URL of a real sglang-router with this engine."""
    with start_blocking_portal() as portal, ExitStack() as stack:

        def start(engine_url: str) -> str:
            router = stack.enter_context(
                portal.wrap_async_context_manager(Router(RouterConfig(), tmp_path / "router.log"))
            )
            portal.call(router.add, engine_url)
            return router.url

        yield start
