"""Presign the URLs with which an agent's container writes one attempt's result without credentials, and with which a
verifier's container reads the artifacts.

Invariants of the agent's URLs, all enforced by S3:

- A URL writes one object under the key for which it was signed: the result, the failure marker, or the artifacts.
- It cannot replace an object: `If-None-Match: *` is part of the signature.
- It expires with the attempt's session key.
"""

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from agent_wrapper.contract import (
    PUT_HEADERS,
    ResultUrls,
    Rollout,
    artifacts_key,
    failure_marker_key,
    probe_key,
    put_headers,
    result_key,
)
from rollout_backend.base import aws
from rollout_backend.base.aws import log_call
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import NoCredentials, PreflightError

log = logging.getLogger(__name__)


class Presigner:
    """Signs URLs with this process's credentials, which must allow the write. Signing makes no call to S3."""

    def __init__(self, storage: StorageConfig, where: AwsConfig, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._where = where
        self._wall = wall
        self._s3: aws.Client | None = None
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._warned = False

    async def urls(self, claims: SessionClaims) -> ResultUrls:
        """Return the URLs of the attempt that these claims belong to. They expire with the claims.

        Raises:
            NoCredentials: there are currently no credentials to sign with.
        """
        place = (self._storage.prefix, claims.run_id, claims.step, claims.rollout_id)
        seconds = max(1, round(claims.expires_at - self._wall()))
        return ResultUrls(
            result=await self._put_url(result_key(*place), seconds),
            failure_marker=await self._put_url(failure_marker_key(*place, claims.attempt), seconds),
            artifacts=await self._put_url(artifacts_key(*place, claims.attempt), seconds),
        )

    async def artifacts_url(self, rollout: Rollout, seconds: float) -> str:
        """Return a URL for a GET of a result's artifacts, valid for at most this time. Raises NoCredentials."""
        place = self._storage.prefix, rollout.run_id, rollout.step, rollout.rollout_id, rollout.attempt
        return await self._url("get_object", round(seconds), Key=artifacts_key(*place))

    async def check(self, lasting_s: float) -> str:
        """Write an object through a presigned URL, as an agent does, and remove it if that is allowed. Return a
        warning if URLs signed now do not last for `lasting_s`.

        Raises:
            PreflightError: S3 refuses the URL.
        """
        key = probe_key(self._storage.prefix, secrets.token_hex(4), agents=True)
        try:
            s3, url, body = await self._client(), await self._put_url(key, 60), b"{}"
            status, said = await s3.send("PUT", url, put_headers(body), body)
            # Without the permission to delete it, the object stays.
            await s3.send("DELETE", await self._url("delete_object", 60, Key=key), {})
            left_s = await self._credentials_last_s(lasting_s)
        except NoCredentials as error:
            raise PreflightError(f"storage.presigned: {error}") from error
        except aws.NO_ANSWER as error:
            raise PreflightError(f"storage.presigned: writing by a presigned URL failed: {error}") from error
        named = re.search(rb"<Code>([^<]+)</Code>\s*<Message>([^<]*)</Message>", said)
        code, message = (part.decode(errors="replace") for part in named.groups()) if named else ("", "")
        log_call("s3", "PutObject by a presigned URL", status, code or ("AccessDenied" if status == 403 else ""))
        if status != 200:
            why = f" ({code}: {message})" if code else ""
            raise PreflightError(
                f"storage.presigned: S3 answered {status}{why} to a write by a URL that these credentials signed. "
                "Deploy the stack with Presigned=true, attach its TrainerPolicyArn to the trainer's role, and set "
                "storage.prefix to the stack's parameter ResultPrefix, or leave both out"
            )
        return _too_short(left_s, lasting_s) if left_s < lasting_s else ""

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def _put_url(self, key: str, seconds: int) -> str:
        signed = {"ContentType": PUT_HEADERS["Content-Type"], "IfNoneMatch": PUT_HEADERS["If-None-Match"]}
        return await self._url("put_object", seconds, Key=key, **signed)

    async def _url(self, operation: str, seconds: int, **params: str) -> str:
        s3 = await self._client()
        left_s = await self._credentials_last_s(seconds)
        if left_s < seconds and not self._warned:
            self._warned = True
            log.warning("%s", _too_short(left_s, seconds))
        params["Bucket"] = self._storage.bucket
        try:
            url: str = await s3.generate_presigned_url(operation, Params=params, ExpiresIn=seconds)
        except aws.UNSIGNED as error:
            raise _unsigned(error) from error
        return url

    async def _credentials_last_s(self, wanted_s: float) -> float:
        """Return how long the credentials last, and so the URLs that they sign. Renew them first if they do not last
        for `wanted_s`."""
        credentials = (await self._client()).credentials
        try:
            await credentials.get_frozen_credentials(lasting_s=wanted_s)
        except aws.UNSIGNED as error:
            raise _unsigned(error) from error
        return math.inf if credentials.expires_at is None else credentials.expires_at.timestamp() - time.time()

    async def _client(self) -> aws.Client:
        async with self._opening:
            if self._s3 is None:
                style = "path" if self._where.endpoint_of("s3") else "virtual"
                made = aws.client(
                    "s3",
                    region=self._where.region,
                    endpoint_url=self._where.endpoint_of("s3"),
                    # Older signature versions do not sign headers.
                    signature_version="s3v4",
                    # The body is not known yet.
                    request_checksum_calculation="when_required",
                    s3={"addressing_style": style},
                )
                self._s3 = await self._stack.enter_async_context(made)
            return self._s3


def _unsigned(error: BaseException) -> NoCredentials:
    return NoCredentials(f"the URLs of results could not be signed: {error}")


def _too_short(left_s: float, wanted_s: float) -> str:
    return (
        f"the AWS credentials end in {left_s:.0f} s, and presigned URLs with them, but agents may need theirs for "
        f"{wanted_s:.0f} s: results written later are lost. Use credentials that last longer, such as a role with a "
        "longer session, or lower timeouts.agent_s and timeouts.session_key_s"
    )
