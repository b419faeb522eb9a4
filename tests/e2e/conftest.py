"""Whole runs: manager, router, gateway, runtime, the agent in its own process, S3, SQS, buffer.

The engine is scripted here, so that each run is short and ends as the test says; the router in front is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.local.scripted import BYTE_MODEL, Script, ScriptedEngine
from rollout_backend.local.sessions import Limits
from rollout_backend.manager import RolloutManager

AGENT = """
import asyncio, os, signal, time
from openai import AsyncOpenAI
from agent_wrapper import AgentFailure, RolloutApp

app = RolloutApp()

async def ask(context, question="What is 3 + 4?"):
    client = AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0)
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model=context.model, messages=messages)
    return reply.choices[0].message.content

@app.entrypoint
async def agent(context):
    match context.payload.get("do"):
        case "never call the model":
            return 1.0
        case "never return":
            await ask(context)
            await asyncio.Event().wait()
        case "die":
            await ask(context)
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            await ask(context)
            raise ValueError("no such answer")
        case "score its failure":
            await ask(context)
            raise AgentFailure("gave up", reward=-1.0)
        case "swallow":
            await ask(context)
            try:
                await ask(context, "And then?")
            except Exception:
                return 0.0
        case "nan":
            await ask(context)
            return float("nan")
        case "text":
            return await ask(context)
        case "tell its environment":
            await ask(context)
            return {"reward": 1.0, "house": os.environ["HOUSE"]}
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


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent" / "agent.py"
    path.parent.mkdir()
    path.write_text(dedent(AGENT))
    return path


@pytest.fixture
def held_back() -> Iterator[Callable[[str], str]]:
    """A script that answers nothing until the test is over."""
    over = threading.Event()

    def answer(prompt: str) -> str:
        over.wait(60)
        return "late"

    yield answer
    over.set()


@pytest.fixture
def base_settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 16384},
        "serving": {"kind": "external"},
        "queue": {"wait_s": 2},
        "group": {"size": 2, "min_viable": 1},
        "timeouts": {"model_call_s": 10, "agent_s": 30, "publish_grace_s": 20, "collection_s": 90, "token_s": 120},
        "output_dir": str(tmp_path / "runs"),
    }


@pytest.fixture
async def open_run(
    agent: Path, base_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Opens a run of `agent` against scripted replies; further arguments are overrides of its settings."""
    async with AsyncExitStack() as stack:

        async def open_(
            *overrides: str,
            replies: Script = ("The answer is 7.",),
            script: Path = agent,
            by_image: bool = False,
        ) -> Bench:
            engine = stack.enter_context(ScriptedEngine(replies))
            cloud = await stack.enter_async_context(
                LocalCloud(script, run_dir=tmp_path / "logs", limits=Limits(grace_s=2.0))
            )
            for name, value in cloud.environ.items():
                monkeypatch.setenv(name, value)
            base = {**base_settings, "serving": {"kind": "external", "urls": [engine.url]}}
            config = load_config(base=base, overrides=overrides, top=cloud.settings(by_image=by_image))
            manager = await stack.enter_async_context(RolloutManager(config))
            return Bench(config, cloud, engine, manager)

        yield open_
