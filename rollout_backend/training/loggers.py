"""Send a training's curve to TensorBoard and to Weights & Biases (`training_service.loggers`).

A logger that fails costs the training nothing but its values.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError

log = logging.getLogger(__name__)

Log = Callable[[int, Mapping[str, float]], None]
"""Takes a step's number and its values, by name. A step may come twice."""


@contextlib.asynccontextmanager
async def open_loggers(config: RolloutConfig) -> AsyncIterator[Log]:
    """Open the loggers of a run, and yield a function that sends values to all of them.

    Raises:
        ConfigError: a logger's package is missing, or the logger cannot start.
    """
    assert config.training_service is not None
    opened: dict[str, Log] = {}
    with contextlib.ExitStack() as stack:
        for name in config.training_service.loggers:
            try:
                opened[name] = _OPENERS[name](config, stack)
            except ImportError as error:
                raise ConfigError(f"training_service.loggers: the package {name} is missing ({error})") from None
            except Exception as error:
                advice = ": set WANDB_API_KEY, or WANDB_MODE=offline" if name == "wandb" else ""
                raise ConfigError(f"training_service.loggers: {name} does not start ({error}){advice}") from error

        def send(step: int, values: Mapping[str, float]) -> None:
            for name, to_one in opened.items():
                try:
                    to_one(step, values)
                except Exception as error:
                    # A full disk and a service that is away raise anything.
                    log.warning("%s got no values of step %d: %s", name, step, error)

        yield send


def _tensorboard(config: RolloutConfig, stack: contextlib.ExitStack) -> Log:
    module: Any = importlib.import_module("tensorboard.summary")
    writer = module.Writer(str(config.run_dir / "tensorboard"))

    @stack.callback
    def close() -> None:
        with contextlib.suppress(OSError):
            writer.close()

    def send(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send


def _wandb(config: RolloutConfig, stack: contextlib.ExitStack) -> Log:
    module: Any = importlib.import_module("wandb")
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # A resumed training continues the curve of its run.
    started = module.init(id=config.run_id, name=config.run_id, resume="allow", dir=str(config.run_dir))
    run = stack.enter_context(started)
    return lambda step, values: run.log(dict(values), step=step)


_OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb}
