"""URLs by which an agent's container writes one attempt's result without any credential of its own.

What must always hold: a URL takes one object, under the one key that it was signed for, and none where one stands
(`If-None-Match: *` is part of the signature); it is good as long as the attempt's session key. S3 checks all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import boto3
from botocore.config import Config

from agent_wrapper.contract import PUT_HEADERS, ResultUrls, notice_key, result_key
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.gateway.tokens import SessionClaims


class Presigner:
    """Signs with this process's own credentials, which must themselves allow the write. Makes no call to AWS."""

    def __init__(self, storage: StorageConfig, aws: AwsConfig, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._wall = wall
        config = Config(
            signature_version="s3v4",  # the older one leaves headers out of the signature
            request_checksum_calculation="when_required",  # the body is not known yet
            s3={"addressing_style": "path" if aws.endpoint_url else "virtual"},
        )
        session = boto3.Session(region_name=aws.region)
        self._s3 = session.client("s3", endpoint_url=aws.endpoint_url, config=config)

    def urls(self, claims: SessionClaims) -> ResultUrls:
        """Of the attempt that these claims are for, good until they expire."""
        place = (self._storage.prefix, claims.run_id, claims.step, claims.rollout_id)
        seconds = max(1, round(claims.expires_at - self._wall()))
        return ResultUrls(
            result=self._url(result_key(*place), seconds),
            notice=self._url(notice_key(*place, claims.attempt), seconds),
        )

    def _url(self, key: str, seconds: int) -> str:
        params = {
            "Bucket": self._storage.bucket,
            "Key": key,
            "ContentType": PUT_HEADERS["Content-Type"],
            "IfNoneMatch": PUT_HEADERS["If-None-Match"],
        }
        return self._s3.generate_presigned_url("put_object", Params=params, ExpiresIn=seconds)
