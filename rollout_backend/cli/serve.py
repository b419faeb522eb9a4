"""`rollout serve`: serve a checkpoint behind the gateway of its training."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_backend.base.names import derived_name
from rollout_backend.cli.common import Overrides, echo
from rollout_backend.config import RolloutConfig, load_config, merge_overrides
from rollout_backend.errors import ConfigError

_DAY_S = 86_400.0


async def serve(
    checkpoint: Annotated[
        Path, typer.Argument(help="Model folder with weights and tokenizer, as `from_pretrained` reads it.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="Settings of the training: its file, or config.yaml in a run's folder.")
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Days for which the printed key is valid.")] = 30.0,
    override: Overrides = None,
) -> int:
    """Serve a checkpoint to a deployed agent, with the engine, renderer and APIs of its training, until Ctrl-C.

    It prints the address and a key, which stays valid after a restart. Calls are sampled with the settings of the
    training, and nothing is recorded. The training's own engines, relay and address are not used. Name another relay
    with `-o relay.url=URL -o relay.key=KEY`, or an address with `-o gateway.public_url=URL -o gateway.port=PORT`.
    """
    return await serve_model(serving_config(checkpoint, config, override or []), days, echo)


def serving_config(checkpoint: Path, config: Path | None, overrides: Sequence[str]) -> RolloutConfig:
    """Return the settings of the training, with the checkpoint in place of its model and the same model name.

    Raises:
        ConfigError: the settings are invalid, or the folder contains no checkpoint.
    """
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"{checkpoint} has no config.json: name a folder in Hugging Face's format. `python -m verl.model_merger "
            "merge` makes one of a checkpoint of verl"
        )
    nowhere = {"storage": {"bucket": "none"}, "runtime": {"kind": "http", "url": "http://127.0.0.1"}}
    trained = load_config(config, base={**nowhere, "model": {"path": str(checkpoint)}}) if config else None
    name = trained.model.served_name if trained is not None else checkpoint.name
    top: dict[str, Any] = {
        **nowhere,
        "run_id": derived_name(f"serve-{name}", "A-Za-z0-9._-", 128),
        "model": {"path": str(checkpoint.absolute()), "name": name},
        # The training's address and port lead to its own gateway.
        "gateway": {"processes": 1, "public_url": None, "port": 0},
        # A relay has one training side. A second one would take it over and end a running training.
        "relay": None,
    }
    if trained is not None and trained.serving.kind in ("external", "tinker"):
        # External servers belong to the trainer, and a service does not serve checkpoints on disk.
        top["serving"] = {"kind": "process", "engine": trained.serving.engine}
    merge_overrides(top, overrides)
    return load_config(config, top=top)


async def serve_model(config: RolloutConfig, days: float, show: Callable[[str], object]) -> int:
    """Serve until cancelled. `show` receives each line about the address.

    Raises:
        StartupError, ServingError: an engine or the gateway did not start, or was permanently lost.
    """
    from rollout_backend.core.session_key import SessionClaims
    from rollout_backend.model.serving.model_serving import ModelServing
    from rollout_backend.model.serving.run_secret import run_secret

    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    show(f"starting the engines and the gateway; logs: {logs}")
    serving = ModelServing(config, logs)
    try:
        await serving.start(run_secret(config))
        claims = SessionClaims(
            run_id=config.run_id,
            step=0,
            rollout_id="serve",
            attempt=1,
            session_id="serve",
            sampling=config.sampling,
            expires_at=time.time() + days * _DAY_S,
            is_recorded=False,
        )
        endpoint = serving.gateways.endpoint(claims)
        show(f"serving {endpoint.name} for {days:g} days:")
        show(f"  OPENAI_BASE_URL={endpoint.base_url}")
        show(f"  OPENAI_API_KEY={endpoint.api_key}")
        lost = [asyncio.ensure_future(each) for each in serving.failures()]
        try:
            done, _ = await asyncio.wait(lost, return_when=asyncio.FIRST_COMPLETED)
            await done.pop()
        finally:
            for task in lost:
                task.cancel()
    finally:
        await serving.stop()
    return 1
