"""Write a result to S3 once, then announce it on SQS.

Invariants:

- the object under a rollout's key never changes: the write fails if the key exists;
- only an existing object is announced. An unannounced result still counts, because the backend lists the prefix. A
  repeated announcement has no effect and a missing one costs time, so an attempt that finds an existing object
  announces it again;
- a presigned URL grants access to the bucket, so it never appears in an error message or log record.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from agent_wrapper.contract import Announcement, ResultTarget, put_headers
from agent_wrapper.shared.aws_errors import is_transient
from agent_wrapper.shared.own_answers import is_page
from agent_wrapper.shared.redaction import redact_logs, without_secrets
from agent_wrapper.shared.threads import in_thread

if TYPE_CHECKING:
    import boto3
    import httpx
    import tenacity
    from botocore.loaders import Loader

logger = logging.getLogger("agent_wrapper")

_T = TypeVar("_T")
Limit = Callable[[], AbstractAsyncContextManager[object]]
"""Returns a context that interrupts its block with TimeoutError, such as `asyncio.timeout(60)`."""

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 20.0
# One try may take as long, and longer with a large body. The read timeout starts again with each byte.
_TRY_S = 60.0
_SLOWEST_BYTES_PER_S = 1024**2
# A policy, a grant or a bucket may be replaced meanwhile: a refusal is permanent once it repeats this often, for this
# long.
_LEAST_REFUSALS = 5
_PERMANENT_AFTER_S = 60.0
_CONNECTIONS = 32
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")
# A retry may find the right credentials, or a corrected clock.
_STALE_CREDENTIALS = ("ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "Unrecognized")


class PublishError(Exception):
    """The result could not be written. The message says why and names the key."""


class Refused(Exception):
    """S3 or SQS refused a request. The message says why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def is_transient(self) -> bool:
        """Whether the service says, by this one answer, that it may accept the request later."""
        dated = any(each in str(self).lower() for each in ("signature expired", "signature not yet current"))
        # SQS says so if the clock is wrong. With a success comes a page of a proxy.
        return is_transient(self.status, self.code) or self.status < 300 or dated


class Publisher:
    """Writes and announces results, with the clients of S3 and SQS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str | None], Any] = {}

    def prepare(self, target: ResultTarget) -> None:
        """Create the clients that `publish` needs. Creating them takes a few tenths of a second."""
        if target.urls is not None:
            # boto3 is not needed.
            return
        self._client("s3", target.region)
        if target.queue_url is not None:
            self._client("sqs", target.region)

    async def publish(
        self, target: ResultTarget, key: str, body: bytes, limit: Limit, url: str | None = None
    ) -> None:
        """Write `body` under `key` as `write` does, and announce it. `limit` limits each of the two.

        Raises:
            PublishError: the key may not exist.
        """
        await self.write(target, key, body, limit, url)
        if target.queue_url is not None:
            said = Announcement(bucket=target.bucket, key=key).encode()
            message = {"QueueUrl": target.queue_url, "MessageBody": said}
            where = f"s3://{target.bucket}/{key}"
            try:
                await _retry(
                    lambda: self._call("sqs", target.region, lambda sqs: sqs.send_message(**message)),
                    limit,
                    f"announce {where}",
                )
            except Exception as error:
                logger.warning("%s was written but could not be announced on %s: %s", where, target.queue_url, error)

    async def write(self, target: ResultTarget, key: str, body: bytes, limit: Limit, url: str | None = None) -> None:
        """Write `body` under `key` unless the key exists. Retry until `limit` interrupts, or S3 refuses repeatedly.

        With `url`, a presigned URL for that key, the write needs no credentials.

        Raises:
            PublishError: the key may not exist.
        """
        where = f"s3://{target.bucket}/{key}"
        put = functools.partial(_put_by_url, url, body) if url else lambda: self._put_once(target, key, body)
        try:
            is_first = await _retry(put, limit, f"write {where}", _TRY_S + len(body) / _SLOWEST_BYTES_PER_S)
        except Exception as error:
            raise PublishError(f"cannot write {where}: {type(error).__name__}: {error}") from error
        if not is_first:
            # An agent's role may not read the object, which would show whose it is.
            logger.warning("%s exists: another attempt wrote it, or this one, if the response was lost", where)

    def _put_once(self, target: ResultTarget, key: str, body: bytes) -> bool:
        """Write `body`. Return False if the key exists."""
        place = {"Bucket": target.bucket, "Key": key, "ContentType": "application/octet-stream", "IfNoneMatch": "*"}
        return _is_first(lambda: self._call("s3", target.region, lambda s3: s3.put_object(**place, Body=body)))

    def _client(self, service: str, region: str | None) -> Any:
        # boto3, botocore and httpx are imported on first use: see shared/trajectory.py.
        from botocore.config import Config

        with self._lock:
            if (service, region) not in self._clients:
                config = Config(
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    max_pool_connections=_CONNECTIONS,
                    # `_retry` is the only layer of retries.
                    retries={"total_max_attempts": 1},
                )
                # Not boto3's default session: the agent may have configured it, and it caches what it reads first.
                # The session is `Any`, because boto3's types have one overload per service name.
                session: Any = new_session(region)
                self._clients[service, region] = session.client(service, config=config)
            return self._clients[service, region]

    def _call(self, service: str, region: str | None, call: Callable[[Any], object]) -> None:
        """Call a service. After an error, the next call has a new client: a client keeps the credentials that it was
        created with, even if there were none.

        Raises:
            Refused: the service refused.
            PublishError: the arguments are invalid.
        """
        from botocore.exceptions import ClientError, ParamValidationError

        client = None
        try:
            client = self._client(service, region)
            call(client)
        except Exception as error:
            with self._lock:
                if self._clients.get((service, region)) is client:
                    # Another thread may have replaced the client.
                    self._clients.pop((service, region), None)
            if isinstance(error, ParamValidationError):
                raise PublishError(str(error)) from error
            if isinstance(error, ClientError):
                status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
                stale = code.startswith(_STALE_CREDENTIALS)
                raise Refused(503 if stale else int(status), code, str(error)) from error
            raise


def _put_by_url(url: str, body: bytes) -> bool:
    """Write `body` with one PUT. Return False if the object exists."""
    return _is_first(lambda: _call_url("PUT", url, content=body, headers=put_headers(body)))


def _is_first(put: Callable[[], object]) -> bool:
    """Call a conditional PUT. Return False if the object exists."""
    try:
        put()
    except Refused as error:
        if error.status != 412 or error.is_transient:
            raise
        return False
    return True


def download(url: str, limit_s: float) -> bytes:
    """Return the object at a presigned URL. Retry for at most `limit_s`, unless S3 refuses repeatedly.

    Raises:
        PublishError: the URL is invalid.
        Exception: the last error, or refusal.
    """
    get = functools.partial(_call_url, "GET", url)
    return asyncio.run(_retry(get, lambda: asyncio.timeout(limit_s), "read the artifacts", limit_s)).content


def _call_url(method: str, url: str, **more: Any) -> httpx.Response:
    """Send a request to a presigned URL, and return the response if it succeeded.

    Raises:
        Refused: S3 refused, or a proxy answered.
        ConnectionError: nothing answered.
        PublishError: the URL is invalid.
    """
    import httpx

    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    redact_logs()
    try:
        with httpx.Client(timeout=timeout, verify=not url.startswith("http://")) as client:
            response = client.request(method, url, **more)
    except httpx.InvalidURL as error:
        raise PublishError(without_secrets(f"InvalidURL: {error}")) from None
    except httpx.HTTPError as error:
        raise ConnectionError(without_secrets(f"{type(error).__name__}: {error}")) from None
    if response.is_success and not (method == "PUT" and is_page(response.content)):
        return response
    named = None if response.is_success else _CODE.search(response.text)
    code = named[1] if named else ""
    raise Refused(response.status_code, code, f"S3 answered {response.status_code} {code or response.reason_phrase}")


async def _retry(call: Callable[[], _T], limit: Limit, what: str, try_s: float = _TRY_S) -> _T:
    """Return what `call` returns in a thread. Repeat it, for at most `try_s` each, until `limit` interrupts it or its
    error is permanent. Raise the last error then."""
    import tenacity

    last: Exception = TimeoutError("no answer in time")

    async def attempt() -> _T:
        nonlocal last
        try:
            async with asyncio.timeout(try_s):
                return await in_thread(call, "publish")
        except TimeoutError:
            last = TimeoutError(f"no answer within {try_s:.0f} s")
            raise last from None
        except Exception as error:
            last = error
            raise

    def log_error(state: tenacity.RetryCallState) -> None:
        pause_s = state.next_action.sleep if state.next_action else 0.0
        logger.warning("cannot %s: %s; retrying in %.1f s", what, last, pause_s)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_may_pass()),
        wait=tenacity.wait_exponential_jitter(multiplier=0.2, max=8.0, jitter=0.5),
        before_sleep=log_error,
        reraise=True,
    )
    try:
        async with limit():
            return await retrying(attempt)
    except TimeoutError:
        raise last from None


def _may_pass() -> Callable[[BaseException], bool]:
    """Return whether another try may succeed, for the errors of one call in turn."""
    refusals, since = 0, 0.0

    def may_pass(error: BaseException) -> bool:
        nonlocal refusals, since
        # tenacity hands over a cancellation too.
        if not isinstance(error, Exception) or isinstance(error, PublishError):
            return False
        if not isinstance(error, Refused) or error.is_transient:
            refusals = 0
            return True
        now = asyncio.get_running_loop().time()
        refusals, since = refusals + 1, since if refusals else now
        return refusals < _LEAST_REFUSALS or now - since < _PERMANENT_AFTER_S

    return may_pass


def new_session(region: str | None) -> boto3.Session:
    """Return a boto3 session whose clients share this process's models."""
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    return boto3.Session(botocore_session=core, region_name=region)


def preload_models() -> None:
    """Load the models of S3 and SQS."""
    session = new_session("us-east-1")
    for service in ("s3", "sqs"):
        # Placeholder credentials keep botocore from searching for any.
        session.client(service, aws_access_key_id="-", aws_secret_access_key="-")  # noqa: S106


@functools.cache
def _loader(data_path: str | None) -> Loader:
    """Cache botocore's service models, because loading those of S3 and SQS takes 0.3 s. A process that forks one
    agent per session loads them once: see `rollout_backend.workbench.local.prefork`."""
    from botocore.loaders import create_loader

    return create_loader(data_path)
