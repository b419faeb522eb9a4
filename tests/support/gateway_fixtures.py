"""Fixtures of gateways and engines, for the tests of several folders. Imports are inside: some take seconds."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from rollout_backend.config import GatewayConfig, ModelConfig, RouterConfig, RouterKind, ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.install import cache_dir, find_engine, find_model, model_path

# A CPU engine starts without grammars. Without the second option, a small model fills JSON with blanks.
GRAMMARS = ("--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace")


@pytest.fixture(scope="session")
def byte_model() -> ModelConfig:
    from rollout_backend.workbench.local.scripted import BYTE_MODEL

    return ModelConfig(path=BYTE_MODEL, name="scripted", renderer="chatml", context_length=4096)


@pytest.fixture(scope="session")
def byte_bundle(byte_model):
    """The renderer of the byte model."""
    from rollout_backend.model.rendering.renderer import load_renderer

    return load_renderer(byte_model)


@pytest.fixture(scope="session")
def bundle(byte_bundle):
    """The byte model's renderer; the folder of the families has theirs."""
    return byte_bundle


@pytest.fixture(scope="session")
def smollm2() -> Path:
    path = model_path(cache_dir())
    if not (path / "tokenizer.json").is_file():
        pytest.skip("the small model is not installed")
    return path


def make_app(engine_url: str, model: ModelConfig, bundle, gateway=None, dialects=None, port: int = 1, **settings):
    """Make the application of a gateway."""
    from gateway_server import CONTROL_KEY, SECRET
    from rollout_backend.model.dialects.registry import DIALECTS
    from rollout_backend.model.gateway.gateway_settings import GatewaySettings
    from rollout_backend.model.gateway.server import create_app

    settings = GatewaySettings(
        port=port,
        gateway=GatewayConfig(**(gateway or {})),
        engine_url=engine_url,
        secret=SECRET,
        control_key=CONTROL_KEY,
        model=model,
        **{"engine_attempts": 2, "model_call_s": 120, **settings},
    )
    return create_app(settings, bundle, dialects or DIALECTS)


async def post_raw(app, path: str, body: dict, headers: dict[str, str], gone: asyncio.Event, send) -> None:
    """Make a request to an application in this process. Its client disconnects once `gone` is set."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict:
        if sent:
            return sent.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    await app(scope, receive, send)


def make_gateway(engine_url: str, model: ModelConfig, bundle, engine=None, **settings):
    """Make a gateway, which the caller starts."""
    from gateway_server import GatewayServer
    from rollout_backend.model.serving.server_process import free_port

    port = free_port()
    return GatewayServer(make_app(engine_url, model, bundle, port=port, **settings), port, engine)


@pytest.fixture
def serve(bundle, byte_model):
    """Start a gateway for an engine's URL; keyword arguments are its settings."""
    with ExitStack() as stack:
        yield lambda engine_url="http://127.0.0.1:1", **settings: stack.enter_context(
            make_gateway(engine_url, **{"model": byte_model, "bundle": bundle, **settings})
        )


@pytest.fixture(scope="session")
def shared_gateway(byte_model, byte_bundle):
    """One gateway before one scripted engine, for all tests that need no settings. Use `play`."""
    from rollout_backend.workbench.local.scripted import ScriptedEngine

    with ScriptedEngine(()) as engine, make_gateway(engine.url, byte_model, byte_bundle, engine=engine) as gateway:
        yield gateway


@pytest.fixture
def play(shared_gateway, byte_model, bundle):
    """`play(script)` returns a gateway whose `engine` answers with the script.

    It is a view of the shared gateway; with keyword arguments, its settings, it is a new gateway and a new engine.
    """
    from rollout_backend.workbench.local.scripted import ScriptedEngine

    with ExitStack() as stack:

        def start(script, **settings):
            if not settings:
                view = shared_gateway.view(script)
                stack.callback(view.close)
                return view
            engine = stack.enter_context(ScriptedEngine(script))
            settings = {"model": byte_model, "bundle": bundle, "engine": engine, **settings}
            return stack.enter_context(make_gateway(engine.url, **settings))

        yield start


@pytest.fixture
def held():
    """A script whose replies wait until the test releases them."""
    from builders import Held

    script = Held()
    yield script
    script.go.set()


@pytest.fixture
def in_thread():
    """Call a function in a thread; return its future."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


@pytest.fixture(scope="session")
def real_model() -> ModelConfig:
    return ModelConfig(path=find_model(), name="scripted", renderer="auto", context_length=4096)


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory) -> Callable[..., AbstractContextManager[str]]:
    """`run_engine(model, within_s, **serving)` is a context: a real engine on the CPU, in float32; its URL."""
    from rollout_backend.model.serving.local_engine import LocalEngine

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
    """Start one real SGLang with the small model for all tests; return its URL."""
    with run_engine(real_model, 170.0, max_total_tokens=8192, extra_args=GRAMMARS) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return vLLM's interpreter. Skip the tests that need it if it is not installed: `make engine ENGINE=vllm`."""
    try:
        return find_engine(engine="vllm")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_vllm(real_model, run_engine, vllm_python) -> Iterator[str]:
    """Start one real vLLM with the small model for all tests; return its URL."""
    grammars = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )  # see GRAMMARS
    with run_engine(real_model, 170.0, engine="vllm", max_total_tokens=8192, extra_args=grammars) as url:
        yield url


@pytest.fixture
def behind_router(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`behind_router(engine_url, kind)` is the URL of a real router with this engine."""
    from rollout_backend.model.serving.router import Router

    with start_blocking_portal() as portal, ExitStack() as stack:

        def start(engine_url: str, kind: RouterKind = "sglang-router") -> str:
            router = stack.enter_context(
                portal.wrap_async_context_manager(Router(RouterConfig(kind=kind), tmp_path / "router.log"))
            )
            portal.call(router.add, engine_url)
            return router.url

        yield start
