"""Read, list and write a run's objects in S3, the source of truth.

Each call may also raise CredentialsExpired.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, Self

import aiohttp
from botocore.exceptions import ClientError

from agent_wrapper.contract import MAX_PACKED_ARTIFACT_BYTES, ContractError, probe_key
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from agent_wrapper.shared.aws_errors import is_transient
from rollout_backend.base import aws
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.errors import PreflightError, ResultMissing, StoreError, WriteConflict

# S3 answers 409 if another write of the key is in progress, and 404 if the key was deleted.
_CONFLICTS = frozenset({"ConditionalRequestConflict", "NoSuchKey", "PreconditionFailed"})
# Errors while a body is read. botocore retries earlier errors.
_TRUNCATED = (aiohttp.ClientError, ConnectionError)
# Pauses before an object with a truncated body is read again.
_PAUSES_S = (0.1, 0.2)
# The limit per object, so that an endless body does not block a fetch slot forever.
_GET_S = 300.0
# Size limits by folder, except results: objects that only trainers write, or that another limit bounds.
_MAX_BYTES = {
    **dict.fromkeys(("lease", "manifests", "scores", "task-blocklist"), MAX_OBJECT_BYTES),
    "artifacts": MAX_PACKED_ARTIFACT_BYTES,
}
# An ETag that matches no object.
_NO_ETAG = '"00000000000000000000000000000000"'


@dataclass(frozen=True)
class StoredObject:
    """An object that was read."""

    body: bytes
    etag: str
    age_s: float
    """Seconds since the object was written, by the store's clock."""


class ObjectStore(Protocol):
    """The objects of a run in its bucket. See `ResultStore`."""

    @property
    def config(self) -> StorageConfig: ...

    async def get(self, key: str) -> bytes: ...

    async def fetch(self, key: str) -> StoredObject: ...

    async def put(self, key: str, body: bytes) -> None: ...

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str: ...

    def keys(self, prefix: str) -> AsyncIterator[str]: ...


class ResultStore:
    """The bucket of a run. Use `open` to create one."""

    def __init__(self, config: StorageConfig, client: Any, stack: AsyncExitStack) -> None:
        self.config = config
        self._s3 = client
        self._get_object = client.repeated("get_object", Bucket=config.bucket)
        self.get_s = _GET_S
        # The last key that could be read or written.
        self._readable: str | None = None
        self._stack = stack

    @classmethod
    async def open(cls, config: StorageConfig, aws_config: AwsConfig, connections: int = 32) -> Self:
        stack = AsyncExitStack()
        made = aws.client(
            "s3",
            region=aws_config.region,
            endpoint_url=aws_config.endpoint_of("s3"),
            connections=connections,
            retries=3,
        )
        return cls(config, await stack.enter_async_context(made), stack)

    async def check(self, *, writes_results: bool = False) -> bool:
        """Make the calls that a run makes to the bucket: list it, write conditionally under the prefix, read back.

        `writes_results`: also write where results are, as a run does that translates its agents' results.

        Return whether the written object was removed, for which a run needs no permission.

        Raises:
            PreflightError: the bucket does not exist, a call is refused, or a write ignores its condition.
        """
        place = {
            "Bucket": self.config.bucket,
            "Key": probe_key(self.config.prefix, secrets.token_hex(4), agents=writes_results),
        }
        with self._explained():
            await self._s3.list_objects_v2(Bucket=self.config.bucket, Prefix=self.config.prefix, MaxKeys=1)
            await self._try_to_write(place, IfNoneMatch="*")
        try:
            with self._explained():
                # Both conditions must fail now.
                for condition in ({"IfNoneMatch": "*"}, {"IfMatch": _NO_ETAG}):
                    if await self._try_to_write(place, **condition):
                        raise self._unsupported(condition, "ignores it")
            with self._explained():
                async with (await self._s3.get_object(**place))["Body"]:
                    pass
        finally:
            removed = False
            with contextlib.suppress(*aws.CALL_ERRORS):
                await self._s3.delete_object(**place)
                removed = True
        return removed

    async def keeping(self) -> str:
        """Describe how long the bucket keeps objects, from its versioning and lifecycle.

        Raises one of `aws.CALL_ERRORS`.
        """
        versioning = (await self._s3.get_bucket_versioning(Bucket=self.config.bucket)).get("Status", "off")
        try:
            reply = await self._s3.get_bucket_lifecycle_configuration(Bucket=self.config.bucket)
        except ClientError as error:
            if aws.status_of(error) != 404:
                raise
            reply = {}
        return describe_keeping(versioning, reply.get("Rules", ()), f"{self.config.prefix}runs/")

    async def _try_to_write(self, place: dict[str, str], **condition: str) -> bool:
        """Write the probe conditionally. Return False if the condition does not hold."""
        try:
            await self._s3.put_object(**place, Body=b"{}", ContentType="application/json", **condition)
        except ClientError as error:
            if aws.status_of(error) in (409, 412):
                # With 409, another check is writing the probe at this moment.
                return False
            if aws.status_of(error) == 501 or aws.code_of(error) == "NotImplemented":
                raise self._unsupported(condition, f"answers {aws.status_of(error)} to it") from error
            raise
        return True

    def _unsupported(self, condition: dict[str, str], what: str) -> PreflightError:
        header = {"IfNoneMatch": "If-None-Match", "IfMatch": "If-Match"}[next(iter(condition))]
        return PreflightError(
            f"bucket {self.config.bucket!r}: the store, or a proxy in front of it, does not support PutObject with "
            f"{header}: it {what}. Results are written once, and a manifest replaces only the version that was read, "
            "so both If-None-Match and If-Match are needed. Use a store that supports them (AWS S3, current MinIO or "
            "Cloudflare R2), or point aws.s3_endpoint_url past the proxy"
        )

    def _explained(self) -> AbstractContextManager[None]:
        return aws.explained(f"bucket {self.config.bucket!r}", "storage.bucket")

    async def get(self, key: str) -> bytes:
        """Return an object's bytes. Raises the same errors as `fetch`."""
        body, _ = await self._read(key)
        return body

    async def fetch(self, key: str) -> StoredObject:
        """Return an object. A truncated body is read again.

        Raises:
            ResultMissing: the object does not exist.
            ContractError: the object exceeds its size limit (`storage.max_result_bytes` for results), or S3 refuses
                it permanently.
            StoreError: S3 did not answer.
        """
        body, headers = await self._read(key)
        return StoredObject(body, headers.get("etag", ""), _age_s(headers))

    async def _read(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        """Return an object's bytes and headers. Raises the same errors as `fetch`."""
        try:
            async with asyncio.timeout(self.get_s):
                try:
                    found = await self._read_whole(key)
                except ClientError as error:
                    raise await self._explain_refusal(key, error) from error
        except aws.NO_ANSWER as error:
            raise StoreError(f"reading {key!r} from S3 failed: {error or 'no answer in time'}") from error
        self._readable = key
        return found

    async def _read_whole(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        for pause_s in _PAUSES_S:
            try:
                return await self._read_once(key)
            except _TRUNCATED:
                await asyncio.sleep(pause_s + 0.1 * random.random())  # noqa: S311
        return await self._read_once(key)

    async def _explain_refusal(self, key: str, error: ClientError) -> Exception:
        """Return the exception for a refused GET.

        A 4xx is a permanent defect of the object (archived, or encrypted with a key that the caller may not use) only
        if the object exists and another object can be read at this time. S3 also answers 403 for a missing key if the
        caller may not list the whole bucket, and for every key while the caller's permissions are wrong.
        """
        code = aws.code_of(error)
        missing = ResultMissing(f"nothing is stored under {key!r}")
        if code == "NoSuchKey":
            return missing
        aws.raise_if_expired(error, "S3")
        refused = StoreError(f"S3 refused {key!r}: {aws.reason(error)}")
        if not 400 <= aws.status_of(error) < 500 or is_transient(aws.status_of(error), code):
            return refused
        try:
            if not await self._exists(key):
                return missing
            if self._readable in (None, key) or not await self._can_read(self._readable):
                return refused
        except aws.CALL_ERRORS:
            return refused
        return ContractError("object", f"S3 refuses it permanently, but not others: {code}: {aws.message_of(error)}")

    async def _exists(self, key: str) -> bool:
        reply = await self._s3.list_objects_v2(Bucket=self.config.bucket, Prefix=key, MaxKeys=1)
        if "IsTruncated" not in reply:
            raise ConnectionError("the response is not a listing")
        return any(item["Key"] == key for item in reply.get("Contents", ()))

    async def _can_read(self, key: str) -> bool:
        reply = await self._s3.get_object(Bucket=self.config.bucket, Key=key, Range="bytes=0-0")
        async with reply["Body"] as body:
            return bool(await body.read())

    async def _read_once(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        """Read an object once. Raises ContractError if it exceeds its size limit, or one of `aws.CALL_ERRORS`."""
        reply = await self._get_object(Key=key)
        headers: Mapping[str, str] = reply["ResponseMetadata"]["HTTPHeaders"]
        # The folder in runs/RUN/FOLDER.
        folder = key.removeprefix(self.config.prefix).split("/")[2:3]
        cap = _MAX_BYTES.get("".join(folder), self.config.max_result_bytes)
        return await self._body(reply["Body"], headers, cap), headers

    async def _body(self, stream: Any, headers: Mapping[str, str], cap: int) -> bytes:
        size = headers.get("content-length")
        async with stream as body:
            if size is not None:
                if int(size) > cap:
                    raise ContractError("object", f"has {size} bytes, more than the cap of {cap}")
                return bytes(await body.read())
            if headers.get("transfer-encoding", "").lower() != "chunked":
                raise ConnectionError("the response has no Content-Length, so a truncated body would go unnoticed")
            data = await aws.read_up_to(body, cap + 1)
            if len(data) > cap:
                raise ContractError("object", f"has more than the cap of {cap} bytes")
            return data

    async def put(self, key: str, body: bytes) -> None:
        """Write a small object, replacing an existing one.

        Raises:
            StoreError: S3 did not store it.
        """
        try:
            await self._s3.put_object(Bucket=self.config.bucket, Key=key, Body=body, ContentType="application/json")
        except aws.CALL_ERRORS as error:
            aws.raise_if_expired(error, "S3")
            raise StoreError(f"writing {key!r} to S3 failed: {aws.reason(error)}") from error
        self._readable = key

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        """Write a small object if it still has this ETag or, with None, if it does not exist. Return its new ETag.

        If a response is lost, the retry conflicts with the first write. The stored object is therefore compared with
        `body` on a conflict.

        Raises:
            WriteConflict: the object has other content.
            StoreError: S3 did not store it.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            reply = await self._s3.put_object(
                Bucket=self.config.bucket, Key=key, Body=body, ContentType="application/json", **condition
            )
            self._readable = key
            return str(reply["ETag"])
        except (KeyError, *aws.CALL_ERRORS) as error:
            # A proxy that answers instead of S3 causes a KeyError.
            aws.raise_if_expired(error, "S3")
            if not isinstance(error, ClientError) or aws.code_of(error) not in _CONFLICTS:
                raise StoreError(f"writing {key!r} to S3 failed: {aws.reason(error)}") from error
        with contextlib.suppress(ResultMissing):
            stored = await self.fetch(key)
            if stored.body == body:
                return stored.etag
        raise WriteConflict(f"{key!r} has changed since it was read")

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key under `prefix`.

        Raises:
            StoreError: S3 did not answer.
        """
        try:
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.config.bucket, Prefix=prefix)
            async for page in pages:
                if "IsTruncated" not in page:
                    # S3 always sends this field, and a truncated body parses as an empty listing.
                    raise ConnectionError("the response is not a listing")
                for item in page.get("Contents", ()):
                    yield str(item["Key"])
        except aws.CALL_ERRORS as error:
            aws.raise_if_expired(error, "S3")
            raise StoreError(f"listing {prefix!r} in S3 failed: {aws.reason(error)}") from error

    async def aclose(self) -> None:
        await self._stack.aclose()


def describe_keeping(versioning: str, rules: Iterable[Mapping[str, Any]], prefix: str) -> str:
    """Describe what a bucket's versioning and lifecycle rules do to objects under `prefix`."""
    days = [
        rule["Expiration"]["Days"]
        for rule in rules
        if rule.get("Status") == "Enabled" and "Days" in rule.get("Expiration", {}) and _applies(rule, prefix)
    ]
    kept = f"objects expire after {min(days)} days" if days else "objects never expire"
    return f"versioning is {versioning.lower()}, {kept}"


def _applies(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a lifecycle rule applies to objects under `prefix`, which have no tags but any size."""
    # Rules of the first version have no filter.
    where = rule.get("Filter") or rule
    where = where.get("And", where)
    return prefix.startswith(where.get("Prefix", "")) and where.keys().isdisjoint(("Tag", "Tags"))


def _age_s(headers: Mapping[str, str]) -> float:
    """Return the object's age by the store's clock, or by the local clock if the response has no `Date` header."""
    written, date = headers.get("last-modified"), headers.get("date")
    if written is None:
        return 0.0
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return max(0.0, (now - parsedate_to_datetime(written)).total_seconds())
