"""The relay's command line: `rollout relay`, or `python -m rollout_backend.model.relay` in the relay's image."""

import logging
import os
import ssl
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr

from rollout_backend.model.relay.protocol import MIN_KEY_CHARS
from rollout_backend.model.relay.relay_settings import RelaySettings

KEY_ENV = "ROLLOUT__RELAY__KEY"
_DEFAULTS = RelaySettings.model_construct(key=SecretStr(""))


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; use 0.0.0.0 in a container.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(min=1, max=65535)] = _DEFAULTS.port,
    wait_s: Annotated[
        float, typer.Option(help="Time for which a call waits for the training side.")
    ] = _DEFAULTS.wait_s,
    reconnect_s: Annotated[
        float, typer.Option(help="Time for which calls in flight survive without a connection.")
    ] = _DEFAULTS.reconnect_s,
    heartbeat_s: Annotated[
        float, typer.Option(help="Interval of pings on a silent connection.")
    ] = _DEFAULTS.heartbeat_s,
    call_s: Annotated[float, typer.Option(help="Timeout of one call.")] = _DEFAULTS.call_s,
    max_calls: Annotated[int, typer.Option(min=1, max=65_536, help="Maximum calls in flight.")] = _DEFAULTS.max_calls,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, help="Maximum size of a request body.")
    ] = _DEFAULTS.max_body_bytes,
    tls_certificate: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file, to serve HTTPS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the certificate's key.")
    ] = None,
) -> None:
    """Forward agents' calls to the training side, which dials in. Reads the key from ROLLOUT__RELAY__KEY."""
    key = os.environ.get(KEY_ENV, "")
    if len(key) < MIN_KEY_CHARS:
        raise typer.BadParameter(
            f"{KEY_ENV} must hold the training side's relay.key, with at least {MIN_KEY_CHARS} characters: create "
            "one with openssl rand -hex 32",
            param_hint="environment",
        )
    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key belong together: give both, or neither")
    settings = RelaySettings.model_validate(
        {
            "key": key,
            "host": host,
            "port": port,
            "wait_s": wait_s,
            "reconnect_s": reconnect_s,
            "heartbeat_s": heartbeat_s,
            "call_s": call_s,
            "max_calls": max_calls,
            "max_body_bytes": max_body_bytes,
        }
    )
    tls = None
    if tls_certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(tls_certificate, tls_key)
    # `rollout --help` must not load the server.
    from rollout_backend.model.relay.relay_server import run

    logging.getLogger("rollout_backend.model.relay").setLevel(logging.INFO)
    run(settings, tls)
