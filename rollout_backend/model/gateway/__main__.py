"""Serve one gateway: `python -m rollout_backend.model.gateway` reads `GatewaySettings` as JSON from its input."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
from types import ModuleType
from typing import Any

import uvicorn

from rollout_backend.base.addresses import is_everywhere, listen_addresses
from rollout_backend.base.garbage_collection import exempt_loaded_objects
from rollout_backend.base.logs import configure_logs
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.gateway_settings import GatewaySettings

# Rendering threads would otherwise hold the GIL for 5 ms while the event loop waits.
_SWITCH_S = 0.001
# glibc's options, and the values that `return_freed_memory` gives them: a large block never fits into the padding.
_M_TOP_PAD, _M_MMAP_THRESHOLD = -2, -3
_PADDING_BYTES, _LARGE_BYTES = 32 * 1024, 64 * 1024


def main() -> None:
    return_freed_memory()
    # Imports leave little garbage, and collections take a tenth of the time of the start.
    gc.disable()
    configure_logs(logging.INFO, collapse=True, in_thread=True)
    settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    try:
        server = import_server()
        from rollout_backend.model.gateway.access import PacedServer, allow_files

        allow_files(settings.gateway.max_concurrent_calls)
        app = server.create_app(settings)
    except ConfigError as error:
        sys.exit(str(error))
    exempt_loaded_objects()
    gc.enable()
    sys.setswitchinterval(_SWITCH_S)
    serving = PacedServer(uvicorn.Config(app, **server_options(settings)), app.state.is_known)
    with contextlib.suppress(KeyboardInterrupt):
        serving.run()
    if not serving.started:
        sys.exit(1)


def return_freed_memory() -> None:
    """Let glibc return each freed block of 64 KiB or more to the system, such as the bodies of requests.

    By default it raises that size with the blocks that are freed, and keeps smaller ones between those in use:
    sessions with 32,000 tokens took 1.2 MiB each instead of .5.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TOP_PAD, _PADDING_BYTES)


def server_options(settings: GatewaySettings) -> dict[str, Any]:
    # `access` imports `renderers`, which needs the stub that `import_server` puts in place of `openai`.
    from rollout_backend.model.gateway.access import KEEP_ALIVE_S, bounded_protocol, max_connections

    return {
        "host": listen_addresses(settings.host) if is_everywhere(settings.host) else settings.host,
        "port": settings.port,
        "log_level": "info",
        # uvicorn's lines pass through this process's handler, which counts repeated ones.
        "log_config": None,
        "access_log": False,
        # uvloop, which uvicorn prefers where it is installed, would accept connections that `ConnectionPace` paces.
        "loop": "asyncio",
        "http": bounded_protocol(max_connections(settings.gateway.max_concurrent_calls)),
        "ws": "none",
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": 2,
        "backlog": 4096,
        "ssl_certfile": settings.gateway.tls_certificate,
        "ssl_keyfile": settings.gateway.tls_key,
    }


def import_server() -> ModuleType:
    """Import the server without `openai`, which takes 0.7 s and 20 MB, and `torch`, which takes 4 s and 270 MB.

    The gateway uses neither: `renderers` imports `openai` only for its vLLM client, `transformers` imports `torch`
    wherever it is installed. The code of a tokenizer or renderer can still import both, but not those classes of
    `transformers` that need torch.
    """
    unused = ModuleType("openai")
    unused.AsyncOpenAI = object  # type: ignore[attr-defined]
    # None makes an import of torch fail, as if it were not installed.
    sys.modules |= {"openai": unused, "torch": None}  # type: ignore[dict-item]
    # One of the advisory warnings says that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from rollout_backend.model.gateway import server

    del sys.modules["openai"], sys.modules["torch"]
    return server


if __name__ == "__main__":
    main()
