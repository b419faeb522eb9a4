"""Fixtures for whole runs: manager, router, gateway, runtime, agent processes, S3, SQS and buffer.

The engine is scripted, so that each run is short and deterministic. The router is the real one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.manager import RolloutManager
from rollout_backend.workbench.local.cloud import LocalCloud, LocalRuntime, LocalStorage
from rollout_backend.workbench.local.scripted import BYTE_MODEL, Script, ScriptedEngine
from rollout_backend.workbench.local.session_pool import EmulatorLimits

AGENT = """
from openai import AsyncOpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()

async def ask(context, question="What is 3 + 4?", max_retries=0):
    client = AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=max_retries)
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model=context.model, messages=messages)
    return reply.choices[0].message.content

@app.entrypoint
async def agent(context):
    match context.payload.get("do"):
        case "ask patiently":
            answer = await ask(context, max_retries=8)
            return {"reward": float("7" in answer), "base_url": context.base_url}
        case "never call the model":
            return 1.0
        case "raise":
            await ask(context)
            raise ValueError("no such answer")
        case "lose its model":
            await ask(context, "Fail!")
        case "swallow":
            await ask(context)
            try:
                await ask(context, "Fail!")
            except Exception:
                return 0.0
        case "nan":
            await ask(context)
            return float("nan")
        case "text":
            return await ask(context)
    answer = await ask(context)
    return {"reward": float("7" in answer), "answer": answer}

if __name__ == "__main__":
    app.run()
"""


@dataclass
class Bench:
    config: RolloutConfig
    cloud: LocalCloud
    engine: ScriptedEngine
    manager: RolloutManager


LIMITS = EmulatorLimits(grace_s=60.0)


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(dedent(AGENT))
    return path


def cloud_with(storage: LocalStorage, agent: Any, run_dir: Path) -> LocalCloud:
    """Return a cloud with this storage, which runs, and a runtime of an agent, which must be started."""
    cloud = LocalCloud(agent, run_dir=run_dir, limits=LIMITS)
    env = {**storage.environ, "AWS_ENDPOINT_URL": storage.endpoint_url}
    cloud.storage, cloud.runtime = storage, LocalRuntime(agent, run_dir=run_dir, env=env, limits=LIMITS)
    return cloud


@pytest.fixture(scope="session")
def shared_cloud(
    agent: Path, storage: LocalStorage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCloud]:
    """S3, SQS and a runtime of `agent` for all runs: each test leaves it without a session."""
    cloud = cloud_with(storage, agent, tmp_path_factory.mktemp("cloud"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(cloud.runtime):
        yield cloud


BASE: dict[str, Any] = {  # settings of runs
    "model": {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 16384},
    "queue": {"wait_s": 2},
    "group": {"size": 2, "min_viable": 1},
    "timeouts": {
        "model_call_s": 120,
        "agent_s": 240,
        "publish_grace_s": 120,
        "collection_s": 600,
        "session_key_s": 900,
    },
}


@pytest.fixture
async def open_run(
    request: pytest.FixtureRequest,
    storage: LocalStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Open a run of `agent`, or of a `script`, with scripted replies. Further arguments override its settings."""
    async with AsyncExitStack() as stack:

        async def open_(
            *overrides: str,
            replies: Script = ("The answer is 7.",),
            script: Path | None = None,
        ) -> Bench:
            engine = stack.enter_context(ScriptedEngine(replies))
            if script is None:
                cloud: LocalCloud = request.getfixturevalue("shared_cloud")
            else:
                cloud = cloud_with(storage, script, tmp_path / "logs")
                await stack.enter_async_context(cloud.runtime)
            for name, value in cloud.environ.items():
                monkeypatch.setenv(name, value)
            own = {"serving": {"kind": "external", "urls": [engine.url]}, "output_dir": str(tmp_path / "runs")}
            config = load_config(base={**BASE, **own}, overrides=overrides, top=cloud.settings())
            manager = await stack.enter_async_context(RolloutManager(config))
            return Bench(config, cloud, engine, manager)

        yield open_
