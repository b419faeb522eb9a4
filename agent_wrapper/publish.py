"""Write a result to S3 once, then announce it on SQS.

Invariants:

- the object under a rollout's key never changes: the write fails if the key exists;
- only an existing object is announced. An unannounced result still counts, because the backend lists the prefix. A
  repeated announcement has no effect and a missing one costs time, so an attempt that finds an existing object
  announces it again;
- a presigned URL grants access to the bucket, so it never appears in an error message or log record.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent_wrapper.contract import Announcement, ResultTarget, put_headers
from agent_wrapper.shared.aws_errors import is_transient
from agent_wrapper.shared.own_answers import is_page
from agent_wrapper.shared.redaction import redact_logs, without_secrets

if TYPE_CHECKING:
    import boto3
    import httpx
    import tenacity
    from botocore.loaders import Loader

logger = logging.getLogger("agent_wrapper")

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 20.0
_CONNECTIONS = 32
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")
# A retry may find the right credentials, or a corrected clock.
_STALE_CREDENTIALS = ("ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "Unrecognized")


class PublishError(Exception):
    """The result could not be written. The message says why and names the key."""


class S3Refused(Exception):
    """S3 refused a request or could not be reached in time. The message says why."""


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

    def publish(self, target: ResultTarget, key: str, body: bytes, budget_s: float, url: str | None = None) -> None:
        """Write `body` under `key` as `write` does, and announce it. Each of the two takes at most about `budget_s`.

        Raises:
            PublishError: the key may not exist.
        """
        self.write(target, key, body, budget_s, url)
        if target.queue_url is not None:
            said = Announcement(bucket=target.bucket, key=key).encode()
            message = {"QueueUrl": target.queue_url, "MessageBody": said}
            try:
                self._retry("sqs", target.region, budget_s, lambda sqs: sqs.send_message(**message))
            except Exception as error:
                where = f"s3://{target.bucket}/{key}"
                logger.warning("%s was written but could not be announced on %s: %s", where, target.queue_url, error)

    def write(self, target: ResultTarget, key: str, body: bytes, budget_s: float, url: str | None = None) -> None:
        """Write `body` under `key` unless the key exists. Takes at most about `budget_s`.

        With `url`, a presigned URL for that key, the write needs no credentials.

        Raises:
            PublishError: the key may not exist.
        """
        where = f"s3://{target.bucket}/{key}"
        try:
            is_first = _put_by_url(url, body, budget_s) if url else self._put_once(target, key, body, budget_s)
        except Exception as error:
            raise PublishError(f"cannot write {where}: {type(error).__name__}: {error}") from error
        if not is_first:  # an agent's role may not read the object, which would show whose it is
            logger.warning("%s exists: another attempt wrote it, or this one, if the response was lost", where)

    def _put_once(self, target: ResultTarget, key: str, body: bytes, budget_s: float) -> bool:
        """Write `body`. Return False if the key exists."""
        from botocore.exceptions import ClientError

        place = {"Bucket": target.bucket, "Key": key, "ContentType": "application/octet-stream", "IfNoneMatch": "*"}
        try:
            self._retry("s3", target.region, budget_s, lambda s3: s3.put_object(**place, Body=body))
        except ClientError as error:
            if _status(error) != 412 or is_transient(412, error.response["Error"]["Code"]):
                raise
            return False
        return True

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

    def _retry(self, service: str, region: str | None, budget_s: float, call: Callable[[Any], object]) -> None:
        """Retry a call until it succeeds, each time with a new client: a client keeps the credentials that it was
        created with, even if there were none."""
        import tenacity

        def attempt() -> None:
            client = None
            try:
                client = self._client(service, region)
                call(client)
            except Exception as error:
                with self._lock:
                    if _is_transient(error) and self._clients.get((service, region)) is client:
                        self._clients.pop((service, region), None)  # unless another thread has replaced it
                raise

        _retrying(tenacity.retry_if_exception(_is_transient), budget_s, reraise=True)(attempt)


def _put_by_url(url: str, body: bytes, budget_s: float) -> bool:
    """Write `body` with one PUT. Return False if the object exists.

    Raises:
        S3Refused: the retries used up `budget_s`, or the error is permanent.
    """
    response = call_url("PUT", url, budget_s, content=body, headers=put_headers(body))
    if response.status_code == 412 and _code(response):
        return False
    if not response.is_success or is_page(response.content):
        raise S3Refused(f"S3 answered {response.status_code} {_code(response) or response.reason_phrase}")
    return True


def call_url(method: str, url: str, budget_s: float, **more: Any) -> httpx.Response:
    """Send a request to a presigned URL until its answer is final or `budget_s` is used up. Return the last answer.

    Raises:
        S3Refused: there is none.
    """
    import httpx  # imported on first use: see shared/trajectory.py
    import tenacity

    send = _retrying(
        tenacity.retry_if_exception_type(httpx.TransportError)
        | tenacity.retry_if_result(
            lambda response: (
                is_transient(response.status_code, _code(response)) or (method == "PUT" and is_page(response.content))
            )
        ),
        budget_s,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,  # as it was, last
    )
    verify = not url.startswith("http://")
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    redact_logs()
    try:
        with httpx.Client(timeout=timeout, verify=verify) as client:
            response: httpx.Response = send(client.request, method, url, **more)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise S3Refused(without_secrets(f"{type(error).__name__}: {error}")) from None
    return response


def _code(response: httpx.Response) -> str:
    code = None if response.is_success else _CODE.search(response.text)
    return code[1] if code else ""


def _retrying(when: tenacity.retry_base, budget_s: float, **more: Any) -> tenacity.Retrying:
    """Return a retrier that repeats a call while `when` holds, for at most `budget_s`."""
    import tenacity

    wait = tenacity.wait_exponential_jitter(multiplier=0.2, max=8.0, jitter=0.5)
    return tenacity.Retrying(retry=when, stop=tenacity.stop_before_delay(budget_s), wait=wait, **more)


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
