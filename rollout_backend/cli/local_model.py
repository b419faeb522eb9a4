"""Configure the model for commands that run an agent on this machine, and install its engine: `rollout engine`."""

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rollout_backend.cli.common import console
from rollout_backend.config import EngineName, RolloutConfig, load_config
from rollout_backend.errors import ConfigError

Settings = Mapping[str, Any]


@asynccontextmanager
async def local_model(
    scripted: bool,
    endpoint: str | None,
    servers: int,
    echo: Callable[[str], None],
    engine: EngineName = "sglang",
) -> AsyncIterator[Settings]:
    """Yield the settings of a model on this machine, served by a script, by `endpoint`, or by an engine started here.

    Raises:
        PreflightError: the endpoint cannot serve rollouts.
    """
    if scripted:
        from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums

        echo("a script answers instead of a model, and a third of its sums are wrong")
        with ScriptedEngine(ScriptedSums()) as script:
            model = {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": 32_768}
            yield {"model": model, "serving": {"kind": "external", "urls": [script.url]}}
    elif endpoint is not None:
        from rollout_backend.serving.external_engine import served_model

        url = endpoint.rstrip("/").removesuffix("/v1")
        served = await served_model(url)
        echo(f"{url} serves {served.path}")
        serving = {"kind": "external", "engine": served.engine, "urls": [url]}
        yield {"model": {"path": served.path}, "serving": serving}
    else:
        model_path = _install(engine, echo)
        threads = max(1, ((os.cpu_count() or 2) - 1) // servers)
        yield {
            "model": {"path": model_path, "renderer": "chatml", "context_length": 2048},
            "serving": {"engine": engine, "device": "cpu", "servers": servers, "threads": threads},
        }


def _install(engine: EngineName, echo: Callable[[str], None]) -> str:
    """Install the engine and the model if they are missing. Return the model's folder."""
    from rollout_backend.serving.install import (
        CPU_ENGINES,
        cache_dir,
        find_engine,
        find_model,
        install_cpu_engine,
        prepare_model,
    )

    cache = cache_dir()
    try:
        find_engine(cache, engine)
        find_model(cache)
    except ConfigError:
        title = CPU_ENGINES[engine].title
        echo(f"{title} for the CPU and a 135M model are installed once, in {cache}: two minutes, 3.5 GB")
        echo("to use a script instead: `rollout demo --scripted`, or `rollout dev` without --engine")
    install_cpu_engine(cache, engine, echo=echo)
    return str(prepare_model(cache, engine, echo=echo))


def load_local_config(file: Path | None, overrides: Sequence[str], base: Settings) -> RolloutConfig:
    """Load the settings of a run on this machine, with placeholders for its storage and runtime.

    Raises:
        ConfigError: the settings are invalid, or the model's folder is not on this machine.
    """
    placeholder = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "http", "url": "http://127.0.0.1"}}
    config = load_config(file, overrides, base=base, top=placeholder)
    if not config.model.folder.is_dir():
        raise ConfigError(
            f"{config.model.path} is not a folder on this machine: name a folder that has the tokenizer and "
            "config.json of the served model with -o model.path=FOLDER"
        )
    return config


def engine_install(
    engine: Annotated[
        Literal["sglang", "vllm"], typer.Option(help="Engine to install. Each one has a separate environment.")
    ] = "sglang",
    torch_index_url: Annotated[str | None, typer.Option(help="Package index for the CPU build of torch.")] = None,
) -> None:
    """Install SGLang or vLLM for the CPU in a separate environment, and a small real model, in the cache folder."""
    from rollout_backend.serving.install import cache_dir, install_cpu_engine, prepare_model

    python = install_cpu_engine(cache_dir(), engine, torch_index_url=torch_index_url, echo=console.print)
    model = prepare_model(cache_dir(), engine, echo=console.print)
    console.print(f"engine: {python}\nmodel: {model}", soft_wrap=True)
