"""Serve one gateway: `python -m rollout_backend.model.gateway` reads `GatewaySettings` as JSON from its input."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
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
# How often freed memory is returned to the system at most, and the part of the time that this may take.
_RETURN_PAUSE_S, _RETURN_SHARE = 1.0, 0.01
# A process that has used less CPU since the last time has freed little.
_LITTLE_CPU_S = 0.05


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
    """Return freed memory, such as the bodies of requests, to the system once a second, in a thread.

    glibc keeps freed blocks between those in use: sessions with 32,000 tokens took 1.2 MiB each instead of .5. Its
    own setting, which returns each large block at once, took a seventh of the CPU time of such calls.
    """
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL("libc.so.6").malloc_trim
        threading.Thread(target=_return_repeatedly, args=(trim,), name="freed memory", daemon=True).start()


def _return_repeatedly(trim: Callable[[int], int]) -> None:
    pause_s, used_s = _RETURN_PAUSE_S, 0.0
    while True:
        time.sleep(pause_s)
        if time.process_time() - used_s < _LITTLE_CPU_S:
            continue
        began = time.monotonic()
        trim(0)
        pause_s = max(_RETURN_PAUSE_S, (time.monotonic() - began) / _RETURN_SHARE)
        used_s = time.process_time()


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
