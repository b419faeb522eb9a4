"""`rollout engine`: the engine for machines without a GPU."""

from typing import Annotated, Literal

import typer

from rollout_backend.cli.common import console, exit_codes


def engine_install(
    engine: Annotated[
        Literal["sglang", "vllm"], typer.Option(help="Engine to install. Each one has a separate environment.")
    ] = "sglang",
    torch_index_url: Annotated[str | None, typer.Option(help="Package index for the CPU build of torch.")] = None,
) -> None:
    """Install SGLang or vLLM for the CPU in a separate environment, and a small real model, in the cache folder."""
    from rollout_backend.serving.install import cache_dir, install_cpu_engine, prepare_model

    with exit_codes():
        python = install_cpu_engine(cache_dir(), engine, torch_index_url=torch_index_url, echo=console.print)
        model = prepare_model(cache_dir(), engine, echo=console.print)
        console.print(f"engine: {python}\nmodel: {model}", soft_wrap=True)
