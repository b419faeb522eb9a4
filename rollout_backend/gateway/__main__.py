"""`python -m rollout_backend.gateway`: reads `GatewaySettings` as JSON from standard input and serves."""

from __future__ import annotations

import logging
import sys

import uvicorn

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.server import create_app
from rollout_backend.gateway.settings import GatewaySettings


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = GatewaySettings.model_validate_json(sys.stdin.buffer.read())
    try:
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
    )


if __name__ == "__main__":
    main()
