"""AWS clients, all made here: explicit timeouts, and no retries that nobody sees."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aioboto3
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.loaders import Loader, create_loader
from botocore.utils import deep_merge

from rollout_backend.errors import CredentialsExpired, PreflightError

NO_CONNECTION = (EndpointConnectionError, ConnectTimeoutError)
NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError)
UNSIGNED = (*NO_CREDENTIALS, CredentialRetrievalError, SSOError, TokenRetrievalError)  # no call was sent
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException"})


def client(
    service: str,
    *,
    region: str,
    endpoint_url: str | None = None,
    connect_timeout_s: float = 5.0,
    read_timeout_s: float = 30.0,
    connections: int = 64,
    retries: int = 0,
    newer_fields: Mapping[str, Any] | None = None,
) -> AbstractAsyncContextManager[Any]:
    """A client of one service, to be entered. `retries` are botocore's own; where it is 0 they are the caller's.

    A PUT or a receive may be repeated by botocore without harm; an invoke may not. `newer_fields` is merged into
    botocore's own description of the service: what the service knows, and this botocore does not yet.
    """
    config = AioConfig(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=connections,
        retries={"total_max_attempts": 1 + retries, "mode": "standard"},
        s3={"addressing_style": "path"} if endpoint_url else {},
        tcp_keepalive=True,
    )
    core = AioSession()
    if newer_fields is None:
        core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
    else:
        loader = core.get_component("data_loader")  # keeps what it has loaded, and the client is made from that
        deep_merge(loader.load_service_model(service, "service-2"), newer_fields)
    # Its types list every service by name, and lag behind the services.
    session: Any = aioboto3.Session(botocore_session=core)
    plain = endpoint_url is not None and endpoint_url.startswith("http://")
    made: AbstractAsyncContextManager[Any] = session.client(
        service,
        region_name=region,
        endpoint_url=endpoint_url,
        config=config,
        verify=False if plain else None,  # without TLS there is nothing to verify: spares reading the certificates
    )
    return made


@functools.cache
def _descriptions(data_path: str | None) -> Loader:
    """botocore's descriptions of services: a third of a second to read, which each client would do anew."""
    return create_loader(data_path)


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", error))


def expired(error: ClientError) -> bool:
    """Whether the service takes the credentials no more. Those that renew themselves are renewed long before, so no
    later try does better."""
    return code_of(error) in _EXPIRED


def end_if_expired(error: BaseException, what: str) -> None:
    """Raises CredentialsExpired if that is why `what` did not do as it was asked."""
    if isinstance(error, ClientError) and expired(error):
        raise CredentialsExpired(
            f"the AWS credentials have expired ({what} says {code_of(error)}). Get new ones (aws sso login, or the "
            "three of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN) and start the run again under "
            "its run_id: what is finished is taken. Those of a role or of a profile renew themselves"
        ) from error


def preflight_error(error: BotoCoreError | ClientError, what: str, setting: str) -> PreflightError:
    """What a failed look at `what`, named by `setting`, means to the user."""
    if isinstance(error, NO_CREDENTIALS):
        return PreflightError(
            f"{what} cannot be reached: there are no AWS credentials. Log in (aws sso login), or set AWS_PROFILE, "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, NO_CONNECTION):
        return PreflightError(f"{what} cannot be reached: {error}. Check aws.region and aws.endpoint_url")
    if isinstance(error, ClientError):
        match status_of(error):
            case 404 | 400 if not expired(error) and code_of(error) not in ("AccessDenied", "InvalidAccessKeyId"):
                return PreflightError(f"{what} does not exist. Create it, or mend {setting}")
            case 301:
                return PreflightError(f"{what} is in another region: set aws.region")
            case _:
                return PreflightError(
                    f"{what} refuses us: {code_of(error)}: {message_of(error)}. "
                    "Check the credentials' permissions, and that they have not expired"
                )
    return PreflightError(f"{what} cannot be used: {error}")
