"""Write a result to S3 once, then announce it on SQS.

Invariants:

- the object under a rollout's key never changes: the write fails if the key exists;
- only an existing object is announced. An unannounced result still counts, because the backend lists the prefix. A
  repeated announcement has no effect and a missing one costs time, so an attempt that finds an existing object
  announces it again.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from agent_wrapper.contract import Announcement, ResultTarget
from agent_wrapper.shared.presigned import is_transient, put_once, write_retry

if TYPE_CHECKING:
    import boto3
    from botocore.loaders import Loader
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_sqs import SQSClient

logger = logging.getLogger("agent_wrapper")

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 20.0
_CONNECTIONS = 32
# A retry may find the right credentials, or a corrected clock.
_STALE_CREDENTIALS = ("ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "Unrecognized")
_T = TypeVar("_T")


class PublishError(Exception):
    """The result could not be written. The message says why and names the key."""


class WriteOutcome(StrEnum):
    """Which attempt wrote the object."""

    NOW = "now"
    BEFORE = "before"  # an earlier write of this attempt, whose response was lost
    BY_ANOTHER = "by_another"  # another attempt of this rollout, whose result counts
    UNSEEN = "unseen"  # BEFORE or BY_ANOTHER: the object could not be read


class Publisher:
    """Holds the S3 and SQS clients. Thread-safe; each call blocks its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str | None], Any] = {}

    def prepare(self, target: ResultTarget) -> None:
        """Create the clients that `publish` needs. Creating them takes a few tenths of a second."""
        if target.urls is not None:
            return  # boto3 is not needed
        self._client("s3", target.region)
        if target.queue_url is not None:
            self._client("sqs", target.region)

    def publish(
        self, target: ResultTarget, key: str, body: bytes, budget_s: float, url: str | None = None
    ) -> WriteOutcome:
        """Write `body` under `key` as `write` does, and announce it. Each of the two takes at most about `budget_s`.

        Raises:
            PublishError: the key may not exist.
        """
        written = self.write(target, key, body, budget_s, url)
        if target.queue_url is not None:
            try:
                self._announce(target, key, budget_s)
            except Exception as error:
                where = f"s3://{target.bucket}/{key}"
                logger.warning("%s was written but could not be announced on %s: %s", where, target.queue_url, error)
        return written

    def write(
        self, target: ResultTarget, key: str, body: bytes, budget_s: float, url: str | None = None
    ) -> WriteOutcome:
        """Write `body` under `key` unless the key exists. Takes at most about `budget_s`.

        With `url`, a presigned URL for that key, the write needs no credentials.

        Raises:
            PublishError: the key may not exist.
        """
        where = f"s3://{target.bucket}/{key}"
        try:
            if url is not None:
                written = WriteOutcome.NOW if put_once(url, body, budget_s) else WriteOutcome.UNSEEN
            else:
                written = self._write(target, key, body, budget_s)
        except Exception as error:
            raise PublishError(f"cannot write {where}: {type(error).__name__}: {error}") from error
        match written:
            case WriteOutcome.BEFORE:
                logger.info("%s: an earlier write of this attempt had succeeded", where)
            case WriteOutcome.BY_ANOTHER:
                logger.warning("%s: another attempt wrote its result first; this result is dropped", where)
            case WriteOutcome.UNSEEN:
                logger.warning(
                    "%s: the key exists, and the object could not be read to see which attempt wrote it", where
                )
        return written

    def _write(self, target: ResultTarget, key: str, body: bytes, budget_s: float) -> WriteOutcome:
        from botocore.exceptions import ClientError

        def put(s3: S3Client) -> None:
            s3.put_object(
                Bucket=target.bucket, Key=key, Body=body, ContentType="application/octet-stream", IfNoneMatch="*"
            )

        def read(s3: S3Client) -> bytes:
            return s3.get_object(Bucket=target.bucket, Key=key)["Body"].read()

        try:
            self._retry("s3", target.region, budget_s, put)
        except ClientError as error:
            if _status(error) != 412:
                raise
        else:
            return WriteOutcome.NOW
        try:
            there = self._retry("s3", target.region, budget_s, read)
        except Exception:  # the role may lack s3:GetObject, and does not need it
            logger.debug("cannot read %s", key, exc_info=True)
            return WriteOutcome.UNSEEN
        return WriteOutcome.BEFORE if there == body else WriteOutcome.BY_ANOTHER

    def _announce(self, target: ResultTarget, key: str, budget_s: float) -> None:
        message = Announcement(bucket=target.bucket, key=key).encode()
        queue_url = target.queue_url or ""

        def send(sqs: SQSClient) -> None:
            sqs.send_message(QueueUrl=queue_url, MessageBody=message)

        self._retry("sqs", target.region, budget_s, send)

    def _client(self, service: str, region: str | None) -> Any:
        from botocore.config import Config  # imported on first use: see shared/trajectory.py

        with self._lock:
            if (service, region) not in self._clients:
                config = Config(
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    max_pool_connections=_CONNECTIONS,
                    retries={"total_max_attempts": 1},  # `_retry` is the only layer of retries
                )
                # Not boto3's default session: the agent may have configured it, and it caches what it reads first.
                session: Any = new_session(region)  # the types of boto3 have one overload per service name
                self._clients[service, region] = session.client(service, config=config)
            return self._clients[service, region]

    def _retry(self, service: str, region: str | None, budget_s: float, call: Callable[[Any], _T]) -> _T:
        """Retry a call until it succeeds, each time with a new client: a client keeps the credentials that it was
        created with, even if there were none."""
        import tenacity

        def attempt() -> _T:
            client = None
            try:
                client = self._client(service, region)
                return call(client)
            except Exception as error:
                with self._lock:
                    if _is_transient(error) and self._clients.get((service, region)) is client:
                        self._clients.pop((service, region), None)  # unless another thread has replaced it
                raise

        return write_retry(tenacity.retry_if_exception(_is_transient), budget_s, reraise=True)(attempt)


def _is_transient(error: BaseException) -> bool:
    """Return whether a later try may succeed. Among errors that are not the service's response (no connection, no
    credentials, a failing provider), only invalid arguments are permanent."""
    from botocore.exceptions import ClientError, ParamValidationError

    if isinstance(error, ClientError):
        code, message = error.response["Error"]["Code"], error.response["Error"].get("Message", "").lower()
        dated = "signature expired" in message or "signature not yet current" in message  # SQS, if the clock is wrong
        return is_transient(_status(error), code) or code.startswith(_STALE_CREDENTIALS) or dated
    return not isinstance(error, ParamValidationError)


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def new_session(region: str | None) -> boto3.Session:
    """Return a boto3 session whose clients share this process's models."""
    import boto3  # imported on first use: see shared/trajectory.py
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    return boto3.Session(botocore_session=core, region_name=region)


def preload_models() -> None:
    """Load the models of S3 and SQS."""
    session = new_session("us-east-1")
    for service in ("s3", "sqs"):  # placeholder credentials, so that botocore does not search for any
        session.client(service, aws_access_key_id="-", aws_secret_access_key="-")  # noqa: S106


@functools.cache
def _loader(data_path: str | None) -> Loader:
    """Cache botocore's service models, because loading those of S3 and SQS takes 0.3 s. A process that forks one
    agent per session loads them once: see `rollout_backend.local.prefork`."""
    from botocore.loaders import create_loader

    return create_loader(data_path)
