"""Run one payload from a file and exit, for a runtime that starts one container per attempt, such as a Kubernetes
Job.

Invariants:

- the exit code is 0 if the result was published, otherwise 1;
- SIGTERM ends the rollout as a failure, which is still published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agent_wrapper.contract import PAYLOAD_VARIABLE, ContractError

if TYPE_CHECKING:
    from agent_wrapper.app import RolloutApp

logger = logging.getLogger("agent_wrapper")


def payload_file() -> Path | None:
    """Return the file with the single payload to run; None if the app serves HTTP."""
    name = os.environ.get(PAYLOAD_VARIABLE)
    return Path(name) if name else None


def flush_output() -> None:
    """Flush the standard streams, which the agent may have closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def run_and_exit(app: RolloutApp, path: Path) -> NoReturn:
    """Run the rollout that the file requests, and exit the process."""
    try:
        code = 0 if asyncio.run(_run(app, path)) else 1
    except (OSError, ValueError, ContractError) as error:
        logger.error("%s holds no rollout to run: %s", path, error)  # noqa: TRY400
        code = 1
    logging.shutdown()
    flush_output()
    # An abandoned agent may hold threads that the interpreter would wait for.
    os._exit(code)


async def _run(app: RolloutApp, path: Path) -> bool:
    from pydantic_core import from_json

    # Nothing else runs yet, so blocking the event loop is harmless.
    payload = from_json(path.read_bytes())  # noqa: ASYNC240
    if not isinstance(payload, dict):
        # A file that is not JSON raises ValueError, too.
        raise ValueError("it is not a JSON object")  # noqa: TRY004
    running = asyncio.create_task(app.run_payload(payload))
    ending: list[asyncio.Task[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: ending.append(asyncio.create_task(app.shutdown()))
        )
    published = await running
    await asyncio.gather(*ending)
    return published
