"""Results in S3: the truth. Read, listed, and put aside with evidence when they cannot be used.

Each call may raise CredentialsExpired beside what it says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError

from agent_wrapper.contract import ContractError
from rollout_backend import aws
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.errors import ResultMissing, StoreError

_MISSING = frozenset({"NoSuchKey", "404"})
_EVIDENCE_BYTES = 4096


class ResultStore:
    """One bucket. Made with `open`."""

    def __init__(self, config: StorageConfig, client: Any, stack: AsyncExitStack) -> None:
        self.config = config
        self._s3 = client
        self._stack = stack

    @classmethod
    async def open(cls, config: StorageConfig, aws_config: AwsConfig, connections: int = 32) -> Self:
        stack = AsyncExitStack()
        made = aws.client(
            "s3",
            region=aws_config.region,
            endpoint_url=aws_config.endpoint_url,
            connections=connections,
            retries=3,
        )
        return cls(config, await stack.enter_async_context(made), stack)

    async def check(self) -> None:
        """Raises PreflightError unless the bucket is there and can be listed."""
        try:
            await self._s3.list_objects_v2(Bucket=self.config.bucket, Prefix=self.config.prefix, MaxKeys=1)
        except (ClientError, BotoCoreError) as error:
            raise aws.preflight_error(error, f"bucket {self.config.bucket!r}", "storage.bucket") from error

    async def get(self, key: str) -> bytes:
        """The object's bytes.

        Raises:
            ResultMissing: there is none.
            ContractError: it is larger than `storage.max_result_bytes`; it is not read.
            StoreError: S3 did not answer.
        """
        try:
            reply = await self._s3.get_object(Bucket=self.config.bucket, Key=key)
            async with reply["Body"] as body:
                size, cap = int(reply["ContentLength"]), self.config.max_result_bytes
                if size > cap:
                    raise ContractError("object", f"has {size} bytes, more than the cap of {cap}")
                return bytes(await body.read())
        except ClientError as error:
            if aws.code_of(error) in _MISSING:
                raise ResultMissing(f"nothing is stored under {key!r}") from error
            aws.end_if_expired(error, "S3")
            raise StoreError(f"S3 refused {key!r}: {error}") from error
        except (BotoCoreError, OSError, TimeoutError) as error:
            raise StoreError(f"S3 did not give {key!r}: {error}") from error

    async def put(self, key: str, body: bytes) -> None:
        """Writes a small object of ours, in the place of what stands there. Raises StoreError."""
        try:
            await self._s3.put_object(Bucket=self.config.bucket, Key=key, Body=body, ContentType="application/json")
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            aws.end_if_expired(error, "S3")
            raise StoreError(f"S3 did not take {key!r}: {error}") from error

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        """Every key under `prefix`. Raises StoreError if S3 does not answer."""
        try:
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.config.bucket, Prefix=prefix)
            async for page in pages:
                for item in page.get("Contents", ()):
                    yield str(item["Key"])
        except (ClientError, BotoCoreError, OSError, TimeoutError) as error:
            aws.end_if_expired(error, "S3")
            raise StoreError(f"S3 did not list {prefix!r}: {error}") from error

    async def quarantine(self, run_id: str, what: str, reason: str, evidence: bytes) -> str:
        """Puts a record of something unusable beside the run, and tells its key. Told twice, it stands once.

        `what` names it (a key, a message's id); `evidence` is cut to its first 4 KiB.
        """
        record = {
            "what": what,
            "reason": reason,
            "bytes": len(evidence),
            "sha256": hashlib.sha256(evidence).hexdigest(),
            "begins": evidence[:_EVIDENCE_BYTES].decode("utf-8", errors="backslashreplace"),
        }
        body = json.dumps(record, indent=1).encode()
        key = f"{self.config.prefix}runs/{run_id}/quarantine/{hashlib.sha256(body).hexdigest()[:24]}.json"
        await self.put(key, body)
        return key

    async def own(self, run_id: str, owner: str) -> str:
        """Writes down who owns the run, in the place of whoever did, and tells the object's key. See `janitor`."""
        key = f"{self.config.prefix}runs/{run_id}/owner"
        await self.put(key, json.dumps({"owner": owner}).encode())
        return key

    async def aclose(self) -> None:
        await self._stack.aclose()
