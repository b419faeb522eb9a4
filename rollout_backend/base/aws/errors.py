"""Classify AWS responses: what an error says about the call, what the user can do about it, and which permissions it
shows."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from agent_wrapper.shared.own_answers import is_page
from rollout_backend.base.local_keys import HOST
from rollout_backend.errors import CredentialsExpired, PreflightError

NO_CONNECTION = (
    EndpointConnectionError,
    ConnectTimeoutError,
    ProxyConnectionError,
    SSLError,
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
)
NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError)
# No call was sent.
UNSIGNED = (*NO_CREDENTIALS, CredentialRetrievalError, MetadataRetrievalError, SSOError, TokenRetrievalError)
NO_ANSWER = (BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError, TimeoutError)
"""Errors of a call without a response, or with a truncated or invalid one. The service may have executed the call.
Neither botocore nor aiobotocore wraps errors that occur while a body is streamed or XML is parsed."""
CALL_ERRORS = (ClientError, *NO_ANSWER)
EXPLAINED = (ClientError, BotoCoreError, ResponseParserError, KeyError)
"""Errors that `preflight_error` describes. A KeyError means that a wrong server sent JSON without a field."""
# A key of a response's `Error`.
_RENEWABLE = "CredentialsRenewable"
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException"})
_UNKNOWN_CREDENTIALS = frozenset(
    {"InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken", "UnrecognizedClientException"}
)
_WRONG_CLOCK = frozenset({"RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"})
CLOCK_ADVICE = "This machine's clock is wrong: synchronise it, e.g. by chrony"
_ENDPOINT_ADVICE = "Check aws.endpoint_url, or the service's own endpoint"
_OTHER_REGION = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect"})
_NO_SUCH = ("NonExistentQueue", "QueueDoesNotExist", "NoSuchBucket", "ResourceNotFoundException")
_THROTTLED = frozenset(
    {
        "LimitExceededException", "RequestLimitExceeded", "RequestThrottled", "SlowDown", "ThrottledException",
        "Throttling", "ThrottlingException", "TooManyRequestsException",
    }
)  # fmt: skip
_DENIED = frozenset({"AccessDenied", "AccessDeniedException"})
_GRANTED_BY = {
    "queue": "Deploy the stack with RunQueues=true, so that each run can create its queue, and attach its "
    "TrainerPolicyArn to the trainer's role; or set queue.url to the stack's QueueUrl",
    "queue.url": "Attach the stack's TrainerPolicyArn to the trainer's role, and set queue.url to the same stack's "
    "QueueUrl",
    "storage.bucket": "Attach the stack's TrainerPolicyArn to the trainer's role, and set storage.prefix to the "
    "stack's parameter ResultPrefix, or leave both out",
}
CallLog = dict[str, bool]
"""Whether every call was allowed, by service and operation, such as `s3:GetObject`."""

_log: ContextVar[CallLog | None] = ContextVar("_log", default=None)


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    """Return the service's message. A proxy's response has none."""
    message = (
        error.response.get("Error", {}).get("Message") or f"an answer without a message, HTTP {status_of(error)}"
    )
    return str(message)


def is_foreign(body: bytes) -> bool:
    """Return whether AWS did not send a response: it is an HTML page, plain text, or JSON that is not an object."""
    if is_page(body):
        return True
    try:
        return not isinstance(json.loads(body.decode() or "{}"), dict)
    except UnicodeDecodeError:
        return True
    except ValueError:
        return not body.lstrip().startswith(b"<")


def is_of_proxy(error: ClientError) -> bool:
    """Return whether a proxy refused the call: its page is dropped, so the status is the only code."""
    return code_of(error).isdecimal()


def reason(error: BaseException) -> str:
    """Describe in one line why a call failed."""
    if isinstance(error, ClientError):
        text = f"{code_of(error)}: {message_of(error)}"
        return f"{text}. {CLOCK_ADVICE}" if is_wrong_clock(error) else text
    return str(error).partition("\n")[0] or type(error).__name__


def was_sent(error: BaseException) -> bool:
    """Return whether a NO_CONNECTION error means that the connection was lost after the call was sent. aiobotocore
    raises the same error for a refused and for a reset connection."""
    cause = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    return isinstance(cause, aiohttp.ClientOSError) and not isinstance(cause, aiohttp.ClientConnectorError)


def mark_renewable(parsed: dict[str, Any]) -> bool:
    """Mark a response that refuses the caller's credentials, which can be renewed. Return whether it refuses them."""
    refused = parsed.get("Error", {}).get("Code") in _EXPIRED | _UNKNOWN_CREDENTIALS
    if refused:
        parsed["Error"][_RENEWABLE] = True
    return refused


def is_renewable(error: ClientError) -> bool:
    """Return whether the service refuses credentials for which new ones can be found, so that a retry may succeed: a
    metadata service is late, or a file will be rewritten."""
    return _RENEWABLE in error.response.get("Error", {})


def is_expired(error: ClientError) -> bool:
    """Return whether the credentials have expired and cannot be renewed, so that a retry is pointless."""
    return code_of(error) in _EXPIRED and not is_renewable(error)


def is_unknown_caller(error: ClientError) -> bool:
    """Return whether the service does not accept the credentials, or the signature made with them."""
    code = code_of(error)
    return code in _EXPIRED | _UNKNOWN_CREDENTIALS | _WRONG_CLOCK or "Signature" in code


def is_wrong_clock(error: ClientError) -> bool:
    """Return whether the service refuses the signature because of its date. Most services say so in the message."""
    message = message_of(error).lower()
    dated = "signature expired" in message or "signature not yet current" in message
    return code_of(error) in _WRONG_CLOCK or ("Signature" in code_of(error) and dated)


def is_throttled(error: ClientError) -> bool:
    """Return whether the service throttles the call. SQS does so with status 400."""
    return status_of(error) == 429 or code_of(error) in _THROTTLED


def is_denied(error: BaseException) -> bool:
    """Return whether IAM does not allow the call."""
    return isinstance(error, ClientError) and code_of(error) in _DENIED


def raise_if_expired(error: BaseException, what: str) -> None:
    """Raise CredentialsExpired if `what` refused the call because the credentials have expired."""
    if isinstance(error, ClientError) and is_expired(error):
        raise CredentialsExpired(
            f"the AWS credentials have expired ({what} says {code_of(error)}). Get new ones (aws sso login, or the "
            "three of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN) and start the run again under "
            "its run_id: what is finished is taken. Those of any other source than these variables are renewed"
        ) from error


def preflight_error(error: BaseException, what: str, setting: str) -> PreflightError:
    """Describe a failed check of `what`, which `setting` names, to the user. `error` is one of `EXPLAINED`."""
    server = urlsplit(getattr(error, "kwargs", {}).get("endpoint_url") or "")
    is_local = server.hostname in (HOST, "localhost", "::1")
    start = f"no local cloud of yours runs at {server.netloc}: start it again (rollout deploy --local)"
    if isinstance(error, NO_CREDENTIALS):
        cause = f"{start}. For another server, " if is_local else ""
        return PreflightError(
            f"{what} cannot be reached: {cause}there are no AWS credentials. Log in (aws sso login), or set "
            "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            server.netloc if is_local else "no_credentials",
        )
    if isinstance(error, NO_CONNECTION):
        is_refused = is_local and isinstance(error, EndpointConnectionError) and not was_sent(error)
        said = f"{start}, or the server that you mean. Check" if is_refused else f"{error}. Check aws.region and"
        text = f"{what} cannot be reached: {said} aws.endpoint_url, or the service's own endpoint"
        return PreflightError(text, server.netloc if is_refused else "")
    if isinstance(error, ClientError):
        return PreflightError(_refusal(error, what, setting), _cause_of_refusal(error))
    if isinstance(error, BotoCoreError):
        return PreflightError(f"{what} cannot be used: {error}")
    said = f"the answer has no {error}" if isinstance(error, KeyError) else str(error)
    return PreflightError(f"{what} cannot be used: {said}. {_ENDPOINT_ADVICE}")


@contextmanager
def explained(what: str, setting: str) -> Iterator[None]:
    """Raise a failed call's error as `preflight_error`."""
    try:
        yield
    except EXPLAINED as error:
        raise preflight_error(error, what, setting) from error


def _cause_of_refusal(error: ClientError) -> str:
    """Return why the service accepts no call of this caller, as a rollout's reason; empty if it accepts others."""
    if not is_unknown_caller(error):
        return ""
    return "wrong_clock" if is_wrong_clock(error) else "credentials_expired" if is_expired(error) else code_of(error)


def _refusal(error: ClientError, what: str, setting: str) -> str:
    """Describe a service's error code, and what to do about it."""
    code, status = code_of(error), status_of(error)
    said = f"{code}: {message_of(error)}"
    if code_of(error) in _EXPIRED:
        return f"{what} refuses us: {said}. The AWS credentials have expired: get new ones, e.g. aws sso login"
    if code in _UNKNOWN_CREDENTIALS:
        return f"{what} refuses us: {said}. AWS does not know these credentials: check AWS_PROFILE or the access key"
    if is_wrong_clock(error):
        return f"{what} refuses us: {said}. {CLOCK_ADVICE}"
    if "Signature" in code:
        return (
            f"{what} refuses us: {said}. The secret access key does not belong to the access key, or a proxy changes "
            "requests: check AWS_SECRET_ACCESS_KEY and aws.endpoint_url"
        )
    if is_throttled(error) or status >= 500:
        advice = "The service is busy: start the run again later"
        if is_of_proxy(error):
            # AWS has no such code: a proxy, or a server that is not this service, sent it.
            advice += f", or another server answers. {_ENDPOINT_ADVICE}"
        return f"{what} was not reached: {said}. {advice}"
    if status == 301 or code in _OTHER_REGION:
        return f"{what} is in another region ({said}): set aws.region"
    if status == 404 or code.endswith(_NO_SUCH):
        return f"{what} does not exist: create it, or correct {setting}"
    if kms := re.search(r"\bkms:\w+", said):
        return (
            f"{what}: {error.operation_name} is not allowed ({said}). Its encryption uses a KMS key: allow {kms[0]} "
            "on that key to these credentials, and to the agents' role if agents write there"
        )
    if is_denied(error) and setting in _GRANTED_BY:
        return f"{what}: {error.operation_name} is not allowed ({message_of(error)}). {_GRANTED_BY[setting]}"
    if status in (401, 403) or code.startswith("AccessDenied"):
        return f"{what} refuses us: {said}. Give these credentials the permission that is missing"
    return f"{what} refuses the call: {said}. Check {setting}"


@contextmanager
def logged_calls() -> Iterator[CallLog]:
    """Log which calls of this task, and of the tasks that it starts, are allowed and refused, as evidence of
    permissions for a check before a run."""
    calls: CallLog = {}
    token = _log.set(calls)
    try:
        yield calls
    finally:
        _log.reset(token)


def log_call(service: str, operation: str, status: int, code: str) -> None:
    """Log a response if it shows whether the caller has the permission, which AWS checks before the arguments."""
    calls = _log.get()
    if calls is None:
        return
    name = f"{service}:{operation}"
    if code.startswith("AccessDenied"):
        calls[name] = False
    elif status < 400 or status in (404, 409, 412) or "ReceiptHandle" in code:
        calls.setdefault(name, True)
