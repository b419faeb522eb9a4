"""`python -m rollout_backend.gateway`: reads `GatewaySettings` as JSON from standard input and serves."""

from __future__ import annotations

import logging
import resource
import sys

import uvicorn

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.journal import OPEN_FILES
from rollout_backend.gateway.server import create_app
from rollout_backend.gateway.settings import GatewaySettings

_FILES_OF_A_CALL = 3  # the agent's connection, the engine's, and one that an agent keeps open between calls
_OTHER_FILES = 256 + OPEN_FILES


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    try:
        allow_files(settings.gateway.max_concurrent_calls)
        app = create_app(settings)
    except ConfigError as error:
        sys.exit(str(error))
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=2,
        backlog=4096,
        ssl_certfile=settings.gateway.tls_certificate,
        ssl_keyfile=settings.gateway.tls_key,
    )


def allow_files(calls: int) -> None:
    """Lets this process open the files that so many calls at once need; the shell's own limit may be 1024.

    Raises:
        ConfigError: it may not.
    """
    needed = calls * _FILES_OF_A_CALL + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"gateway.max_concurrent_calls={calls} takes {needed} open files, and this machine allows a process "
            f"{hard}: raise that (`ulimit -Hn`), or lower the setting and raise gateway.processes"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


if __name__ == "__main__":
    main()
