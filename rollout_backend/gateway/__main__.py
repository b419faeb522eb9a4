"""Serve one gateway: `python -m rollout_backend.gateway` reads `GatewaySettings` as JSON from standard input."""

from __future__ import annotations

import logging
import resource
import sys
from types import ModuleType

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from rollout_backend.errors import ConfigError
from rollout_backend.garbage_collection import exempt_loaded_objects
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.journal import OPEN_FILES
from rollout_backend.logs import configure_logs, logs_json

_FILES_OF_A_CALL = 3  # a connection of the agent, one to the engine, and one that an agent keeps open when idle
_OTHER_FILES = 256 + OPEN_FILES


def main() -> None:
    configure_logs(logging.INFO)
    settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    try:
        allow_files(settings.gateway.max_concurrent_calls)
        app = import_server().create_app(settings)
    except ConfigError as error:
        sys.exit(str(error))
    exempt_loaded_objects()
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="info",
        log_config=None if logs_json() else LOGGING_CONFIG,
        access_log=False,
        timeout_graceful_shutdown=2,
        backlog=4096,
        ssl_certfile=settings.gateway.tls_certificate,
        ssl_keyfile=settings.gateway.tls_key,
    )


def import_server() -> ModuleType:
    """Import the server without `openai`, which takes 0.7 s and 20 MB. `renderers` imports it for a client of vLLM,
    which is not used here."""
    unused = ModuleType("openai")
    unused.AsyncOpenAI = object  # type: ignore[attr-defined]
    sys.modules["openai"] = unused
    from rollout_backend.gateway import server

    del sys.modules["openai"]
    return server


def allow_files(calls: int) -> None:
    """Raise this process's limit of open files to what this many concurrent calls need. A shell's default is 1024.

    Raises:
        ConfigError: the hard limit is lower.
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
