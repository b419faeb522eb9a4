"""Check the keys that requests carry.

A revoked key stays valid here, because the registry refuses its session.

Keys are accepted in `Authorization: Bearer`, in `x-api-key`, and in paths.

Invariants:

- Keys and secrets are never logged.
- Behind `PathKeys`, no path contains a key, so no log, error, trace or journal can contain one.
"""

import hmac
import re
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_backend.core.api_error import ApiError
from rollout_backend.core.session_key import KeyRefused, SessionClaims, shard_of, verify
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.sessions.journal import check_journal
from rollout_backend.logs import bind_log_fields

_KEY_PATH = re.compile(r"/k/([A-Za-z0-9._-]+)(/v1/.*)", re.DOTALL)
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})


class PathKeys:
    """ASGI middleware that takes session keys from URLs, for agents that hard-code an API key or send none.

    /k/KEY/v1/... is served as /v1/... with the session key KEY, which replaces any key in the headers. Unless
    `enabled`, the path is not found.
    """

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := _KEY_PATH.fullmatch(scope["path"])):
            key, path = found.groups()
            headers = scope["headers"]
            if self._enabled:
                headers = [(name, value) for name, value in headers if name not in _KEY_HEADERS]
                headers.append((b"authorization", b"Bearer " + key.encode()))
            else:
                path = f"/k/...{path}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, send)


class Authenticator:
    """Checks session keys and the control key of one gateway."""

    def __init__(self, settings: GatewaySettings, journal_id: str) -> None:
        self._settings = settings
        self._journal_id = journal_id

    def session(self, request: Request) -> SessionClaims:
        """Return the claims of the request's session key.

        Later log lines of this request name the session.

        Raises:
            ApiError: status 401 if the key is not valid, 421 if its session belongs to another gateway, 410 if the
                journal of its session is lost.
        """
        key = _bearer(request) or request.headers.get("x-api-key", "")
        try:
            claims = verify(self._settings.secret, key, time.time(), self._settings.previous_secret)
        except KeyRefused as error:
            advice = "use the api_key of this rollout's request, or set gateway.key_in_path for agents that cannot"
            raise ApiError(401, f"{error}; {advice}", code="invalid_api_key") from None
        self._check_shard(claims.session_id)
        check_journal(claims, self._journal_id)
        bind_log_fields(run=claims.run_id, step=claims.step, rollout=claims.rollout_id, session=claims.session_id)
        return claims

    def _check_shard(self, session_id: str) -> None:
        shard, shards = self._settings.shard, self._settings.gateway.processes
        owner = shard_of(session_id, shards)
        if owner != shard:
            raise ApiError(
                421,
                f"this is gateway {shard} of {shards}, and the session belongs to gateway {owner} of {shards}: use "
                "the base_url of this rollout's request as it is",
                code="wrong_shard",
            )

    def require_control_key(self, request: Request) -> None:
        """Raise ApiError (401) if the request does not carry the control key."""
        if not hmac.compare_digest(_bearer(request).encode(), self._settings.control_key.encode()):
            raise ApiError(401, "this needs the control key", code="invalid_control_key")


def _bearer(request: Request) -> str:
    """Return the bearer token of a request, or an empty string."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
