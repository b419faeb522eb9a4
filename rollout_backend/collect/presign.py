"""Presigned URLs by which an agent's container writes one attempt's result without credentials, and by which the
verifier's container reads the artifacts.

Invariants of the agent's, all checked by S3:

- A URL writes one object, under the key that it was signed for: the result, the failure marker, or the artifacts.
- It replaces no object: `If-None-Match: *` is part of the signature.
- It expires with the attempt's session key.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import aiohttp
import boto3
from botocore.config import Config

from agent_wrapper.contract import (
    PUT_HEADERS,
    ResultUrls,
    Rollout,
    artifacts_key,
    failure_marker_key,
    probe_key,
    result_key,
)
from rollout_backend.aws import log_call
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import PreflightError


class Presigner:
    """Signs URLs with this process's credentials, which must allow the write. Signing makes no call to AWS."""

    def __init__(self, storage: StorageConfig, aws: AwsConfig, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._wall = wall
        config = Config(
            signature_version="s3v4",  # older versions do not sign headers
            request_checksum_calculation="when_required",  # the body is unknown at this time
            s3={"addressing_style": "path" if aws.endpoint_url else "virtual"},
        )
        session = boto3.Session(region_name=aws.region)
        self._s3 = session.client("s3", endpoint_url=aws.endpoint_url, config=config)

    def urls(self, claims: SessionClaims) -> ResultUrls:
        """Return the URLs of the attempt that these claims belong to. They expire with the claims."""
        place = (self._storage.prefix, claims.run_id, claims.step, claims.rollout_id)
        seconds = max(1, round(claims.expires_at - self._wall()))
        return ResultUrls(
            result=self._url(result_key(*place), seconds),
            failure_marker=self._url(failure_marker_key(*place, claims.attempt), seconds),
            artifacts=self._url(artifacts_key(*place, claims.attempt), seconds),
        )

    def artifacts_url(self, rollout: Rollout, seconds: float) -> str:
        """Return a URL whose GET returns the artifacts of a result, for at most this time."""
        place = self._storage.prefix, rollout.run_id, rollout.step, rollout.rollout_id, rollout.attempt
        params = {"Bucket": self._storage.bucket, "Key": artifacts_key(*place)}
        return self._s3.generate_presigned_url("get_object", Params=params, ExpiresIn=round(seconds))

    async def check(self) -> None:
        """Write an object by a presigned URL, as an agent does, and remove it if that is allowed.

        Raises:
            PreflightError: S3 refuses the URL.
        """
        place = {
            "Bucket": self._storage.bucket,
            "Key": probe_key(self._storage.prefix, secrets.token_hex(4), agents=True),
        }
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
                async with http.put(self._url(place["Key"], 60), data=b"{}", headers=PUT_HEADERS) as response:
                    status = response.status
                async with http.delete(self._s3.generate_presigned_url("delete_object", Params=place, ExpiresIn=60)):
                    pass  # without the permission the object stays
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PreflightError(f"storage.presigned: writing by a presigned URL failed: {error}") from error
        log_call("s3", "PutObject by a presigned URL", status, "AccessDenied" if status == 403 else "")
        if status != 200:
            raise PreflightError(
                f"storage.presigned: S3 answered {status} to a write by a URL that these credentials signed. "
                "Deploy the stack with Presigned=true, attach its TrainerPolicyArn to the trainer's role, and set "
                "storage.prefix to the stack's parameter ResultPrefix, or leave both out"
            )

    def _url(self, key: str, seconds: int) -> str:
        params = {
            "Bucket": self._storage.bucket,
            "Key": key,
            "ContentType": PUT_HEADERS["Content-Type"],
            "IfNoneMatch": PUT_HEADERS["If-None-Match"],
        }
        return self._s3.generate_presigned_url("put_object", Params=params, ExpiresIn=seconds)
